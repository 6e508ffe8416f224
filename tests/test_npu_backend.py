"""RknnBackend on the double: the graph's own logits however it is fed, and nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from npu_bundles import GEOMETRY
from npu_double import Double, TinyDraft, changed, opened, padded, tiny_draft
from tiny_checkpoints import TINY

from headrace.errors import NpuCallError, NpuDeviceError, NpuError, NpuTimeoutError
from headrace.export.npu_text import FP16_MASK, NpuText, ort_run, text_logits
from headrace.models.manifest import NPU_EMBEDDINGS, NPU_GRAPH, NPU_IO
from headrace.models.npu_io import NativeTensor, kv_planes
from headrace.npu.abi import TensorAttr
from headrace.npu.backend import RknnBackend
from headrace.npu.librknnrt import Buffer, Context
from headrace.runtime.batch import F32, LaneRows, chain

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]

CLOSE = 0.015
"""Of the largest logit: keys, values and results are float16 on the NPU, float32 in the reference.
The largest seen is half of it."""

ORDER = 0.002
"""Of the largest logit: the same values summed in another order, where entries of the tail were given
out in another one."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyDraft:
    return tiny_draft(tmp_path_factory.mktemp(request.param), TINY / request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyDraft:
    return tiny_draft(tmp_path_factory.mktemp("llama"), TINY / "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyDraft:
    return tiny_draft(tmp_path_factory.mktemp("gemma3"), TINY / "gemma3")


class Reference:
    """The graph over whole texts, with main inputs that hold all of a text."""

    def __init__(self, draft: TinyDraft, folder: Path) -> None:
        geometry = dataclasses.replace(GEOMETRY, window=160)
        self.files = tiny_draft(folder, draft.source, geometry).files
        self._run = ort_run(folder / NPU_GRAPH)
        config = draft.files.config
        shape = (config.vocab_size, config.hidden_size)
        self._table = np.fromfile(folder / NPU_EMBEDDINGS, np.float16).reshape(shape)

    def __call__(self, token_ids: Sequence[int]) -> F32:
        """[T, num_logits]"""
        files = self.files
        text = NpuText(files.config, files.io.geometry, self._table.astype(np.float32), FP16_MASK)
        return text_logits(self._run, text, np.array(token_ids, np.int64), 32)


@pytest.fixture(scope="module")
def reference_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[TinyDraft], Reference]:
    made: dict[Path, Reference] = {}

    def of(draft: TinyDraft) -> Reference:
        if draft.folder not in made:
            made[draft.folder] = Reference(draft, tmp_path_factory.mktemp("reference"))
        return made[draft.folder]

    return of


def text_of(draft: TinyDraft, length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, draft.files.config.vocab_size, length)]


def feed(
    backend: RknnBackend,
    token_ids: Sequence[int],
    chunks: Iterator[int],
    *,
    lane: int = 0,
    past: int = 0,
) -> F32:
    """Logits [T, num_logits] of a text behind `past` slots, in passes of so many rows."""
    found, ids = [], np.array(token_ids, np.int64)
    while len(ids):
        num = min(next(chunks), len(ids))
        found.append(backend.forward([chain(lane, ids[:num], past, tuple(range(num)))]))
        ids, past = ids[num:], past + num
    return np.concatenate(found)


def at_random(seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    while True:
        yield chance.choice([1, 1, 2, 3, 4, 5, 8, 9, 20, 32])


def assert_close(found: F32, expected: F32, share: float = CLOSE) -> None:
    assert found.shape == expected.shape
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * largest)


# -- Logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_logits_are_the_graphs_however_a_text_is_cut(
    family: TinyDraft,
    double: Double,
    reference_of: Callable[[TinyDraft], Reference],
    seed: int,
) -> None:
    """Through main, tail and all variants, up to the last slot."""
    with opened(family.files, double) as backend:
        text = text_of(family, backend.facts.capacity, seed)
        found = feed(backend, text, at_random(seed))
        assert backend.counters.retries == 0 and backend.counters.main_flushes > 0
        with pytest.raises(AssertionError, match="full"):
            backend.forward([chain(0, np.array([1]), backend.facts.capacity, (0,))])
    expected = reference_of(family)(text)
    assert_close(found, expected)
    assert np.abs(expected - expected[:1]).max() > 10 * CLOSE * np.abs(expected).max(), (
        "texts that matter"
    )


