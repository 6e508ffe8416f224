"""Laws of acceptance in a language of six tokens: what is proposed does not show in the text.

`coupled` keeps the text itself, `rejection` its distribution. Each test of a distribution is shown to
fail for a rule that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt
import pytest
import six_tokens as six
from hypothesis import example, given, settings
from hypothesis import strategies as st
from six_tokens import SAMPLINGS, SIZE, Drafter, Language, emitted, sampler_of, spread

from headrace.runtime import verify
from headrace.runtime.fit import chi_square_tail, fit
from headrace.runtime.noise import drafting_seed, gumbel, uniform
from headrace.runtime.propose import Proposal
from headrace.runtime.sampling import Candidates, Sampler
from headrace.runtime.verify import Sibling, Stage, coupled, rejection

CHANCE = 1e-6
"""How often a test of a distribution fails although all is well."""

SAMPLES = 20_000
DRAWN = [name for name in SAMPLINGS if name != "greedy"]


def candidates(p: Sequence[float], *, keeps_zeros: bool = False) -> Candidates:
    weights = np.array(p, np.float64)
    ids = np.arange(SIZE) if keeps_zeros else np.flatnonzero(weights)
    with np.errstate(divide="ignore"):
        scores = np.log(weights[ids] / weights.max())
    return Candidates(ids.astype(np.uint32), scores.astype(np.float32))


# rejection, counted out

weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1.0), st.integers(1, 9).map(float)),
    min_size=SIZE,
    max_size=SIZE,
).filter(any)


@given(p=weights, q=weights, count=st.integers(1, 4), keeps_zeros=st.booleans())
@example(p=[1.0] * 6, q=[1.0] * 6, count=3, keeps_zeros=True)
@example(p=[1.0, 2, 0, 0, 0, 0], q=[0, 0, 3.0, 1, 1, 0], count=2, keeps_zeros=False)
@example(p=[1e-3, 1, 0, 0, 0, 0], q=[1, 1e-3, 0, 0, 0, 0], count=2, keeps_zeros=True)
@settings(max_examples=150, deadline=None)
def test_drawn_siblings_leave_the_distribution(
    p: list[float], q: list[float], count: int, keeps_zeros: bool
) -> None:
    """Without replacement; q may be p, miss tokens of it, or have none of them."""
    target, draft = candidates(p), candidates(q, keeps_zeros=keeps_zeros)
    mean = sum(
        (
            probability * emitted(target, siblings)
            for probability, siblings in six.draws(draft, count)
        ),
        np.zeros(SIZE),
    )
    assert np.abs(mean - spread(target)).max() < 1e-9


@given(p=weights, picked=st.lists(st.integers(0, SIZE - 1), max_size=4, unique=True))
@example(p=[1, 0, 0, 0, 0, 0], picked=[0])
@example(p=[1, 0, 0, 0, 0, 0], picked=[1, 0])
@example(p=[1.0] * 6, picked=[0, 1, 2, 3])
def test_picked_siblings_leave_the_distribution(p: list[float], picked: list[int]) -> None:
    """A looked up token, or several, whether the target can say it or not."""
    target = candidates(p)
    siblings = [Sibling(i, token_id) for i, token_id in enumerate(picked)]
    assert np.abs(emitted(target, siblings) - spread(target)).max() < 1e-9


@given(p=weights, q=weights, picked=st.integers(0, SIZE - 1), is_first=st.booleans())
@settings(deadline=None)
def test_drawn_beside_picked_ones(
    p: list[float], q: list[float], picked: int, is_first: bool
) -> None:
    """Even if the same token is both."""
    target, draft = candidates(p), candidates(q)
    mean = np.zeros(SIZE)
    for probability, drawn in six.draws(draft, 2):
        told = [Sibling(9, picked)]
        mean += probability * emitted(target, told + drawn if is_first else drawn + told)
    assert np.abs(mean - spread(target)).max() < 1e-9


@given(p=weights, q=weights)
@settings(max_examples=60, deadline=None)
def test_as_many_are_kept_as_can_be(p: list[float], q: list[float]) -> None:
    """The mass that p and q share (Leviathan et al., theorem 3.5); all where q is p."""
    target, draft = candidates(p), candidates(q)
    kept = sum(w * six.outcomes(target, s)[0][0] for w, s in six.draws(draft, 1))
    assert abs(kept - np.minimum(spread(target), spread(draft)).sum()) < 1e-9


@pytest.mark.parametrize("num_draft", [SIZE, 4])
@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "picked"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_chain_leaves_the_joint_distribution(
    sampling: str, is_drawn: bool, num_draft: int
) -> None:
    """Of three tokens, over all draws, verdicts and new proposals after a refusal."""
    language = Language.random(1, num_draft=num_draft)
    sampler = sampler_of(sampling)
    counted = six.Counted(language, sampler, 3, 2, is_drawn=is_drawn)
    joint = six.plain_joint(language, sampler, 3)
    assert abs(joint.sum() - 1) < 1e-9
    assert np.abs(counted.joint - joint).max() < 1e-9


# rejection, sampled


def sampled(
    sampling: str,
    propose: Callable[[Language, Sampler], six.Proposer],
    num: int,
    *,
    count: int = SAMPLES,
    likeness: float = 0.6,
) -> tuple[list[float], float]:
    """How well many outputs fit: [num] each place's tokens, and the first two together."""
    language = Language.random(4, likeness=likeness, num_draft=5)
    outputs = np.array(
        [
            six.decode(language, sampler, rejection, propose(language, sampler), num)
            for sampler in (sampler_of(sampling, seed) for seed in range(count))
        ]
    )
    joint = six.plain_joint(language, sampler_of(sampling), num)
    return fits(outputs, joint)


