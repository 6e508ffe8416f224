"""Streams: what a wrapped ring computes, and that it does not depend on how tokens came to it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streaming import (
    Step,
    Tiny,
    assert_wrapped,
    chunks,
    crowd_out,
    drive,
    fresh,
    layouts,
    long_enough,
    one_pass,
    random_chunks,
    recomputed,
    seeds,
    tiny,
    with_proposals,
)

from headrace.runtime.batch import F32
from headrace.runtime.engine import Engine
from headrace.runtime.ring import RingLayout
from headrace.runtime.sequence import Sequence

TOLERANCE = 1e-4
"""Of a row's largest logit: the random weights' are 10 to 20, and float32 alone costs up to 1e-5."""

FAMILIES = ("llama", "llama_linear", "llama_llama3", "llama_yarn", "mistral", "qwen3", "gemma3")

CACHES = (
    ("llama", "f32", "f32"),
    ("gemma3", "f32", "f32"),
    ("llama_yarn", "f32", "f16"),
    ("gemma3", "int8", "f16"),
    ("qwen3", "int4", "int8"),
    ("mistral", "int8", "int8"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def float_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """No rounding anywhere but that of float32."""
    return tiny(request.param, "f32", "f32", tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=CACHES, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    name, quant, kv = request.param
    return tiny(name, quant, kv, tmp_path_factory.mktemp(name), lanes=2)


@settings(max_examples=2, deadline=None)
@given(layout=layouts, seed=seeds)
@example(layout=RingLayout(16, 16, 16), seed=0)
@example(layout=RingLayout(32, 64, 32), seed=1)
def test_logits_are_those_of_a_plain_recomputation(
    float_model: Tiny, layout: RingLayout, seed: int
) -> None:
    engine = float_model.engine()
    ids = float_model.ids(long_enough(layout), seed)
    stream = engine.stream(layout)
    logits = drive(engine, stream, ids, with_proposals(seed))
    assert_wrapped(stream)
    expected = recomputed(float_model, layout, ids)
    error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
    worst = int(error.argmax())
    assert error[worst] < TOLERANCE, f"token {worst}: {error[worst]:.2e}"


def assert_same(logits: F32, expected: F32, what: str) -> None:
    different = (logits != expected).any(axis=1).nonzero()[0]
    assert not len(different), f"{what}: {len(different)} rows differ, from row {different[0]} on"


@settings(max_examples=2, deadline=None)
@given(layout=layouts, seed=seeds, size=st.integers(2, 32))
@example(layout=RingLayout(16, 48, 16), seed=1, size=17)
def test_the_same_bits_however_tokens_came(
    model: Tiny, layout: RingLayout, seed: int, size: int
) -> None:
    ids = model.ids(long_enough(layout), seed)
    expected = fresh(model, layout, ids, chunks(1))
    ways = {
        f"chunks of {size}": chunks(size),
        "random chunks": random_chunks(seed),
        "rejected proposals": with_proposals(seed),
        "one at a time, proposals rejected": with_proposals(seed, widest=1),
    }
    for what, plan in ways.items():
        engine = model.engine()
        stream = engine.stream(layout)
        assert_same(drive(engine, stream, ids, plan), expected, what)
        assert_wrapped(stream)


@settings(max_examples=2, deadline=None)
@given(layout=layouts, seed=seeds)
@example(layout=RingLayout(16, 32, 16), seed=3)
def test_a_fork_is_a_fresh_stream_and_its_parent_goes_on(
    model: Tiny, layout: RingLayout, seed: int
) -> None:
    """Taken from a lane or parked, with tokens pending or not; driven at once or at the end."""
    chance, engine = random.Random(seed), model.engine(num_streams=9)
    ids = model.ids(long_enough(layout), seed)
    parent = engine.stream(layout)
    logits, waiting, start = [], [], 0
    for cut in moments(layout, chance):
        part, leave = ids[start:cut], chance.choice([0, 1, 9])
        logits.append(drive(engine, parent, part, with_proposals(seed), leave=leave))
        left = len(parent.pending)
        if chance.random() < 0.5:
            crowd_out(engine, parent)
        fork, start = engine.fork(parent), cut
        assert fork.tokens() == parent.tokens()
        if chance.random() < 0.5:
            check_fork(model, engine, fork, ids[:cut], left)
        else:
            waiting.append((fork, cut, left))
    logits.append(drive(engine, parent, ids[start:], random_chunks(seed)))
    assert_wrapped(parent)
    for fork, cut, left in waiting:
        check_fork(model, engine, fork, ids[:cut], left)
    assert_same(np.concatenate(logits), fresh(model, layout, ids), "the parent")
    engine.close_sequence(parent)
    assert engine.check().held == 0


def moments(layout: RingLayout, chance: random.Random) -> list[int]:
    """Around the first eviction, and some time before and after it."""
    first = layout.capacity
    near = [first - 1, first, first + 1]
    later = chance.randint(first + layout.window, long_enough(layout))
    return [chance.randint(10, first - 2), *sorted(chance.sample(near, 2)), later]


def check_fork(model: Tiny, engine: Engine, fork: Sequence, before: list[int], left: int) -> None:
    """Feeds it tokens of its own, over an eviction or two."""
    layout = fork.layout
    assert layout is not None
    ids = model.ids(layout.capacity // 2 + layout.unit, len(before))
    logits = drive(engine, fork, ids, with_proposals(len(before)))
    expected = fresh(model, layout, before + ids)[len(before) - left :]
    assert_same(logits, expected, f"fork after {len(before)} tokens, {left} of them pending")
    engine.close_sequence(fork)


@pytest.mark.parametrize("layout", [RingLayout(16, 32, 16), RingLayout(32, 64, 32)], ids=str)
def test_parked_and_staged_again(model: Tiny, layout: RingLayout) -> None:
    """More streams than lanes, a pass each in turn: every pass of theirs begins with staging."""
    engine = model.engine(num_streams=3)
    texts = [model.ids(long_enough(layout), seed) for seed in range(3)]
    streams = [engine.stream(layout) for _ in texts]
    plans = [random_chunks(seed, widest=24) for seed in range(3)]
    logits: list[list[F32]] = [[], [], []]
    for stream, ids in zip(streams, texts, strict=True):
        stream.append(ids)
    while any(stream.pending for stream in streams):
        for stream, plan, rows in zip(streams, plans, logits, strict=True):
            if stream.pending:
                rows.append(one_pass(engine, stream, plan()))
    assert engine.stats.lane_switches >= 2 * len(logits[0])
    for stream, ids, rows in zip(streams, texts, logits, strict=True):
        assert_wrapped(stream)
        assert_same(np.concatenate(rows), fresh(model, layout, ids), "parked")


@settings(max_examples=2, deadline=None)
@given(first=layouts, second=layouts, seed=seeds)
def test_beside_a_neighbour_in_one_pass(
    model: Tiny, first: RingLayout, second: RingLayout, seed: int
) -> None:
    """Streams of other sizes, of which each evicts when its own tail is full."""
    chance, engine = random.Random(seed), model.engine()
    streams = [engine.stream(first), engine.stream(second)]
    num_tokens = max(long_enough(first), long_enough(second))
    texts = [model.ids(num_tokens, seed + i) for i in range(2)]
    logits: list[list[F32]] = [[], []]
    for stream, ids in zip(streams, texts, strict=True):
        stream.append(ids)
    while any(stream.pending for stream in streams):
        widths = [chance.choice([1, chance.randint(1, 16)]) for _ in streams]
        for rows, part in zip(logits, pass_of_all(engine, streams, widths), strict=True):
            rows.append(part)
    for stream, layout, ids, rows in zip(streams, (first, second), texts, logits, strict=True):
        assert_wrapped(stream)
        assert_same(np.concatenate(rows), fresh(model, layout, ids), "beside a neighbour")


def pass_of_all(engine: Engine, streams: list[Sequence], widths: list[int]) -> list[F32]:
    """A pass of as many rows of each; one that has nothing left to compute rides along."""
    with ExitStack() as turns:
        lanes = [turns.enter_context(engine.turn(stream)) for stream in streams]
        rows = []
        for stream, lane, width in zip(streams, lanes, widths, strict=True):
            ids = stream.pending[: min(width, stream.state.room)]
            rows.append(stream.lane_rows(lane, ids, tuple(range(len(ids)))))
        rows.sort(key=lambda r: r.lane)
        split = np.cumsum([r.num_rows for r in rows])[:-1]
        by_lane = np.split(engine.backend.forward(rows).copy(), split)
        for stream, lane in zip(streams, lanes, strict=True):
            stream.commit(lane, stream.pending[: len(by_lane[lane])])
    return [by_lane[lane] for lane in lanes]


def test_threads_share_passes(model: Tiny) -> None:
    """A stream to each thread, more than there are lanes; forks are taken while they compute."""
    layout, engine = RingLayout(16, 48, 16), model.engine(num_streams=6)
    texts = [model.ids(long_enough(layout), seed) for seed in range(3)]
    streams = [engine.stream(layout) for _ in texts]
    for stream, ids in zip(streams, texts, strict=True):
        stream.append(ids)
    steps: list[Step] = []

    def run(turn: int) -> F32:
        plan = random_chunks(turn, widest=4)

        def step() -> Step:
            steps.append(plan())
            return steps[-1]

        return drive(engine, streams[turn], [], step)

    with ThreadPoolExecutor(3) as threads:
        running = threads.map(run, range(3))
        forks = [engine.fork(stream) for stream in streams]
        logits = list(running)
    assert engine.passes.num_passes < len(steps)
    for ids, fork, ours in zip(texts, forks, logits, strict=True):
        expected = fresh(model, layout, ids)
        assert_same(ours, expected, "in a thread")
        num_done = fork.state.num_tokens
        assert fork.pending == ids[num_done:]
        assert_same(drive(engine, fork, [], chunks(9)), expected[num_done:], f"at {num_done}")
