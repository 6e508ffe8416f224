"""Laws of the draft's lane: what it drafted, and what became of that, leaves no trace in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import SamplingParams
from headrace.models.manifest import DRAFT, Bundle
from headrace.models.vocab_map import NO_TOKEN, VocabMap, load_vocab_map
from headrace.runtime.draft import (
    MAX_NODES,
    DraftLane,
    DraftModel,
    draft_capacity,
    draft_layout,
    frontier,
)
from headrace.runtime.guess import Guesser, Head
from headrace.runtime.ort import OrtBackend
from headrace.runtime.prepare import session_options
from headrace.runtime.sampling import Sampler


@pytest.fixture(scope="module")
def model(twin_bundle: Path) -> Iterator[DraftModel]:
    bundle = Bundle.open(twin_bundle)
    record = bundle.draft
    assert record is not None
    session = ort.InferenceSession(
        str(bundle.file(DRAFT)), session_options(), providers=["CPUExecutionProvider"]
    )
    capacity = draft_capacity(record.config)
    backend = OrtBackend(session, record.config, kv=record.kv, lanes=2, capacity=capacity)
    layout = draft_layout(record.config)
    model = DraftModel(backend, record.config, record.kv, load_vocab_map(bundle), layout)
    yield model
    model.close()


def lane_of(model: DraftModel, index: int, temperature: float = 0.0) -> DraftLane:
    size = model.config.vocab_size
    sampler = Sampler(SamplingParams(temperature=temperature, seed=3), [], size)
    lane = DraftLane(model, index)
    lane.begin(Guesser(sampler, "coupled", model.head))
    return lane


def assert_same_guesses(lane: DraftLane, other: DraftLane) -> None:
    mine, others = lane.nodes[0].guesses, other.nodes[0].guesses
    # Rows in another order differ in the last bits, and close calls among tiny weights are many.
    assert mine and others
    assert mine[0].probability == pytest.approx(others[0].probability, rel=2e-3)
    if others[0].probability > 1.01 * others[1].probability:
        assert mine[0].token_id == others[0].token_id


@given(st.integers(0, 10_000), st.integers(1, 40))
@settings(deadline=None)
def test_a_cut_head_guesses_as_one_with_the_other_tokens_ruled_out(seed: int, kept: int) -> None:
    """A bias of nothing leads through the target's whole vocabulary."""
    random, size = np.random.default_rng(seed), 40
    to_draft, to_target = np.full(size, NO_TOKEN, np.int32), np.full(kept, NO_TOKEN, np.int32)
    to_target[: max(1, kept - 2)] = random.permutation(size)[: max(1, kept - 2)]
    to_draft[to_target[to_target != NO_TOKEN]] = np.flatnonzero(to_target != NO_TOKEN)
    head = Head.of(VocabMap(to_target, to_draft))
    logits = random.normal(size=kept).astype(np.float32)
    ways = SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={0: 0.0})
    short, whole = (
        Guesser(Sampler(params, [], size), "coupled", head).guess(logits, 1, []) for params in ways
    )
    assert [guess.token_id for guess in short] == [guess.token_id for guess in whole]
    assert [g.probability for g in short] == pytest.approx([g.probability for g in whole])


