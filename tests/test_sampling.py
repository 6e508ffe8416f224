"""Sampling: each step on four tokens by hand, the draw by its frequencies, the rest by laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import ModelOutputError, UsageError
from headrace.runtime.noise import draw, gumbel
from headrace.runtime.request import SamplingParams
from headrace.runtime.sampling import (
    Candidates,
    Row,
    Sampler,
    TokenCounts,
    add_bias,
    best_tokens,
    heat,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_normalizer,
    penalize,
)

LARGE = 20_000


def row_of(*probabilities: float) -> Row:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float32))


def candidates(*probabilities: float) -> Candidates:
    ids = np.arange(len(probabilities), dtype=np.uint32)
    return Candidates(ids, heat(row_of(*probabilities), 1.0))


def kept(result: Candidates) -> dict[int, float]:
    """Token id to its probability among what was kept."""
    probabilities = np.exp(result.log_probs()).tolist()
    return dict(zip(result.ids.tolist(), [round(p, 5) for p in probabilities], strict=True))


def sampler(row: Row, prompt: list[int] | None = None, **params: Any) -> Sampler:
    params = {"temperature": 1.0, "seed": 1, **params}
    return Sampler(SamplingParams(**params), prompt or [], len(row))


def zipf_row(seed: int, size: int = LARGE) -> Row:
    """Logits with the tail of a language model's, in shuffled order."""
    logits = -1.5 * np.log(np.arange(size) + 2.0)
    return np.random.default_rng(seed).permutation(logits).astype(np.float32)


# Four tokens, by hand.


def test_top_k() -> None:
    assert kept(keep_top_k(candidates(0.1, 0.4, 0.2, 0.3), 2)) == {1: 0.57143, 3: 0.42857}
    assert kept(keep_top_k(candidates(0.2, 0.4, 0.2, 0.2), 2)) == {0: 0.33333, 1: 0.66667}
    assert len(keep_top_k(candidates(0.1, 0.4, 0.2, 0.3), 9).ids) == 4
    assert kept(keep_top_k(candidates(0.0, 1.0, 0.0, 0.0), 2)) == {1: 1.0}


def test_top_p() -> None:
    four = candidates(0.1, 0.4, 0.2, 0.3)
    assert kept(keep_top_p(four, 0.39)) == {1: 1.0}
    assert kept(keep_top_p(four, 0.41)) == {1: 0.57143, 3: 0.42857}
    assert kept(keep_top_p(four, 0.89)) == {1: 0.44444, 2: 0.22222, 3: 0.33333}
    assert len(keep_top_p(four, 0.91).ids) == 4
    assert kept(keep_top_p(candidates(0.25, 0.25, 0.25, 0.25), 0.5)) == {0: 0.5, 1: 0.5}


def test_min_p() -> None:
    four = candidates(0.1, 0.4, 0.2, 0.3)
    assert kept(keep_min_p(four, 0.26)) == {1: 0.44444, 2: 0.22222, 3: 0.33333}
    assert kept(keep_min_p(four, 0.74)) == {1: 0.57143, 3: 0.42857}
    assert kept(keep_min_p(four, 1.0)) == {1: 1.0}


def test_temperature() -> None:
    heated = Candidates(np.arange(4, dtype=np.uint32), heat(row_of(0.1, 0.4, 0.2, 0.3), 0.5))
    assert kept(heated) == {0: 0.03333, 1: 0.53333, 2: 0.13333, 3: 0.3}


def test_penalties() -> None:
    row = np.array([2.0, -2.0, 1.0, 4.0], np.float32)
    counts = TokenCounts([0, 1], [3, 3, 1])
    assert penalize(row, counts, repeat=2.0).tolist() == [1.0, -4.0, 1.0, 2.0]
    assert penalize(row, counts, presence=0.5).tolist() == [2.0, -2.5, 1.0, 3.5]
    assert penalize(row, counts, frequency=0.5).tolist() == [2.0, -2.5, 1.0, 3.0]
    assert row.tolist() == [2.0, -2.0, 1.0, 4.0]


