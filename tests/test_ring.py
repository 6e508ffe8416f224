"""The ring's arithmetic against a plain simulation of a lane, and the messages of its rules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from headrace.runtime.ring import Eviction, RingLayout, RingState, entries

WRAPS = 6


@dataclass
class Row:
    """A row of a lane: the token it holds, and the position its key is rotated to."""

    token: int
    position: int


@dataclass
class Lane:
    """What a stream must do, written down without formulas: a row for each slot, live or not."""

    layout: RingLayout
    slots: list[Row | None]
    live: list[int] = field(default_factory=list)
    """Slots that attention must see."""
    num_tokens: int = 0

    def write(self, slot: int, token: int) -> None:
        assert slot not in self.live, f"token {token} overwrites a live slot, {slot}"
        self.slots[slot] = Row(token, token)

    def rows(self) -> list[Row]:
        rows = [row for slot in self.live if (row := self.slots[slot]) is not None]
        assert len(rows) == len(self.live)
        return rows

    def commit(self, slots: range) -> None:
        self.live += slots
        self.num_tokens += len(slots)
        if len(self.live) == self.layout.capacity:
            self.evict()

    def evict(self) -> None:
        """The newest tokens take the places of the oldest that are no sinks."""
        by_age = sorted(self.live, key=lambda slot: self.token(slot))
        sinks, others = by_age[: self.layout.sinks], by_age[self.layout.sinks :]
        unit = self.layout.unit
        for oldest, newest in zip(others[:unit], others[-unit:], strict=True):
            self.slots[oldest], self.slots[newest] = self.slots[newest], None
            self.live.remove(newest)
        for slot in sinks:
            row = self.slots[slot]
            assert row is not None
            row.position += unit

    def token(self, slot: int) -> int:
        row = self.slots[slot]
        assert row is not None
        return row.token


def apply(eviction: Eviction, slots: list[Row | None], sinks: int) -> None:
    """Carries an eviction out on a second lane, as a runtime would on arrays."""
    for source, destination in zip(eviction.source, eviction.destination, strict=True):
        slots[destination] = slots[source]
    slots[:sinks] = [Row(sink, sink + eviction.sink_shift) for sink in range(sinks)]


layouts = st.builds(
    lambda sinks, units, unit: RingLayout(16 * sinks, 16 * unit * units, 16 * unit),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
)


@settings(max_examples=40, deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1), widest=st.sampled_from([1, 3, 16, 200]))
@example(layout=RingLayout(16, 16, 16), seed=0, widest=200)
@example(layout=RingLayout(64, 128, 64), seed=1, widest=1)
def test_the_formulas_are_the_simulation(layout: RingLayout, seed: int, widest: int) -> None:
    """Random chunks, of which any number of rows is rejected, until the ring has wrapped often."""
    chance = random.Random(seed)
    lane = Lane(layout, [None] * layout.capacity)
    copy: list[Row | None] = [None] * layout.capacity
    state = RingState(layout)
    while state.num_tokens < layout.capacity + WRAPS * layout.window:
        num_rows = min(state.room, chance.randint(1, widest))
        accepted = chance.choice([num_rows, chance.randint(0, num_rows)])
        slots = state.new_slots(num_rows)
        for slot, token in zip(slots, state.new_positions(num_rows), strict=True):
            lane.write(slot, token)
            copy[slot] = Row(token, token)
        lane.commit(slots[:accepted])
        state, eviction = state.commit(accepted)
        if eviction is not None:
            apply(eviction, copy, layout.sinks)
        agree(state, lane, copy)


def agree(state: RingState, lane: Lane, copy: list[Row | None]) -> None:
    layout = state.layout
    assert state.num_tokens == lane.num_tokens
    assert state.num_slots == len(lane.live)
    assert sorted(lane.live) == list(range(state.num_slots)), "no gaps below the total"
    assert 1 <= state.room == layout.capacity - len(lane.live)
    rows = [lane.slots[slot] for slot in range(state.num_slots)]
    assert [row.token for row in rows if row] == state.slot_tokens().tolist()
    assert [row.position for row in rows if row] == state.slot_positions().tolist()
    assert copy[: state.num_slots] == rows
    where = {row.token: slot for slot, row in enumerate(rows) if row}
    gone = range(layout.sinks, layout.sinks + state.num_evicted)
    for token in [*where, *gone[:1], *gone[-1:]]:
        assert state.slot_of(token) == where.get(token)
    assert len(where) + len(gone) == state.num_tokens
    recent = [token for token in where if token >= layout.sinks]
    assert recent == [] or max(recent) == state.num_tokens - 1
    if state.num_evictions:
        assert layout.window <= len(recent) < layout.window + layout.unit


@settings(max_examples=60, deadline=None)
@given(layout=layouts, chunks=st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_a_token_sees_the_same_slots_however_it_came(layout: RingLayout, chunks: list[int]) -> None:
    """What lies below a token's slot, token by token, in chunks, and in the widest passes."""
    total = layout.capacity + 2 * layout.window

    def seen(sizes: list[int]) -> dict[int, list[int]]:
        found, state, turn = {}, RingState(layout), 0
        while state.num_tokens < total:
            num_rows = min(state.room, sizes[turn % len(sizes)], total - state.num_tokens)
            before = state.slot_tokens().tolist()
            positions = state.new_positions(num_rows)
            for row, (slot, token) in enumerate(
                zip(state.new_slots(num_rows), positions, strict=True)
            ):
                found[token] = [slot, *before, *positions[:row]]
            state, _ = state.commit(num_rows)
            turn += 1
        return found

    alone = seen([1])
    assert seen(chunks) == alone
    assert seen([10_000]) == alone