def fits(outputs: npt.NDArray[np.int64], joint: six.F64) -> tuple[list[float], float]:
    num = joint.ndim
    places = []
    for place in range(num):
        expected = joint.sum(axis=tuple(i for i in range(num) if i != place))
        seen = np.bincount(outputs[:, place], minlength=SIZE)
        places.append(fit(seen, expected * len(outputs)))
    cells = np.ravel_multi_index(tuple(outputs[:, -2:].T), (SIZE, SIZE))
    pairs = joint.sum(axis=tuple(range(num - 2)))
    return places, fit(np.bincount(cells, minlength=SIZE**2), pairs.ravel() * len(outputs))


def chains(language: Language, sampler: Sampler) -> six.Proposer:
    return Drafter(language, sampler, "rejection")


def trees(language: Language, sampler: Sampler) -> six.Proposer:
    return Drafter(language, sampler, "rejection", width=2, length=2)


def picks(language: Language, sampler: Sampler) -> six.Proposer:
    """What a draft thinks likeliest."""

    def propose(text: Sequence[int], most: int) -> Proposal:
        path = list(text)
        for _ in range(most):
            path.append(int(language.draft_row_of_target(path).argmax()))
        return six.chain(path[len(text) :])

    return propose


@pytest.mark.parametrize(
    ("sampling", "propose", "num", "count"),
    [("plain", chains, 2, SAMPLES), ("all", chains, 3, 2_000), ("cool", trees, 3, 4_000)],
)
def test_sampled_texts_fit(
    sampling: str, propose: Callable[[Language, Sampler], six.Proposer], num: int, count: int
) -> None:
    """The real guesser with its own noise, and the real rule."""
    places, pairs = sampled(sampling, propose, num, count=count)
    assert min(*places, pairs) > CHANCE


def wrong_stages(
    ids: npt.NDArray[np.uint32], p: six.F64, siblings: Iterable[Sibling]
) -> Iterator[Stage]:
    """With what is left of logits, not of probabilities, after a refusal."""
    for stage in verify_stages(ids, p, siblings):
        with np.errstate(divide="ignore"):
            logits, drafts = np.log(p), np.log(verify._on(ids, stage.sibling))
        rest = np.where(np.isfinite(drafts), np.maximum(logits - drafts, 0), 0.0)
        yield Stage(stage.sibling, stage.kept, rest / rest.sum() if rest.any() else p)


verify_stages = verify.stages


def of_the_same_noise(language: Language, sampler: Sampler) -> six.Proposer:
    """A draft that draws with the target's own noise."""
    drafter = chains(language, sampler)
    assert isinstance(drafter, Drafter)
    drafter.guesser._seed = sampler.seed
    return drafter


def picked_as_drawn(language: Language, sampler: Sampler) -> six.Proposer:
    """Likeliest tokens that are said to be drawn."""
    pick = picks(language, sampler)

    def propose(text: Sequence[int], most: int) -> Proposal:
        chosen, drawn, counts = pick(text, most), [], sampler.counts(text[2:])
        for i in range(len(chosen)):
            path = [*text, *chosen.tree.token_ids[:i]]
            drawn.append(sampler.distribution(language.draft_row_of_target(path), counts))
        return Proposal(chosen.tree, chosen.origins, tuple(drawn))

    return propose


