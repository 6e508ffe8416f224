"""A pool that is full: what is given up first, who waits, who is refused, and that all of it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hands import Gate, assert_all_is_back, audit, hooked, ids, in_threads, params, said, watchdog
from hypothesis import given
from hypothesis import strategies as st

from headrace import LLM
from headrace.errors import PoolFullError, UsageError
from headrace.runtime import room
from headrace.runtime.admission import Admission
from headrace.runtime.sequence import Sequence

STREAM: dict[str, Any] = {"mode": "stream", "sinks": 16, "window": 48, "unit": 16}
"""Five blocks."""

NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def loaded(tiny_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, cache=shared_cache, lanes=2, pool=NUM_BLOCKS * 16) as model:
        yield model


@pytest.fixture(scope="module")
def roomy(tiny_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, cache=shared_cache, lanes=4, pool=4096) as model:
        yield model


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """Every test begins and ends with twelve free blocks."""
    loaded.engine.cache.evict(NUM_BLOCKS)
    yield loaded
    assert_all_is_back(loaded)
    loaded.engine.cache.evict(NUM_BLOCKS)
    assert audit(loaded.engine).free == NUM_BLOCKS


def wait_for_queue(llm: LLM, length: int) -> None:
    """Until so many requests wait for blocks."""
    while len(llm.engine._room._queue) < length:
        time.sleep(0.001)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=40))
def test_reservations_never_exceed_the_pool(steps: list[tuple[int, int, bool]]) -> None:
    admission, shadow = Admission(12), dict[int, tuple[int, bool]]()
    for owner, num_blocks, is_lasting in steps:
        if num_blocks == 9:
            admission.release(owner)
            shadow.pop(owner, None)
            continue
        others = sum(n for o, (n, _) in shadow.items() if o != owner)
        admitted = admission.reserve(owner, num_blocks, is_lasting=is_lasting)
        assert admitted == (others + num_blocks <= 12)
        if admitted:
            shadow[owner] = num_blocks, is_lasting
        assert admission.num_reserved == sum(n for n, _ in shadow.values()) <= 12
        assert admission.num_lasting == sum(n for n, lasting in shadow.values() if lasting)
        for size in (0, 6, 12, 13):
            assert admission.ever_fits(size) == (size <= 12 - admission.num_lasting)


def test_unreferenced_blocks_go_first_then_the_session_used_longest_ago(
    llm: LLM, roomy: LLM
) -> None:
    sessions = [llm.session() for _ in range(3)]
    for i, session in enumerate(sessions):  # 3 blocks each
        session.feed(ids(40, start=i))
    sessions[0].feed(ids(2))  # used last
    before = llm.engine.stats
    llm.generate(ids(40, start=7), params(5))
    after = llm.engine.stats
    assert (after.dropped_sequences, after.waited_requests) == (
        before.dropped_sequences,
        before.waited_requests,
    )
    cached = llm.engine.stats.blocks.cached
    assert cached
    llm.generate(ids(70, start=8), params(5))  # 5 blocks: those, one free one, and a session's
    audit(llm.engine)
    after = llm.engine.stats
    assert after.prefix.evicted_blocks - before.prefix.evicted_blocks >= cached
    assert after.dropped_sequences - before.dropped_sequences == 1
    assert [s.num_blocks for s in sessions] == [3, 0, 3]
    texts = [[*ids(40), *ids(2)], ids(40, start=1), ids(40, start=2)]
    for session, text in zip(sessions, texts, strict=True):
        assert said(session.generate("", params(9))) == said(roomy.generate(text, params(9)))
        session.close()


def test_a_dropped_session_computes_only_what_is_gone(llm: LLM) -> None:
    with llm.session() as session:
        session.feed(ids(60))
        for start in (1, 2):
            llm.generate(ids(80, start=start), params(5))
        assert llm.engine.stats.dropped_sequences
        llm.generate(ids(33), params(1))  # its beginning, computed for another
        assert session.generate("", params(4)).timings.prefill_tokens < 60 - 16


def test_what_can_never_fit_is_refused_with_the_figures(
    tiny_bundle: Path, shared_cache: Path
) -> None:
    with LLM(tiny_bundle, cache=shared_cache, pool=6 * 16) as small:
        refused: list[tuple[Any, str]] = [
            (lambda: small.generate(ids(90), params(20)), r"up to 112 tokens needs 7 .* has 6;"),
            (lambda: small.score(ids(100)), r"needs 7 .* has 6;"),
            (lambda: small.pin(ids(100)), r"needs 7 .* has 6;"),
            (lambda: small.session("stream", sinks=32, window=64, unit=32), r"needs 8 .* has 6;"),
        ]
        for call, message in refused:
            with pytest.raises(PoolFullError, match=message) as error:
                call()
            assert "\n" not in str(error.value) and "raise --pool" in str(error.value)
        assert small.engine.stats.refused_requests == 4
        with small.session(**STREAM) as stream:
            stream.feed(ids(30))
            figures = r"this window needs 5 blocks of 16 tokens.*has 6, of which .* keep 5; close"
            with pytest.raises(PoolFullError, match=figures):
                stream.fork()
            with pytest.raises(PoolFullError, match="keep 5"):
                small.generate(ids(10), params(10))
            small.pin(ids(16))
            with pytest.raises(PoolFullError, match="keep 6"):
                small.generate(ids(1), params(1))
            stream.feed(ids(200))
            small.unpin(ids(16))
        assert_all_is_back(small)


def test_streams_keep_their_place(llm: LLM, roomy: LLM) -> None:
    with llm.session(**STREAM) as stream, roomy.session(**STREAM) as undisturbed:
        for start in range(6):
            text = ids(35, start=start)
            stream.feed(text)
            undisturbed.feed(text)
            llm.generate(ids(80, start=start), params(20))
            audit(llm.engine)
        assert said(stream.generate("", params(30))) == said(undisturbed.generate("", params(30)))


def test_the_newest_waits_and_all_get_done(llm: LLM, roomy: LLM) -> None:
    """Eight requests of seven blocks each, in a pool of twelve."""
    texts = [ids(60, start=i) for i in range(8)]
    alone = [said(roomy.generate(text, params(45))) for text in texts]
    results: list[Any] = [None] * 8
    waited = llm.engine.stats.waited_requests

    def work(i: int) -> None:
        results[i] = said(llm.generate(texts[i], params(45)))

    assert in_threads(*(lambda i=i: work(i) for i in range(8))) == [None] * 8
    assert results == alone
    assert llm.engine.stats.waited_requests - waited >= 6


def test_the_first_to_wait_is_the_first_to_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large request, and then small ones that would fit beside the one that runs."""
    gate, order = Gate(), list[int]()
    reserve = llm.engine._room._reserve

    def noted(sequence: Sequence) -> bool:
        is_admitted = reserve(sequence)
        if is_admitted:
            order.append(sequence.worst_case)
        return is_admitted

    monkeypatch.setattr(llm.engine._room, "_reserve", noted)

    def work(num_before: int, num_blocks: int) -> None:
        if num_blocks < 8:
            gate.wait()
            wait_for_queue(llm, num_before)
        llm.generate(ids(10, start=num_blocks), params(num_blocks * 16 - 10))

    def release() -> None:
        wait_for_queue(llm, 3)
        gate.open()

    with hooked(llm, gate):
        errors = in_threads(
            release, lambda: work(0, 8), lambda: work(0, 7), lambda: work(1, 2), lambda: work(2, 3)
        )
    assert errors == [None] * 5
    assert order == [8, 7, 2, 3]


