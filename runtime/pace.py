"""Pace: how many tokens to propose, from what a pass costs and what was accepted before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

MAX_PROPOSED = 16

_MATCH_STEPS = (4, 8, 16, 32)
"""Match lengths from which a proposal counts as surer."""

_DEPTH_STEPS = (2, 3, 5, 9)
"""Depths from which acceptance is kept apart; the first token is depth 1."""

_MEMORY = 200.0
"""Proposed tokens after which an old outcome weighs 1/e of a new one."""


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a target pass by its number of rows, interpolated between measured ones."""

    seconds: Mapping[int, float]

    def of(self, num_rows: int) -> float:
        """Constant below the smallest measured number of rows, linear beyond the largest."""
        rows = sorted(self.seconds)
        costs = [self.seconds[r] for r in rows]
        if num_rows > rows[-1] and len(rows) > 1:
            slope = (costs[-1] - costs[-2]) / (rows[-1] - rows[-2])
            return costs[-1] + slope * (num_rows - rows[-1])
        return float(np.interp(num_rows, rows, costs))

    def table(self, most: int) -> F64:
        """[most] seconds of a pass with 1 .. most rows."""
        return np.array([self.of(rows) for rows in range(1, most + 1)])


class Acceptance:
    """How often a source's tokens are accepted, given that those before them were.

    Kept by how sure the source is (`sureness`, e.g. a match length) and by depth, as two decaying
    counts. Begins with a guess that a few outcomes outweigh.
    """

    def __init__(self, guess: float = 0.6, weight: float = 4.0) -> None:
        shape = (len(_MATCH_STEPS) + 1, len(_DEPTH_STEPS) + 1)
        self._tried: F64 = np.full(shape, weight)
        self._accepted: F64 = np.full(shape, weight * guess)

    def note(self, sureness: int, num_proposed: int, num_accepted: int) -> None:
        """The outcome of a chain: its first tokens were accepted, the next, if any, was not."""
        bucket = _step(_MATCH_STEPS, sureness)
        for depth in range(1, min(num_proposed, num_accepted + 1) + 1):
            cell = bucket, _step(_DEPTH_STEPS, depth)
            fade = 1 - 1 / _MEMORY
            self._tried[cell] = self._tried[cell] * fade + 1
            self._accepted[cell] = self._accepted[cell] * fade + (depth <= num_accepted)

    def rates(self, sureness: int, most: int) -> F64:
        """[most] probability that the token at depth 1 .. most is accepted, given those before."""
        bucket = _step(_MATCH_STEPS, sureness)
        cells = [_step(_DEPTH_STEPS, depth) for depth in range(1, most + 1)]
        rates: F64 = self._accepted[bucket, cells] / self._tried[bucket, cells]
        return rates


def best_length(rates: F64, costs: F64, base_rows: int, free_rows: int) -> int:
    """How many tokens of a chain to propose so that tokens per second are most.

    Args:
        rates: [n] acceptance by depth, given that the tokens before were accepted.
        costs: seconds of a pass with 1, 2, … rows; at least base_rows + n of them.
        base_rows: rows of the pass without a proposal.
        free_rows: rows that are computed anyway, as padding: proposals there cost nothing.
    """
    expected = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(rates))])  # [n + 1]
    lengths = np.arange(len(rates) + 1)
    rows = np.maximum(base_rows + lengths, free_rows)
    return int(np.argmax(expected / costs[rows - 1]))


def _step(steps: Sequence[int], value: int) -> int:
    return sum(value >= step for step in steps)