def unreduced(language: Language, sampler: Sampler) -> six.Proposer:
    """Second siblings that are said to be drawn from all of q."""
    draft = trees(language, sampler)

    def propose(text: Sequence[int], most: int) -> Proposal:
        proposal = draft(text, most)
        drawn = [
            proposal.drawn_from[proposal.tree.children(parent)[0]]
            for parent in proposal.tree.parents
        ]
        return Proposal(proposal.tree, proposal.origins, tuple(drawn))

    return propose


@pytest.mark.parametrize("wrong", [of_the_same_noise, picked_as_drawn, unreduced])
def test_wrong_proposals_are_caught(
    wrong: Callable[[Language, Sampler], six.Proposer],
) -> None:
    places, pairs = sampled("cool", wrong, 2, count=6_000, likeness=0.0)
    assert min(*places, pairs) < CHANCE


def test_a_residual_of_logits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "stages", wrong_stages)
    places, pairs = sampled("cool", chains, 2, count=6_000, likeness=0.0)
    assert min(*places, pairs) < CHANCE
    target, draft = candidates([4, 3, 2, 1, 1, 1]), candidates([1, 1, 5, 1, 1, 1])
    monkeypatch.setattr(six, "stages", wrong_stages)
    mean = sum(w * emitted(target, s) for w, s in six.draws(draft, 1))
    assert np.abs(mean - spread(target)).max() > 1e-3


def test_a_bias_of_two_percent_is_caught() -> None:
    """Of one token in favour of another, in samples as large as these."""
    language, sampler = Language.random(4), sampler_of("plain")
    joint = six.plain_joint(language, sampler, 2)
    first = joint.sum(axis=1)
    best, second = np.argsort(-first)[:2]
    biased = first.copy()
    biased[best] -= 0.02
    biased[second] += 0.02
    rng = np.random.default_rng(0)
    found = [fit(rng.multinomial(SAMPLES, biased), first * SAMPLES) for _ in range(200)]
    assert np.mean(np.array(found) < CHANCE) > 0.9
    found = [fit(rng.multinomial(SAMPLES, first), first * SAMPLES) for _ in range(200)]
    assert min(found) > 1e-5


# coupled


def told(
    language: Language,
    sampler: Sampler,
    kind: str,
    truth: tuple[int, ...],
    rng: np.random.Generator,
) -> six.Proposer:
    """Proposals of a kind; `truth` is what is said without any."""
    if kind.startswith("draft"):
        return Drafter(language, sampler, "coupled", width=2 if kind == "draft's trees" else 1)

    def propose(text: Sequence[int], most: int) -> Proposal:
        done = len(text) - len(six.PROMPT)
        right = truth[done : done + min(most, 4)]
        if kind == "right":
            return six.chain(right)
        if kind == "wrong":
            return six.chain([(token_id + 1) % SIZE for token_id in right])
        if kind == "random":
            return six.chain(rng.integers(SIZE, size=min(most, 3)).tolist())
        return six.random_tree(rng, int(rng.integers(1, 9)))

    return propose


KINDS = ("right", "wrong", "random", "random trees", "draft's chains", "draft's trees")


@pytest.mark.parametrize("num_draft", [SIZE, 3])
def test_coupled_texts_are_the_plain_ones(num_draft: int) -> None:
    """For 10,000 seeds with whatever proposals; and the plain ones fit their distribution."""
    language, rng = Language.random(7, num_draft=num_draft), np.random.default_rng(1)
    ways = cycle([(sampling, kind) for kind in KINDS for sampling in SAMPLINGS])
    outputs: dict[str, list[tuple[int, ...]]] = {name: [] for name in SAMPLINGS}
    for seed, (sampling, kind) in enumerate(islice(ways, 5_000)):
        sampler = sampler_of(sampling, seed)
        plain = six.decode(language, sampler, coupled, six.nothing, 4)
        propose = told(language, sampler, kind, plain, rng)
        found = six.decode(language, sampler, coupled, propose, 4)
        assert found == plain, (seed, sampling, kind)
        outputs[sampling].append(plain[:2])
    assert len(set(outputs["greedy"])) == 1
    for sampling in DRAWN:
        joint = six.plain_joint(language, sampler_of(sampling), 2)
        places, pairs = fits(np.array(outputs[sampling]), joint)
        assert min(*places, pairs) > CHANCE, sampling


