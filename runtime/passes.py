"""Passes of several threads become one: whoever comes first runs what the others wait for as well.

A pass costs the weights' traffic once, however many lanes take part. There is no thread of its own
behind this: the first one to wait runs a pass with all rows that suit each other, and hands out the
logits ("flat combining", Hendler et al., 2010).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from headrace.errors import UsageError
from headrace.models.iospec import SPARE_SLOTS
from headrace.runtime.backend import Backend
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.exactness import MIN_DECLARED_ROWS
from headrace.runtime.lanes import Lanes

MAX_WASTE = 1.5
"""Rows of a pass over rows asked for: what padding and riding lanes may add to it."""

GATHER_SHARE = 0.1
"""How long to wait for the others of the last pass, as a share of how long that took."""


@dataclass(eq=False)
class _Job:
    rows: LaneRows
    thread: int
    logits: F32 | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.logits is not None or self.error is not None


@dataclass
class _Group:
    """Jobs that one pass can take."""

    jobs: list[_Job] = field(default_factory=list)

    def lanes(self) -> range:
        numbers = [job.rows.lane for job in self.jobs]
        return range(min(numbers), max(numbers) + 1)

    def num_wanted(self) -> int:
        return sum(len(job.rows.wanted) for job in self.jobs)

    def is_worth_it(self, max_rows: int) -> bool:
        declared = [max(MIN_DECLARED_ROWS, job.rows.num_rows) for job in self.jobs]
        padded = len(self.lanes()) * max(declared)
        return padded <= MAX_WASTE * sum(declared) and padded <= max_rows


class Passes:
    """Runs rows on a backend, one pass at a time."""

    def __init__(
        self, backend: Backend, lanes: Lanes, lock: threading.Lock, changed: threading.Condition
    ) -> None:
        """`changed` is the condition of `lock`, which guards all of this."""
        self.num_passes = 0
        self.num_rows = 0
        """Rows asked for, padding not counted."""
        self.closed = False
        self._backend, self._lanes = backend, lanes
        self._lock, self._changed = lock, changed
        self._waiting: list[_Job] = []
        self._running: list[_Job] | None = None
        self._leader = 0
        """The thread that runs a pass, or ran the last one."""
        self._expected: dict[int, int] = {}
        """Lanes of the last pass whose threads have not come back, and those threads."""
        self._last_s = 0.0
        self._lender: int | None = None
        """The lane whose thread reads the backend's own memory, until its turn ends."""

    def run(self, rows: LaneRows) -> F32:
        """Logits [wanted, V] of `rows`, from a pass that may hold others' too. They hold until the
        turn ends.

        The caller has the lane's turn. Raises UsageError once closed, ModelOutputError.
        """
        job = _Job(rows, threading.get_ident())
        with self._lock:
            self._lanes.submitted(rows)
            self._expected.pop(rows.lane, None)
            if self._lender == rows.lane:
                self._lender = None
            self._waiting.append(job)
            self._changed.notify_all()
            try:
                while not job.is_done:
                    if self._running is not None:
                        self._changed.wait()
                    else:
                        self._lead()
            except BaseException:
                self._withdraw(job)
                raise
        if job.error is not None:
            raise job.error
        assert job.logits is not None
        return job.logits

    def expect_no_more(self, lane: int) -> None:
        """Nobody waits for its thread any longer. Under the lock."""
        self._expected.pop(lane, None)

    def _lead(self) -> None:
        """Runs a pass. Its jobs wait until they are done, so what an interrupt has cut short is run
        again: it writes the same rows.
        """
        try:
            self._running, self._leader = [], threading.get_ident()
            while self._lender is not None and self._lanes.is_in_turn(self._lender):
                self._changed.wait()
            self._gather()
            self._running = group = self._pick().jobs
            self._run(group)
            self._waiting = [job for job in self._waiting if not job.is_done]
        finally:
            self._running = None
            self._changed.notify_all()

    def _gather(self) -> None:
        """Waits a moment for the threads of the last pass: they usually come back with one row."""
        me = threading.get_ident()
        until = time.monotonic() + self._last_s * GATHER_SHARE
        while any(thread != me for thread in self._expected.values()):
            remaining = until - time.monotonic()
            if remaining <= 0:
                break
            self._changed.wait(remaining)
        self._expected.clear()

    def _pick(self) -> _Group:
        """The job that has waited longest, and those that share its pass at little cost."""
        facts = self._backend.facts
        first, *others = [job for job in self._waiting if not job.is_done]
        group = _Group([first])
        for job in others:
            larger = _Group([*group.jobs, job])
            fits = larger.num_wanted() <= facts.max_wanted and self._has_room(larger)
            if fits and larger.is_worth_it(facts.max_rows):
                group = larger
        return group

    def _has_room(self, group: _Group) -> bool:
        """Whether the longest lane's rows fit behind what each lane holds: all are padded to it."""
        by_lane = {job.rows.lane: job.rows for job in group.jobs}
        width = max(MIN_DECLARED_ROWS, *(rows.num_rows for rows in by_lane.values()))
        past = max(by_lane[i].past if i in by_lane else self._lanes.end(i) for i in group.lanes())
        facts = self._backend.facts
        return past + width + facts.most_padding <= facts.capacity + SPARE_SLOTS

    def _run(self, group: list[_Job]) -> None:
        if self.closed:
            error = UsageError("the model of this answer is closed; load the bundle again")
            for job in group:
                job.error = error
            return
        by_lane = {job.rows.lane: job for job in group}
        lanes = range(min(by_lane), max(by_lane) + 1)
        entries = [by_lane[i].rows if i in by_lane else self._lanes.rider(i) for i in lanes]
        # Copying eight rows of a large vocabulary takes a tenth of a millisecond and more.
        self._lender = group[0].rows.lane if self._lanes.num_in_turn == 1 else None
        start = time.monotonic()
        self._lock.release()
        try:
            logits = self._backend.forward(entries)
            self._hand_out(group, entries, logits, is_lent=self._lender is not None)
        except Exception as error:  # noqa: BLE001  every thread of the pass hears of it
            for job in group:
                job.error = error
        finally:
            self._lock.acquire()
            self._lanes.rode(lanes)
        self._last_s = time.monotonic() - start
        self._expected = {job.rows.lane: job.thread for job in group}
        self.num_passes += 1
        self.num_rows += sum(job.rows.num_rows for job in group)

    @staticmethod
    def _hand_out(
        group: list[_Job], entries: Sequence[LaneRows], logits: F32, *, is_lent: bool
    ) -> None:
        starts, end = {}, 0
        for rows in entries:
            starts[rows.lane] = end
            end += len(rows.wanted)
        assert len(logits) == end, f"{len(logits)} rows of logits, {end} wanted"
        for job in group:
            start = starts[job.rows.lane]
            own = logits[start : start + len(job.rows.wanted)]
            # The next pass writes over them.
            job.logits = own if is_lent else own.copy()

    def _withdraw(self, job: _Job) -> None:
        """After an interrupt: the lane must be quiet before its turn ends, whatever comes."""
        if self._running is not None and self._leader == threading.get_ident():
            # It came before the pass was put down, and nobody else would.
            self._running = None
            self._changed.notify_all()
        while self._running is not None and job in self._running:
            with suppress(KeyboardInterrupt):
                self._changed.wait()
        if job in self._waiting:
            self._waiting.remove(job)
