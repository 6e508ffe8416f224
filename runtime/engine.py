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
from dataclasses import dataclass, replace

from headrace.errors import UsageError
from headrace.models.config import ModelConfig
from headrace.runtime.arena import Arena
from headrace.runtime.backend import Backend
from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool, PoolCounts
from headrace.runtime.kv import PoolArrays, PoolShape
from headrace.runtime.lanes import IDLE_S, Lanes
from headrace.runtime.passes import Passes
from headrace.runtime.prefix import PrefixCache, PrefixCounters, Root
from headrace.runtime.request import Exactness
from headrace.runtime.ring import RingLayout
from headrace.runtime.room import PAUSED_S, Room
from headrace.runtime.sampling import Sampler
from headrace.runtime.sequence import Sequence
from headrace.runtime.speculate import Speculation, Speculator, Text
from headrace.runtime.trace import Trace

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
    lent_requests: int
    """Paused ones whose reservation went to another; they wait for it when they go on."""
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
        self,
        backend: Backend,
        config: ModelConfig,
        kv: str,
        num_blocks: int,
        root: Root,
        *,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Allocates the pool. Without `speculation` nothing is proposed. Raises MemoryError."""
        self.backend, self.facts, self._root = backend, backend.facts, root
        self.arrays = PoolArrays(PoolShape(config, kv, num_blocks))
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, is_on=prefix_cache)
        # Held by `with` on the lock itself: an interrupt within a Condition's own `__enter__`, which
        # is no C code, would leave it locked.
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._lanes = Lanes(self.facts.lanes)
        self.passes = Passes(backend, self._lanes, self.lock, self._changed)
        self._room = Room(self.cache, self._lanes, num_blocks)
        self._abandoned: deque[tuple[Sequence, bool]] = deque()
        self.speculation, self.trace = speculation, trace
        self._closed = False
        self._staging_s = self._committing_s = 0.0

    @property
    def arena(self) -> Arena:
        return self.backend.arena

    @property
    def chunk_rows(self) -> int:
        """The most rows a pass should have now."""
        crowded = self._lanes.num_in_turn > 1
        return min(CROWDED_CHUNK, self.facts.max_rows) if crowded else self.facts.max_rows

    def speculator(self, sequence: Sequence, sampler: Sampler, num_new: int) -> Speculator | None:
        """One for a request on `sequence` of up to `num_new` tokens; None where it is off."""
        shared = self.speculation
        if shared is None or (sampler.params.speculate or shared.speculate) == "off":
            return None
        # An endless answer must not make an endless index.
        num_new = min(num_new, sequence.capacity)
        text = Text(sequence.tokens(), sequence.length, num_new, sequence.exactness)
        return Speculator(
            shared,
            text,
            sampler,
            self.facts,
            lambda: 1 + self._lanes.num_in_turn,
        )

    def share(self, token_ids: Ids[int]) -> None:
        """Lets all requests look up what follows in these tokens."""
        if self.speculation is not None:
            self.speculation.recent.extend(token_ids)

    # sequences

    def root(self, exactness: Exactness) -> Root:
        """What keys and values of such sequences can be shared under."""
        return replace(self._root, exactness=exactness)

    def sequence(self, exactness: Exactness | None = None) -> Sequence:
        """A context of up to a lane's capacity; it holds nothing yet."""
        return Sequence(self, None, self.facts.capacity, exactness or self._root.exactness)

    def stream(self, layout: RingLayout, exactness: Exactness | None = None) -> Sequence:
        """An endless context; its blocks are reserved until it is closed.

        Raises UsageError if the layout is larger than a lane, PoolFullError.
        """
        if layout.capacity > self.facts.capacity:
            raise UsageError(
                f"sinks {layout.sinks} + window {layout.window} + unit {layout.unit} are "
                f"{layout.capacity} tokens, beyond the {self.facts.capacity} of a lane; use a "
                f"smaller window or raise --ctx"
            )
        sequence = Sequence(self, layout, layout.capacity, exactness or self._root.exactness)
        self._settle(sequence)
        return sequence

    def fork(self, source: Sequence) -> Sequence:
        """A second sequence that is what `source` is now, whatever becomes of `source`.

        Full blocks are shared. Raises PoolFullError for a fork of a stream, which reserves the
        whole window: it ends up owning it, since the stream moves on.
        """
        with self.lock:
            self._require_open(source)
        fork = Sequence(self, source.layout, source.capacity, source.exactness)
        if source.is_stream:
            self._settle(fork)
        try:
            with self.lock:
                self._wait_for_quiet(source)
                take = self._room.take if source.is_stream else self.cache.allocate
                source.fork_into(fork, take)
                self._room.sequences[fork] = None
        except BaseException:
            self.close_sequence(fork)
            raise
        return fork

    def _wait_for_quiet(self, source: Sequence) -> None:
        """Until it is in no turn; its own thread's next one waits as well."""
        source.forks_waiting += 1
        try:
            while source.in_turn:
                self._changed.wait()
        finally:
            source.forks_waiting -= 1
            self._changed.notify_all()
        self._require_open(source)

    def _settle(self, stream: Sequence) -> None:
        """Reserves a stream's blocks for its life."""
        with self.lock:
            self._require_open(stream)
            self._reap()
            stream.worst_case = stream.blocks_of(0)
            self._room.require_fit(stream, stream.worst_case)
            self._room.sequences[stream] = None
            try:
                self._wait_until(stream, lambda: self._room.admit(stream))
            except BaseException:
                del self._room.sequences[stream]
                raise

    @contextmanager
    def request(self, sequence: Sequence, num_new: int) -> Iterator[None]:
        """`begin_request`, and `end_request` at the end."""
        self.begin_request(sequence, num_new)
        try:
            yield
        finally:
            self.end_request(sequence)

    def require_fit(self, sequence: Sequence, num_new: int) -> None:
        """Raises as `begin_request` would for `num_new` tokens more, and changes nothing."""
        with self.lock:
            self._require_open(sequence)
            self._reap()
            if not sequence.is_stream:
                self._room.require_fit(sequence, sequence.blocks_of(num_new))

    def begin_request(self, sequence: Sequence, num_new: int) -> None:
        """Until its end, `sequence` may grow by `num_new` tokens beyond what is pending.

        Raises PoolFullError when that can never fit. Blocks are reserved at the first turn.
        """
        self.require_fit(sequence, num_new)
        if not sequence.is_stream:
            with self.lock:
                sequence.worst_case = sequence.blocks_of(num_new)
                self._room.sequences[sequence] = None

    def end_request(self, sequence: Sequence, *, is_closed: bool = False) -> None:
        """Others may have what it reserved, and with `is_closed` all that it holds."""
        with self.lock:
            self._end_request(sequence, is_closed)

    def _end_request(self, sequence: Sequence, is_closed: bool) -> None:
        if sequence.lane is not None:
            self.passes.expect_no_more(sequence.lane)
        if not sequence.is_stream:
            self._room.release(sequence)
            sequence.worst_case = 0
        if is_closed:
            self._close_sequence(sequence)
        self._changed.notify_all()

    def close_sequence(self, sequence: Sequence) -> None:
        """Gives blocks and lane back, once the turn in progress has ended; may be called again."""
        with self.lock:
            self._close_sequence(sequence)

    def _close_sequence(self, sequence: Sequence) -> None:
        sequence.closed = True
        while sequence.in_turn:
            self._changed.wait()
        if sequence in self._room.sequences:
            self._room.drop(sequence)
            self._room.release(sequence)
            del self._room.sequences[sequence]
        self._changed.notify_all()

    def give_up(self, sequence: Sequence) -> None:
        """After a commit that was cut short. A stream cannot be computed again: it is closed."""
        with self.lock:
            sequence.closed = sequence.is_stream
            self._room.drop(sequence)

    def abandon(self, sequence: Sequence, *, is_closed: bool) -> None:
        """Ends its request at the next opportunity, and closes it if `is_closed`.

        For finalizers: they may run in a thread that holds the lock.
        """
        self._abandoned.append((sequence, is_closed))

    def _reap(self) -> None:
        while self._abandoned:
            self._end_request(*self._abandoned.popleft())

    def pin(self, token_ids: Ids[int]) -> int:
        """Computes a prefix and keeps its full blocks for good. Returns the tokens pinned.

        Raises PoolFullError, ContextFullError; UsageError where nothing can be found again.
        """
        if not self.cache.is_on:
            raise UsageError("the prefix cache is off, and pins are kept in it; leave it on")
        sequence = self.sequence()
        sequence.require_room(len(token_ids))
        sequence.append(token_ids)
        owner = ("pin", tuple(token_ids))
        try:
            with self.request(sequence, 0):
                sequence.compute()
                with self.lock:
                    self._room.release(sequence)
                    num_tokens = self.cache.pin(self.root(sequence.exactness), token_ids)
                    pinned = self._room.keep(owner, num_tokens // BLOCK_TOKENS)
                    assert pinned, "a pin takes what computing it had reserved"
        finally:
            self.close_sequence(sequence)
        return num_tokens

    def unpin(self, token_ids: Ids[int]) -> None:
        """Takes `pin` back. Raises UsageError for a prefix that is not pinned."""
        self.cache.unpin(self._root, token_ids)
        with self.lock:
            self._room.release(("pin", tuple(token_ids)))
            self._changed.notify_all()

    # turns

    @contextmanager
    def turn(self, sequence: Sequence, *, with_lane: bool = True) -> Iterator[int]:
        """The right to compute and commit, with everything computed in a lane, which it yields.

        Without a lane only for a sequence that has computed nothing. Waits for another's turn on
        the same sequence, for blocks and for a lane.
        """
        has_begun = False
        try:
            with self.lock:
                self._require_open(sequence)
                sequence.thread = threading.get_ident()
                self._wait_until(sequence, lambda: self._may_begin(sequence, with_lane))
                has_begun = sequence.in_turn = True
                if not with_lane:
                    self._lanes.vacate(sequence)
            if with_lane and self._lanes.must_stage(sequence):
                self._stage(sequence)
            yield -1 if sequence.lane is None else sequence.lane
        finally:
            if has_begun:
                with self.lock:
                    self._end_turn(sequence)

    def _may_begin(self, sequence: Sequence, with_lane: bool) -> bool:
        if sequence.in_turn or sequence.forks_waiting:
            return False
        return self._room.admit(sequence) and (not with_lane or self._lanes.give(sequence))

    def _end_turn(self, sequence: Sequence) -> None:
        sequence.in_turn = False
        sequence.last_used = time.monotonic()
        self._lanes.turn_ended(sequence)
        self._changed.notify_all()

    def _wait_until(self, sequence: Sequence, ready: Callable[[], bool]) -> None:
        self._reap()
        try:
            while not ready():
                # Nobody tells us when others become idle, or are dropped.
                self._changed.wait(IDLE_S if self._room.is_admitted(sequence) else PAUSED_S / 20)
                self._require_open(sequence)
                self._reap()
        except BaseException:
            self._lanes.leave_queue(sequence)
            raise
        finally:
            self._room.leave_queue(sequence)

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

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of an admitted sequence; others may lose theirs."""
        with self.lock:
            return self._room.take(num_blocks)

    # the whole

    @property
    def stats(self) -> KvStats:
        with self.lock:
            self._reap()
            return KvStats(
                blocks=self.pool.counts,
                reserved_blocks=self._room.num_reserved,
                pinned_blocks=self.cache.num_pinned_blocks,
                prefix=self.cache.counters,
                dropped_sequences=self._room.num_dropped,
                waited_requests=self._room.num_waited,
                lent_requests=self._room.num_lent,
                refused_requests=self._room.num_refused,
                lane_switches=self._lanes.num_switches,
                passes=self.passes.num_passes,
                rows=self.passes.num_rows,
                seconds_staging=self._staging_s,
                seconds_committing=self._committing_s,
            )

    def check(self) -> PoolCounts:
        """Raises PoolError unless every block is accounted for: free, cached, or in a table."""
        with self.lock:
            self._reap()
            self.cache.check()
            return self.pool.check()

    def close(self) -> None:
        """Closes backend and pool, after the turns in progress; may be called again."""
        if self.speculation is not None:
            self.speculation.close()
        with self.lock:
            self._closed = self.passes.closed = True
            self._changed.notify_all()
            while any(s.in_turn for s in self._room.sequences):
                self._changed.wait()
            self.backend.close()
            self.arrays.close()
