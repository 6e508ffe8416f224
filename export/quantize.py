"""Block quantisation of weight matrices, 32 columns a block.

One record covers everything the graph can run: w = scale * (code - zero_point) + offset. Without
zero points and offsets it is GGUF's Q4_0 and Q8_0; with an offset of m + 8 d it is Q4_1, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

BLOCK = 32

Bits = Literal[4, 8]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
_SMALLEST_STEP = np.float32(1e-12)

_ROWS_AT_ONCE = 1024  # bounds the temporaries of a vocabulary-sized matrix


@dataclass(frozen=True, eq=False)
class QuantMatrix:
    """A weight matrix W [N, K] in blocks along K; y = x @ W.T.

    K is padded up to whole blocks; what the padding decodes to is never read.
    """

    bits: Bits
    codes: U8
    """[N, ceil(K/32), 32], one code an element, 0 .. 2^bits - 1."""
    scales: F32
    """[N, ceil(K/32)]"""
    offsets: F32 | None
    """[N, ceil(K/32)], added to every weight of the block; or None."""
    columns: int
    """K."""
    zero_points: U8 | None = None
    """[N, ceil(K/32)], the code that stands for 0; None is 2^(bits-1) everywhere."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.columns

    @property
    def stored_bytes(self) -> int:
        """What it takes in a graph's data file."""
        parts = [p for p in (self.scales, self.offsets, self.zero_points) if p is not None]
        return self.codes.size * self.bits // 8 + sum(part.nbytes for part in parts)

    def dequantize(self) -> F32:
        """The float32 matrix [N, K] that this one stands for."""
        zero: np.float32 | F32 = np.float32(2 ** (self.bits - 1))
        if self.zero_points is not None:
            zero = self.zero_points[..., None].astype(np.float32)
        w = (self.codes.astype(np.float32) - zero) * self.scales[..., None]
        if self.offsets is not None:
            w += self.offsets[..., None]
        return np.asarray(w.reshape(len(w), -1)[:, : self.columns])

    def rows(self, order: npt.NDArray[np.int64]) -> QuantMatrix:
        """The matrix with its rows taken in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        zeros = None if self.zero_points is None else self.zero_points[order]
        return QuantMatrix(
            self.bits, self.codes[order], self.scales[order], offsets, self.columns, zeros
        )

    @classmethod
    def stack(cls, parts: Sequence[QuantMatrix]) -> QuantMatrix:
        """Matrices of one form and one K, one below the other."""
        offsets = [p.offsets for p in parts if p.offsets is not None]
        zeros = [p.zero_points for p in parts if p.zero_points is not None]
        return cls(
            parts[0].bits,
            np.concatenate([p.codes for p in parts]),
            np.concatenate([p.scales for p in parts]),
            np.concatenate(offsets) if offsets else None,
            parts[0].columns,
            np.concatenate(zeros) if zeros else None,
        )


def pack(w: QuantMatrix) -> U8:
    """Codes as MatMulNBits and GatherBlockQuantized store them: low nibble first at 4 bits.

    Returns [N, ceil(K/32), 32 * bits / 8].
    """
    if w.bits == 8:
        return w.codes
    return np.asarray(w.codes[..., 0::2] | (w.codes[..., 1::2] << 4), dtype=np.uint8)


def pack_zero_points(w: QuantMatrix) -> U8:
    """Zero points [N, blocks] as MatMulNBits stores them: two a byte at 4 bits."""
    assert w.zero_points is not None
    if w.bits == 8:
        return w.zero_points
    zeros = np.pad(w.zero_points, ((0, 0), (0, w.zero_points.shape[1] % 2)))
    return np.asarray(zeros[:, 0::2] | (zeros[:, 1::2] << 4), dtype=np.uint8)


def quantize_int8(weight: F32) -> QuantMatrix:
    """Symmetric 8-bit: a step of max|w| / 127 a block."""
    return _int8(weight, np.dtype(np.float32))


def quantize_q8_0(weight: F32) -> QuantMatrix:
    """The same with steps of half precision, as GGUF's Q8_0 has them; infinite above 65,504."""
    return _int8(weight, np.dtype(np.float16))


