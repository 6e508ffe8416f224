"""transformers' logits of SmolLM2-135M-Instruct, loaded from the GGUF that headrace exports.

All logits of 200 tokens are 39 MB, so the fixture holds a sample of each row, the row's eight best,
and its normaliser: enough to bound the largest difference and to compute log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import F32, I64
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 200
SAMPLE = 256
TOP = 8

TEXT = """2024-03-11 06:58:02 INFO  plc3 shift B started, line 2 at 118.4 units/min
2024-03-11 06:58:07 INFO  pump03 pressure=4.21bar temp=61.5C flow=117.9l/min
2024-03-11 06:58:12 WARN  pump03 vibration=7.9mm/s above limit 7.1mm/s
The night shift reported that the second pump had been running louder than usual since the filter
was changed on Friday. Nobody had seen a leak, and the bearings had been greased a week before. If
the vibration stays above the limit for more than ten minutes, the controller closes the inlet
valve and starts the spare pump by itself; until then an operator may silence the alarm once."""


def load(gguf: Path) -> tuple[Any, I64]:
    """The model in float32, and the first NUM_TOKENS ids of TEXT."""
    where = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    ids = np.asarray(tokenizer(TEXT, add_special_tokens=False)["input_ids"], dtype=np.int64)
    assert len(ids) >= NUM_TOKENS
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, attn_implementation="eager", **where
    )
    return model.eval(), ids[:NUM_TOKENS]


def logits(model: Any, ids: I64) -> F32:
    """Logits [T, V]."""
    with torch.inference_mode():
        values = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return np.asarray(values.numpy(), dtype=np.float32)


def fixture(values: F32, ids: I64) -> dict[str, Any]:
    """The arrays of tests/data/smollm2_logits.npz, from logits [T, V] and ids [T].

    input_ids [T] i64; sample_ids [T, SAMPLE] u16 and sample_logits f32; top_ids [T, TOP] u16, best
    first, and top_logits f32; logsumexp [T] f64.
    """
    rng = np.random.default_rng(0)
    vocab = values.shape[1]
    sample = np.sort([rng.choice(vocab, SAMPLE, replace=False) for _ in ids], axis=1)  # [T, S]
    top = np.argsort(-values, axis=1, kind="stable")[:, :TOP]
    peak = values.max(axis=1).astype(np.float64)
    normaliser = peak + np.log(np.exp(values - peak[:, None]).sum(axis=1))
    return {
        "input_ids": ids,
        "sample_ids": sample.astype(np.uint16),
        "sample_logits": np.take_along_axis(values, sample, axis=1),
        "top_ids": top.astype(np.uint16),
        "top_logits": np.take_along_axis(values, top, axis=1),
        "logsumexp": normaliser,
    }
