"""Laws of the engine: more threads than lanes change no bit, share passes, and stop for nobody."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hands import (
    PARAMS,
    Gate,
    Once,
    assert_all_is_back,
    audit,
    hooked,
    ids,
    in_threads,
    params,
    said,
    watchdog,
)

from headrace import LLM
from headrace.errors import ModelOutputError, UsageError
from headrace.runtime.batch import chain
from headrace.runtime.lanes import TURN_PASSES
from headrace.runtime.session import Session
from headrace.runtime.tree import Tree
from headrace.runtime.verify import Accepted

SEVEN = [ids(5 + 9 * i, start=i) for i in range(7)]
STREAM = (16, 48, 16)


@pytest.fixture(scope="module")
def loaded(tiny_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, cache=shared_cache, lanes=2, pool=2048) as model:
        yield model


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    loaded.engine.cache.evict(10_000)
    yield loaded
    assert_all_is_back(loaded)


@pytest.fixture(scope="module")
def endless(endless_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(endless_bundle, cache=shared_cache, lanes=2, ctx=2048) as model:
        yield model


def open_seven(llm: LLM) -> list[Session]:
    """Two of them streams, which wrap."""
    sinks, window, unit = STREAM
    return [
        llm.session("stream", sinks=sinks, window=window, unit=unit) if i > 4 else llm.session()
        for i in range(7)
    ]


def answers_alone(llm: LLM) -> list[tuple[object, ...]]:
    alone = []
    for session, text in zip(open_seven(llm), SEVEN, strict=True):
        alone.append(said(session.generate(text, params(40))))
        session.close()
    llm.engine.cache.evict(10_000)
    return alone


def test_seven_sessions_take_turns_in_one_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, sessions = answers_alone(llm), open_seven(llm)
    before = llm.engine.stats.lane_switches
    answers = [s.generate(t, params(40), stream=True) for s, t in zip(sessions, SEVEN, strict=True)]
    waits: list[float | None] = []
    monkeypatch.setattr(llm.engine._changed, "wait", waits.append)
    for _ in zip_longest(*answers):
        audit(llm.engine)
    assert not waits, "a thread waits for nobody when it is the only one"
    assert [said(a.completion) for a in answers] == alone
    switches = llm.engine.stats.lane_switches - before
    assert switches > 7 * 30
    for session in sessions:
        session.close()


def test_seven_threads_are_as_if_alone(llm: LLM) -> None:
    alone, sessions = answers_alone(llm), open_seven(llm)
    before = llm.engine.stats
    results: list[tuple[object, ...]] = [()] * 7

    def work(i: int) -> None:
        results[i] = said(sessions[i].generate(SEVEN[i], params(40)))

    errors = in_threads(*(lambda i=i: work(i) for i in range(7)))
    assert errors == [None] * 7
    assert results == alone
    after = llm.engine.stats
    assert after.passes - before.passes < after.rows - before.rows
    for session in sessions:
        session.close()


def test_threads_share_passes_in_decoding(llm: LLM) -> None:
    """Two threads on two lanes: hardly a pass is for one alone."""
    rows_of_passes: list[list[int]] = []

    def hook(rows: object) -> None:
        assert isinstance(rows, list)
        rows_of_passes.append([r.num_rows for r in rows])
        time.sleep(0.005)  # a pass of a real model

    with hooked(llm, hook):
        in_threads(*(lambda i=i: llm.generate(SEVEN[i], params(40)) for i in (0, 1)))
    decoding = [rows for rows in rows_of_passes if max(rows) == 1]
    shared = [rows for rows in decoding if rows == [1, 1]]
    assert len(shared) > 0.6 * len(decoding) and len(shared) > 20


def test_one_thread_never_waits_for_company(llm: LLM) -> None:
    """Answers that one thread asks in turn: no pass could be shared, so none is waited for."""
    answers = [llm.generate(text, params(40), stream=True) for text in SEVEN[:2]]
    with hooked(llm, lambda rows: time.sleep(0.02)):
        next(answers[0]), next(answers[1])
        start = time.monotonic()
        for _ in range(10):
            next(answers[0]), next(answers[1])
    elapsed = time.monotonic() - start
    assert elapsed < 20 * 0.02 * 1.5, f"{elapsed:.2f} s for 20 passes of 0.02 s"
    for answer in answers:
        answer.close()


def test_every_thread_makes_progress(endless: LLM) -> None:
    """Six threads on two lanes: after some time all have come about as far."""
    counts: Counter[int] = Counter()
    stop = threading.Event()

    def work(i: int) -> None:
        with endless.generate(SEVEN[i], params(600), stream=True) as answer:
            for _ in answer:
                counts[i] += 1
                if counts[i] > 400:
                    stop.set()
                if stop.is_set():
                    return

    errors = in_threads(*(lambda i=i: work(i) for i in range(6)))
    assert errors == [None] * 6
    least, most = min(counts.values()), max(counts.values())
    assert len(counts) == 6 and most <= 2 * least + 3 * TURN_PASSES, counts
    assert_all_is_back(endless)


def test_a_paused_answer_blocks_nobody_for_long(llm: LLM) -> None:
    paused = [llm.generate(text, params(40), stream=True) for text in SEVEN[:2]]
    for answer in paused:
        next(answer)
    took: list[float] = []

    def work() -> None:
        start = time.monotonic()
        llm.generate(SEVEN[2], params(5))
        took.append(time.monotonic() - start)

    assert in_threads(work) == [None]
    assert took[0] < 1
    assert said(paused[0].result()) == said(llm.generate(SEVEN[0], params(40)))
    paused[1].close()


def test_warm_equals_cold(llm: LLM) -> None:
    for num_tokens in (16, 17, 32, 33, 47, 100):
        llm.engine.cache.evict(10_000)
        cold = llm.generate(ids(num_tokens), PARAMS)
        warm = llm.generate(ids(num_tokens), PARAMS)
        assert said(warm) == said(cold)
        assert cold.timings.prefill_tokens == num_tokens
        known = (num_tokens - 1) // 16 * 16
        assert warm.timings.prefill_tokens == num_tokens - known


def test_a_stream_starts_from_what_is_known(llm: LLM) -> None:
    sinks, window, unit = STREAM
    results = []
    for _ in range(2):
        with llm.session("stream", sinks=sinks, window=window, unit=unit) as stream:
            answer = stream.generate(ids(130), params(20))
            results.append((said(answer), answer.timings.prefill_tokens))
    assert results[0][0] == results[1][0]
    # Only what lies before the first eviction is found.
    assert (results[0][1], results[1][1]) == (130, 130 - 64)


def test_generated_tokens_are_found_in_the_next_turn(llm: LLM) -> None:
    first = llm.generate(ids(30), params(50))
    context = [*ids(30), *first.token_ids]
    second = llm.generate([*context, *ids(9)], params(5))
    # The last token given out was not computed.
    assert second.timings.prefill_tokens == 89 - 79 // 16 * 16
    llm.engine.cache.evict(10_000)
    assert said(llm.generate([*context, *ids(9)], params(5))) == said(second)


def test_a_pinned_system_message_is_computed_once(llm: LLM) -> None:
    system = "You watch pumps. " * 4
    kept = llm.pin_system(system)
    assert kept >= 16 and kept % 16 == 0
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "low flow"}]
    num_tokens = len(llm.tokenizer.encode_chat(messages))
    for start in range(3):
        for _ in range(20):  # others evict whatever can be evicted
            llm.generate(ids(100, start=start), params(2))
        llm.engine.cache.evict(10_000)
        chat = llm.chat(messages, params(4))
        assert chat.timings.prefill_tokens == num_tokens - kept
    assert llm.engine.stats.reserved_blocks == llm.engine.stats.pinned_blocks == kept // 16
    pinned = [key[1] for key in llm.engine.cache._pins]
    llm.unpin(list(pinned[0]))
    with pytest.raises(UsageError, match="not pinned"):
        llm.unpin(list(pinned[0]))
    llm.engine.cache.evict(10_000)
    again = llm.chat(messages, params(4))
    assert again.timings.prefill_tokens == num_tokens
    assert said(again) == said(chat)


def test_pinning_twice_is_once(llm: LLM) -> None:
    assert llm.pin(ids(40)) == llm.pin(ids(40)) == 32
    assert llm.pin(ids(40)[:20]) == 16
    assert llm.engine.stats.pinned_blocks == 2
    llm.unpin(ids(40))
    assert audit(llm.engine).held == 1
    llm.unpin(ids(40)[:20])
    assert llm.pin(ids(7)) == 0, "no whole block"
    llm.unpin(ids(7))
    with pytest.raises(UsageError, match="nothing to pin"):
        llm.pin("")


def test_tree_and_exact_keep_apart(llm: LLM) -> None:
    llm.generate(ids(40), PARAMS)
    exact, tree = llm.engine.root("exact"), llm.engine.root("tree")
    assert llm.engine.cache.num_known(exact, ids(40)) == 2
    assert llm.engine.cache.num_known(tree, ids(40)) == 0


@pytest.mark.parametrize("at", [0, 1, 7, 20])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ModelOutputError("a pass failed")], ids=["interrupt", "failure"]
)
def test_what_stops_one_thread_stops_no_other(llm: LLM, error: BaseException, at: int) -> None:
    """The passes of an interrupted thread are run by another; a failed pass fails who took part."""
    alone = answers_alone(llm)
    results: list[tuple[object, ...]] = [()] * 7
    sessions = open_seven(llm)

    def work(i: int) -> None:
        results[i] = said(sessions[i].generate(SEVEN[i], params(40)))

    with hooked(llm, Once(error, at)):
        errors = in_threads(*(lambda i=i: work(i) for i in range(7)))
    stopped = [i for i, raised in enumerate(errors) if raised is not None]
    assert {errors[i] for i in stopped} == {error}
    assert len(stopped) == 1 if isinstance(error, KeyboardInterrupt) else len(stopped) in (1, 2)
    for i in range(7):
        assert results[i] == (() if i in stopped else alone[i])
    audit(llm.engine)
    for i in stopped:  # they go on from what they gave out
        with sessions[i].fork() as fork:
            num_given = sessions[i].num_tokens - len(SEVEN[i])
            rest = fork.generate("", params(40 - num_given))
            assert rest.token_ids == alone[i][0][num_given:]  # type: ignore[index]
    for session in sessions:
        session.close()


def test_closing_while_threads_generate(endless_bundle: Path, shared_cache: Path) -> None:
    closing = LLM(endless_bundle, cache=shared_cache, lanes=2, ctx=1024)
    sinks, window, unit = STREAM
    sessions = [closing.session("stream", sinks=sinks, window=window, unit=unit) for _ in range(2)]
    gate = threading.Barrier(7)

    def full(i: int) -> None:
        with closing.generate(SEVEN[i], params(900), stream=True) as answer:
            next(answer)
            gate.wait()
            for _ in answer:
                pass

    def stream(i: int) -> None:
        sessions[i].feed(ids(50))
        gate.wait()
        sessions[i].feed([5] * 10**6)

    def close() -> None:
        gate.wait()
        time.sleep(0.2)
        closing.close()

    errors = in_threads(
        *(lambda i=i: full(i) for i in range(4)),
        *(lambda i=i: stream(i) for i in range(2)),
        close,
    )
    assert errors[-1] is None
    for error in errors[:-1]:
        assert isinstance(error, UsageError), error
        assert "closed" in str(error) and "\n" not in str(error)
    for session in sessions:
        session.close()
    closing.close()
    assert closing.engine.check().held == 0


def test_closing_waits_for_the_pass_in_progress(tiny_bundle: Path, shared_cache: Path) -> None:
    closing, gate = LLM(tiny_bundle, cache=shared_cache, lanes=1), Gate()

    def close() -> None:
        gate.wait()
        threading.Timer(0.1, gate.open).start()
        closing.close()
        assert closing.engine.passes._running is None

    with hooked(closing, gate):
        errors = in_threads(lambda: closing.generate(ids(20), PARAMS), close)
    assert isinstance(errors[0], UsageError) and errors[1] is None


def test_the_engine_costs_little_beside_a_pass(llm: LLM) -> None:
    """Its share of a decode step, with a backend that computes nothing: 40 microseconds when
    nothing else runs on the machine.
    """
    nothing = np.zeros((4, llm.engine.facts.vocab_size), np.float32)

    class Null:
        facts, arena = llm.backend.facts, llm.backend.arena

        def forward(self, rows: list[object]) -> object:
            return nothing[:1]

    passes = llm.engine.passes
    before, passes._backend = passes._backend, Null()  # type: ignore[assignment]
    token = np.array([5])
    best = {"engine": 1.0, "direct": 1.0}
    try:
        for _ in range(30):
            sequence = llm.engine.sequence()
            sequence.append([5, 5])
            with watchdog(), llm.engine.request(sequence, 120):
                sequence.verify(Tree(), lambda logits, tree: Accepted((5,), ()))
                start = time.thread_time()
                for _ in range(100):
                    sequence.verify(Tree(), lambda logits, tree: Accepted((5,), ()))
                best["engine"] = min(best["engine"], (time.thread_time() - start) / 100)
            llm.engine.close_sequence(sequence)
            llm.engine.cache.evict(10_000)
            start = time.thread_time()
            for past in range(100):
                passes._backend.forward([chain(0, token, past, (0,))]).copy()
            best["direct"] = min(best["direct"], (time.thread_time() - start) / 100)
    finally:
        passes._backend = before
    overhead = best["engine"] - best["direct"]
    assert overhead < 150e-6, f"{overhead * 1e6:.0f} microseconds a step"
