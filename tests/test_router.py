"""Streamed text: what was shown never changes, and no part of a stop string is ever shown."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.router import StopRouter

# Two letters make overlaps and repeats likely; the third is outside the basic plane.
LETTERS = st.text("ab\U0001f525", max_size=30)
STOPS = st.lists(st.text("ab\U0001f525", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The law, written down naively: the earliest end wins, among equals the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def route(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    router = StopRouter(stops)
    shown = [router.push(piece) for piece in pieces]
    return [*shown, router.finish()], router.stopped


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
def test_any_split_gives_the_text_cut_at_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    borders = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    shown, stopped = route([text[a:b] for a, b in pairwise(borders)], stops)
    assert ("".join(shown), stopped) == cut(text, stops)


@given(LETTERS, STOPS, LETTERS)
def test_what_is_shown_holds_for_every_continuation(text: str, stops: list[str], more: str) -> None:
    assert cut(text + more, stops)[0].startswith(StopRouter(stops).push(text))


@given(LETTERS, STOPS)
def test_nothing_waits_that_could_not_begin_a_stop_string(text: str, stops: list[str]) -> None:
    router = StopRouter(stops)
    shown = router.push(text)
    if router.stopped is None:
        waiting = text[len(shown) :]
        assert not waiting or any(stop.startswith(waiting) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["aaab"], ["aab"], ["a", ""], "aab"),
        (["a", "a", "a", "b", "c"], ["aab"], ["", "", "a", "", "", ""], "aab"),
        (["ab", "c"], ["abc", "b"], ["a", "", ""], "b"),
        (["x\n", "\n", "User"], ["\n\nUser:"], ["x", "", "", "\n\nUser"], None),
        (["vale", "té"], ["té"], ["vale", "", ""], "té"),
        (["all", " of it"], [], ["all", " of it", ""], None),
    ],
)
def test_pieces(pieces: list[str], stops: list[str], shown: list[str], stopped: str | None) -> None:
    assert route(pieces, stops) == (shown, stopped)


def test_time_is_linear_even_when_a_long_stop_string_nearly_matches() -> None:
    def seconds(length: int) -> float:
        router = StopRouter(["a" * length + "b"])
        begin = time.process_time()
        for _ in range(2 * length):
            router.push("a")
        return time.process_time() - begin

    # Quadratic time would be 400 times as much.
    assert seconds(20_000) < 100 * max(seconds(1_000), 1e-3)
