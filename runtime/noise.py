"""Gumbel noise that is a function of (seed, position, token id), and the draw that uses it.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
has no state to carry along: any token's noise at any position can be asked for in any order, by
target and draft alike. Seed and position make a key by the finaliser of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); the token id is mixed
with it by `triple32`, a 32-bit permutation found by search (Wellons, "hash-prospector", 2018).
The integer part is the same on every machine; the logarithm may differ in its last bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Streams of their own for what must not depend on the target's draws. Any odd words do.
_ACCEPTING = 0xD1B54A32D192ED03
_DRAFTING = 0x8CB92BA72F3D8DD7


def gumbel(seed: int, position: int, token_ids: ArrayLike) -> NDArray[np.float64]:
    """Standard Gumbel noise [n] of the tokens [n] at `position`; from -3.7 to 36.8.

    `seed` is below 2**64, `position` not negative, ids below 2**32. An element depends on nothing
    but its own id, seed and position.
    """
    ids = np.asarray(token_ids).astype(np.uint32, copy=False)
    high_key, low_key = _keys(seed, position)
    return _gumbel_of(_hash32(ids, high_key), _hash32(ids, low_key))


def draw(
    scores: NDArray[np.float32], token_ids: NDArray[np.uint32], seed: int, position: int
) -> int:
    """Index of the largest `scores + gumbel(seed, position, token_ids)`, all [n], in float64.

    So token i is drawn with probability softmax(scores)[i], and -inf never (the Gumbel-max trick;
    Maddison, Tarlow and Minka, "A* sampling", NIPS 2014). The first wins a tie. Scores hold no
    NaN and at least one finite value.
    """
    if len(token_ids) == 1:
        return 0
    high_key, low_key = _keys(seed, position)
    high = _hash32(token_ids, high_key)  # uint32 [n]
    bound = _upper_bound(scores, high)
    leader = int(bound.argmax())
    # Rounding moves a bound by at most 2e-5 where it matters, so nothing below can win.
    can_win = np.flatnonzero(bound >= _lower_bound(scores[leader], high[leader]) - 1e-3)
    if can_win.size == 1:
        return leader
    low = _hash32(token_ids[can_win], low_key)
    total = scores[can_win].astype(np.float64) + _gumbel_of(high[can_win], low)
    return int(can_win[total.argmax()])


def uniform(seed: int, position: int, index: int) -> float:
    """A number in [0, 1) for every (seed, position, index), independent of the Gumbel noise."""
    return (_mix64(_mix64(_keyed(seed, _ACCEPTING) + position) + index * _GOLDEN) >> 11) * 2.0**-53


def drafting_seed(seed: int) -> int:
    """A seed whose noise is independent of that of `seed`."""
    return _keyed(seed, _DRAFTING)


def _keyed(seed: int, purpose: int) -> int:
    return _mix64(_mix64(seed + purpose) ^ purpose)


def _keys(seed: int, position: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two pairs of 32-bit words that key the noise's high and low half."""
    stream = _mix64(seed + _GOLDEN)
    first = _mix64(stream + position * _GOLDEN)
    second = _mix64(first + _GOLDEN)
    return (first & 0xFFFFFFFF, first >> 32), (second & 0xFFFFFFFF, second >> 32)


def _mix64(x: int) -> int:
    x &= _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _hash32(ids: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """A permutation of 32-bit words for every key; the second key word goes in half-way, so that
    keys which differ little in the first do not give the same values in another order."""
    x = ids ^ np.uint32(key[0])  # [n]
    shifted = x >> np.uint32(17)
    x ^= shifted
    x *= np.uint32(0xED5AD4BB)
    x ^= np.right_shift(x, np.uint32(11), out=shifted)
    x += np.uint32(key[1])
    x *= np.uint32(0xAC4C1B51)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    x *= np.uint32(0x31848BAB)
    x ^= np.right_shift(x, np.uint32(14), out=shifted)
    return x


def _gumbel_of(high: NDArray[np.uint32], low: NDArray[np.uint32]) -> NDArray[np.float64]:
    # 52 bits and a half: exact in float64, never 0 or 1, and finest where the noise is largest.
    bits = (high.astype(np.uint64) << np.uint64(20)) | (low >> np.uint32(12))
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52  # [n]
    noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return noise


# With v = high / 2**32, the noise is -log(-log1p(-v')) for a v' in [v, v + 2**-32]. It is at most
# -log(v), and a float's bits read as an integer are a piecewise linear log2 from below.
_LOG2_OF_ONE_BIT = math.log(2) * 2.0**-23
_LOG_OFFSET = math.log(2) * (127 + 32)


def _upper_bound(scores: NDArray[np.float32], high: NDArray[np.uint32]) -> NDArray[np.float32]:
    bits = high.astype(np.float32).view(np.int32)
    bound = bits.astype(np.float32)
    bound *= np.float32(-_LOG2_OF_ONE_BIT)
    bound += np.float32(_LOG_OFFSET)
    bound += scores
    return bound


def _lower_bound(score: np.float32, high: np.uint32) -> float:
    v = (int(high) + 1) * 2.0**-32
    return float(score) - math.log(-math.log1p(-v)) if v < 1 else -math.inf
