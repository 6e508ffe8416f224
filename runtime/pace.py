"""Pace: how many tokens to propose, from what a pass costs and what was accepted before."""

from __future__ import annotations

import contextlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.runtime.backend import BackendFacts, LaneBackend
from headrace.runtime.batch import LaneRows
from headrace.runtime.request import MAX_PROPOSED

F64 = npt.NDArray[np.float64]

_MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 17)
_ROUNDS = 11  # the first of them warms up
_MEASURED_S = 8.0
"""No further round is begun after so long."""

_MEMORY = 60.0
"""Proposed tokens after which an old outcome weighs 1/e of a new one: a text's nature changes within
fewer than a hundred tokens, from a log's lines to an operator's question."""

_DEPTH_STEPS = (2, 3, 5, 9)
"""Depths from which acceptance is kept apart; the first token is depth 1."""

_GUESSES = (0.6, 0.3)
"""Acceptance of a source that nothing is known of: of its first choice, and of a second one."""

_GUESS_WEIGHT = 4.0
"""Outcomes that a guess is worth."""

_MOST_PADDING = 8
"""Rows that any machine adds to a pass (exactness.py)."""

ANY = -1
"""Sureness of a source's tokens on the whole, for those that are yet to be drafted."""


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass by its number of rows, interpolated between measured ones."""

    seconds: Mapping[int, float]

    def of(self, num_rows: int) -> float:
        """Constant below the smallest measured number of rows, linear beyond the largest."""
        rows = sorted(self.seconds)
        costs = [self.seconds[r] for r in rows]
        if num_rows > rows[-1] and len(rows) > 1:
            slope = (costs[-1] - costs[-2]) / (rows[-1] - rows[-2])
            return costs[-1] + slope * (num_rows - rows[-1])
        return float(np.interp(num_rows, rows, costs))

    def table(self, most: int, lanes: int = 1) -> F64:
        """[most] seconds of a pass in which each of the lanes has 1 .. most rows."""
        return np.array([self.of(rows * lanes) for rows in range(1, most + 1)])


def costs_of(backend: LaneBackend, path: Path, say: Callable[[str], None]) -> PassCosts:
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


def measured_past(facts: BackendFacts) -> int:
    """Tokens behind which passes are measured."""
    return max(0, min(facts.capacity - max(_MEASURED_ROWS), 512))


def measure(backend: LaneBackend) -> PassCosts:
    """The fastest of a few passes of each width, taken in turn, behind up to 512 tokens. What else
    runs on the machine only ever adds to that; so a wider pass that was faster counts as well.

    Writes over lane 0, so nothing may be in it yet. About a second for 0.1B parameters.
    """
    facts = backend.facts
    past = measured_past(facts)
    most = min(facts.capacity, facts.max_rows)
    seconds: dict[int, list[float]] = {rows: [] for rows in _MEASURED_ROWS if rows <= most}
    began = time.perf_counter()
    for done in range(_ROUNDS):
        if done > 1 and time.perf_counter() - began > _MEASURED_S:
            break
        for num_rows, found in seconds.items():
            ids = np.zeros(num_rows, np.int64)
            positions, wanted = np.arange(past, past + len(ids)), tuple(range(len(ids)))
            rows = LaneRows(0, ids, positions, past, wanted, exact=False)
            start = time.perf_counter()
            backend.forward([rows])
            found.append(time.perf_counter() - start)
    fastest = {rows: min(found[1:]) for rows, found in seconds.items()}
    return PassCosts({rows: min(s for r, s in fastest.items() if r >= rows) for rows in fastest})


class Origin(NamedTuple):
    """Where a proposed token comes from: what its chance of being accepted goes by."""

    source: str
    rank: int = 0
    """0 for the source's first choice at its place, 1 for another one."""
    sureness: int = ANY
    """A step of the source's own scale."""
    is_after_boundary: bool = False
    """Behind punctuation or a line's end, where texts are less predictable."""


class Acceptance:
    """How often proposed tokens are accepted, given that those before them were.

    Decaying counts by origin and depth. What is rarely seen leans on what it is a part of: a depth
    on the same sureness at all depths, that on its source, and that on a guess.
    """

    def __init__(self) -> None:
        self._cells: dict[object, tuple[float, float]] = {}
        """(tried, accepted)"""

    def note(self, origin: Origin, depth: int, *, accepted: bool) -> None:
        """An outcome of a token whose predecessors were accepted; its first depth is 1."""
        for key in _levels(origin, depth):
            tried, kept = self._cells.get(key, (0.0, 0.0))
            fade = 1 - 1 / _MEMORY
            self._cells[key] = tried * fade + 1, kept * fade + accepted

    def rate(self, origin: Origin, depth: int) -> float:
        """Probability that the token is accepted, given that those before it were."""
        rate = _GUESSES[origin.rank]
        for key in _levels(origin, depth):
            tried, kept = self._cells.get(key, (0.0, 0.0))
            rate = (kept + _GUESS_WEIGHT * rate) / (tried + _GUESS_WEIGHT)
        return rate

    def rates(self, origins: Sequence[Origin]) -> F64:
        """[n] of a chain."""
        known: dict[object, float] = {}
        found = np.empty(len(origins))
        for i, origin in enumerate(origins):
            key = origin, _depth_step(i + 1)
            if key not in known:
                known[key] = self.rate(origin, i + 1)
            found[i] = known[key]
        return found


def _levels(origin: Origin, depth: int) -> Iterator[object]:
    """From the whole to the part."""
    yield origin.source, origin.rank
    yield origin
    yield origin, _depth_step(depth)


def _depth_step(depth: int) -> int:
    return bisect_right(_DEPTH_STEPS, depth)


@dataclass(frozen=True)
class Plan:
    """What a proposal promises."""

    num_tokens: int
    tokens_per_s: float


class Pace:
    """Decides the sizes of proposals for all requests of a model. Threads may share it: the
    estimates are sums, and one that is lost or counted twice changes no text.
    """

    def __init__(self, costs: PassCosts) -> None:
        self.acceptance = Acceptance()
        self._costs = costs
        self._tables: dict[int, F64] = {}

    def plan(
        self,
        reach: F64,
        *,
        lanes: int = 1,
        rows: Sequence[int] | None = None,
        extra_s: float = 0.0,
        once_s: float = 0.0,
        fixed: int | None = None,
    ) -> Plan:
        """How many of n tokens to propose.

        Args:
            reach: [n] probability that each token becomes text, the largest first.
            lanes: lanes that take part in a pass.
            rows: [at least n + 1] rows that the lane computes for 0, 1, … tokens, padding included:
                proposed tokens in its place cost nothing. None is one more than the tokens.
            extra_s: seconds that each token costs beside its row in the pass.
            once_s: seconds that it costs to propose anything.
            fixed: how many to propose whatever they cost.
        """
        expected = 1 + np.concatenate([[0.0], np.cumsum(reach)])  # [n + 1]
        lengths = np.arange(len(expected))
        computed = 1 + lengths if rows is None else np.array(rows[: len(lengths)])
        extra = extra_s * lengths + once_s * (lengths > 0)
        speeds = expected / (self.costs(lanes)[computed - 1] + extra)
        best = int(np.argmax(speeds)) if fixed is None else min(fixed, len(reach))
        return Plan(best, float(speeds[best]))

    def costs(self, lanes: int = 1) -> F64:
        """Seconds of a pass with 1, 2, … rows in each lane, padding included."""
        if lanes not in self._tables:
            self._tables[lanes] = self._costs.table(1 + MAX_PROPOSED + _MOST_PADDING, lanes)
        return self._tables[lanes]
