"""Laws of pace: the size with the best yield is chosen, and outcomes change the estimates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.exactness import padded_rows
from headrace.runtime.pace import ANY, Acceptance, Origin, Pace, PassCosts
from headrace.runtime.request import MAX_PROPOSED

costs = st.lists(st.floats(0.01, 1.0), min_size=17, max_size=17).map(
    lambda steps: PassCosts(dict(enumerate(np.cumsum(steps).tolist(), 1)))
)
reaches = st.lists(st.floats(0.0, 1.0), max_size=MAX_PROPOSED).map(
    lambda values: np.array(sorted(values, reverse=True))
)


def rows_of(past: int, row_multiple: int, least: int) -> list[int]:
    return [padded_rows(past, 1 + n, row_multiple, least) for n in range(MAX_PROPOSED + 1)]


@given(
    reaches,
    costs,
    st.integers(1, 4),
    st.integers(1, 2),
    st.floats(0.0, 0.5),
    st.tuples(st.integers(0, 3), st.sampled_from([1, 4])),
)
def test_no_other_size_yields_more(
    reach: np.ndarray,
    costs: PassCosts,
    lanes: int,
    least: int,
    extra_s: float,
    place: tuple[int, int],
) -> None:
    rows = rows_of(*place, least)

    def speed(size: int) -> float:
        return float((1 + reach[:size].sum()) / (costs.of(rows[size] * lanes) + extra_s * size))

    plan = Pace(costs).plan(reach, lanes=lanes, rows=rows, extra_s=extra_s)
    assert np.isclose(plan.tokens_per_s, speed(plan.num_tokens))
    assert all(plan.tokens_per_s >= speed(n) * (1 - 1e-9) for n in range(len(reach) + 1))


def test_what_is_free_is_proposed_and_what_never_pays_is_not() -> None:
    pace = Pace(PassCosts({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0}))
    assert pace.plan(np.full(16, 0.0)).num_tokens == 0
    assert pace.plan(np.full(16, 0.01), rows=rows_of(8, 1, 2)).num_tokens == 1, (
        "the padding row is there anyway"
    )
    for past, num_free in enumerate((3, 2, 1, 4)):
        # An Arm's passes end at a multiple of four, with two rows or more.
        of_arm = pace.plan(np.full(16, 0.01), rows=rows_of(past, 4, 2))
        assert of_arm.num_tokens == num_free
    assert pace.plan(np.full(16, 1.0)).num_tokens == 16
    assert pace.plan(np.full(16, 1.0), extra_s=1.1).num_tokens < 2
    assert pace.plan(np.full(16, 0.0), fixed=5).num_tokens == 5
    assert pace.plan(np.full(3, 0.0), fixed=5).num_tokens == 3


def test_a_crowded_pass_proposes_less() -> None:
    pace = Pace(PassCosts({1: 1.0, 8: 1.1, 17: 9.0}))
    reach = np.full(MAX_PROPOSED, 0.6)
    assert pace.plan(reach, lanes=4).num_tokens < pace.plan(reach, lanes=1).num_tokens


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = PassCosts({2: 1.0, 4: 2.0, 8: 3.0})
    assert [costs.of(n) for n in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert PassCosts({2: 1.0}).of(9) == 1.0


@given(st.integers(0, 4), st.floats(0.05, 0.95))
def test_estimates_come_to_what_happens(sureness: int, rate: float) -> None:
    acceptance, rng = Acceptance(), np.random.default_rng(1)
    origin = Origin("session", 0, sureness)
    for _ in range(2000):
        depth, accepted = 1, True
        while depth <= 8 and accepted:
            accepted = bool(rng.random() < rate)
            acceptance.note(origin, depth, accepted=accepted)
            depth += 1
    assert abs(acceptance.rate(origin, 1) - rate) < 0.12


def test_kinds_of_proposals_are_told_apart() -> None:
    acceptance = Acceptance()
    bad, good = Origin("session", 0, 0), Origin("session", 0, 3)
    for _ in range(50):
        acceptance.note(bad, 1, accepted=False)
        for depth in range(1, 5):
            acceptance.note(good, depth, accepted=True)
    assert acceptance.rate(bad, 1) < 0.2
    assert acceptance.rates([good] * 4).min() > 0.9
    assert acceptance.rate(good, 9) > 0.8, "a depth that was never tried leans on those that were"
    assert 0.2 < acceptance.rate(Origin("corpus"), 1) < 0.9, "another source says nothing of it"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 16), st.sampled_from([ANY, 0, 3]))))
def test_estimates_are_probabilities(outcomes: list[tuple[bool, int, int]]) -> None:
    acceptance = Acceptance()
    for accepted, depth, sureness in outcomes:
        acceptance.note(Origin("draft", 0, sureness), depth, accepted=accepted)
    assert 0 < acceptance.rate(Origin("draft", 0, 0), 1) < 1
