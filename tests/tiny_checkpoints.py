"""The tiny checkpoints of tests/data/tiny, and the numpy oracle's logits of any checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.export.checkpoint import open_checkpoint
from headrace.export.quantize import QuantMatrix
from headrace.models.config import ModelConfig
from headrace.models.reference import forward

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

DATA = Path(__file__).resolve().parent / "data"
TINY = DATA / "tiny"
NAMES = sorted(path.parent.name for path in TINY.glob("*/config.json"))


@dataclass(frozen=True)
class Stored:
    """What the real libraries computed for a tiny checkpoint."""

    input_ids: I64
    """[T]"""
    logits: F32
    """[T, V], by transformers."""
    optimum_logits: F32 | None
    """[T, V], by optimum's own ONNX export; for one checkpoint only."""


def stored(name: str) -> Stored:
    with np.load(TINY / name / "logits.npz") as arrays:
        return Stored(arrays["input_ids"], arrays["logits"], arrays.get("optimum_logits"))


def read_weights(source: Path) -> tuple[ModelConfig, dict[str, F32]]:
    """Config and every weight in float32, by Hugging Face name, of a folder or a GGUF file."""
    checkpoint = open_checkpoint(str(source))
    weights = {}
    for name in checkpoint.names():
        weight = checkpoint.read(name)
        weights[name] = weight.dequantize() if isinstance(weight, QuantMatrix) else weight
    return checkpoint.config, weights


def reference_logits(source: Path, ids: I64) -> F32:
    """The numpy oracle's logits [T, V] of a checkpoint."""
    config, weights = read_weights(source)
    return forward(config, weights, ids)