def test_only_wanted_logits_come(llama: TinyDraft, double: Double) -> None:
    text = np.array(text_of(llama, 6))
    with opened(llama.files, double) as backend:
        every = backend.forward([chain(0, text, 0, (0, 1, 2, 3, 4, 5))])
        some = backend.forward([chain(0, text, 0, (4, 1))])
        none = backend.forward([chain(0, text, 0)])
    np.testing.assert_array_equal(some, every[[4, 1]])
    assert none.shape == (0, llama.files.config.num_logits)


def branch(parents: Sequence[int], first: int = 0) -> np.ndarray:
    """[n, first + n] hidden: what node i must not see of nodes that are not before it."""
    hidden = np.ones((len(parents) - first, len(parents)), np.bool_)
    for row in range(len(hidden)):
        node = first + row
        while node != -1:
            hidden[row, node] = False
            node = parents[node]
    return hidden


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    while node != -1:
        found.insert(0, node)
        node = parents[node]
    return found


@pytest.mark.parametrize("length", [56, 95, 120])
def test_a_tree_a_rejection_and_what_is_gathered(
    family: TinyDraft,
    double: Double,
    reference_of: Callable[[TinyDraft], Reference],
    length: int,
) -> None:
    """Nodes see their own path alone, in one pass or in several; then some of them become text.

    Behind 56 tokens the first nodes are moved to main before the others come; behind 95 the second
    is the first slot that main has no place for.
    """
    reference, chance = reference_of(family), random.Random(length)
    parents = [-1, 0, 0, 1, 1, 2, 5, 3, 6, 8]
    ids = text_of(family, len(parents), 7)
    text = text_of(family, length, 3)
    depths = np.array([len(path_to(node, parents)) - 1 for node in range(len(parents))])
    with opened(family.files, double) as backend:
        # Twice, so that a token that all nodes see is in the tail's first entry.
        feed(backend, text[:64], iter([32, 32]))
        feed(backend, text, iter([32, 32, 31, 25]))
        # Slot i is position i only as long as there is no tree.
        found, cut = [], chance.randint(2, 8)
        for start, end in ((0, cut), (cut, len(parents))):
            slots = np.concatenate([np.arange(length), length + depths[:start]])
            rows = LaneRows(
                0,
                np.array(ids[start:end], np.int64),
                length + depths[start:end],
                length + start,
                tuple(range(end - start)),
                slots,
                branch(parents[:end], start),
            )
            found.append(backend.forward([rows]))
        logits = np.concatenate(found)
        for node in range(len(parents)):
            path = [ids[i] for i in path_to(node, parents)]
            assert_close(logits[node], reference([*text, *path])[-1])
        chosen = path_to(8, parents)
        backend.arena.gather(0, [length + i for i in chosen], length)
        text += [ids[i] for i in chosen]
        later = text_of(family, 9, 11)
        again = feed(backend, later, iter([1, 3, 5]), past=len(text))
        assert_close(again, reference([*text, *later])[len(text) :])
        # As if none of it had been: back to where the tree stood.
        other = text_of(family, 6, 12)
        over = feed(backend, other, iter([4, 2]), past=length)
        assert_close(over, reference([*text[:length], *other])[length:])


@pytest.mark.parametrize("seed", range(3))
def test_two_lanes_interleaved_equal_each_alone(
    llama: TinyDraft, double: Double, seed: int
) -> None:
    chance = random.Random(seed)
    texts = [text_of(llama, 150, seed), text_of(llama, 110, 50 + seed)]
    sizes = [[next(cut) for _ in range(150)] for cut in (at_random(seed), at_random(9 + seed))]
    with opened(llama.files, double) as backend:
        alone = [feed(backend, t, iter(s)) for t, s in zip(texts, sizes, strict=True)]
    with opened(llama.files, double, lanes=2) as backend:
        found: list[list[F32]] = [[], []]
        past, cuts = [0, 0], [iter(s) for s in sizes]
        while left := [lane for lane in (0, 1) if past[lane] < len(texts[lane])]:
            lane = chance.choice(left)
            part = texts[lane][past[lane] :][: next(cuts[lane])]
            found[lane].append(feed(backend, part, iter([32]), lane=lane, past=past[lane]))
            past[lane] += len(part)
        assert backend.counters.binds >= 6
    for lane in (0, 1):
        assert_close(np.concatenate(found[lane]), alone[lane], ORDER)


