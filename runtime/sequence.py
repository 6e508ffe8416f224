"""A sequence: tokens in order, which of them are computed, and where their keys and values are.

What a session or a request is made of. Tokens wait in `pending` until a pass computes them. Computed
ones have slots: full blocks are written through to the pool at the commit that fills them, the
partly filled one when the sequence is parked. So a lane can be taken away between any two passes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from headrace.errors import ContextFullError
from headrace.runtime.batch import F32, I64, LaneRows
from headrace.runtime.blocks import BLOCK_TOKENS, BlockTable, blocks_for
from headrace.runtime.ring import Eviction, RingLayout, RingState, entries

if TYPE_CHECKING:
    from headrace.runtime.engine import Engine


class State(Protocol):
    """Where everything is after `num_tokens` computed tokens; `RingState` has the contracts."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def sink_shift(self) -> int: ...
    def commit(self, num_rows: int) -> tuple[Self, Eviction | None]: ...


@dataclass(frozen=True)
class FullState:
    """A context that keeps everything: token p is in slot p, until `capacity` are computed."""

    capacity: int
    num_tokens: int = 0

    num_evictions = 0
    sink_shift = 0

    @property
    def num_slots(self) -> int:
        return self.num_tokens

    @property
    def room(self) -> int:
        return self.capacity - self.num_tokens

    def commit(self, num_rows: int) -> tuple[FullState, None]:
        assert 0 <= num_rows <= self.room, f"{num_rows} rows, room for {self.room}"
        return FullState(self.capacity, self.num_tokens + num_rows), None


@dataclass(frozen=True)
class Wanted:
    """What to take from `pending` in a pass."""

    num_rows: int
    rows: tuple[int, ...]
    """Those of them whose logits are wanted."""


