"""Laws of the host's side of the NPU's memory: layouts by the documents' formula, slots by a dict."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import TINY

from headrace.errors import NpuModelError
from headrace.export.checkpoint import open_checkpoint
from headrace.models.npu_io import NpuGeometry, kv_planes
from headrace.models.vocab_map import VocabMap
from headrace.npu.abi import TensorAttr
from headrace.npu.staging import LaneMemory, Layout, Native, TailTable
from headrace.runtime.backend import BackendFacts
from headrace.runtime.batch import F32, LaneRows, chain
from headrace.runtime.draft import DraftLane, DraftModel, frontier
from headrace.runtime.guess import Guesser
from headrace.runtime.request import SamplingParams
from headrace.runtime.ring import RingLayout
from headrace.runtime.sampling import Sampler

NCHW, NHWC, NC1HWC2, UNDEFINED = range(4)
FLOAT32, FLOAT16, INT8 = range(3)
DTYPES = {FLOAT32: np.float32, FLOAT16: np.float16, INT8: np.int8}
UNTOUCHED = 0xA5

CONFIG = open_checkpoint(str(TINY / "llama")).config
GEOMETRY = NpuGeometry(sinks=16, window=32, unit=16, nodes=12, rows=(1, 4, 16))

Dims = tuple[int, int, int, int]

# -- Layouts --------------------------------------------------------------------------------------


def attr_of(fmt: int, kind: int, dims: Dims, c2: int = 8, padding: int = 0) -> TensorAttr:
    """As the runtime answers for a tensor [n, c, h, w] whose rows are `padding` places longer."""
    n, c, h, w = dims
    c1 = -(-c // c2)
    native = {NCHW: (n, c, h, w), NHWC: (n, h, w, c), NC1HWC2: (n, c1, h, w, c2)}[fmt]
    channels = c1 * c2 if fmt == NC1HWC2 else c
    size = n * channels * h * (w + padding) * np.dtype(DTYPES[kind]).itemsize
    attr = TensorAttr(name=b"x", n_dims=len(native), fmt=fmt, type=kind, scale=0.5, zp=3)
    attr.dims[: len(native)] = native
    attr.w_stride, attr.size_with_stride = w + padding, size
    return attr


def place(fmt: int, dims: Dims, stride: int, c2: int, at: Sequence[int]) -> int:
    """Of an element, by the formulas in Rockchip's documents."""
    _, num_c, num_h, _ = dims
    n, c, h, w = at
    if fmt == NC1HWC2:
        c1s = -(-num_c // c2)
        plane = (n * c1s + c // c2) * num_h * stride
        return (plane + h * stride + w) * c2 + c % c2
    if fmt == NHWC:
        return ((n * num_h + h) * stride + w) * num_c + c
    return ((n * num_c + c) * num_h + h) * stride + w


small = st.integers(1, 4)
any_dims = st.tuples(small, st.integers(1, 20), small, st.integers(1, 6))


@given(
    st.sampled_from([NCHW, NHWC, NC1HWC2]),
    st.sampled_from([FLOAT32, FLOAT16, INT8]),
    any_dims,
    st.sampled_from([4, 8, 16]),
    st.integers(0, 5),
)
def test_a_view_is_where_the_documents_say(
    fmt: int, kind: int, dims: Dims, c2: int, padding: int
) -> None:
    layout = Layout.of(attr_of(fmt, kind, dims, c2, padding))
    memory = np.full(layout.size, UNTOUCHED, np.uint8)
    view = layout.view(memory)
    elements = list(itertools.product(*(range(d) for d in dims)))
    width = view.shape[4]
    for number, (n, c, h, w) in enumerate(elements):
        view[n, c // width, h, w, c % width] = number % 100
    flat = memory.view(layout.dtype)
    seen = np.zeros(len(flat), np.bool_)
    for number, at in enumerate(elements):
        index = place(fmt, dims, dims[3] + padding, c2, at)
        assert flat[index] == number % 100, at
        assert not seen[index], "two elements at one place"
        seen[index] = True
    kept = memory.reshape(len(flat), -1)[~seen]
    assert (kept == UNTOUCHED).all(), "what is between the elements is nobody's"


@given(st.sampled_from([NCHW, NHWC, NC1HWC2]), any_dims)
def test_a_whole_view_stays_within_its_memory(fmt: int, dims: Dims) -> None:
    layout = Layout.of(attr_of(fmt, FLOAT16, dims, padding=3))
    memory = np.full(layout.size + 64, UNTOUCHED, np.uint8)
    layout.view(memory[: layout.size])[...] = 1
    assert (memory[layout.size :] == UNTOUCHED).all()
    assert (layout.view(memory[: layout.size]) == 1).all()


@pytest.mark.parametrize(
    ("size", "stride", "plane"),
    [
        (2 * 1 * 6 * 8 * 2, 0, 6),
        (2 * 1 * 8 * 8 * 2, 0, 8),
        (2 * 1 * 8 * 8 * 2, 6, 8),
        (2 * 1 * 7 * 8 * 2, 7, 7),
        (2 * 1 * 12 * 8 * 2, 0, 6),
        (2 * 1 * 6 * 8 * 2 + 2, 6, 6),
    ],
)
def test_positions_are_padded_to_four_or_not_and_what_is_more_lies_behind(
    size: int, stride: int, plane: int
) -> None:
    """A compiler's plan gives embeddings twice their bytes."""
    attr = attr_of(NC1HWC2, FLOAT16, (1, 16, 1, 6))
    attr.size_with_stride, attr.w_stride = size, stride
    layout = Layout.of(attr)
    assert layout.size == size and layout.strides[1] == plane * 8 * 2
    assert layout.view(np.zeros(size, np.uint8)).shape == (1, 2, 1, 6, 8)


DIMS: Dims = (2, 12, 3, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"fmt": UNDEFINED},
        {"fmt": 4},
        {"fmt": 2**31 - 1},
        {"fmt": -1},
        {"fmt": NHWC},
        {"n_dims": 4},
        {"n_dims": 0},
        {"n_dims": 17},
        {"type": 3},
        {"type": 99},
        {"type": -1},
        {"w_stride": 4},
        {"w_stride": 6},
        {"size_with_stride": 0},
        {"size_with_stride": 2 * 16 * 3 * 5 * 2 - 1},
        {"size_with_stride": 2 * 16 * 3 * 4 * 2},
    ],
    ids=str,
)
def test_a_layout_that_is_not_documented_is_refused(change: dict[str, int]) -> None:
    attr = attr_of(NC1HWC2, FLOAT16, DIMS)
    Layout.of(attr)
    for name, value in change.items():
        setattr(attr, name, value)
    with pytest.raises(NpuModelError) as caught:
        Layout.of(attr)
    assert str(caught.value).startswith("x: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("axis", range(5))
def test_a_tensor_of_nothing_is_refused(axis: int) -> None:
    attr = attr_of(NC1HWC2, FLOAT16, DIMS)
    attr.dims[axis] = 0
    with pytest.raises(NpuModelError):
        Layout.of(attr)


@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([4, 8, 16]))
def test_rows_split_and_joined_are_the_same(num_rows: int, channels: int, c2: int) -> None:
    layout = Layout.of(attr_of(NC1HWC2, FLOAT16, (1, channels, 1, num_rows), c2))
    rows = np.arange(1, num_rows * channels + 1, dtype=np.float32).reshape(num_rows, channels)
    columns = layout.split(rows)
    assert columns.shape == (-(-channels // c2), num_rows, c2)
    np.testing.assert_array_equal(layout.joined(columns, channels), rows)
    assert columns.sum() == rows.sum(), "padded with zeros"


@given(st.lists(st.floats(-100, 100, width=32), min_size=1), st.integers(-20, 20))
def test_int8_is_the_nearest_code(values: list[float], zero: int) -> None:
    layout = dataclasses.replace(Layout.of(attr_of(NC1HWC2, INT8, DIMS)), zero=zero)
    x = np.array(values, np.float32)
    least, most = (-128 - zero) * 0.5, (127 - zero) * 0.5
    found = layout.decode(layout.encode(x))
    assert (abs(found - np.clip(x, least, most)) <= 0.25).all()
    half = Layout.of(attr_of(NC1HWC2, FLOAT16, DIMS))
    assert not half.codes_as(layout) and half.codes_as(half)
    np.testing.assert_array_equal(half.recode(layout.encode(x), layout), found.astype(np.float16))
    assert layout.recode(layout.encode(x), layout).dtype == np.int8


# -- Slots ----------------------------------------------------------------------------------------


def check_table(table: TailTable, num_entries: int) -> None:
    """Free and held are all entries, each of them once."""
    held = [entry for _, entry in table.held()]
    assert sorted([*held, *table._free]) == list(range(num_entries))
    assert table.num_free == num_entries - len(held)


@given(st.integers(0, 10_000))
def test_no_entry_is_lost_or_doubled(seed: int) -> None:
    chance = random.Random(seed)
    table, slots = TailTable(6, 8), dict[int, int]()
    for _ in range(60):
        what = chance.choice(["take", "release", "release_from", "rename"])
        chosen = chance.sample(range(12), chance.randint(0, 4))
        if what == "take":
            fresh = [slot for slot in chosen if slot not in slots][: table.num_free]
            slots.update(zip(fresh, table.take(fresh), strict=True))
        elif what == "release":
            table.release(chosen)
            slots = {s: e for s, e in slots.items() if s not in chosen}
        elif what == "release_from":
            table.release_from(5, but=chosen)
            slots = {s: e for s, e in slots.items() if s < 5 or s in chosen}
        else:
            sources = [slot for slot in chosen if slot in slots]
            targets = range(chance.randint(0, 8), 12)[: len(sources)]
            sources = sources[: len(targets)]
            moved = [slots.pop(slot) for slot in sources]
            table.rename(sources, targets)
            slots = {s: e for s, e in slots.items() if s not in targets}
            slots.update(zip(targets, moved, strict=True))
        check_table(table, 8)
        assert dict(table.held()) == slots
        assert [table.entry(slot) for slot in range(12)] == [slots.get(slot) for slot in range(12)]
        assert sorted(table.of_main()) == sorted((s, e) for s, e in slots.items() if s < 6)


class Ledger:
    """A draft's backend that computes nothing: every row gets contents of its own, which go into a
    LaneMemory as RknnBackend puts them there, and into a dict. After each call both are compared.
    """

    def __init__(self, chance: random.Random, kind: int, padding: int) -> None:
        c, g = CONFIG, GEOMETRY
        self.chance, self.main, self.tail = chance, g.main, g.tail
        self.rng = np.random.default_rng(chance.randrange(2**32))
        self.facts = BackendFacts(
            vocab_size=c.vocab_size,
            num_logits=c.num_logits,
            lanes=1,
            capacity=g.main + g.tail,
            max_rows=max(g.rows),
            max_wanted=max(g.rows),
            least_rows=1,
            row_multiple=1,
        )
        self.seconds_in_passes = 0.0
        self.contents = dict[int, F32]()
        """[planes, heads, head_dim] of each slot in use."""
        tail = self._tensor(kv_planes(c), g.tail, kind, padding)
        mains = [
            self._tensor(c.num_kv_heads, g.main, FLOAT16, padding) for _ in range(2 * c.num_layers)
        ]
        self.memory = LaneMemory(c, g, tail, mains)
        self.new_layout = Layout.of(attr_of(NC1HWC2, kind, (kv_planes(c), c.head_dim, 1, 16)))
        self.views = mains
        self.seen_by_npu = [view.copy() for _, view in mains]
        self.passes = self.flushes = 0

    def _tensor(self, n: int, w: int, kind: int, padding: int) -> tuple[Layout, Native]:
        layout = Layout.of(attr_of(NC1HWC2, kind, (n, CONFIG.head_dim, 1, w), padding=padding))
        return layout, layout.view(np.zeros(layout.size, np.uint8))

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        (r,) = rows
        self._drop_from(r.past)
        self.memory.table.release_from(r.past)
        self.memory.make_room(r.num_rows)
        assert self.memory.table.num_free >= r.num_rows
        if self.memory.is_main_changed:
            self.seen_by_npu = [view.copy() for _, view in self.views]
            self.memory.is_main_changed = False
            self.flushes += 1
        self._check_visible(r.past)
        self.passes += 1
        shape = (kv_planes(CONFIG), CONFIG.head_dim, r.num_rows)
        values: F32 = self.rng.integers(-100, 100, shape).astype(np.float32) / np.float32(2)
        native = np.zeros(self.new_layout.shape, self.new_layout.dtype)
        for row in range(r.num_rows):
            columns = self.new_layout.encode(self.new_layout.split(values[:, :, row]))
            native[:, :, 0, row] = columns.transpose(1, 0, 2)
            by_plane = values[:, :, row].reshape(-1, CONFIG.num_kv_heads, CONFIG.head_dim)
            self.contents[r.past + row] = by_plane
        self.memory.append(r.past, native, self.new_layout, r.num_rows)
        self._check()
        return self.rng.random((len(r.wanted), CONFIG.num_logits), np.float32)

    @property
    def arena(self) -> Ledger:
        return self

    def read(self, lane: int, start: int, num_rows: int) -> F32:
        found = self.memory.read(start, num_rows)
        np.testing.assert_array_equal(found, self._expected(range(start, start + num_rows)))
        return found

    def write(self, lane: int, start: int, rows: npt.NDArray[np.generic]) -> None:
        # Whole numbers, so that no layout rounds them.
        values = np.rint(rows.astype(np.float32)).clip(-50, 50)
        self.memory.write(start, values)
        for i in range(rows.shape[3]):
            planes = values[:, :, :, i].swapaxes(0, 1)
            self.contents[start + i] = planes.reshape(-1, *planes.shape[2:])
        self._check()

    def gather(self, lane: int, sources: Sequence[int], start: int) -> None:
        self.memory.gather(sources, start)
        kept = [self.contents[slot] for slot in sources]
        self._drop_from(start)
        self.contents.update(enumerate(kept, start))
        self._check()

    def move(self, lane: int, source: range, destination: range) -> None:
        self.memory.move(source, destination)
        for old, new in zip(source, destination, strict=True):
            self.contents[new] = self.contents.pop(old)
        self._check()

    def close(self) -> None:
        pass

    def _drop_from(self, start: int) -> None:
        self.contents = {slot: held for slot, held in self.contents.items() if slot < start}

    def _expected(self, slots: Sequence[int]) -> F32:
        stacked = np.stack([self.contents[slot] for slot in slots], axis=2)
        return stacked.reshape(-1, 2, *stacked.shape[1:]).swapaxes(0, 1)

    def _check(self) -> None:
        check_table(self.memory.table, self.tail)
        assert {slot for slot, _ in self.memory.table.held()} <= set(self.contents)
        for slot in self.chance.sample(sorted(self.contents), min(4, len(self.contents))):
            found = self.memory.read(slot, 1)
            np.testing.assert_array_equal(found, self._expected([slot]), f"slot {slot}")

    def _check_visible(self, past: int) -> None:
        """The NPU sees every slot in use, at one place, and there what belongs into it."""
        assert sorted(self.contents) == list(range(past))
        in_main, slots = self.memory.visible(past)
        seen = [*np.flatnonzero(in_main), *slots[slots >= 0]]
        assert sorted(seen) == list(range(past))
        heads, head_dim = CONFIG.num_kv_heads, CONFIG.head_dim
        for plane, native in enumerate(self.seen_by_npu):
            held = native[:, :, 0].transpose(2, 0, 1, 3).reshape(self.main, heads, -1)[in_main]
            expected = [self.contents[int(slot)][plane] for slot in np.flatnonzero(in_main)]
            np.testing.assert_array_equal(held[..., :head_dim], expected or held)
        for slot in slots[slots >= 0]:
            np.testing.assert_array_equal(self.memory.read(slot, 1), self._expected([slot]))


def lane_over(ledger: Ledger) -> DraftLane:
    ids = np.arange(CONFIG.vocab_size, dtype=np.int32)
    layout = RingLayout(GEOMETRY.sinks, GEOMETRY.window, GEOMETRY.unit)
    model = DraftModel(ledger, CONFIG, "f16", VocabMap(ids, ids), layout)
    assert model.max_nodes == GEOMETRY.nodes
    lane = DraftLane(model, 0)
    sampler = Sampler(SamplingParams(), [], CONFIG.vocab_size)
    lane.begin(Guesser(sampler, "coupled", model.head))
    return lane


def tree(lane: DraftLane, chance: random.Random) -> None:
    """Nodes at random places, rejected ones among them, as far as there is room."""
    for _ in range(chance.randint(0, 5)):
        outcomes = [(node, guess, 0.5) for node, guess, _ in frontier(lane)]
        room = lane.model.max_nodes - len(lane.nodes)
        chosen = chance.sample(outcomes, max(0, min(room, len(outcomes), chance.randint(1, 4))))
        if chosen:
            lane.compute(chosen)


@given(st.integers(0, 100_000), st.sampled_from([FLOAT16, INT8]), st.integers(0, 3))
@settings(max_examples=6, deadline=None)
def test_a_lane_holds_what_a_dict_would(seed: int, kind: int, padding: int) -> None:
    """Over many evictions, with trees that are taken up in part, in whole or not at all."""
    chance = random.Random(seed)
    ledger = Ledger(chance, kind, padding)
    lane = lane_over(ledger)
    text = [chance.randrange(CONFIG.vocab_size) for _ in range(chance.randint(1, 30))]
    while len(text) < 240:
        if chance.random() < 0.02:
            lane.restart()
        lane.follow(text[-lane.state.layout.window :], len(text))
        tree(lane, chance)
        node = chance.randrange(len(lane.nodes))
        text += lane.path(node)[: chance.randint(0, 12)]
        text += [chance.randrange(CONFIG.vocab_size) for _ in range(chance.randint(1, 4))]
    assert ledger.flushes >= 3
    assert ledger.flushes < ledger.passes / 2, "main is flushed once in many steps"


def test_a_chain_flushes_main_once_a_unit() -> None:
    """What the tail is for: token by token, as most text comes."""
    ledger = Ledger(random.Random(1), FLOAT16, 0)
    lane, length = lane_over(ledger), 20
    lane.follow([1] * length, length)
    before = ledger.passes, ledger.flushes
    for length in range(21, 21 + 10 * GEOMETRY.unit):
        lane.follow([1] * min(length, GEOMETRY.window), length)
    assert ledger.passes - before[0] == 10 * GEOMETRY.unit
    assert ledger.flushes - before[1] <= 11


def test_the_tail_without_room_is_our_own_mistake() -> None:
    ledger = Ledger(random.Random(1), FLOAT16, 0)
    with pytest.raises(AssertionError, match="no room"):
        ledger.memory.make_room(GEOMETRY.tail + 1)
    with pytest.raises(AssertionError):
        ledger.memory.table.take([3, 3])


def test_what_is_written_wins_over_the_tail() -> None:
    """And every byte of the way there and back is told, once."""
    ledger = Ledger(random.Random(1), FLOAT16, 7)
    memory, row = ledger.memory, kv_planes(CONFIG) * CONFIG.head_dim * 2
    lane_over(ledger).follow([1, 2, 3], 3)
    assert memory.take_bytes_written() == 3 * row
    assert memory.take_bytes_written() == 0
    sinks = ledger.rng.integers(-9, 9, (2, CONFIG.num_layers, CONFIG.num_kv_heads, 2, 8))
    ledger.write(0, 0, sinks)
    np.testing.assert_array_equal(memory.read(0, 2), sinks)
    assert memory.table.num_free == GEOMETRY.tail - 1
    assert memory.take_bytes_written() == 2 * row
    memory.make_room(GEOMETRY.tail)
    assert memory.take_bytes_written() == row, "what was in the tail went to main"
    ledger.gather(0, [1], 0)
    np.testing.assert_array_equal(memory.read(0, 1), sinks[:, :, :, 1:])
    assert memory.take_bytes_written() == row, "and comes back from there"


def test_a_tail_too_full_for_what_comes_back() -> None:
    ledger, past = Ledger(random.Random(1), FLOAT16, 0), 0
    for num in (16, 12, 16, 4):
        ledger.forward([chain(0, np.ones(num, np.int64), past)])
        past += num
    assert past == GEOMETRY.main and ledger.memory.table.num_free == 8
    ledger.move(0, range(10), range(past, past + 10))