@given(layout=layouts)
def test_home_is_where_tokens_are_after_growth(layout: RingLayout) -> None:
    """While it grows, token p is in slot p; that is its home already, or the tail's turn comes."""
    state, eviction = RingState(layout), None
    for _ in range(layout.capacity):
        assert eviction is None
        state, eviction = state.commit(1)
        newest = state.num_tokens - 1
        if newest < layout.tail_start:
            assert state.slot_of(newest) == layout.home(newest) == newest
    assert eviction is not None
    tail = range(layout.tail_start, layout.capacity)
    assert eviction.source == tail, "tokens S+W .. S+W+E-1 were in the slots of their numbers"
    assert [layout.home(p) for p in tail] == list(eviction.destination)
    assert eviction.destination == range(layout.sinks, layout.sinks + layout.unit)
    assert eviction.evicted == eviction.destination, "and the oldest were in theirs"
    assert [state.slot_of(p) for p in tail] == list(eviction.destination)


@given(layout=layouts, turn=st.integers(0, 40))
def test_sinks_stay_directly_before_the_window(layout: RingLayout, turn: int) -> None:
    for num_tokens in (
        layout.tail_start + turn * layout.unit,
        layout.capacity + turn * layout.unit - 1,
    ):
        state = RingState(layout, num_tokens)
        positions = sorted(state.slot_positions().tolist())
        start = state.sink_shift
        assert positions == list(range(start, start + state.num_slots))
        assert state.slot_positions()[: layout.sinks].tolist() == positions[: layout.sinks]
        assert num_tokens - positions[0] < layout.capacity, "no distance beyond S + W + E"


