"""optimum's own ONNX export of a checkpoint: a second opinion that shares no code with ours."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from optimum.exporters.onnx import main_export
from tiny_models import F32, I64


def optimum_logits(folder: Path, ids: I64) -> F32:
    """Logits [T, V] of optimum's float32 export, run in onnxruntime."""
    with tempfile.TemporaryDirectory() as out:
        main_export(
            str(folder), out, task="text-generation", local_files_only=True, do_validation=False
        )
        session = onnxruntime.InferenceSession(
            Path(out) / "model.onnx", providers=["CPUExecutionProvider"]
        )
        row = ids[None]
        feeds = {
            "input_ids": row,
            "attention_mask": np.ones_like(row),
            "position_ids": np.arange(len(ids))[None],
        }
        wanted = {i.name for i in session.get_inputs()}
        logits = session.run(["logits"], {k: v for k, v in feeds.items() if k in wanted})[0]
    return np.asarray(logits[0], dtype=np.float32)
