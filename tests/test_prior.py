"""Laws of the n-gram index: what it proposes did follow the same tokens, and its memory is fixed."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runtime.prior import MAX_MATCH, ORDERS, NgramIndex

CAPACITY = 64

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=300)


def places(text: list[int], context: list[int]) -> dict[int, int]:
    """Places of the last CAPACITY tokens of `text` that agree with `context`: place to length."""
    found = {}
    oldest = max(0, len(text) - CAPACITY)
    for place in range(oldest, len(text) - 1):
        length = 0
        while (
            length < min(len(context), MAX_MATCH)
            and place - length >= oldest
            and text[place - length] == context[-1 - length]
        ):
            length += 1
        found[place] = length
    return found


@given(tokens, st.integers(1, 20), st.data())
@settings(max_examples=300, deadline=None)
def test_a_proposal_followed_the_same_tokens(
    text: list[int], most: int, data: st.DataObject
) -> None:
    index = NgramIndex(CAPACITY)
    cut = data.draw(st.integers(0, len(text)))
    index.extend(text[:cut])
    index.extend(text[cut:])
    context = data.draw(st.sampled_from([text, [*text, 0, 1], text[: len(text) // 2], [0, 1, 2]]))
    match = index.match(context, most)
    agreeing = {p: n for p, n in places(text, context).items() if n >= ORDERS[-1]}
    if match is None:
        return
    sources = [p for p, n in agreeing.items() if n == match.length]
    assert any(tuple(text[p + 1 : p + 1 + most]) == match.continuation for p in sources), (
        agreeing,
        match,
    )
    assert index.num_tokens == len(text)


@given(st.lists(st.integers(0, 50), min_size=14, max_size=30), st.integers(1, 16))
@settings(max_examples=100, deadline=None)
def test_a_text_seen_once_is_proposed_whole(text: list[int], most: int) -> None:
    index = NgramIndex(1024)
    index.extend([*text, 99, 98, 97])
    match = index.match(text[: len(text) - 1], most)
    assert match is not None
    assert match.continuation[0] in (*text, 99), match
    longest = index.match(text[:13], most)
    assert longest is not None
    assert longest.length >= 12


def test_a_loop_is_proposed_beyond_the_end_of_what_was_seen() -> None:
    index = NgramIndex(64)
    index.extend([1, 2, 3, 4] * 3)
    match = index.propose([1, 2, 3, 4] * 3, 16)
    assert match is not None
    assert match.continuation == (1, 2, 3, 4) * 4


def test_the_latest_place_wins() -> None:
    index = NgramIndex(64)
    index.extend([1, 2, 3, 7, 1, 2, 3, 8, 0])
    match = index.match([1, 2, 3], 1)
    assert match is not None
    assert match.continuation == (8,)


def test_nothing_is_proposed_for_what_was_never_seen() -> None:
    index = NgramIndex(64)
    assert index.match([1, 2, 3], 4) is None
    index.extend(range(40))
    assert index.match([5, 9, 11], 4) is None
    assert index.match([2, 3], 4) is None, "shorter than any order"


def test_memory_does_not_grow() -> None:
    index = NgramIndex(256)
    ids = np.random.default_rng(0).integers(0, 1000, 5000).tolist()
    index.extend(ids)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index.extend(ids)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2000, grown