def test_right_proposals_are_all_kept_and_wrong_ones_never() -> None:
    language, sampler, rng = Language.random(7), sampler_of("plain", 3), np.random.default_rng(0)
    truth = six.decode(language, sampler, coupled, six.nothing, 8)
    passes: dict[str, int] = {}
    for kind in ("right", "wrong"):
        asked: list[int] = []
        inner = told(language, sampler, kind, truth, rng)

        def propose(
            text: Sequence[int], most: int, inner: six.Proposer = inner, asked: list[int] = asked
        ) -> Proposal:
            asked.append(len(text))
            return inner(text, most)

        six.decode(language, sampler, coupled, propose, 8)
        passes[kind] = len(asked)
    assert passes == {"right": 2, "wrong": 8}


def test_a_coupled_draft_agrees_more_often_than_one_of_its_own_noise() -> None:
    """What the shared noise is for (Daliri, Musco and Suresh, 2024)."""
    language = Language.random(5)
    row, other = language.row(six.PROMPT), language.draft_row(six.PROMPT)
    agreed = {True: 0, False: 0}
    for seed in range(3_000):
        sampler = sampler_of("plain", seed)
        choice = sampler.choose(row, 2, sampler.counts()).token_id
        for is_shared in agreed:
            drafts = sampler if is_shared else sampler_of("plain", drafting_seed(seed))
            agreed[is_shared] += drafts.choose(other, 2, sampler.counts()).token_id == choice
    assert agreed[True] > agreed[False] + 300, agreed


# noise


def pairs_fit(x: six.F64, y: six.F64) -> float:
    """That [n] and [n] in [0, 1) are uniform and independent."""
    cells = np.floor(x * 8) * 8 + np.floor(y * 8)
    return fit(np.bincount(cells.astype(np.int64), minlength=64), np.full(64, len(x) / 64))


def level(noise: npt.ArrayLike) -> six.F64:
    """Gumbel noise as what is uniform in [0, 1)."""
    found: six.F64 = np.exp(-np.exp(-np.asarray(noise, np.float64)))
    return np.minimum(found, 1 - 2**-53)


@pytest.mark.parametrize("seeds", [range(8_000), range(0, 8_000 << 40, 1 << 40)])
def test_verdicts_and_drafts_know_nothing_of_the_targets_noise(seeds: range) -> None:
    token, position = [3], 5
    verdicts = np.array([uniform(seed, position, 0) for seed in seeds])
    second = np.array([uniform(seed, position, 1) for seed in seeds])
    following = np.array([uniform(seed, position + 1, 0) for seed in seeds])
    target = level([gumbel(seed, position, token)[0] for seed in seeds])
    drafts = level([gumbel(drafting_seed(seed), position, token)[0] for seed in seeds])
    named = {"second": second, "following": following, "target": target, "drafts": drafts}
    for name, other in named.items():
        assert pairs_fit(verdicts, other) > CHANCE, name
        assert abs(np.corrcoef(verdicts, other)[0, 1]) < 5 / np.sqrt(len(verdicts)), name
    assert pairs_fit(target, drafts) > CHANCE
    assert abs(np.corrcoef(target, drafts)[0, 1]) < 5 / np.sqrt(len(target))
    assert pairs_fit(verdicts, (verdicts + 0.01) % 1) < CHANCE


def test_verdicts_along_one_text_are_uniform_too() -> None:
    found = np.array([uniform(11, position, 0) for position in range(8_000)])
    assert pairs_fit(found[:-1], found[1:]) > CHANCE
    noise = level([gumbel(11, position, [2])[0] for position in range(8_000)])
    assert pairs_fit(found, noise) > CHANCE
    own = level([gumbel(drafting_seed(11), position, [2])[0] for position in range(8_000)])
    assert pairs_fit(noise, own) > CHANCE


# the statistic itself


@pytest.mark.parametrize(
    ("statistic", "freedom", "probability"),
    [(3.841459, 1, 0.05), (5.991465, 2, 0.05), (37.56623, 20, 0.01), (27.87716, 9, 0.001),
     (149.4493, 100, 0.001), (0.0, 3, 1.0)],
)  # fmt: skip
def test_chi_square_has_the_tables_values(
    statistic: float, freedom: int, probability: float
) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(probability, rel=1e-4)


def test_fits_are_uniform_under_the_law() -> None:
    """Rare cells among them; and what cannot come must not."""
    p = np.array([0.5, 0.3, 0.15, 0.049, 0.0009, 0.0001])
    rng = np.random.default_rng(3)
    found = np.array([fit(rng.multinomial(4_000, p), 4_000 * p) for _ in range(2_000)])
    assert fit(np.histogram(found, 10, (0, 1))[0], np.full(10, 200.0)) > CHANCE
    assert fit([10, 10, 1], [10.5, 10.5, 0]) == 0.0
