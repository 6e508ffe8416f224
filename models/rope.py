"""Rotary position embeddings: scaling rules resolved to frequencies, and the cos/sin rows.

Everything is computed in float64 and cast once, so a position far out is as precise as the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.models.config import Rope

F32 = npt.NDArray[np.float32]


def plain(head_dim: int, theta: float) -> Rope:
    """RoPE as in Su et al., 2021 (RoFormer)."""
    return Rope(tuple(float(f) for f in _inv_freq(head_dim, theta)))


def linear(head_dim: int, theta: float, factor: float) -> Rope:
    """Position interpolation, Chen et al., 2023: positions divided by `factor`."""
    return Rope(tuple(float(f) for f in _inv_freq(head_dim, theta) / factor))


def with_factors(head_dim: int, theta: float, factors: Sequence[float]) -> Rope:
    """Frequencies divided one by one, as GGUF's `rope_freqs.weight` stores Llama 3's scaling."""
    return Rope(tuple(float(f) for f in _inv_freq(head_dim, theta) / np.asarray(factors)))


def llama3(
    head_dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> Rope:
    """Llama 3.1's rule: long wavelengths divided by `factor`, short kept, a ramp between."""
    inv_freq = _inv_freq(head_dim, theta)
    wavelength = 2 * math.pi / inv_freq
    ramp = (original_max_position / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    ramp = np.clip(ramp, 0.0, 1.0)
    scaled = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    return Rope(tuple(float(f) for f in scaled))


def yarn(
    head_dim: int,
    theta: float,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Rope:
    """YaRN, Peng et al., 2023: interpolation by wavelength, and a temperature on attention."""

    def dimension(rotations: float) -> float:
        return (
            head_dim
            * math.log(original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    inv_freq = _inv_freq(head_dim, theta)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return Rope(tuple(float(f) for f in scaled), attention_factor)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _inv_freq(head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.asarray(theta**-exponent)


def cos_sin(rope: Rope, positions: npt.NDArray[np.int64]) -> tuple[F32, F32]:
    """cos and sin rows for absolute positions of any shape.

    Args:
        positions: integers, shape [...].

    Returns:
        two float32 arrays of shape [..., head_dim / 2].
    """
    angles = positions[..., None].astype(np.float64) * np.asarray(rope.inv_freq)
    cos = np.cos(angles) * rope.attention_scaling
    sin = np.sin(angles) * rope.attention_scaling
    return cos.astype(np.float32), sin.astype(np.float32)


class RopeTable:
    """cos and sin rows by position, from blocks that are computed whole and remembered.

    A position always comes out of the same block, so its bits do not depend on which positions
    were asked for together; and a step of decoding computes no cosines.
    """

    BLOCK = 64
    MAX_BLOCKS = 256

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._blocks: dict[int, tuple[F32, F32]] = {}

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[F32, F32]:
        """cos and sin [n, head_dim / 2] of positions [n]."""
        if len(positions) == 1:
            index, offset = divmod(int(positions[0]), self.BLOCK)
            cos, sin = self._block(index)
            return cos[offset : offset + 1], sin[offset : offset + 1]
        half = len(self._rope.inv_freq)
        cos, sin = np.empty((2, len(positions), half), np.float32)
        indices = positions // self.BLOCK
        for index in np.unique(indices):
            here = indices == index
            block_cos, block_sin = self._block(int(index))
            offsets = positions[here] - index * self.BLOCK
            cos[here], sin[here] = block_cos[offsets], block_sin[offsets]
        return cos, sin

    def _block(self, index: int) -> tuple[F32, F32]:
        block = self._blocks.get(index)
        if block is None:
            if len(self._blocks) >= self.MAX_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            start = index * self.BLOCK
            block = cos_sin(self._rope, np.arange(start, start + self.BLOCK))
            self._blocks[index] = block
        return block


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotates channel pairs (i, i + head_dim / 2) of x [..., head_dim]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1, dtype=np.float32)
