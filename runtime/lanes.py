"""Who is in which lane. More sequences than lanes take turns; all of this is under one lock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from headrace.runtime.batch import LaneRows
from headrace.runtime.sequence import Sequence

TURN_PASSES = 32
"""Passes after which a lane is given up if another sequence waits. Staging costs a few passes."""

IDLE_S = 0.005
"""A lane is given up sooner when its sequence has let it idle so long, e.g. a paused answer's."""

_NO_IDS = np.empty(0, np.int64)


@dataclass(eq=False)
class _Lane:
    index: int
    holder: Sequence | None = None
    num_passes: int = 0
    """Since the holder was staged, or last gave others the chance."""
    is_staged: bool = False
    is_riding: bool = False
    """In the pass that is running, without rows of its own."""
    end: int = 0
    """Slots from here on hold nothing that matters: where padding rows may land."""

    @property
    def in_turn(self) -> bool:
        return self.holder is not None and self.holder.in_turn


class Lanes:
    """The arena's lanes. Every method is called under the engine's lock."""

    def __init__(self, num_lanes: int) -> None:
        self._lanes = [_Lane(i) for i in range(num_lanes)]
        self._queue: list[Sequence] = []
        """Sequences that wait for a lane, the first to come first."""
        self.num_switches = 0
        """Times that a sequence had to leave its lane for another."""

    @property
    def num_in_turn(self) -> int:
        return sum(lane.in_turn for lane in self._lanes)

    def is_in_turn(self, index: int) -> bool:
        return self._lanes[index].in_turn

    def give(self, sequence: Sequence) -> bool:
        """Whether the sequence has a lane now; if not, it stands in the queue for one."""
        if sequence.lane is not None and not (self._queue and self._is_used_up(sequence.lane)):
            self.leave_queue(sequence)
            return True
        if sequence not in self._queue:
            self._queue.append(sequence)
        if self._queue[0] is not sequence:
            return False
        lane = self._lanes[sequence.lane] if sequence.lane is not None else self._choose()
        if lane is None:
            return False
        self._queue.pop(0)
        self._move_in(lane, sequence)
        return True

    def leave_queue(self, sequence: Sequence) -> None:
        if sequence in self._queue:
            self._queue.remove(sequence)

    def is_waiting(self, sequence: Sequence) -> bool:
        return sequence in self._queue

    def _is_used_up(self, index: int) -> bool:
        return self._lanes[index].num_passes >= TURN_PASSES

    def _choose(self) -> _Lane | None:
        """The first empty lane, else the one that has idled longest of those to be given up.

        A thread that asks for a lane has let all others idle that it used.
        """
        quiet = [lane for lane in self._lanes if not lane.in_turn and not lane.is_riding]
        now, me = time.monotonic(), threading.get_ident()
        best: _Lane | None = None
        for lane in quiet:
            if lane.holder is None:
                return lane
            is_idle = lane.holder.thread == me or now - lane.holder.last_used >= IDLE_S
            if is_idle or self._is_used_up(lane.index):
                is_older = (
                    best is None
                    or best.holder is None
                    or lane.holder.last_used < best.holder.last_used
                )
                best = lane if is_older else best
        return best

    def _move_in(self, lane: _Lane, sequence: Sequence) -> None:
        lane.num_passes = 0
        if lane.holder is sequence:
            return
        if lane.holder is not None:
            lane.holder.park()
            self.num_switches += 1
        lane.holder, lane.is_staged = sequence, False
        lane.end = sequence.state.num_slots
        sequence.lane = lane.index

    def must_stage(self, sequence: Sequence) -> bool:
        assert sequence.lane is not None
        return not self._lanes[sequence.lane].is_staged

    def staged(self, sequence: Sequence) -> None:
        assert sequence.lane is not None
        self._lanes[sequence.lane].is_staged = True

    def turn_ended(self, sequence: Sequence) -> None:
        """Also after a turn that failed before its sequence was staged."""
        if sequence.lane is None:
            return
        lane = self._lanes[sequence.lane]
        lane.end = sequence.state.num_slots
        if not lane.is_staged:
            self.vacate(sequence)

    def vacate(self, sequence: Sequence) -> None:
        """Leaves the lane; what only the lane has is lost."""
        if sequence.lane is not None:
            lane = self._lanes[sequence.lane]
            lane.holder, lane.is_staged, lane.end, sequence.lane = None, False, 0, None

    def submitted(self, rows: LaneRows) -> None:
        lane = self._lanes[rows.lane]
        lane.num_passes += 1
        lane.end = max(lane.end, rows.past + rows.num_rows)

    def end(self, index: int) -> int:
        return self._lanes[index].end

    def rider(self, index: int) -> LaneRows:
        """An entry without rows, for a lane between two busy ones."""
        lane = self._lanes[index]
        lane.is_riding = True
        return LaneRows(index, _NO_IDS, _NO_IDS, lane.end)

    def rode(self, lanes: range) -> None:
        for index in lanes:
            self._lanes[index].is_riding = False