def test_a_small_context_has_a_window_that_fits(model: DraftModel) -> None:
    assert model.config.max_position == 128
    assert model.layout.capacity <= 128


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.8]))
@settings(max_examples=12, deadline=None)
def test_a_drafting_lane_equals_one_that_only_follows(
    model: DraftModel, seed: int, temperature: float
) -> None:
    """Over evictions, with trees that are taken up in part, in whole or not at all."""
    chance = random.Random(seed)
    drafting, following = (lane_of(model, i, temperature) for i in (0, 1))
    text = [chance.randrange(model.config.vocab_size) for _ in range(chance.randint(1, 40))]
    while len(text) < 220:
        # Both are told at the same places, or their windows would not be the same.
        for lane in (drafting, following):
            lane.follow(text[-model.layout.window :], len(text))
            assert lane.length == len(text) - 1
            assert lane.nodes[0].token_id == text[-1]
        assert_same_guesses(drafting, following)
        assert drafting.state == following.state
        for _ in range(chance.randint(0, 4)):
            outcomes = [(node, guess, 0.5) for node, guess, _ in frontier(drafting)]
            # What is drafted beyond the tail's end saw tokens that are evicted before it is text.
            room = min(MAX_NODES, drafting.state.room) - len(drafting.nodes)
            num_chosen = max(0, min(len(outcomes), room, chance.randint(1, 3)))
            chosen = chance.sample(outcomes, num_chosen)
            if chosen:
                drafting.compute(chosen)
        node = chance.randrange(len(drafting.nodes))
        text += drafting.path(node)[: chance.randint(0, 9)]
        text += [chance.randrange(model.config.vocab_size) for _ in range(chance.randint(1, 3))]
    assert drafting.num_true > 0 or seed


@given(st.integers(0, 10_000))
@settings(max_examples=4, deadline=None)
def test_rows_drafted_beyond_the_tail_move_with_the_eviction(model: DraftModel, seed: int) -> None:
    """The first layer's keys depend on token and position alone, so they are to be the same."""
    chance = random.Random(seed)
    drafting, following, text = lane_of(model, 0), lane_of(model, 1), [1, 2, 3]
    while len(text) < 300:
        for lane in (drafting, following):
            lane.follow(text[-model.layout.window :], len(text))
        assert drafting.state == following.state
        end = drafting.state.num_slots
        keys = [model.backend.arena.read(lane, 0, end + 1)[0, 0] for lane in (0, 1)]
        np.testing.assert_allclose(keys[0], keys[1], atol=1e-5)
        for _ in range(24):
            node = len(drafting.nodes) - 1
            drafting.compute([(node, drafting.nodes[node].guesses[0], 1.0)])
        text += drafting.path(24)[: chance.randint(1, 24)]
        text.append(chance.randrange(model.config.vocab_size))
    assert drafting.state.num_evictions > 5


def test_what_came_true_is_not_computed_again(model: DraftModel) -> None:
    lane = lane_of(model, 0)
    text = [5, 6, 7, 8]
    assert lane.follow(text, 4) == 4
    for _ in range(3):
        node = len(lane.nodes) - 1
        lane.compute([(node, lane.nodes[node].guesses[0], 1.0)])
    path = lane.path(3)
    assert lane.follow([*text, *path[:2]], 6) == 0, "a head start"
    assert [n.token_id for n in lane.nodes] == [path[1], path[2]], "what stood behind it is kept"
    assert lane.follow([*text, *path, 1], 8) == 1
    assert len(lane.nodes) == 1


def test_another_request_on_the_same_text_goes_on_there(model: DraftModel) -> None:
    lane = lane_of(model, 0)
    text = list(range(20))
    lane.follow(text, 20)
    assert lane.agrees([*text, 3, 4], 22)
    assert not lane.agrees([9, *text[1:], 3], 21)
    assert not lane.agrees(text[:10], 10), "it is longer than that"
    assert not lane_of(model, 1).agrees(text, 20), "it knows nothing"
    sampler = Sampler(SamplingParams(), [], model.config.vocab_size)
    lane.begin(Guesser(sampler, "coupled", model.head))
    assert lane.follow([*text, 3, 4], 22) == 3


def test_a_long_text_is_cut_to_the_window(model: DraftModel) -> None:
    lane, window = lane_of(model, 0), model.layout.window
    text = [int(t) for t in np.random.default_rng(0).integers(0, 200, 1000)]
    assert lane.follow(text, 1000) == window
    assert lane.follow([*text, 4], 1001) == 1
    assert lane.follow([*text, *text], 2001) == window
