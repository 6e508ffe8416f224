"""A sequence: tokens in order, which of them are computed, and where their keys and values are.

What a session or a request is made of. Tokens are `pending` until a pass computes them. Computed
ones have slots: full blocks are written through to the pool at the commit that fills them, the
partly filled one when the sequence is parked. So a lane can be taken away between any two passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import ContextFullError
from headrace.runtime.batch import F32, I64, LaneRows
from headrace.runtime.blocks import BLOCK_TOKENS, Allocate, BlockTable, blocks_for
from headrace.runtime.request import Exactness
from headrace.runtime.ring import Eviction, RingLayout, RingState, entries
from headrace.runtime.trace import span
from headrace.runtime.tree import Tree
from headrace.runtime.verify import Accepted

if TYPE_CHECKING:
    from headrace.runtime.engine import Engine


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


Judge = Callable[[F32, Tree], Accepted]
"""What to append, from logits [1 + n, V] after the root and each node of a proposal."""


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

    def __init__(
        self, engine: Engine, layout: RingLayout | None, capacity: int, exactness: Exactness
    ) -> None:
        """`layout` is a stream's; without one the context holds `capacity` tokens and ends."""
        self._engine = engine
        self.exactness = exactness
        self.layout = layout
        self.capacity = capacity
        self.state: FullState | RingState = self._initial()
        self.table = BlockTable()
        self._tokens: list[int] = []
        """All tokens; of a stream that has evicted some at least the last ones, `capacity`."""
        self.length = 0
        """Tokens so far, computed or not: the position of the next one."""
        self.num_computed = 0
        """Rows that went through a pass so far; tokens found in the prefix cache did not."""
        self.pass_s = 0.0
        """Seconds in passes so far, and waiting for others' to end."""
        self.closed = False
        self.in_turn = False
        self.thread = 0
        """The one that had the last turn."""
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
        """All tokens; of a stream those that its lane holds, or that are pending."""
        return self._tokens[-max(self.capacity, self.num_pending) :]

    @property
    def num_pending(self) -> int:
        return self.length - self.state.num_tokens

    @property
    def pending(self) -> list[int]:
        """Tokens that are not computed yet."""
        return self._tokens[len(self._tokens) - self.num_pending :]

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
            num_tokens = len(token_ids)
            self._tokens += token_ids
            self.length += num_tokens

    def compute(self, *, leave: int = 0) -> None:
        """Computes what is pending, but for the last `leave` tokens."""
        self._find()
        while self.num_pending > leave:
            self._pass(lambda most: Wanted(min(most, self.num_pending - leave), ()))

    def verify(self, proposed: Tree, judge: Judge) -> None:
        """Computes what is pending, and behind it `proposed`, and appends what `judge` chooses.

        `judge` gets the logits [1 + n, V] after the last pending token and after each of n nodes,
        and the tree of those: all of `proposed`, or as many as there is room for. It accepts a path
        from the root and one token more, which stays pending. Rejected rows leave no trace. What it
        raises is raised, and nothing was appended. A tree that is no chain is for a sequence of
        `tree` exactness.
        """
        assert self.num_pending, "there is nothing to compute"
        assert proposed.is_chain or self.exactness == "tree"
        self._find()
        while not self._verify(proposed, judge):
            pass

    def _verify(self, proposed: Tree, judge: Judge) -> bool:
        """One pass of `verify`; whether it was the last."""
        with self._engine.turn(self) as lane:
            most = min(self.state.room, self._engine.chunk_rows)
            pending = self.pending
            if len(pending) > most:
                self._run(self.lane_rows(lane, pending[:most], ()))
                self.commit(lane, pending[:most])
                return False
            tree = proposed.cut(most - len(pending))
            logits = self._run(self._tree_rows(lane, pending, tree))
            accepted = judge(logits, tree)
            first = self.state.num_slots + len(pending)
            self._engine.arena.gather(lane, [first + node for node in accepted.path], first)
            self.append(accepted.token_ids)
            self.commit(lane, [*pending, *accepted.token_ids[:-1]])
        return True

    def _run(self, rows: LaneRows) -> F32:
        start = time.perf_counter()
        with span(self._engine.trace, "target", "pass"):
            logits = self._engine.passes.run(rows)
        self.pass_s += time.perf_counter() - start
        self.num_computed += rows.num_rows
        return logits

    def rows(self) -> Iterator[F32]:
        """Logits [V] after each pending token, in order."""
        done = self.state.num_tokens

        def wanted(most: int) -> Wanted:
            again = done - self.state.num_tokens  # computed before the sequence was dropped
            num_rows = min(most, again + self._engine.facts.max_wanted)
            return Wanted(num_rows, tuple(range(again, num_rows)))

        while self.num_pending:
            logits = self._pass(wanted)
            done += len(logits)
            yield from logits

    def _pass(self, choose: Callable[[int], Wanted]) -> F32:
        """Computes pending tokens in one pass; `choose` is given the most that it can take.

        It is asked within the turn: before it, another's need of blocks may have made everything
        pending again.
        """
        with self._engine.turn(self) as lane:
            most = min(self.num_pending, self.state.room, self._engine.chunk_rows)
            assert most, "the context is full"
            chosen = choose(most)
            ids = self.pending[: chosen.num_rows]
            logits = self._run(self.lane_rows(lane, ids, chosen.rows)).copy()
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
            exact=self.exactness == "exact",
        )

    def _tree_rows(self, lane: int, pending: Ids[int], tree: Tree) -> LaneRows:
        """Pending rows, and those of a proposal behind the last of them."""
        num_before = len(pending)
        wanted = tuple(range(num_before - 1, num_before + len(tree)))
        rows = self.lane_rows(lane, [*pending, *tree.token_ids], wanted)
        rows.positions[num_before:] = tree.positions(rows.positions[num_before - 1])
        return replace(rows, hidden=tree.hidden(num_before))

    def _slot_positions(self) -> I64 | None:
        if isinstance(self.state, RingState) and self.state.num_evictions:
            return self.state.slot_positions()
        return None

    def commit(self, lane: int, token_ids: Ids[int]) -> None:
        """Makes the first rows of the last pass context: `token_ids` are accepted.

        They must be the beginning of `pending`. Within a turn.
        """
        assert self.pending[: len(token_ids)] == list(token_ids)
        after, eviction = self.state.commit(len(token_ids))
        with self._engine.committing():
            try:
                self._keep(lane, len(token_ids))
                if eviction is not None:
                    self._evict(lane, eviction)
                self.state = after
            except BaseException:  # an interrupt: nobody knows how much of it is done
                self._engine.give_up(self)
                raise
        if after.num_evictions:
            del self._tokens[: -max(self.capacity, self.num_pending)]

    def _keep(self, lane: int, num_rows: int) -> None:
        """Writes what the next rows make full through to the pool, and lets others find it."""
        engine, before = self._engine, self.state
        num_slots = before.num_slots + num_rows
        if self.table.missing_blocks(num_slots):
            grown = self.table.grow(num_slots, engine.allocate)
            assert grown, "what was admitted can grow"
        else:
            self.table.num_slots = num_slots
        newly_full = range(before.num_slots // BLOCK_TOKENS, num_slots // BLOCK_TOKENS)
        for entry in newly_full:
            engine.arrays.store(self.table.block_ids[entry], engine.arena, lane, entry)
        # Keys and values after an eviction depend on what was evicted: not for others.
        if newly_full and not before.num_evictions:
            self.table.block_ids = engine.cache.insert(
                engine.root(self.exactness),
                self._tokens[:num_slots],
                self.table.block_ids,
                newly_full.start,
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
        if self.state.num_tokens or not self._tokens:
            return
        with self._engine.turn(self, with_lane=False):
            # The last token is computed in any case: its logits are wanted.
            most = min(self.length, self.capacity) - 1
            found = self._engine.cache.match(self._engine.root(self.exactness), self._tokens[:most])
            num_tokens = len(found) * BLOCK_TOKENS
            self.table = BlockTable(found, num_tokens)
            self.state, _ = self.state.commit(num_tokens)

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

        Not a stream's that goes on: its keys and values depend on what was evicted. Without a lane.
        """
        assert self.lane is None
        self.state = self._initial()
        self.table.release(self._engine.pool)

    def fork_into(self, other: Sequence, allocate: Allocate) -> None:
        """Makes `other`, a new sequence of the same layout, what this one is.

        In no turn, under the engine's lock. Without a block for the copy of a partly filled one,
        its few tokens are pending in `other`.
        """
        engine = self._engine
        other._tokens, other.length = self._tokens.copy(), self.length
        forked = self.table.fork(engine.pool, allocate)
        if forked is None:
            assert not self.is_stream, "a stream's fork has reserved its blocks"
            full = self.table.block_ids[: self.table.num_full_blocks]
            for block_id in full:
                engine.pool.share(block_id)
            other.table = BlockTable(full, len(full) * BLOCK_TOKENS)
            other.state, _ = other.state.commit(len(full) * BLOCK_TOKENS)
            return
        if forked.copy is not None:
            if self.lane is not None:  # its rows may be newer than the block's
                self._store_partial(forked.copy.destination, forked.copy.num_rows)
            else:
                copy = forked.copy
                engine.arrays.copy_rows(copy.source, copy.destination, copy.num_rows)
        other.table, other.state = forked.table, self.state

    def _initial(self) -> FullState | RingState:
        return FullState(self.capacity) if self.layout is None else RingState(self.layout)