def test_bias() -> None:
    row = np.zeros(4, np.float32)
    biased = add_bias(row, np.array([3, 1]), np.array([2.0, -1.0], np.float32))
    assert biased.tolist() == [0.0, -1.0, 0.0, 2.0]
    assert row.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_the_chain_renormalises_after_each_step() -> None:
    row = row_of(0.1, 0.4, 0.2, 0.3)
    # 4/7 reach a half once top-k has dropped the rest, 0.4 would not have.
    chain = sampler(row, top_k=2, top_p=0.5)
    assert kept(chain.distribution(row, chain.counts())) == {1: 1.0}
    chain = sampler(row, top_p=0.5, logit_bias={0: 100.0})
    assert kept(chain.distribution(row, chain.counts())) == {0: 1.0}
    chain = sampler(row, temperature=0.5, top_k=3, top_p=0.85, min_p=0.5)
    assert kept(chain.distribution(row, chain.counts())) == {1: 0.64, 3: 0.36}


def test_greedy_takes_the_lowest_of_equals() -> None:
    row = np.array([1.0, 3.0, 3.0, -np.inf], np.float32)
    greedy = sampler(row, temperature=0.0, seed=None)
    assert greedy.choose(row, 0, greedy.counts()).token_id == 1
    assert kept(greedy.distribution(row, greedy.counts())) == {1: 1.0}
    biased = sampler(row, temperature=0.0, logit_bias={0: 5.0}, repeat_penalty=10.0, prompt=[1])
    assert biased.choose(row, 0, biased.counts()).token_id == 0


def test_logprobs_are_of_the_untouched_logits() -> None:
    row = row_of(0.1, 0.4, 0.2, 0.3) + 7
    chain = sampler(row, temperature=0.3, top_k=1, logprobs=2, logit_bias={0: 50.0}, prompt=[1])
    choice = chain.choose(row, 0, chain.counts())
    assert choice.token_id == 0 and choice.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token_id for token_id, _ in choice.top] == [1, 3]
    assert [math.exp(p) for _, p in choice.top] == pytest.approx([0.4, 0.3], abs=1e-6)
    bare = sampler(row, logprobs=0)
    assert bare.choose(row, 0, bare.counts()).top == ()
    none = sampler(row)
    assert none.choose(row, 0, none.counts()).logprob is None


# The draw.


