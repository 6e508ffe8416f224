"""Pace: how many tokens to propose, from what a pass costs and what was accepted before."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.runtime.backend import Backend
from headrace.runtime.batch import chain
from headrace.runtime.config import MAX_PROPOSED, Speculate
from headrace.runtime.exactness import MIN_DECLARED_ROWS

F64 = npt.NDArray[np.float64]

_MEASURED_ROWS = (2, 3, 4, 6, 8, 12, 17)
_ROUNDS = 6  # the first of them warms up

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


class Pace:
    """Decides the lengths of proposals for all requests of a model. Threads may share it: the
    estimates are sums, and one that is lost or counted twice changes no text.
    """

    def __init__(self, costs: PassCosts, speculate: Speculate) -> None:
        """`speculate`: `auto`, `off`, or a number of tokens to propose whatever they cost."""
        self._fixed = speculate if isinstance(speculate, int) else None
        self.limit = {"auto": MAX_PROPOSED, "off": 0}.get(str(speculate), self._fixed or 0)
        self._costs = costs.table(MAX_PROPOSED + 1)
        self._acceptance = Acceptance()

    def length(self, sureness: int, most: int) -> int:
        """How many of `most` tokens to propose."""
        if self._fixed is not None:
            return most
        rates = self._acceptance.rates(sureness, most)
        return best_length(rates, self._costs, 1, MIN_DECLARED_ROWS)

    def note(self, sureness: int, num_proposed: int, num_accepted: int) -> None:
        """See Acceptance.note."""
        if num_proposed:
            self._acceptance.note(sureness, num_proposed, num_accepted)


def costs_of(backend: Backend, path: Path, say: Callable[[str], None]) -> PassCosts:
    """What `path` remembers, or else `measure`, which it then remembers if it can be written."""
    try:
        found = {int(rows): float(s) for rows, s in json.loads(path.read_text()).items()}
        if tuple(found) == _MEASURED_ROWS and min(found.values()) > 0:
            return PassCosts(found)
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # none yet, or not ours: it is made anew
    say("measuring what a pass costs, once")
    costs = measure(backend)
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(costs.seconds))
    return costs


def measure(backend: Backend) -> PassCosts:
    """Medians over a few passes of each width, in turn, beside a context of half a lane.

    Writes over lane 0, so nothing may be in it yet. Takes about a second for 0.1B parameters.
    """
    room = backend.facts.capacity - max(_MEASURED_ROWS)
    past = max(0, min(room, 512))
    seconds: dict[int, list[float]] = {rows: [] for rows in _MEASURED_ROWS}
    for _ in range(_ROUNDS):
        for rows, found in seconds.items():
            ids = np.zeros(min(rows, backend.facts.capacity), np.int64)
            start = time.perf_counter()
            backend.forward([chain(0, ids, past, tuple(range(len(ids))))])
            found.append(time.perf_counter() - start)
    return PassCosts({rows: float(np.median(found[1:])) for rows, found in seconds.items()})


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
