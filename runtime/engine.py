"""The engine: sequences on one backend, with a pool of blocks behind its lanes.

It decides who computes next, in which lane, and whose blocks are given up when the pool is full.
One lock guards those decisions; passes and copies run outside it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.errors import PoolFullError, UsageError
from headrace.models.config import ModelConfig
from headrace.runtime.admission import Admission
from headrace.runtime.arena import Arena
from headrace.runtime.backend import Backend
from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool, PoolCounts
from headrace.runtime.kv import PoolArrays, PoolShape
from headrace.runtime.lanes import IDLE_S, Lanes
from headrace.runtime.passes import Passes
from headrace.runtime.prefix import PrefixCache, PrefixCounters, Root
from headrace.runtime.ring import RingLayout
from headrace.runtime.sequence import Sequence

PAUSED_S = 1.0
"""A request that nobody has asked for a token so long lends its reservation to those that wait."""

CROWDED_CHUNK = 64
"""Rows of a prefill chunk while other sequences compute too, so that they do not wait long."""


@dataclass(frozen=True)
class KvStats:
    """What the pool holds and what was decided about it since the start."""

    blocks: PoolCounts
    reserved_blocks: int
    """By running requests, streams and pins."""
    pinned_blocks: int
    prefix: PrefixCounters
    dropped_sequences: int
    """Idle ones whose blocks were taken; they are computed again on return."""
    waited_requests: int
    """Requests that had to wait for blocks."""
    refused_requests: int
    """Requests that could never fit."""
    lane_switches: int
    """Times that a sequence had to leave its lane for another."""
    passes: int
    rows: int
    seconds_staging: float
    seconds_committing: float


class Engine:
    """Owns lanes, pool and prefix cache of a backend. Threads may share it."""

    def __init__(
        self, backend: Backend, config: ModelConfig, kv: str, num_blocks: int, root: Root
    ) -> None:
        """Allocates the pool. Raises MemoryError."""
        self.backend, self.facts, self.root = backend, backend.facts, root
        self.arrays = PoolArrays(PoolShape(config, kv, num_blocks))
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.lock = threading.Condition(threading.Lock())
        self._lanes = Lanes(self.facts.lanes)
        self.passes = Passes(backend, self._lanes, self.lock)
        self._admission = Admission(num_blocks)
        self._queue: list[Sequence] = []
        """Requests that wait for blocks, the first to come first."""
        self._sequences: dict[Sequence, None] = {}
        """All that hold blocks or may come to."""
        self._abandoned: deque[Sequence] = deque()
        self._closed = False
        self._dropped = self._waited = self._refused = 0
        self._staging_s = self._committing_s = 0.0

    @property
    def arena(self) -> Arena:
        return self.backend.arena

    @property
    def chunk_rows(self) -> int:
        """The most rows a pass should have now."""
        crowded = self._lanes.num_in_turn > 1
        return min(CROWDED_CHUNK, self.facts.max_rows) if crowded else self.facts.max_rows

    # sequences

    def sequence(self) -> Sequence:
        """A context of up to a lane's capacity; it holds nothing yet."""
        return Sequence(self, None, self.facts.capacity)

    def stream(self, layout: RingLayout) -> Sequence:
        """An endless context; its blocks are reserved until it is closed.

        Raises UsageError if the layout is larger than a lane, PoolFullError.
        """
        if layout.capacity > self.facts.capacity:
            raise UsageError(
                f"sinks {layout.sinks} + window {layout.window} + unit {layout.unit} are "
                f"{layout.capacity} tokens, beyond the {self.facts.capacity} of a lane; use a "
                f"smaller window or raise --ctx"
            )
        sequence = Sequence(self, layout, layout.capacity)
        self._settle(sequence)
        return sequence

    def fork(self, source: Sequence) -> Sequence:
        """A second sequence that is what `source` is now, whatever becomes of `source`.

        Full blocks are shared. Raises PoolFullError for a fork of a stream, which reserves the
        whole window: it ends up owning it, since the stream moves on.
        """
        fork = Sequence(self, source.layout, source.capacity)
        if source.is_stream:
            self._settle(fork)
        try:
            with self._fork_turn(source):
                source.fork_into(fork)
        except BaseException:
            self.close_sequence(fork)
            raise
        with self.lock:
            self._sequences[fork] = None
        return fork

    def _settle(self, stream: Sequence) -> None:
        """Reserves a stream's blocks for its life."""
        stream.worst_case = stream.blocks_of(0)
        with self.lock:
            self._require_fit(stream.worst_case, "a stream of this window")
            self._sequences[stream] = None
            try:
                self._wait_until(stream, lambda: self._admit(stream))
            except BaseException:
                del self._sequences[stream]
                raise

    @contextmanager
    def request(self, sequence: Sequence, num_new: int) -> Iterator[None]:
        """While it lasts, `sequence` may grow by `num_new` tokens beyond what is pending.

        Raises PoolFullError when that can never fit. Blocks are reserved at the first turn.
        """
        with self.lock:
            self._require_open(sequence)
            self._reap()
            if not sequence.is_stream:
                worst_case = sequence.blocks_of(num_new)
                self._require_fit(
                    worst_case, f"a request of up to {worst_case * BLOCK_TOKENS} tokens"
                )
                sequence.worst_case = worst_case
                self._sequences[sequence] = None
        try:
            yield
        finally:
            with self.lock:
                if not sequence.is_stream:
                    self._admission.release(sequence)
                    sequence.worst_case = 0
                self.lock.notify_all()

    def close_sequence(self, sequence: Sequence) -> None:
        """Gives blocks and lane back, once the turn in progress has ended; may be called again."""
        with self.lock:
            sequence.closed = True
            while sequence.in_turn:
                self.lock.wait()
            self._forget(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Closes it at the next opportunity; for finalizers, which may run while we hold the lock."""
        self._abandoned.append(sequence)

    def _reap(self) -> None:
        for _ in range(len(self._abandoned)):
            sequence = self._abandoned.popleft()
            sequence.closed = True
            if sequence.in_turn:
                self._abandoned.append(sequence)
            else:
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self._sequences:
            self._lanes.vacate(sequence)
            if not self._closed:
                sequence.forget()
            self._admission.release(sequence)
            del self._sequences[sequence]
        self.lock.notify_all()

    def pin(self, token_ids: Ids[int]) -> int:
        """Computes a prefix and keeps its full blocks for good. Returns the tokens pinned.

        Raises PoolFullError, ContextFullError.
        """
        sequence = self.sequence()
        sequence.require_room(len(token_ids))
        sequence.append(token_ids)
        owner = ("pin", tuple(token_ids))
        try:
            with self.request(sequence, 0):
                sequence.compute()
                with self.lock:
                    self._admission.release(sequence)
                    num_tokens = self.cache.pin(self.root, token_ids)
                    pinned = self._admission.reserve(
                        owner, num_tokens // BLOCK_TOKENS, is_lasting=True
                    )
                    assert pinned, "a pin takes what computing it had reserved"
        finally:
            self.close_sequence(sequence)
        return num_tokens

    def unpin(self, token_ids: Ids[int]) -> None:
        """Takes `pin` back. Raises UsageError for a prefix that is not pinned."""
        self.cache.unpin(self.root, token_ids)
        with self.lock:
            self._admission.release(("pin", tuple(token_ids)))
            self.lock.notify_all()

    # turns

    @contextmanager
    def turn(self, sequence: Sequence, *, with_lane: bool = True) -> Iterator[int]:
        """The right to compute and commit, with everything computed in a lane, which it yields.

        Waits for another's turn on the same sequence, for blocks and for a lane.
        """
        with self.lock:
            self._require_open(sequence)
            self._reap()
            self._wait_until(sequence, lambda: self._may_begin(sequence, with_lane))
            sequence.in_turn = True
        try:
            if with_lane and self._lanes.must_stage(sequence):
                self._stage(sequence)
            yield -1 if sequence.lane is None else sequence.lane
        finally:
            with self.lock:
                self._end_turn(sequence)

    def _may_begin(self, sequence: Sequence, with_lane: bool) -> bool:
        if sequence.in_turn or sequence.forks_waiting:
            return False
        return self._admit(sequence) and (not with_lane or self._lanes.give(sequence))

    def _end_turn(self, sequence: Sequence) -> None:
        sequence.in_turn = False
        sequence.last_used = time.monotonic()
        self._lanes.turn_ended(sequence)
        self.lock.notify_all()

    @contextmanager
    def _fork_turn(self, sequence: Sequence) -> Iterator[None]:
        """A turn for copying alone; its own thread's next turn comes after it."""
        with self.lock:
            self._require_open(sequence)
            sequence.forks_waiting += 1
            try:
                while sequence.in_turn:
                    self.lock.wait()
                self._require_open(sequence)
                sequence.in_turn = True
            finally:
                sequence.forks_waiting -= 1
        used = sequence.last_used
        try:
            yield
        finally:
            with self.lock:
                self._end_turn(sequence)
                sequence.last_used = used

    def _wait_until(self, sequence: Sequence, ready: Callable[[], bool]) -> None:
        try:
            while not ready():
                # Nobody tells us when others become idle.
                self.lock.wait(IDLE_S)
                self._require_open(sequence)
        except BaseException:
            self._lanes.leave_queue(sequence)
            raise
        finally:
            if sequence in self._queue:
                self._queue.remove(sequence)

    def _stage(self, sequence: Sequence) -> None:
        start = time.perf_counter()
        assert sequence.lane is not None
        sequence.stage(sequence.lane)
        with self.lock:
            self._lanes.staged(sequence)
            self._staging_s += time.perf_counter() - start

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Takes the time of a commit."""
        start = time.perf_counter()
        yield
        self._committing_s += time.perf_counter() - start

    def _require_open(self, sequence: Sequence) -> None:
        if self._closed:
            raise UsageError("the model of this answer is closed; load the bundle again")
        if sequence.closed:
            raise UsageError("this session is closed; open another")

    # blocks

    def _require_fit(self, num_blocks: int, what: str) -> None:
        if self._admission.ever_fits(num_blocks):
            return
        self._refused += 1
        total, lasting = self._admission.num_blocks, self._admission.num_lasting
        kept = f", of which streams and pinned prompts keep {lasting}" if lasting else ""
        remedy = "close one of them, " if lasting else ""
        raise PoolFullError(
            f"{what} needs {num_blocks} blocks of {BLOCK_TOKENS} tokens, and the pool has "
            f"{total}{kept}; {remedy}raise --pool, or lower --max-tokens or the window"
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Whether the sequence's worst case is reserved; if not, it stands in the queue."""
        if sequence in self._admission:
            return True
        is_new = sequence not in self._queue
        if is_new:
            self._queue.append(sequence)
        if self._queue[0] is sequence and self._reserve(sequence):
            self._queue.pop(0)
            return True
        self._waited += is_new
        return False

    def _reserve(self, sequence: Sequence) -> bool:
        while not self._admission.reserve(
            sequence, sequence.worst_case, is_lasting=sequence.is_stream
        ):
            if not self._suspend_one():
                return False
        return True

    def _suspend_one(self) -> bool:
        """Takes the reservation of the request that has been paused longest, if there is one."""
        now = time.monotonic()
        paused = [
            s
            for s in self._sequences
            if s in self._admission
            and not s.is_stream
            and not s.in_turn
            and now - s.last_used > PAUSED_S
        ]
        if not paused:
            return False
        self._admission.release(min(paused, key=lambda s: s.last_used))
        return True

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of an admitted sequence. Evicts unreferenced ones and drops idle sequences."""
        with self.lock:
            while (block_ids := self.cache.allocate(num_blocks)) is None:
                self._drop_one()
        return block_ids

    def spare(self, num_blocks: int) -> tuple[int, ...] | None:
        """Blocks for what can do without: nobody is dropped for them."""
        return self.cache.allocate(num_blocks)

    def _drop_one(self) -> None:
        idle = [
            s
            for s in self._sequences
            if s.table.num_blocks and s not in self._admission and not s.in_turn
        ]
        assert idle, "admission has let in more than the pool holds"
        sequence = min(idle, key=lambda s: s.last_used)
        self._lanes.vacate(sequence)
        sequence.drop()
        self._dropped += 1

    # the whole

    @property
    def stats(self) -> KvStats:
        with self.lock:
            return KvStats(
                blocks=self.pool.counts,
                reserved_blocks=self._admission.num_reserved,
                pinned_blocks=self.cache.num_pinned_blocks,
                prefix=self.cache.counters,
                dropped_sequences=self._dropped,
                waited_requests=self._waited,
                refused_requests=self._refused,
                lane_switches=self._lanes.num_switches,
                passes=self.passes.num_passes,
                rows=self.passes.num_rows,
                seconds_staging=self._staging_s,
                seconds_committing=self._committing_s,
            )

    def check(self) -> PoolCounts:
        """Raises PoolError unless every block is accounted for: free, cached, or in a table."""
        with self.lock:
            self.cache.check()
            return self.pool.check()

    def close(self) -> None:
        """Closes backend and pool, after the turns in progress; may be called again."""
        with self.lock:
            self._closed = self.passes.closed = True
            self.lock.notify_all()
            while any(s.in_turn for s in self._sequences):
                self.lock.wait()
            self.backend.close()
            self.arrays.close()