def test_what_is_flushed_and_written_is_counted(llama: TinyDraft, double: Double) -> None:
    """By us and by nobody else, inputs and outputs alike; main only when something went there."""
    c, g = llama.files.config, GEOMETRY
    with opened(llama.files, double) as backend:
        feed(backend, text_of(llama, 40), iter([32, 7, 1]))  # counted with the next pass
        before = double.report()["trace"], dataclasses.replace(backend.counters)
        feed(backend, text_of(llama, 24), iter([1] * 24), past=40)
        after = double.report()["trace"], backend.counters
        assert 0 < backend.seconds_in_passes < 60
    for side in ("run_to_device", "run_from_device"):
        assert after[0][side]["flushes"] == 0, side
    flushed = sum(
        after[0][side]["bytes"] - before[0][side]["bytes"]
        for side in ("sync_to_device", "sync_from_device")
    )
    assert after[1].bytes_flushed - before[1].bytes_flushed == flushed
    assert after[1].main_flushes - before[1].main_flushes == 0, "there was room for 64 in the tail"
    row = 2 * (kv_planes(c) + 2) * c.head_dim  # of float16: keys and values, cos and sin
    mask = 2 * g.keys(1)
    assert after[1].bytes_written - before[1].bytes_written == 24 * (row + mask + 2 * c.hidden_size)


# -- Layouts --------------------------------------------------------------------------------------


def test_odd_strides_change_nothing(gemma: TinyDraft, double: Double, tmp_path: Path) -> None:
    amounts = iter(range(10**6))
    by_name: dict[str, int] = {}

    def change(tensor: NativeTensor) -> NativeTensor:
        more = by_name.setdefault(tensor.name, 1 + next(amounts) % 5)
        return padded(tensor, more)

    files = changed(gemma, tmp_path, change)
    assert files.io.variants[0].inputs[1].w_stride > gemma.files.io.variants[0].inputs[1].w_stride
    text = text_of(gemma, 150)
    results = []
    for each in (gemma.files, files):
        with opened(each, double) as backend:
            results.append(feed(backend, text, at_random(4)))
            backend.arena.gather(0, [148], 140)
            results[-1] = np.concatenate(
                [results[-1], feed(backend, text[:9], iter([9]), past=141)]
            )
    np.testing.assert_array_equal(results[0], results[1])


