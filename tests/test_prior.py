"""Laws of the n-gram indexes: what they propose did follow the same tokens; memory is fixed."""

from __future__ import annotations

import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runtime.prior import (
    MAX_MATCH,
    ORDERS,
    SEPARATOR,
    Match,
    NgramIndex,
    NgramTables,
    SharedIndex,
)

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
    (match,) = index.candidates([1, 2, 3, 4] * 3, 16, 1)
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


def follows(texts: list[list[int]], context: list[int], match: Match) -> bool:
    """Whether each token follows, in one of the texts, the n-gram before it."""
    order = ORDERS[-1]
    ngrams = {tuple(t[i : i + order + 1]) for t in texts for i in range(len(t) - order)}
    tokens = [*context, *match.continuation]
    return all(
        tuple(tokens[end - order : end + 1]) in ngrams for end in range(len(context), len(tokens))
    )


segments = st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=5)
contexts = st.lists(st.integers(0, 3), max_size=20)


@given(segments, contexts, st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_candidates_are_different_ways_on(
    texts: list[list[int]], context: list[int], most: int, count: int
) -> None:
    index = SharedIndex(1024)
    for text in texts:
        index.extend(text)
    found = index.candidates(context, most, count)
    assert len(found) <= min(count, len(ORDERS))
    assert len({match.continuation[0] for match in found}) == len(found)
    lengths = [match.length for match in found]
    assert lengths == sorted(lengths, reverse=True)
    for match in found:
        assert 1 <= len(match.continuation) <= most
        assert match.length >= ORDERS[-1]
        assert follows(texts, context, match), match


@given(tokens, contexts, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_the_first_candidate_is_the_match_and_what_follows_it(
    text: list[int], context: list[int], most: int
) -> None:
    index = NgramIndex(CAPACITY)
    index.extend(text)
    for end in (context, text):
        match, candidates = index.match(end, most), index.candidates(end, most, 3)
        assert bool(candidates) == (match is not None)
        if match is not None:
            assert candidates[0].length == match.length
            assert candidates[0].continuation[: len(match.continuation)] == match.continuation
        assert index.candidates(end, most, 1) == candidates[:1]


def test_a_later_place_of_a_shorter_ngram_is_the_second_candidate() -> None:
    index = NgramIndex(256)
    index.extend([*range(20), 100, 101, 17, 18, 19, 200, 201])
    first, second = index.candidates(list(range(20)), 2, 3)
    assert (first.length, first.continuation) == (20, (100, 101))
    assert (second.length, second.continuation) == (3, (200, 201))


def test_texts_do_not_run_into_each_other() -> None:
    index = SharedIndex(1024)
    index.extend([11, 12, 13, 14])
    index.extend([25, 26, 27, 28])
    assert index.candidates([11, 12, 13], 9, 3) == [Match(3, (14,))]
    assert index.candidates([25, 26, 27], 9, 3) == [Match(3, (28,))]
    assert index.candidates([12, 13, 14], 9, 3) == [], "followed by another text"
    assert index.candidates([13, 14, SEPARATOR], 9, 3) == []
    assert index.candidates([14, SEPARATOR, 25], 9, 3) == []


@given(
    st.lists(st.integers(0, 3) | st.just(SEPARATOR), min_size=1, max_size=40),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 50), min_size=8, max_size=8),
    contexts,
)
@settings(max_examples=100, deadline=None)
def test_no_number_in_a_table_leads_outside(
    stored: list[int], places: list[int], context: list[int]
) -> None:
    stored = stored[:8]
    index = NgramTables(stored, [places] * len(ORDERS), len(stored), id_limit=3)
    for match in index.candidates(context, 16, 3):
        assert set(match.continuation) <= {0, 1, 2}


def test_threads_share_an_index() -> None:
    """Each thread's texts have tokens of their own, so a mixture would show."""
    index = SharedIndex(1 << 13)
    wrong: list[object] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        own: list[list[int]] = []
        for _ in range(12):
            text = (rng.integers(0, 4, 300) + 10 * number).tolist()
            own.append(text)
            index.extend(text)
            for start in range(0, 250, 25):
                context = text[start : start + 20]
                found = index.candidates(context, 16, 3)
                if not found or not all(follows(own, context, match) for match in found):
                    wrong.append((number, context, found))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert index.num_tokens == 4 * 12 * 300 + 4 * 12 - 1


def test_who_asks_does_not_wait_for_a_long_text() -> None:
    index = SharedIndex()
    writer = threading.Thread(target=index.extend, args=(list(range(25_000)),))
    started = time.perf_counter()
    writer.start()
    waits = []
    while writer.is_alive():
        asked = time.perf_counter()
        index.candidates([1, 2, 3], 8, 3)
        waits.append(time.perf_counter() - asked)
        time.sleep(0.001)
    took = time.perf_counter() - started
    # Not the longest: on a busy machine a thread may be left out for a while, whatever it asks.
    assert sorted(waits)[len(waits) // 2] < 0.03, (sorted(waits)[-5:], took)
    assert len(waits) > 5, (waits, took)


def test_a_text_cut_short_is_ended_all_the_same() -> None:
    index = SharedIndex(256)
    with pytest.raises(OverflowError):
        index.extend([1, 2, 3, -1])
    index.extend([4, 5])
    assert index.candidates([1, 2, 3], 4, 3) == []


@pytest.mark.parametrize("kind", [NgramIndex, SharedIndex])
def test_memory_does_not_grow(kind: type[NgramIndex | SharedIndex]) -> None:
    index = kind(256)
    ids = np.random.default_rng(0).integers(0, 1000, 2000).tolist()
    index.extend(ids)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index.extend(ids)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2000, grown
