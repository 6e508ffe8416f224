"""Between float32 values that are float16 numbers, and float16: the bits of a cast, five times faster.

NumPy casts to and from float16 value by value. What an arena holds is rounded to float16 already
(docs/exactness.md), so no rounding is left to do, and a multiplication by a power of two moves the
exponent's bias, subnormal numbers included: 2^-24, the least of float16, becomes 2^-136, which
float32 has as a subnormal number of its own. What remains are shifts.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from headrace.runtime.batch import F32

F16 = npt.NDArray[np.float16]

_BIAS = np.float32(2.0 ** (127 - 15))
_MANTISSA = np.uint32(23 - 10)
_SIGN = np.uint16(0x8000)


class Halves:
    """Copies arrays of one shape, or slices of it, both ways. Threads may share it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._size = int(np.prod(shape))
        self._scratch = threading.local()

    def store(self, values: F32, out: F16) -> None:
        """Finite `values`, each of them a float16 number, into `out` of the same shape."""
        wide, narrow = self._views(values.shape)
        np.divide(values, _BIAS, out=wide)
        bits, halves = wide.view(np.uint32), out.view(np.uint16)
        np.right_shift(bits, _MANTISSA, out=narrow, casting="unsafe")
        np.bitwise_and(narrow, ~_SIGN, out=halves)
        np.right_shift(bits, np.uint32(16), out=narrow, casting="unsafe")
        np.bitwise_and(narrow, _SIGN, out=narrow)
        np.bitwise_or(halves, narrow, out=halves)

    def load(self, halves: F16, out: F32) -> None:
        """The way back."""
        wide, narrow = self._views(halves.shape)
        bits = wide.view(np.uint32)
        np.bitwise_and(halves.view(np.uint16), ~_SIGN, out=narrow)
        np.left_shift(narrow, _MANTISSA, out=bits, dtype=np.uint32)
        np.multiply(wide, _BIAS, out=wide)
        np.bitwise_and(halves.view(np.uint16), _SIGN, out=narrow)
        signs = np.left_shift(narrow, np.uint32(16), dtype=np.uint32)
        np.bitwise_or(bits, signs, out=bits)
        out[...] = wide

    def _views(self, shape: tuple[int, ...]) -> tuple[F32, npt.NDArray[np.uint16]]:
        """Scratch memory of this thread's own: fresh pages would cost more than the work."""
        if not hasattr(self._scratch, "wide"):
            self._scratch.wide = np.empty(self._size, np.float32)
            self._scratch.narrow = np.empty(self._size, np.uint16)
        size = int(np.prod(shape))
        return (
            self._scratch.wide[:size].reshape(shape),
            self._scratch.narrow[:size].reshape(shape),
        )