class Sequence:
    """One thread uses a sequence at a time, another may fork or close it meanwhile.

    `in_turn`, `lane` and the fields below them belong to the engine's lock.
    """

    def __init__(self, engine: Engine, layout: RingLayout | None, capacity: int) -> None:
        """`layout` is a stream's; without one the context holds `capacity` tokens and ends."""
        self._engine = engine
        self.layout = layout
        self.capacity = capacity
        self.state: FullState | RingState = self._initial()
        self.table = BlockTable()
        self.known: list[int] | deque[int] = [] if layout is None else deque(maxlen=capacity)
        """Computed tokens; of a stream the last ones, as many as its lane holds."""
        self.pending: list[int] = []
        """Tokens after them that are not computed yet."""
        self.length = 0
        """Tokens so far, computed or not: the position of the next one."""
        self.num_computed = 0
        """Rows that went through a pass so far; tokens found in the prefix cache did not."""
        self.closed = False
        self.in_turn = False
        self.forks_waiting = 0
        self.lane: int | None = None
        self.worst_case = 0
        """Blocks the running request may come to hold; 0 without one."""
        self.last_used = time.monotonic()

    @property
    def is_stream(self) -> bool:
        return self.layout is not None

    @property
    def is_full(self) -> bool:
        return not self.is_stream and self.length >= self.capacity

    def tokens(self) -> list[int]:
        """All tokens; of a stream the last ones."""
        with self._engine.lock:
            return self._tokens()

    def _tokens(self) -> list[int]:
        return [*self.known, *self.pending]

    def require_room(self, num_tokens: int) -> None:
        """Raises ContextFullError unless so many more tokens fit, one of them the answer's."""
        if not self.is_stream and self.length + num_tokens >= self.capacity:
            before = f" after {self.length} tokens" if self.length else ""
            raise ContextFullError(
                f"the prompt has {num_tokens} tokens{before} and the context holds "
                f"{self.capacity}, one of them for the answer; shorten the prompt or raise --ctx"
            )

    def blocks_of(self, num_new: int) -> int:
        """The most blocks that `num_new` tokens more can make it hold."""
        if self.layout is not None:
            return self.layout.num_blocks
        return blocks_for(min(self.capacity, self.length + num_new))

    def append(self, token_ids: Ids[int]) -> None:
        with self._engine.lock:
            self.pending += token_ids
            self.length += len(token_ids)

    def compute(self, *, leave: int = 0) -> None:
        """Computes what is pending, but for the last `leave` tokens."""
        self._find()
        while len(self.pending) > leave:
            self._pass(lambda most: Wanted(min(most, len(self.pending) - leave), ()))

    def advance(self) -> F32:
        """Computes what is pending, at least one token. Returns the logits [V] after the last."""
        assert self.pending, "there is nothing to compute"
        self._find()
        while True:
            logits = self._pass(self._last_wanted)
            if not self.pending:
                row: F32 = logits[0]
                return row

    def rows(self) -> Iterator[F32]:
        """Logits [V] after each pending token, in order."""
        done = self.state.num_tokens

        def wanted(most: int) -> Wanted:
            again = done - self.state.num_tokens  # computed before the sequence was dropped
            num_rows = min(most, again + self._engine.facts.max_wanted)
            return Wanted(num_rows, tuple(range(again, num_rows)))

        while self.pending:
            logits = self._pass(wanted)
            done += len(logits)
            yield from logits

    def _last_wanted(self, most: int) -> Wanted:
        return Wanted(most, (most - 1,) if most == len(self.pending) else ())

    def _pass(self, choose: Callable[[int], Wanted]) -> F32:
        """Computes pending tokens in one pass; `choose` is given the most that it can take.

        It is asked within the turn: before it, another's need of blocks may have sent everything
        back to `pending`.
        """
        with self._engine.turn(self) as lane:
            most = min(len(self.pending), self.state.room, self._engine.chunk_rows)
            chosen = choose(most)
            ids = self.pending[: chosen.num_rows]
            logits = self._engine.passes.run(self.lane_rows(lane, ids, chosen.rows))
            self.num_computed += len(ids)
            self.commit(lane, ids)
        return logits

    def lane_rows(self, lane: int, token_ids: Ids[int], wanted: tuple[int, ...]) -> LaneRows:
        """The rows of a pass that continues this sequence, at most `state.room`."""
        first = self.state.num_tokens
        return LaneRows(
            lane,
            np.array(token_ids, np.int64),
            np.arange(first, first + len(token_ids)),
            self.state.num_slots,
            wanted,
            self._slot_positions(),
        )

    def _slot_positions(self) -> I64 | None:
        if isinstance(self.state, RingState) and self.state.num_evictions:
            return self.state.slot_positions()
        return None

    def commit(self, lane: int, token_ids: Ids[int]) -> None:
        """Makes the first rows of the last pass context: `token_ids` are accepted.

        They must be the beginning of `pending`. Within a turn.
        """
        engine, before = self._engine, self.state
        after, eviction = before.commit(len(token_ids))
        num_slots = before.num_slots + len(token_ids)
        with engine.committing():
            grown = self.table.grow(num_slots, engine.allocate)
            assert grown, "what was admitted can grow"
            newly_full = range(before.num_slots // BLOCK_TOKENS, num_slots // BLOCK_TOKENS)
            for entry in newly_full:
                engine.arrays.store(self.table.block_ids[entry], engine.arena, lane, entry)
            self.known.extend(token_ids)
            # Keys and values after an eviction depend on what was evicted: not for others.
            if not before.num_evictions and newly_full:
                self._insert(newly_full.start)
            if eviction is not None:
                self._evict(lane, eviction)
            self.state = after
            del self.pending[: len(token_ids)]

    def _insert(self, start: int) -> None:
        """Lets others find the full blocks from entry `start` on."""
        known = self.known if isinstance(self.known, list) else list(self.known)
        self.table.block_ids = self._engine.cache.insert(
            self._engine.root, known, self.table.block_ids, start
        )

    def _evict(self, lane: int, eviction: Eviction) -> None:
        engine = self._engine
        engine.arena.move(lane, eviction.source, eviction.destination)
        self.table.evict(engine.pool, eviction.source_entries, eviction.destination_entries)
        engine.arrays.load_sinks(self._sink_blocks(), engine.arena, lane, eviction.sink_shift)

    def _sink_blocks(self) -> list[int]:
        assert self.layout is not None
        return self.table.block_ids[: len(entries(range(self.layout.sinks)))]

    def _find(self) -> None:
        """Takes over what the prefix cache knows of a sequence that has computed nothing yet."""
        if self.state.num_tokens or not self.pending:
            return
        with self._engine.turn(self, with_lane=False):
            # The last token is computed in any case: its logits are wanted.
            most = min(len(self.pending), self.capacity) - 1
            found = self._engine.cache.match(self._engine.root, self.pending[:most])
            num_tokens = len(found) * BLOCK_TOKENS
            self.table = BlockTable(found, num_tokens)
            self.state, _ = self.state.commit(num_tokens)
            self.known.extend(self.pending[:num_tokens])
            del self.pending[:num_tokens]

    def stage(self, lane: int) -> None:
        """Copies everything computed into a lane. Within a turn."""
        engine, num_slots = self._engine, self.state.num_slots
        sinks = 0
        if self.state.sink_shift:
            sinks = len(self._sink_blocks())
            engine.arrays.load_sinks(self._sink_blocks(), engine.arena, lane, self.state.sink_shift)
        for entry in range(sinks, self.table.num_blocks):
            num_rows = min(BLOCK_TOKENS, num_slots - entry * BLOCK_TOKENS)
            engine.arrays.load(self.table.block_ids[entry], engine.arena, lane, entry, num_rows)

    def park(self) -> None:
        """Copies what only the lane has into the pool, and leaves the lane."""
        assert self.lane is not None
        rows = self.table.partial_rows
        if rows:
            self._store_partial(self.table.block_ids[-1], rows)
        self.lane = None

    def _store_partial(self, block_id: int, num_rows: int) -> None:
        assert self.lane is not None
        entry = self.table.num_full_blocks
        self._engine.arrays.store(block_id, self._engine.arena, self.lane, entry, num_rows)

    def drop(self) -> None:
        """Gives all blocks back; the tokens stay and are computed again when they are needed.

        Not a stream's: its keys and values depend on what was evicted.
        """
        assert not self.is_stream
        self.pending = self._tokens()
        self.forget()

    def forget(self) -> None:
        """Gives all blocks back, and what was computed."""
        self.lane = None
        self.table.release(self._engine.pool)
        self.known.clear()
        self.state = self._initial()

    def fork_into(self, other: Sequence) -> None:
        """Makes `other`, a new sequence of the same layout, what this one is. Within a turn."""
        engine = self._engine
        other.length = self.length
        forked = self.table.fork(engine.pool, engine.allocate if self.is_stream else engine.spare)
        if forked is None:
            # No block for the copy: the few tokens in it are computed again.
            full = self.table.num_full_blocks * BLOCK_TOKENS
            for block_id in self.table.block_ids[: self.table.num_full_blocks]:
                engine.pool.share(block_id)
            other.table = BlockTable(self.table.block_ids[: self.table.num_full_blocks], full)
            other.state, _ = other.state.commit(full)
            tokens = self._tokens()
            other.known, other.pending = tokens[:full], tokens[full:]
            return
        if forked.copy is not None:
            if self.lane is not None:  # its rows may be newer than the block's
                self._store_partial(forked.copy.destination, forked.copy.num_rows)
            else:
                copy = forked.copy
                engine.arrays.copy_rows(copy.source, copy.destination, copy.num_rows)
        other.table, other.state = forked.table, self.state
        other.known, other.pending = self.known.copy(), self.pending.copy()

    def _initial(self) -> FullState | RingState:
        return FullState(self.capacity) if self.layout is None else RingState(self.layout)
