"""What benchmarks/soak.py measures: a series of memory with its slope, and peaks by segment."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.runtime import memory

MAX_SLOPE_MB = 1.0
"""Of the interval's ends, in MB per 100,000 tokens."""

MAX_LEFT_SPREAD = 64 * 1024
"""Bytes between the least and the most that a segment of tracemalloc leaves."""

MAX_PEAK_GROWTH = 64 * 1024
"""Bytes from the median peak of the first half of the segments to that of the second half: what is
lost with time raises a half as a whole, and a single peak is chance."""

RESAMPLES = 4000


@dataclass(frozen=True)
class Slope:
    """MB per 100,000 tokens."""

    value: float
    low: float
    high: float

    @property
    def is_flat(self) -> bool:
        return self.low <= 0 <= self.high and max(-self.low, self.high) <= MAX_SLOPE_MB


@dataclass
class Samples:
    """RssAnon + VmSwap over tokens fed."""

    tokens: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def take(self, num_tokens: int) -> None:
        usage = memory.usage()
        self.tokens.append(num_tokens)
        self.num_bytes.append(usage.rss_anon + usage.swap)
        self.seconds.append(time.perf_counter())

    def slope(self) -> Slope:
        x = np.array(self.tokens) / 1e5
        y = np.array(self.num_bytes) / 1e6
        x = x - x.mean()
        value = float(x @ y / (x @ x))
        residuals = y - y.mean() - value * x
        block = max(1, len(x) // 10)
        starts = np.random.default_rng(0).integers(
            0, len(x) - block + 1, (RESAMPLES, -(-len(x) // block))
        )
        drawn = residuals[(starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)]
        slopes = value + drawn[:, : len(x)] @ x / (x @ x)
        low, high = np.percentile(slopes, [2.5, 97.5])
        return Slope(value, float(low), float(high))

    def to_json(self) -> dict[str, Any]:
        y, t = np.array(self.num_bytes), self.seconds
        speeds = np.diff(self.tokens) / np.diff(t)
        return {
            "samples": len(y),
            "slope_mb_per_100k": dataclasses.asdict(self.slope()),
            "rss_mb": {"first": y[0] / 1e6, "last": y[-1] / 1e6, **_spread(y / 1e6)},
            "rss_mb_by_tenths": [float(np.mean(part)) / 1e6 for part in np.array_split(y, 10)],
            "tokens": self.tokens[-1] - self.tokens[0],
            "seconds": t[-1] - t[0],
            "tokens_per_s": (self.tokens[-1] - self.tokens[0]) / (t[-1] - t[0]),
            "tokens_per_s_by_sample": _spread(speeds),
        }


@dataclass(frozen=True)
class Trace:
    """Bytes that Python objects took, by segment."""

    peaks: list[int]
    left: list[int]

    @property
    def peak_growth(self) -> int:
        half = len(self.peaks) // 2
        return int(np.median(self.peaks[half:]) - np.median(self.peaks[:half]))

    @property
    def left_spread(self) -> int:
        return max(self.left) - min(self.left)

    @property
    def is_flat(self) -> bool:
        return self.left_spread <= MAX_LEFT_SPREAD and self.peak_growth <= MAX_PEAK_GROWTH

    def to_json(self) -> dict[str, Any]:
        figures = {"peak_growth": self.peak_growth, "left_spread": self.left_spread}
        return figures | dataclasses.asdict(self)


def _spread(values: np.ndarray[Any, Any]) -> dict[str, float]:
    return {
        "min": float(values.min()),
        "median": float(np.median(values)),
        "max": float(values.max()),
    }