@settings(max_examples=40, deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
def test_the_table_is_a_ring_of_ids_over_the_slots(layout: RingLayout, seed: int) -> None:
    """Rows are written into the pool's blocks as they fill, and nothing is ever copied there."""
    chance = random.Random(seed)
    pool = BlockPool(layout.num_blocks)
    table, state = BlockTable(), RingState(layout)
    contents: dict[int, dict[int, int]] = {}
    while state.num_tokens < layout.capacity + 3 * layout.window:
        num_rows = chance.randint(1, state.room)
        slots, tokens = state.new_slots(num_rows), state.new_positions(num_rows)
        assert table.grow(slots.stop, pool.allocate_many)
        for slot, token in zip(slots, tokens, strict=True):
            block_id = table.block_ids[slot // BLOCK_TOKENS]
            contents.setdefault(block_id, {})[slot % BLOCK_TOKENS] = token
        state, eviction = state.commit(num_rows)
        if eviction is not None:
            table.evict(pool, eviction.source_entries, eviction.destination_entries)
        assert table.num_slots == state.num_slots
        held = [
            contents[table.block_ids[slot // BLOCK_TOKENS]][slot % BLOCK_TOKENS]
            for slot in range(state.num_slots)
        ]
        assert held == state.slot_tokens().tolist()
        assert pool.check().held == table.num_blocks <= layout.num_blocks


@given(layout=layouts, num_tokens=st.integers(0, 2_000))
def test_only_blocks_before_the_first_eviction_may_be_indexed(
    layout: RingLayout, num_tokens: int
) -> None:
    state = RingState(layout, num_tokens)
    last = state.num_indexable_blocks * BLOCK_TOKENS
    assert last <= min(num_tokens, layout.capacity) < last + BLOCK_TOKENS


def test_reading_a_state_does_not_depend_on_how_far_it_ran() -> None:
    """A stream of years: the same shape, positions that are still exact integers."""
    layout = RingLayout(64, 1024, 64)
    far = 10**12 // layout.window * layout.window + layout.sinks
    near = layout.sinks + 4 * layout.window
    assert far % layout.window == near % layout.window
    distance = far - near
    moved = RingState(layout, far).slot_positions() - distance
    assert np.array_equal(moved, RingState(layout, near).slot_positions())


def test_entries() -> None:
    assert entries(range(0)) == range(0)
    assert entries(range(15, 17)) == range(2)
    assert entries(range(16, 32)) == range(1, 2)
    assert entries(range(17, 33)) == range(1, 3)


@pytest.mark.parametrize("num_rows", [-1, 65])
def test_a_pass_never_crosses_an_eviction(num_rows: int) -> None:
    state = RingState(RingLayout(16, 128, 64), 16 + 128)
    assert state.room == 64
    with pytest.raises(AssertionError):
        state.new_slots(num_rows)
    with pytest.raises(AssertionError):
        state.commit(num_rows)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 128, 64), "sinks 0: a stream needs at least one block, 16 tokens"),
        ((-16, 128, 64), "sinks -16: a stream needs at least one block"),
        ((20, 128, 64), "sinks 20 is not a multiple of 16, the tokens of a block; use 16 or 32"),
        ((16, 0, 64), "window 0: a stream needs at least one block"),
        ((16, 100, 64), "window 100 is not a multiple of 16, the tokens of a block; use 96 or 112"),
        ((16, 1008, 64), "window 1008 is not a multiple of the eviction unit, 64; use 960 or 1024"),
        ((16, 32, 64), "window 32 is not a multiple of the eviction unit, 64; use 64"),
        ((16, 128, 8), "unit 8: a stream needs at least one block"),
        ((16, 128, 72), "unit 72 is not a multiple of 16"),
    ],
)
def test_a_layout_says_which_rule_it_breaks(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        RingLayout(*sizes)
    assert message in str(caught.value)


def test_a_layout_must_fit_the_model() -> None:
    layout = RingLayout(16, 1024, 64)
    layout.require_fit(1104, local_window=1024, system_prompt_len=16)
    with pytest.raises(UsageError, match=r"1104 tokens, beyond .* of 1103; use a window of at mo"):
        layout.require_fit(1103)
    with pytest.raises(UsageError, match="use fewer sinks or a smaller unit"):
        layout.require_fit(128)
    with pytest.raises(UsageError, match=r"1025 tokens that the .*local layers.*use at least 1088"):
        layout.require_fit(4096, local_window=1025)
    with pytest.raises(UsageError, match=r"the system prompt's 17 tokens; use at least 32"):
        layout.require_fit(4096, system_prompt_len=17)
    offered = (1103 - 16 - 64) // 64 * 64
    RingLayout(16, offered, 64).require_fit(1103)
