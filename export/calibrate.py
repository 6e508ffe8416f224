"""One reference pass over a text, and what it teaches: KV ranges and the energy of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.export.checkpoint import Checkpoint
from headrace.export.layers import KvScales
from headrace.export.quantize import F32, QuantMatrix
from headrace.models.config import ModelConfig
from headrace.models.reference import forward

_INT8_MAX = np.float32(127)


class FloatWeights(Mapping[str, F32]):
    """A checkpoint's weights as float32, read when asked for and not kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> F32:
        weight = self._checkpoint.read(name)
        return weight.dequantize() if isinstance(weight, QuantMatrix) else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names())

    def __len__(self) -> int:
        return len(self._checkpoint.names())


@dataclass
class Observation:
    """What `reference.forward` showed on a text."""

    config: ModelConfig
    logits: F32
    """[T, V]"""
    key_norms: list[F32] = field(default_factory=list)
    """Per layer [kv_heads, T, head_dim / 2]: norms of the RoPE pairs, which no rotation changes."""
    values: list[F32] = field(default_factory=list)
    """Per layer [kv_heads, T, head_dim], magnitudes."""
    energy: dict[str, F32] = field(default_factory=dict)
    """Mean square of each input channel [K] by the name of the linear map."""

    def kv_scales(self) -> list[KvScales]:
        """Steps of an int8 cache. One for both channels of a RoPE pair, sized to its norm: a key
        that is rotated again may put all of the norm into either channel.
        """
        scales = []
        for norms, values in zip(self.key_norms, self.values, strict=True):
            pair = norms.max(axis=1)  # [kv_heads, head_dim / 2]
            key = np.concatenate([pair, pair], axis=-1).reshape(-1)
            value = values.max(axis=1).reshape(-1)
            scales.append(KvScales(_step(key), _step(value)))
        return scales

    def clipping(self, scales: list[KvScales]) -> dict[str, float]:
        """Share of this text's key pairs and values that lie beyond the given steps."""
        half = self.config.head_dim // 2
        shares: dict[str, list[float]] = {"keys": [], "values": []}
        per_layer = zip(self.key_norms, self.values, scales, strict=True)
        for norms, values, scale in per_layer:
            key = scale.key.reshape(len(norms), 1, -1)[..., :half] * _INT8_MAX
            value = scale.value.reshape(len(values), 1, -1) * _INT8_MAX
            # the step itself was rounded, so the largest value may lie a few ulp beyond
            shares["keys"].append(float((norms > key * 1.0001).mean()))
            shares["values"].append(float((values > value * 1.0001).mean()))
        return {name: float(np.mean(share)) for name, share in shares.items()}


def _step(magnitude: F32) -> F32:
    return np.asarray(np.maximum(magnitude, np.float32(1e-6)) / _INT8_MAX, dtype=np.float32)


def observe(checkpoint: Checkpoint, token_ids: npt.NDArray[np.int64]) -> Observation:
    """Runs the float32 reference over `token_ids` [T]."""
    seen = Observation(checkpoint.config, np.empty((0, 0), np.float32))

    def listen(name: str, x: F32) -> None:
        if name.endswith(".keys"):
            a, b = np.split(x, 2, axis=-1)
            seen.key_norms.append(np.hypot(a, b))
        elif name.endswith(".values"):
            seen.values.append(np.abs(x))
        else:
            seen.energy[name] = np.mean(x * x, axis=0)

    seen.logits = forward(checkpoint.config, FloatWeights(checkpoint), token_ids, observe=listen)
    return seen
