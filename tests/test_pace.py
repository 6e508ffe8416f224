"""Laws of pace: the length with the best yield is chosen, and outcomes change the estimates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.pace import Acceptance, PassCosts, best_length

costs = st.lists(st.floats(0.01, 1.0), min_size=18, max_size=18).map(
    lambda steps: np.cumsum([1.0, *steps])
)
rates = st.lists(st.floats(0.0, 1.0), max_size=16).map(np.array)


@given(rates, costs, st.integers(1, 2), st.integers(1, 2))
def test_no_other_length_yields_more(
    rates: np.ndarray, costs: np.ndarray, base: int, free: int
) -> None:
    def yielded(length: int) -> float:
        expected = 1 + sum(np.prod(rates[: i + 1]) for i in range(length))
        return float(expected / costs[max(base + length, free) - 1])

    chosen = best_length(rates, costs, base, free)
    assert all(yielded(chosen) >= yielded(n) - 1e-9 for n in range(len(rates) + 1))


def test_what_is_free_is_proposed_and_what_never_pays_is_not() -> None:
    costs = PassCosts({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0}).table(17)
    assert best_length(np.full(16, 0.0), costs, 1, 1) == 0
    assert best_length(np.full(16, 0.01), costs, 1, 2) == 1
    assert best_length(np.full(16, 1.0), costs, 1, 1) == 16


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = PassCosts({2: 1.0, 4: 2.0, 8: 3.0})
    assert [costs.of(n) for n in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert PassCosts({2: 1.0}).of(9) == 1.0


@given(st.integers(1, 40), st.floats(0.05, 0.95))
def test_estimates_come_to_what_happens(sureness: int, rate: float) -> None:
    acceptance, rng = Acceptance(), np.random.default_rng(1)
    for _ in range(2000):
        accepted = 0
        while accepted < 8 and rng.random() < rate:
            accepted += 1
        acceptance.note(sureness, 8, accepted)
    assert abs(acceptance.rates(sureness, 1)[0] - rate) < 0.12


def test_kinds_of_proposals_are_told_apart() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.note(3, 4, 0)
        acceptance.note(20, 4, 4)
    assert acceptance.rates(3, 1)[0] < 0.1
    assert acceptance.rates(20, 4).min() > 0.9