def chi_square(observed: NDArray[Any], expected: NDArray[Any]) -> float:
    """Distance from the expected counts in standard deviations, about normal for many cells."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_frequencies_are_the_softmax(vary: str) -> None:
    row = row_of(0.05, 0.4, 0.2, 0.3, 0.04, 0.01)
    drawn = np.zeros(6)
    for i in range(10_000):
        seed, position = (3, i) if vary == "position" else (i, 3)
        drawn[draw(heat(row, 1.0), np.arange(6, dtype=np.uint32), seed, position)] += 1
    assert abs(chi_square(drawn, 10_000 * np.exp(row))) < 4


def test_frequencies_of_a_large_vocabulary() -> None:
    row = zipf_row(0)
    scores, ids = heat(row, 1.0), np.arange(LARGE, dtype=np.uint32)
    share = np.exp(row.astype(np.float64) - log_normalizer(row))
    order = np.argsort(-share)
    group = np.empty(LARGE, int)
    group[order] = np.minimum(np.log2(np.arange(LARGE) + 1).astype(int), 11)
    drawn = np.bincount([group[draw(scores, ids, 11, i)] for i in range(4000)], minlength=12)
    assert abs(chi_square(drawn, 4000 * np.bincount(group, share))) < 4


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.floats(0.05, 20), st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_the_draw_is_the_argmax_of_scores_plus_noise(
    seed: int, position: int, spread: float, size: int
) -> None:
    random = np.random.default_rng([seed, position])
    scores = heat((random.standard_normal(size) * spread).astype(np.float32), 1.0)
    ids = np.sort(random.choice(200_000, size, replace=False)).astype(np.uint32)
    total = scores.astype(np.float64) + gumbel(seed, position, ids)
    assert draw(scores, ids, seed, position) == int(total.argmax())


def noise_levels(seed: int, position: int, ids: NDArray[Any], cells: int) -> NDArray[np.intp]:
    """The noise brought back to a uniform number and cut into equal cells."""
    uniform = np.exp(-np.exp(-gumbel(seed, position, ids)))
    return np.minimum((uniform * cells).astype(np.intp), cells - 1)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_noise_is_uniform(seed: int) -> None:
    for position in (0, 1, 1_000_000):
        counts = np.bincount(noise_levels(seed, position, np.arange(100_000), 256), minlength=256)
        assert abs(chi_square(counts, np.full(256, 100_000 / 256))) < 4.5


@pytest.mark.parametrize(
    ("seed", "position", "shift"),
    [(0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 64), (0, 256, 0), (2**32, 0, 0)],
)
def test_neighbouring_noise_is_independent(seed: int, position: int, shift: int) -> None:
    """Pairs of levels at (0, 0, id) and at the neighbour fill a 16 x 16 table evenly."""
    ids = np.arange(100_000)
    here = noise_levels(5, 7, ids, 16)
    there = noise_levels(5 + seed, 7 + position, ids + shift, 16)
    counts = np.bincount(here * 16 + there, minlength=256)
    assert abs(chi_square(counts, np.full(256, 100_000 / 256))) < 4.5


def test_noise_along_positions_and_seeds_is_uniform_and_independent() -> None:
    one, n = np.array([42]), 8000
    by_position = np.array([noise_levels(9, i, one, 8)[0] for i in range(n)])
    by_seed = np.array([noise_levels(i, 9, one, 8)[0] for i in range(n)])
    neighbours = [(levels[:-1], levels[1:]) for levels in (by_position, by_seed)]
    for first, second in [*neighbours, (by_position, by_seed)]:
        pairs = np.bincount(first * 8 + second, minlength=64)
        assert abs(chi_square(pairs, np.full(64, len(first) / 64))) < 4.5


def test_noise_is_that_of_the_id_alone() -> None:
    whole = gumbel(1, 2, np.arange(1000))
    assert gumbel(1, 2, [999, 3]).tolist() == [whole[999], whole[3]]
    assert whole.mean() == pytest.approx(np.euler_gamma, abs=0.15)


def test_noise_does_not_change_between_versions() -> None:
    """A seed that a user noted down must give the same text next year."""
    known = gumbel(12345, 678, [0, 1, 49151])
    assert known == pytest.approx(KNOWN_NOISE, abs=1e-12)


KNOWN_NOISE = [-0.23858454882971786, 1.1391285875922683, 2.7528921102085455]


# Laws.

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)
POSITIONS = st.integers(0, 100_000)


@given(LOGITS, POSITIONS)
def test_top_k_of_one_is_greedy(logits: list[float], position: int) -> None:
    row = np.array(logits, np.float32)
    one, greedy = sampler(row, top_k=1), sampler(row, temperature=0.0)
    choice = one.choose(row, position, one.counts())
    assert choice == greedy.choose(row, position, greedy.counts())


@given(LOGITS, st.floats(0.001, 100), st.data())
def test_filters_keep_the_best_and_shrink(
    logits: list[float], temperature: float, data: st.DataObject
) -> None:
    row = np.array(logits, np.float32)
    before = Candidates(np.arange(len(row), dtype=np.uint32), heat(row, temperature))
    after = keep_top_k(before, data.draw(st.integers(0, 50)))
    assert int(row.argmax()) in after.ids
    for keep in (keep_top_p, keep_min_p):
        fewer = keep(after, data.draw(st.floats(0.0, 1.0, exclude_min=True)))
        assert int(row.argmax()) in fewer.ids and set(fewer.ids) <= set(after.ids)
        assert fewer.scores.max() == 0 and (np.diff(fewer.ids.astype(int)) > 0).all()
        after = fewer


def test_the_least_difference_outlives_any_temperature() -> None:
    row = np.array([0.0, np.finfo(np.float32).smallest_subnormal], np.float32)
    for temperature in (0.5, 1.0, 2.0, 100.0):
        scores = heat(row, temperature)
        assert scores[0] < scores[1] == 0
        assert keep_top_k(Candidates(np.arange(2, dtype=np.uint32), scores), 1).ids.tolist() == [1]


@given(LOGITS)
def test_neutral_settings_change_nothing(logits: list[float]) -> None:
    row = np.array(logits, np.float32)
    counts = TokenCounts(range(len(row)), [0, 0])
    assert penalize(row, counts).tolist() == row.tolist()
    neutral = sampler(row, top_k=0, top_p=1.0, min_p=0.0, logit_bias={})
    result = neutral.distribution(row, counts)
    assert result.scores.tolist() == heat(row, 1.0).tolist() and len(result.ids) == len(row)


@given(st.integers(0, 100), st.floats(0.01, 0.999), st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_thresholds_equal_a_full_sort(seed: int, p: float, k: int) -> None:
    row = zipf_row(seed) if seed % 2 else np.round(zipf_row(seed), 1)  # many equals
    everything = Candidates(np.arange(LARGE, dtype=np.uint32), heat(row, 1.0))
    order = np.argsort(-row, kind="stable")
    assert keep_top_k(everything, k).ids.tolist() == np.sort(order[:k]).tolist()
    assert best_tokens(row, k).tolist() == order[:k].tolist()
    share = np.exp(everything.log_probs())[order]
    # Sums in another order differ in the last digits, so one token more or less is right.
    count = int(np.searchsorted(np.cumsum(share), p)) + 1
    got = keep_top_p(everything, p).ids.tolist()
    assert abs(len(got) - count) <= 1 and got == np.sort(order[: len(got)]).tolist()


def test_a_flat_distribution_keeps_its_share() -> None:
    flat = Candidates(np.arange(LARGE, dtype=np.uint32), np.zeros(LARGE, np.float32))
    assert len(keep_top_p(flat, 0.5).ids) == LARGE // 2


@given(st.lists(st.one_of(st.integers(0, 5), st.none()), max_size=60), st.lists(st.integers(0, 5)))
def test_counts_follow_a_path_there_and_back(moves: list[int | None], prompt: list[int]) -> None:
    """A number goes down the path, None comes back up."""
    counts, path = TokenCounts(prompt), list[int]()
    for move in moves:
        if move is not None:
            counts.push(move)
            path.append(move)
        elif path:
            assert counts.pop() == path.pop()
        found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
        assert found == {token_id: path.count(token_id) for token_id in {*prompt, *path}}
        assert len(counts) == len(path)


def test_rows_along_branches_equal_rows_alone() -> None:
    """Rows asked for in any order, some twice, give what each path gives by itself."""
    rows = [zipf_row(i, 50) for i in range(8)]
    chain = sampler(rows[0], prompt=[1, 2], repeat_penalty=1.3, frequency_penalty=0.7, top_p=0.9)
    shared = chain.counts()
    for branch in ([3, 3, 4], [3, 5], [], [6, 3]):
        for token_id in branch:
            shared.push(token_id)
        for _ in range(2):
            choice = chain.choose(rows[len(branch)], 2 + len(branch), shared)
            fresh = chain.choose(rows[len(branch)], 2 + len(branch), chain.counts(branch))
            assert choice == fresh
        for _ in branch:
            shared.pop()


def test_a_token_that_is_masked_is_never_chosen() -> None:
    row = np.full(300, -np.inf, np.float32)
    row[[7, 200]] = 0.0
    for params in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.1}, {"repeat_penalty": 2.0}):
        chain = sampler(row, prompt=[1, 7], **params)
        chosen = {chain.choose(row, i, chain.counts([2])).token_id for i in range(50)}
        assert chosen == {7, 200}


@pytest.mark.parametrize("bad", [[0, math.nan], [math.inf, 0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad: list[float], temperature: float) -> None:
    row = np.array(bad, np.float32)
    chain = sampler(row, temperature=temperature)
    with pytest.raises(ModelOutputError, match="largest logit is"):
        chain.choose(row, 0, chain.counts())
    with pytest.raises(ModelOutputError):
        log_normalizer(row)


def test_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="got token id 4, allowed are 0 to 3"):
        sampler(np.zeros(4, np.float32), logit_bias={4: 1.0})


@pytest.mark.parametrize("temperature", [1e-9, 1e-5, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    row = np.array([-1e30, 5.0, 4.0, 1e4], np.float32)
    chain = sampler(row, temperature=temperature)
    assert chain.choose(row, 0, chain.counts()).token_id == 3
