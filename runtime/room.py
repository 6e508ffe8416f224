"""Room in the pool: whose request may begin, who waits, who lends, whose blocks are taken.

In this order: unreferenced blocks are evicted, the least recently used idle sequence is dropped, the
newest request waits. Every decision is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

from headrace.errors import PoolFullError
from headrace.runtime.admission import Admission
from headrace.runtime.blocks import BLOCK_TOKENS
from headrace.runtime.lanes import Lanes
from headrace.runtime.prefix import PrefixCache
from headrace.runtime.sequence import Sequence

PAUSED_S = 1.0
"""A request that nobody has asked for a token so long lends its reservation to those that wait."""


class Room:
    """What sequences hold and may come to hold. Every method is called under the engine's lock."""

    def __init__(self, cache: PrefixCache, lanes: Lanes, num_blocks: int) -> None:
        self._cache, self._lanes = cache, lanes
        self._admission = Admission(num_blocks)
        self._queue: list[Sequence] = []
        """Requests that wait for blocks, the first to come first."""
        self.sequences: dict[Sequence, None] = {}
        """All that hold blocks or may come to."""
        self.num_dropped = self.num_waited = self.num_lent = self.num_refused = 0

    @property
    def num_reserved(self) -> int:
        return self._admission.num_reserved

    def is_admitted(self, sequence: Sequence) -> bool:
        return sequence in self._admission

    def require_fit(self, sequence: Sequence, num_blocks: int) -> None:
        """Raises PoolFullError if so many can never be reserved, beside what is for good."""
        if self._admission.ever_fits(num_blocks):
            return
        self.num_refused += 1
        what = (
            "a stream of this window"
            if sequence.is_stream
            else f"a request of up to {num_blocks * BLOCK_TOKENS} tokens"
        )
        total, lasting = self._admission.num_blocks, self._admission.num_lasting
        kept = f", of which streams and pinned prompts keep {lasting}" if lasting else ""
        remedy = "close one of them, " if lasting else ""
        raise PoolFullError(
            f"{what} needs {num_blocks} blocks of {BLOCK_TOKENS} tokens, and the pool has "
            f"{total}{kept}; {remedy}raise --pool, or lower --max-tokens or the window"
        )

    def admit(self, sequence: Sequence) -> bool:
        """Whether the sequence's worst case is reserved; if not, it stands in the queue.

        Raises PoolFullError when it never can be any more: what it lent may be a stream's now.
        """
        if sequence in self._admission:
            return True
        is_new = sequence not in self._queue
        if is_new:
            self._queue.append(sequence)
        if self._queue[0] is sequence and self._reserve(sequence):
            self._queue.pop(0)
            return True
        self.require_fit(sequence, sequence.worst_case)
        self.num_waited += is_new
        return False

    def leave_queue(self, sequence: Sequence) -> None:
        if sequence in self._queue:
            self._queue.remove(sequence)

    def _reserve(self, sequence: Sequence) -> bool:
        while not self._admission.reserve(
            sequence, sequence.worst_case, is_lasting=sequence.is_stream
        ):
            paused = [s for s in self.sequences if self._is_paused(s)]
            if not paused:
                return False
            self._admission.release(min(paused, key=lambda s: s.last_used))
            self.num_lent += 1
        return True

    def _is_paused(self, sequence: Sequence) -> bool:
        """Whether it is a request that nobody is waiting for.

        What the asking thread had the last turn of cannot go on while it waits for another.
        """
        if sequence.is_stream or sequence.in_turn or sequence not in self._admission:
            return False
        if sequence.thread == threading.get_ident():
            return True
        idle_s = time.monotonic() - sequence.last_used
        return idle_s > PAUSED_S and not self._lanes.is_waiting(sequence)

    def keep(self, owner: Hashable, num_blocks: int) -> bool:
        """Whether so many are reserved for good, for an owner that is no sequence."""
        return self._admission.reserve(owner, num_blocks, is_lasting=True)

    def release(self, owner: Hashable) -> None:
        """Takes a reservation back, if there is one; blocks stay where they are."""
        self._admission.release(owner)

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of an admitted sequence. Evicts unreferenced ones and drops idle sequences."""
        while (block_ids := self._cache.allocate(num_blocks)) is None:
            idle = [
                s
                for s in self.sequences
                if s.table.num_blocks and s not in self._admission and not s.in_turn
            ]
            assert idle, "admission has let in more than the pool holds"
            self.drop(min(idle, key=lambda s: s.last_used))
            self.num_dropped += 1
        return block_ids

    def drop(self, sequence: Sequence) -> None:
        """Takes its lane and its blocks away."""
        self._lanes.vacate(sequence)
        sequence.drop()
