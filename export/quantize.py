"""Block quantisation of weight matrices, 32 columns a block.

One record covers everything the graph can run: w = scale * (code - 2^(bits-1)) + offset, which is
GGUF's Q4_0 and Q8_0 without an offset and Q4_1 with one (offset = m + 8 d), exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

BLOCK = 32

Bits = Literal[4, 8]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class QuantMatrix:
    """A weight matrix W [N, K] in blocks along K; y = x @ W.T.

    K is padded up to whole blocks; the padding decodes to zero only by not being read, so
    `dequantize` cuts it off.
    """

    bits: Bits
    codes: U8
    """[N, ceil(K/32), 32], one code an element, 0 .. 2^bits - 1."""
    scales: F32
    """[N, ceil(K/32)]"""
    offsets: F32 | None
    """[N, ceil(K/32)], or None for a symmetric matrix."""
    columns: int
    """K."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.columns

    def dequantize(self) -> F32:
        """The float32 matrix [N, K] that this one stands for."""
        w = (self.codes.astype(np.float32) - 2 ** (self.bits - 1)) * self.scales[..., None]
        if self.offsets is not None:
            w += self.offsets[..., None]
        return w.reshape(len(w), -1)[:, : self.columns]

    def rows(self, order: npt.NDArray[np.int64]) -> QuantMatrix:
        """The matrix with its rows taken in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return QuantMatrix(self.bits, self.codes[order], self.scales[order], offsets, self.columns)
