"""Laws of sessions: a fork is its parent, pieces are the whole, and whatever ends gives back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

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

from headrace import LLM, SamplingParams
from headrace.errors import ContextFullError, ModelOutputError, PoolFullError, UsageError
from headrace.runtime.session import Session

STREAM: dict[str, Any] = {"mode": "stream", "sinks": 16, "window": 48, "unit": 16}
FULL: dict[str, Any] = {"mode": "full"}
MODES = pytest.mark.parametrize("mode", [FULL, STREAM], ids=["full", "stream"])


@pytest.fixture(scope="module")
def loaded(tiny_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, cache=shared_cache, lanes=2, pool=1024) as model:
        yield model


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """Every test leaves it with nothing held."""
    yield loaded
    assert_all_is_back(loaded)


def fed(llm: LLM, mode: dict[str, Any], *texts: list[int]) -> Session:
    session = llm.session(**mode)
    for text in texts:
        session.feed(text)
    return session


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 18, 33, 70])
@MODES
def test_a_fork_is_its_parent(llm: LLM, mode: dict[str, Any], num_tokens: int) -> None:
    with fed(llm, mode, ids(num_tokens)) as parent:
        before = audit(llm.engine)
        with parent.fork() as fork:
            assert (fork.mode, fork.num_tokens) == (parent.mode, num_tokens)
            partly_filled = (num_tokens - 1) % 16 > 0  # the last token is not computed yet
            assert audit(llm.engine).held == before.held + partly_filled
            assert said(fork.generate("", PARAMS)) == said(parent.generate("", PARAMS))
            audit(llm.engine)


@pytest.mark.parametrize("num_tokens", [79, 80, 81, 97, 200, 305])
def test_a_fork_of_a_stream_that_has_evicted_is_its_parent(llm: LLM, num_tokens: int) -> None:
    with fed(llm, STREAM, ids(num_tokens)) as parent, parent.fork() as fork:
        first = fork.generate("", params(30))
        audit(llm.engine)
        assert said(parent.generate("", params(30))) == said(first)


def test_forks_part_from_each_other(llm: LLM) -> None:
    """What one computes is never seen by another."""
    with fed(llm, FULL, ids(21)) as parent:
        forks = [parent.fork() for _ in range(4)]
        for i, fork in enumerate(forks):
            fork.feed(ids(3, start=i + 1))
        answers = [fork.generate("", PARAMS, stream=True) for fork in forks]
        for _ in zip_longest(*answers):
            audit(llm.engine)
        for i, (fork, answer) in enumerate(zip(forks, answers, strict=True)):
            alone = llm.generate([*ids(21), *ids(3, start=i + 1)], PARAMS)
            assert said(answer.completion) == said(alone)
            fork.close()


@pytest.mark.parametrize("given", [0, 1, 5, 11])
@MODES
def test_a_fork_in_the_middle_of_an_answer_goes_on_as_it_does(
    llm: LLM, mode: dict[str, Any], given: int
) -> None:
    with fed(llm, mode, ids(20)) as parent:
        answer = parent.generate(ids(9), PARAMS, stream=True)
        for _ in range(given):
            next(answer)
        with parent.fork() as fork:
            rest = fork.generate("", params(12 - given))
        whole = answer.result()
        assert rest.token_ids == whole.token_ids[given:]
        assert rest.logprobs == (whole.logprobs or ())[given:]


@MODES
def test_forks_while_another_thread_feeds(llm: LLM, mode: dict[str, Any]) -> None:
    """Each is the parent at some moment between two pieces, computed or not."""
    parent, text = llm.session(**mode), ids(110)
    forks: list[Session] = []

    def feed() -> None:
        for start in range(0, 110, 5):
            parent.feed(text[start : start + 5])

    def fork() -> None:
        while parent.num_tokens < 110 and len(forks) < 6:
            forks.append(parent.fork())
            llm.engine.check()

    assert in_threads(feed, fork) == [None, None]
    for each in forks:
        num_tokens = each.num_tokens
        assert num_tokens % 5 == 0
        if num_tokens:
            with fed(llm, mode, text[:num_tokens]) as alone:
                assert said(each.generate("", params(4))) == said(alone.generate("", params(4)))
        each.close()
    parent.close()


@MODES
def test_pieces_are_the_whole(llm: LLM, mode: dict[str, Any]) -> None:
    text = ids(100)
    with fed(llm, mode, text) as at_once:
        expected = said(at_once.generate("", PARAMS))
    for sizes in ([1] * 100, [15, 1, 16, 17, 31, 20], [99, 1]):
        pieces = iter(text)
        with fed(llm, mode, *([next(pieces) for _ in range(size)] for size in sizes)) as session:
            assert said(session.generate("", PARAMS)) == expected


def test_answers_in_turn_are_one_answer_to_all_that_was_said(llm: LLM) -> None:
    context: list[int] = []
    with llm.session() as session:
        for turn, size in enumerate([3, 16, 1, 20]):
            prompt = ids(size, start=turn)
            answer = session.generate(prompt, params(7))
            context += prompt
            assert said(answer) == said(llm.generate(context, params(7)))
            context += answer.token_ids
            assert session.num_tokens == len(context)


@MODES
def test_an_answer_in_two_parts_is_the_answer(llm: LLM, mode: dict[str, Any]) -> None:
    with fed(llm, mode, ids(70)) as one, one.fork() as two:
        whole = one.generate("", params(40))
        first, second = two.generate("", params(13)), two.generate("", params(27))
        assert first.token_ids + second.token_ids == whole.token_ids
        assert (first.logprobs or ()) + (second.logprobs or ()) == whole.logprobs


@MODES
def test_an_answer_closed_early_leaves_what_it_gave_out(llm: LLM, mode: dict[str, Any]) -> None:
    for num_given in (0, 1, 6):
        with fed(llm, mode, ids(20)) as session:
            answer = session.generate(ids(5), PARAMS, stream=True)
            for _ in range(num_given):
                next(answer)
            answer.close()
            assert session.num_tokens == 25 + num_given
            given = answer.completion.token_ids
            assert len(given) == num_given
            with fed(llm, mode, [*ids(20), *ids(5), *given]) as other:
                assert said(session.generate("", PARAMS)) == said(other.generate("", PARAMS))


def test_an_end_token_is_context(llm: LLM) -> None:
    end = llm.tokenizer.eos_ids[0]
    with fed(llm, FULL, ids(20)) as session:
        assert session.generate("", SamplingParams(logit_bias={end: 100.0})).token_ids == (end,)
        assert session.num_tokens == 21
        again = session.generate(ids(3), PARAMS)
        assert said(again) == said(llm.generate([*ids(20), end, *ids(3)], PARAMS))


def test_the_start_token_comes_before_the_first_text_only(llm: LLM) -> None:
    with llm.session() as session:
        session.feed("pump 3 ")
        session.feed("reports")
        first = llm.encode("pump 3 ")
        rest = llm.encode("reports", is_first=False)
        assert session.num_tokens == len(first) + len(rest)
        assert said(session.generate("", PARAMS)) == said(llm.generate([*first, *rest], PARAMS))


def test_a_text_that_does_not_fit_changes_nothing(llm: LLM) -> None:
    with fed(llm, FULL, ids(100)) as session:
        for call in (session.feed, session.generate):
            with pytest.raises(ContextFullError, match=r"28 tokens after 100 .* holds 128"):
                call(ids(28))
        assert session.num_tokens == 100
        answer = session.generate(ids(27), PARAMS)
        assert (len(answer.token_ids), answer.finish_reason) == (1, "length")
        assert session.num_tokens == 128
        with watchdog(), pytest.raises(ContextFullError, match="holds 128"):
            session.generate("", PARAMS)
        with session.fork() as fork, pytest.raises(ContextFullError):
            fork.feed([5])


def test_a_request_too_large_for_the_pool_changes_nothing(
    tiny_bundle: Path, shared_cache: Path
) -> None:
    with LLM(tiny_bundle, cache=shared_cache, pool=64) as tight, tight.session() as session:
        session.feed(ids(30))
        with pytest.raises(PoolFullError, match=r"up to 80 tokens needs 5 blocks.*pool has 4"):
            session.generate(ids(4), params(40))
        with pytest.raises(PoolFullError):
            session.feed(ids(40))
        assert session.num_tokens == 30 and tight.engine.stats.refused_requests == 2
        assert len(session.generate(ids(4), params(30)).token_ids) == 30


def test_nothing_to_continue(llm: LLM) -> None:
    with llm.session() as session:
        for call in (lambda: session.generate(""), lambda: session.feed(""), session.generate):
            with pytest.raises(UsageError, match="at least one token"):
                call()
        assert session.num_tokens == 0


@MODES
def test_closing_gives_everything_back_at_once(llm: LLM, mode: dict[str, Any]) -> None:
    session = fed(llm, mode, ids(60))
    fork = session.fork()
    answer = session.generate("", PARAMS, stream=True)
    next(answer)
    session.close()
    session.close()
    fork.close()
    assert_all_is_back(llm)
    calls: list[Callable[[], object]] = [
        lambda: session.feed(ids(1)),
        lambda: session.generate(ids(1)),
        session.fork,
        lambda: next(answer),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
    with pytest.raises(StopIteration):
        next(answer)


@MODES
def test_what_is_dropped_gives_everything_back(llm: LLM, mode: dict[str, Any]) -> None:
    session = fed(llm, mode, ids(60))
    answer = session.generate("", PARAMS, stream=True)
    next(answer)
    del session  # the answer still needs it
    assert next(answer).token_ids
    del answer
    assert_all_is_back(llm)


def test_a_dropped_answer_leaves_its_session(llm: LLM) -> None:
    with fed(llm, FULL, ids(20)) as session:
        answer = session.generate("", PARAMS, stream=True)
        given = next(answer).token_ids
        del answer
        assert llm.engine.stats.reserved_blocks == 0
        rest = session.generate("", PARAMS)
        assert said(rest) == said(llm.generate([*ids(20), *given], PARAMS))


@pytest.mark.parametrize("kind", ["answer", "session's answer", "session"])
def test_the_garbage_collector_may_come_at_any_time(llm: LLM, kind: str) -> None:
    """Also within a decision of the engine, in the thread that holds its lock."""
    session = fed(llm, FULL, ids(20))
    target = llm if kind == "answer" else session
    answer = target.generate(ids(20), PARAMS, stream=True)
    next(answer)
    cycle: list[object] = [session if kind == "session" else answer]
    cycle.append(cycle)
    if kind != "session":
        session.close()
    del cycle, answer, session, target
    with watchdog(20), llm.engine.lock:
        gc.collect()
    assert_all_is_back(llm)


def test_one_thread_at_a_time(llm: LLM) -> None:
    gate, others = Gate(), []
    with fed(llm, FULL, ids(20)) as session:
        calls: list[Callable[[], object]] = [lambda: session.feed([5]), session.generate]

        def disturb() -> None:
            gate.wait()
            for call in calls:
                with pytest.raises(UsageError, match="another thread uses this session") as error:
                    call()
                others.append(error)
            gate.open()

        with hooked(llm, gate):
            assert in_threads(lambda: session.generate([7], PARAMS), disturb) == [None, None]
        assert len(others) == 2 and session.num_tokens == 33
        answer = session.generate("", PARAMS, stream=True)
        next(answer)
        for call in calls:
            with pytest.raises(UsageError, match="answering; finish or close"):
                call()
        answer.close()
        session.feed([5])


def test_an_answer_is_one_threads(llm: LLM) -> None:
    gate = Gate()
    answer = llm.generate(ids(20), PARAMS, stream=True)

    def disturb() -> None:
        gate.wait()
        for call in (lambda: next(answer), answer.close):
            with pytest.raises(UsageError, match="another thread uses this answer"):
                call()
        gate.open()

    with hooked(llm, gate):
        assert in_threads(lambda: next(answer), disturb) == [None, None]
    assert said(answer.result()) == said(llm.generate(ids(20), PARAMS))


def test_closing_while_another_thread_computes(llm: LLM) -> None:
    gate, session = Gate(), fed(llm, FULL, ids(20))

    def close() -> None:
        gate.wait()
        threading.Timer(0.05, gate.open).start()
        session.close()

    with hooked(llm, gate):
        errors = in_threads(lambda: session.generate("", PARAMS), close)
    assert isinstance(errors[0], UsageError) and errors[1] is None


def test_a_first_pass_that_is_tried_again_starts_from_what_is_known_by_then(llm: LLM) -> None:
    """Its lane was staged with nothing, before another computed the same beginning."""
    prompt, failure = ids(40, start=9), ModelOutputError("no pass")
    with llm.session() as session:
        with hooked(llm, Once(failure)), pytest.raises(ModelOutputError):
            session.generate(prompt, PARAMS)
        expected = llm.generate(prompt, PARAMS)
        retried = session.generate("", PARAMS)
        assert retried.timings.prefill_tokens == 8
        assert said(retried) == said(expected)