def test_paused_answers_of_one_thread_lend_their_blocks(
    llm: LLM, roomy: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs seven of twelve blocks; one thread asks them in turn."""
    texts = [ids(60, start=i) for i in range(3)]
    before = llm.engine.stats
    answers = [llm.generate(text, params(45), stream=True) for text in texts]
    waits: list[float | None] = []
    monkeypatch.setattr(llm.engine._changed, "wait", waits.append)
    with watchdog():
        for _ in range(45):
            for answer in answers:
                next(answer)
                audit(llm.engine)
        for answer, text in zip(answers, texts, strict=True):
            assert said(answer.result()) == said(roomy.generate(text, params(45)))
    assert not waits, "nobody waits for an answer of the same thread"
    after = llm.engine.stats
    assert after.lent_requests > before.lent_requests
    assert after.dropped_sequences > before.dropped_sequences


def test_a_paused_answer_lends_its_blocks_to_another_thread(
    llm: LLM, roomy: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PAUSED_S", 0.2)
    paused = llm.generate(ids(60), params(45), stream=True)
    next(paused)
    took: list[float] = []

    def work() -> None:
        start = time.monotonic()
        llm.generate(ids(60, start=1), params(45))
        took.append(time.monotonic() - start)

    assert in_threads(work) == [None]
    assert 0.1 < took[0] < 5
    assert said(paused.result()) == said(roomy.generate(ids(60), params(45)))


def test_a_request_that_waits_for_a_lane_is_not_paused(
    tiny_bundle: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slow passes it may wait longer for a lane than a paused one is waited for."""
    monkeypatch.setattr(room, "PAUSED_S", 0.1)
    with LLM(tiny_bundle, cache=shared_cache, lanes=1, pool=160) as slow:

        def work(i: int) -> None:
            slow.generate(ids(20, start=i), params(45))  # five blocks: two fit, a third waits

        with hooked(slow, lambda rows: time.sleep(0.01)):
            assert in_threads(*(lambda i=i: work(i) for i in range(3))) == [None] * 3
        assert slow.engine.stats.waited_requests == 1
        assert slow.engine.stats.lent_requests == 0


def test_what_was_lent_to_a_stream_is_refused_and_not_waited_for(llm: LLM) -> None:
    answer = llm.generate(ids(60), params(45), stream=True)
    next(answer)
    with watchdog(), llm.session(**STREAM), llm.session(**STREAM):
        before = llm.engine.stats.refused_requests
        with pytest.raises(PoolFullError, match=r"needs 7 .* keep 10"):
            next(answer)
        assert llm.engine.stats.refused_requests == before + 1
    assert len(answer.completion.token_ids) == 1


def test_blocks_of_what_was_dropped_are_given_to_those_who_wait(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody closes the answer, and nobody but the one who waits calls the engine."""
    monkeypatch.setattr(room, "PAUSED_S", 1000.0)
    forgotten = [llm.generate(ids(100), params(25), stream=True)]
    next(forgotten[0])

    def forget() -> None:
        wait_for_queue(llm, 1)
        forgotten.clear()

    assert in_threads(forget, lambda: llm.generate(ids(100, start=1), params(25))) == [None] * 2


def test_forks_of_a_session_in_a_full_pool(llm: LLM, roomy: LLM) -> None:
    """No block is left for the copy: its few tokens are computed again."""
    with llm.session() as session, llm.session() as other:
        session.feed(ids(90))  # six blocks, the last partly filled
        other.feed(ids(90, start=1))
        assert audit(llm.engine).available == 0
        forks = [session.fork() for _ in range(3)]
        assert audit(llm.engine).held == NUM_BLOCKS
        expected = said(roomy.generate(ids(90), params(30)))
        for fork in forks:
            assert said(fork.generate("", params(30))) == expected
            audit(llm.engine)
            fork.close()


def test_forks_beside_one_that_grows_into_a_full_pool(llm: LLM) -> None:
    """A fork takes the last free block while another thread needs one it was promised."""
    stop = threading.Event()
    idle = llm.session()
    idle.feed(ids(85, start=3))

    def grow() -> None:
        try:
            for start in range(8):
                llm.generate(ids(30, start=start), params(60))
        finally:
            stop.set()

    def fork() -> None:
        while not stop.is_set():
            with idle.fork() as one, one.fork():
                llm.engine.check()

    assert in_threads(grow, fork, fork) == [None] * 3
    idle.close()


def test_waiting_ends_with_the_session(llm: LLM) -> None:
    """Closed by another thread while its request waits for blocks."""
    session = llm.session()
    first = llm.generate(ids(100), params(25), stream=True)
    next(first)

    def wait_for_blocks() -> None:
        session.generate(ids(100, start=1), params(25))

    def close() -> None:
        wait_for_queue(llm, 1)
        session.close()

    errors = in_threads(wait_for_blocks, close)
    assert isinstance(errors[0], UsageError) and errors[1] is None
    first.close()
