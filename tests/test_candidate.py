"""Places for the draft: one that failed comes back, whoever closes them and whenever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import NpuDeviceError, NpuTimeoutError
from headrace.runtime import candidate as candidate_module
from headrace.runtime.candidate import Candidate, Candidates, Opened
from headrace.runtime.draft import DraftLane, DraftModel
from headrace.runtime.drafter import Drafter
from headrace.runtime.on_npu import open_within
from headrace.runtime.pace import PassCosts


class Closes:
    """A draft of which only its end counts."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def ready(model: Closes) -> Opened:
    return Opened(cast(DraftModel, model), PassCosts({1: 0.01}))


def places(reopen: Callable[[], Opened], log: Callable[[str], None]) -> Candidates:
    """An NPU that has just failed and may be tried at once, and the CPU."""
    npu = Candidate("npu", ready(Closes()), patience=1, reopen=reopen)
    found = Candidates([npu, Candidate("cpu", ready(Closes()), patience=3)], log)
    assert found.fall_back(NpuDeviceError("lost"))
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(candidate_module, "LAST_PAUSE_S", 0.0)


def test_closed_by_the_thread_that_opens() -> None:
    """A finalizer runs wherever memory is collected."""
    made, back, ended = Closes(), list[Candidate](), threading.Event()

    def reopen() -> Opened:
        candidates.stop(60)
        ended.set()
        return ready(made)

    candidates = places(reopen, lambda line: None)
    candidates.reopen_what_is_due(back.append)
    assert ended.wait(10)
    candidates.stop(10)
    assert made.num_closed == 1 and not back
    candidates.reopen_what_is_due(back.append)
    assert candidates.num_failed_openings == 0


def test_without_a_thread_it_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    back = queue.SimpleQueue[Candidate]()
    candidates = places(lambda: ready(Closes()), lambda line: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        candidates.reopen_what_is_due(back.put)
        assert candidates.num_failed_openings == 1
    candidates.reopen_what_is_due(back.put)
    assert back.get(timeout=10).name == "npu"


def test_an_npu_that_hangs_when_it_is_opened_keeps_nobody_waiting() -> None:
    made, freed = Closes(), threading.Event()

    def hang() -> Opened:
        freed.wait(60)
        return ready(made)

    with pytest.raises(NpuTimeoutError, match=r"longer than 0\.05 s"):
        open_within(0.05, hang)
    freed.set()
    limit = time.monotonic() + 10
    while not made.num_closed:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_what_is_opened_in_time_is_ready_or_says_why_not() -> None:
    made = ready(Closes())
    assert open_within(60, lambda: made) is made

    def fail() -> Opened:
        raise NpuDeviceError("lost")

    with pytest.raises(NpuDeviceError, match="lost"):
        open_within(60, fail)


@pytest.fixture
def llm(twin_bundle: Path, shared_cache: Path) -> LLM:
    return LLM(twin_bundle, cache=shared_cache, speculate=4, defer="on")


def drafter_of(llm: LLM) -> Drafter:
    speculation = llm.engine.speculation
    assert speculation is not None and speculation.drafter is not None
    return speculation.drafter


PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def test_it_comes_back_while_there_is_always_something_to_go_on_with(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a board the CPU's draft is slow: the next question is there before it has gone on."""

    def go_on(lane: DraftLane) -> bool:
        time.sleep(0.001)
        return True

    with llm:
        drafter, tried = drafter_of(llm), threading.Event()
        monkeypatch.setattr(drafter, "_go_on", go_on)
        llm.generate("the pump is", PARAMS)

        def reopen() -> Opened:
            tried.set()
            raise NpuDeviceError("lost")

        npu = Candidate("npu", None, patience=1, reopen=reopen)
        npu.breaker.failed()
        drafter.candidates = Candidates([npu, *drafter.candidates.all], lambda line: None)
        llm.generate("the pump is", PARAMS)
        assert tried.wait(10)


def test_a_listener_that_fails_fails_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError(32, line)

    def fail(rows: object) -> None:
        raise NpuDeviceError("lost")

    with llm:
        drafter = drafter_of(llm)
        monkeypatch.setattr(drafter, "_tell", gone)
        cpu = drafter.candidates.current
        assert cpu.opened is not None
        npu = Candidate("npu", cpu.opened, patience=1)
        cpu.patience, drafter.candidates.all, drafter.candidates.current = 1, [npu, cpu], npu
        monkeypatch.setattr(cpu.opened.model.backend, "forward", fail)
        for _ in range(3):
            llm.generate("the pump is", PARAMS)
        assert drafter.counts.failures == 2 and drafter.counts.switches == 1
        assert drafter.broken is not None and drafter._thread.is_alive()