def _int8(weight: F32, step_type: np.dtype[Any]) -> QuantMatrix:
    blocks = _blocks(weight)
    codes = np.empty(blocks.shape, np.uint8)
    scales = np.empty(blocks.shape[:2], np.float32)
    for part in _parts(len(blocks)):
        w = blocks[part]
        step = np.abs(w).max(axis=-1) / np.float32(127)
        with np.errstate(over="ignore"):
            step = step.astype(step_type).astype(np.float32)
        codes[part] = _encode(w, step, 127) + 128
        scales[part] = step
    return QuantMatrix(8, codes, scales, None, weight.shape[1])


def quantize_int4(weight: F32, energy: F32 | None = None) -> QuantMatrix:
    """Asymmetric 4-bit by search: per block the step and zero point of least squared error.

    Args:
        energy: [K], weights of the squared errors, e.g. the mean square of each input channel
            (the diagonal of the Hessian that GPTQ, Frantar et al., 2022, minimises over).
    """
    blocks = _blocks(weight)
    importance = np.ones(blocks.shape[1:], np.float32)
    if energy is not None:
        # a little of the mean, so that a channel that was silent in the text still counts
        importance = _blocks((energy + np.float32(0.01) * energy.mean())[None])[0]
    codes = np.empty(blocks.shape, np.uint8)
    scales = np.empty(blocks.shape[:2], np.float32)
    zeros = np.empty(blocks.shape[:2], np.uint8)
    for part in _parts(len(blocks)):
        codes[part], scales[part], zeros[part] = _search(blocks[part], importance)
    return QuantMatrix(4, codes, scales, None, weight.shape[1], zeros)


def _search(w: F32, importance: F32) -> tuple[U8, F32, U8]:
    """Best of a grid of shrunken ranges for blocks w [n, b, 32], each refined once."""
    low = np.minimum(w.min(axis=-1), 0)  # [n, b]
    high = np.maximum(w.max(axis=-1), 0)
    best_error = np.full(low.shape, np.inf, np.float32)
    best_step, best_zero = np.ones_like(low), np.zeros_like(low)
    for shrink in _SHRINKS:
        step = np.maximum((high - low) * np.float32(shrink / 15), _SMALLEST_STEP)
        zero = np.clip(np.rint(-low * np.float32(shrink) / step), 0, 15)
        step = _refined(w, step, zero, importance)
        error = _error(w, step, zero, importance)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_step = np.where(better, step, best_step)
        best_zero = np.where(better, zero, best_zero)
    codes = _codes(w, best_step, best_zero)
    return codes.astype(np.uint8), best_step, best_zero.astype(np.uint8)


def _refined(w: F32, step: F32, zero: F32, importance: F32) -> F32:
    """The step that fits the codes of `step` best: a least-squares quotient, never negative."""
    units = _codes(w, step, zero) - zero[..., None]  # [n, b, 32]
    weighted = units * importance
    size = np.einsum("nbk,nbk->nb", weighted, units)
    fitted = np.einsum("nbk,nbk->nb", weighted, w) / np.maximum(size, np.float32(1e-30))
    return np.asarray(np.maximum(fitted, _SMALLEST_STEP))


def _codes(w: F32, step: F32, zero: F32) -> F32:
    return np.asarray(np.clip(np.rint(w / step[..., None]) + zero[..., None], 0, 15))


def _error(w: F32, step: F32, zero: F32, importance: F32) -> F32:
    restored = (_codes(w, step, zero) - zero[..., None]) * step[..., None]
    return np.asarray(np.einsum("nbk,bk->nb", (restored - w) ** 2, importance))


def _encode(w: F32, step: F32, limit: int) -> npt.NDArray[np.int16]:
    safe = np.where(step == 0, np.float32(1), step)[..., None]
    return np.clip(np.rint(w / safe), -limit, limit).astype(np.int16)


def _blocks(weight: F32) -> F32:
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -columns % BLOCK)))
    return padded.reshape(rows, -1, BLOCK)


def _parts(rows: int) -> list[slice]:
    return [slice(i, i + _ROWS_AT_ONCE) for i in range(0, rows, _ROWS_AT_ONCE)]