def test_keys_and_values_of_eight_bits(
    llama: TinyDraft, double: Double, reference_of: Callable[[TinyDraft], Reference], tmp_path: Path
) -> None:
    """With a scale of its own for main and tail, so that a move between them counts anew."""

    def change(tensor: NativeTensor) -> NativeTensor:
        kv = tensor.name in ("tail", "new") or tensor.name.startswith("main.")
        if not kv:
            return tensor
        scale = 1 / 16 if tensor.name.startswith("main.") else 1 / 20
        n, c, h, w = tensor.dims
        c1 = -(-c // 16)
        stride = -(-w // 4) * 4 if tensor.name == "new" else w
        native = (n, c1, h, w, 16)
        size = n * c1 * h * stride * 16
        return NativeTensor(tensor.name, tensor.dims, "int8", native, stride, size, scale, 3)

    files = changed(llama, tmp_path, change)
    text = text_of(llama, 150)
    with opened(files, double) as backend:
        found = feed(backend, text, at_random(4))
    expected = reference_of(llama)(text)
    assert np.abs(found - expected).max() < 0.2 * np.abs(expected).max()
    similar = [np.corrcoef(a, b)[0, 1] for a, b in zip(found, expected, strict=True)]
    assert min(similar) > 0.98


def test_a_library_that_duplicates_no_context_of_many_shapes(
    llama: TinyDraft, double: Double
) -> None:
    text = text_of(llama, 150)
    with opened(llama.files, double) as backend:
        expected = feed(backend, text, at_random(2))
        assert backend.counters.binds <= len(GEOMETRY.rows), "once for each width"
    double.play("nodup")
    with opened(llama.files, double) as backend:
        assert_close(feed(backend, text, at_random(2)), expected, ORDER)
        assert backend.counters.binds > len(GEOMETRY.rows)
        before = backend.counters.binds
        feed(backend, text[:4], iter([1] * 4))
        assert backend.counters.binds <= before + 1, "only for another width"


@pytest.mark.parametrize("faults", ["driver:0.9.8", "nodup"], ids=["contexts", "one context"])
@pytest.mark.parametrize(("lane", "num"), [(1, 1), (0, 2), (1, 2)])
def test_a_binding_that_fails_is_made_anew(
    llama: TinyDraft,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    faults: str,
    lane: int,
    num: int,
) -> None:
    """Half of one lane and half of another would be a text that nobody wrote."""
    double.play(faults)
    with opened(llama.files, double, lanes=2) as backend:
        for each in (0, 1):
            feed(backend, text_of(llama, 30, each), iter([30]), lane=each)
        expected = feed(backend, [7], iter([1]), past=30)
        bind, calls = Context.bind, itertools.count()

        def fail(context: Context, buffer: Buffer, attr: TensorAttr) -> None:
            if next(calls) == 2:
                raise NpuDeviceError("rknn_set_io_mem: the call failed (FAIL, -1)")
            bind(context, buffer, attr)

        with monkeypatch.context() as patch:
            patch.setattr(Context, "bind", fail)
            with contextlib.suppress(NpuDeviceError):
                feed(backend, [7] * num, iter([num]), lane=lane, past=30)
        assert_close(feed(backend, [7], iter([1]), past=30), expected, ORDER)


# -- Faults of a pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [-1, -2, -3])
def test_one_failure_is_tried_again(llama: TinyDraft, double: Double, code: int) -> None:
    text = text_of(llama, 40)
    with opened(llama.files, double) as backend:
        expected = feed(backend, text, at_random(2))
        double.play(f"run:+3:{code}")
        found = feed(backend, text, at_random(2))
        assert backend.counters.retries == 1
    assert_close(found, expected, ORDER)


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("run:+1:-1:2", NpuDeviceError, "rknn_run: the call failed (FAIL, -1)"),
        ("run:+1:-2:2", NpuTimeoutError, "took too long"),
        ("run:+1:-5", NpuCallError, "PARAM_INVALID"),
        ("run:+1:-99:2", NpuDeviceError, "returned -99"),
        ("nan:+1", NpuDeviceError, "not numbers"),
        ("lost:+1", NpuDeviceError, "not available"),
    ],
)
def test_a_failure_leaves_the_lane_as_it_was(
    llama: TinyDraft, double: Double, fault: str, kind: type[NpuError], word: str
) -> None:
    """And goes on from there, as long as the device does."""
    text = text_of(llama, 120)
    with opened(llama.files, double) as backend:
        expected = feed(backend, text, iter([32] * 4))
        feed(backend, text[:96], iter([32] * 4))
        double.play(fault)
        with pytest.raises(kind) as caught:
            feed(backend, text[96:], iter([32]), past=96)
        assert word in str(caught.value) and "\n" not in str(caught.value)
        if "lost" not in fault:
            found = feed(backend, text[96:], iter([32]), past=96)
            assert_close(found, expected[96:], ORDER)


def test_keys_that_are_no_numbers_stay_out(
    llama: TinyDraft, double: Double, tmp_path: Path
) -> None:
    """The double spoils a run's first output: here the new keys and values. A mask would not hide
    them, so the lane must not have them, even of a pass whose logits nobody asked for.
    """
    swapped = [dataclasses.replace(v, outputs=v.outputs[::-1]) for v in llama.files.io.variants]
    files = changed(llama, tmp_path, lambda tensor: tensor)
    io = dataclasses.replace(files.io, variants=tuple(swapped))
    io.save(tmp_path / NPU_IO)
    text = np.array(text_of(llama, 8))
    with opened(dataclasses.replace(files, io=io), double) as backend:
        expected = backend.forward([chain(0, text, 0, (7,))])
        double.play("nan:+1")
        with pytest.raises(NpuDeviceError, match="not numbers"):
            backend.forward([chain(0, text, 0)])
        assert_close(backend.forward([chain(0, text, 0, (7,))]), expected, ORDER)


def test_a_closed_backend_has_no_memory(llama: TinyDraft, double: Double) -> None:
    with opened(llama.files, double) as backend:
        feed(backend, [1, 2, 3], iter([3]))
        held = backend.arena.read(0, 0, 3)
        before = held.copy()
    backend.close()
    assert double.held == {}
    np.testing.assert_array_equal(held, before)
    with pytest.raises(IndexError):
        backend.arena.read(0, 0, 3)
    with pytest.raises(IndexError):
        backend.forward([chain(0, np.array([1]), 0, (0,))])
