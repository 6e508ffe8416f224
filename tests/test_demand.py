"""Laws of demand: what a draft has to read is paid as often as it has to be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.demand import Demand, Reading
from headrace.runtime.pace import PassCosts

READING = Reading(PassCosts({1: 1.0, 17: 17.0}))
"""A second a token, beyond the last one."""

passes = st.lists(st.tuples(st.integers(1, 17), st.booleans()), max_size=200)


def told(notes: list[tuple[int, bool]]) -> Demand:
    demand = Demand()
    for num_tokens, is_wanted in notes:
        demand.note(num_tokens, is_wanted=is_wanted)
    return demand


@given(passes, st.integers(1, 448), st.integers(1, 448), st.integers(0, 4096))
def test_a_longer_text_costs_more_and_none_more_than_all_of_it(
    notes: list[tuple[int, bool]], one: int, other: int, num_left: int
) -> None:
    demand = told(notes)
    least, most = (demand.price_s(READING, n, num_left) for n in sorted((one, other)))
    assert 0 <= least <= most + 1e-9
    assert most <= READING.of(max(one, other)) + 1e-9


@given(passes, st.integers(1, 448), st.integers(0, 4096), st.integers(0, 4096))
def test_the_longer_an_answer_may_become_the_less_a_pass_pays(
    notes: list[tuple[int, bool]], num_unread: int, one: int, other: int
) -> None:
    demand = told(notes)
    soon, late = (demand.price_s(READING, num_unread, n) for n in sorted((one, other)))
    assert late <= soon + 1e-9


@pytest.mark.parametrize(("tokens", "every"), [(2, 1), (1, 8), (7, 5)])
def test_what_comes_again_each_time_is_paid_each_time(tokens: int, every: int) -> None:
    demand = told([(tokens, number % every == 0) for number in range(1000)])
    gap = tokens * every
    assert demand.gap == pytest.approx(gap, rel=0.15)  # it swings with each pass
    # no answer is so long that it would become less
    assert demand.price_s(READING, gap, 10**9) == pytest.approx(demand.gap - 1, rel=0.15)


def test_a_prompt_is_paid_once() -> None:
    demand = told([(2, True)] * 500)
    assert demand.price_s(READING, 64, 124) == pytest.approx(1 + 62 / 62, rel=0.01)
    assert demand.price_s(READING, 64, 0) == READING.of(64)


@given(st.lists(st.integers(18, 448), min_size=30), st.floats(0.01, 1.0))
def test_what_a_long_reading_takes_is_learned(lengths: list[int], row_s: float) -> None:
    """A wide pass may cost less a row than the widest that was measured."""
    reading = Reading(PassCosts({1: 1.0, 17: 17.0}))
    few = [reading.of(n) for n in range(18)]
    for length in lengths:
        taken = reading.noted(length, length * row_s)
    assert taken == pytest.approx(max(0.0, lengths[-1] * row_s - 1))
    assert reading.of(200) == pytest.approx(max(0.0, 200 * row_s - 1), rel=0.05, abs=0.1)
    assert [reading.of(n) for n in range(18)] == few
