"""Whether counts fit a distribution: Pearson's chi-square, without a statistics package."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

_LEAST_EXPECTED = 5.0
"""Cells that are expected less often are counted as one, or the approximation does not hold."""


def fit(observed: ArrayLike, expected: ArrayLike) -> float:
    """Probability that counts [n], drawn with `expected` [n] (of the same sum), lie as far off.

    0 where something came that cannot.
    """
    counts = np.asarray(observed, np.float64).ravel()
    means = np.asarray(expected, np.float64).ravel()
    assert math.isclose(counts.sum(), means.sum(), rel_tol=1e-6)
    if counts[means == 0].any():
        return 0.0
    # The rarest cells together, so that what is left of them is as even as can be.
    order = np.argsort(-means)
    counts, means = counts[order], means[order]
    kept = int(np.count_nonzero(means >= _LEAST_EXPECTED))
    if means[kept:].sum() < _LEAST_EXPECTED:
        kept -= 1
    kept = max(0, kept)
    counts = np.append(counts[:kept], counts[kept:].sum())
    means = np.append(means[:kept], means[kept:].sum())
    return chi_square_tail(float(((counts - means) ** 2 / means).sum()), len(counts) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability of a chi-square variable with `freedom` degrees to be at least `statistic`.

    The finite sums of Abramowitz and Stegun, "Handbook of mathematical functions", 26.4.4 and
    26.4.5; each term by its logarithm, so that large ones do not overflow.
    """
    if freedom < 1 or statistic <= 0:
        return 1.0
    half = statistic / 2
    start = 0.5 * (freedom % 2)
    total = math.erfc(math.sqrt(half)) if freedom % 2 else 0.0
    for i in range(freedom // 2):
        power = i + start
        total += math.exp(power * math.log(half) - half - math.lgamma(power + 1))
    return min(1.0, total)
