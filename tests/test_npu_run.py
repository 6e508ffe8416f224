"""With the draft on the NPU the text is what it is without, whatever becomes of the NPU."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from npu_double import RING, Double

from headrace import LLM, SamplingParams
from headrace.errors import BundleError, NpuDeviceError, NpuError, NpuMissingError
from headrace.npu.backend import RknnBackend
from headrace.paths import NPU_LIBRARY_FOLDERS, NPU_LIBRARY_NAME
from headrace.runtime import candidate as candidate_module
from headrace.runtime import drafter as drafter_module
from headrace.runtime import load
from headrace.runtime.drafter import Drafter
from headrace.runtime.request import Completion

PROMPT = "the pump is at 4.2 bar and the valve " * 3

GREEDY = SamplingParams(max_tokens=200, ignore_eos=True, seed=4, speculate=4)
WARM = replace(GREEDY, temperature=0.8)

SHORT_PROMPT = "the pump is"
SHORT = replace(WARM, max_tokens=32)

TIMEOUT_MS = 150
BACK_S = 30.0
"""The NPU is back long before; then a test fails instead of waiting for ever."""


@pytest.fixture(scope="module")
def expected(
    npu_bundle: Path, shared_cache: Path
) -> Iterator[Callable[[SamplingParams], Completion]]:
    """What the target says alone."""
    with LLM(npu_bundle, cache=shared_cache, draft_device="none", speculate="off") as llm:
        answers: dict[SamplingParams, Completion] = {}

        def of(params: SamplingParams) -> Completion:
            if params not in answers:
                alone = replace(params, speculate="off")
                answers[params] = llm.generate(prompt_of(params), alone)
            return answers[params]

        yield of


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU that failed is tried again at once, and its runs time out soon."""
    monkeypatch.setattr(candidate_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(candidate_module, "LAST_PAUSE_S", 0.05)
    defaults = RknnBackend.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_ms", TIMEOUT_MS)


@dataclass
class Run:
    """A model with its draft on the NPU, and what it said of it."""

    llm: LLM
    lines: list[str] = field(default_factory=list)

    @property
    def drafter(self) -> Drafter:
        speculation = self.llm.engine.speculation
        assert speculation is not None and speculation.drafter is not None
        return speculation.drafter

    @property
    def npu(self) -> RknnBackend:
        """While it drafts."""
        backend = self.drafter.model.backend
        assert isinstance(backend, RknnBackend)
        return backend

    def told(self, *words: str) -> list[str]:
        return [line for line in self.lines if all(word in line for word in words)]


@pytest.fixture
def opened(npu_bundle: Path, shared_cache: Path, double: Double) -> Iterator[Callable[..., Run]]:
    """Opens models; when the test has ended they are closed, and their threads gone."""
    runs: list[Run] = []

    def open_one(**settings: Any) -> Run:
        lines: list[str] = []
        common = {"npu_library": double.path, "draft_device": "npu", "speculate": 4, "lanes": 1}
        llm = LLM(npu_bundle, cache=shared_cache, say=lines.append, **{**common, **settings})
        runs.append(Run(llm, lines))
        return runs[-1]

    yield open_one
    for run in runs:
        start = time.perf_counter()
        run.llm.close()
        assert time.perf_counter() - start < 5
    names = [thread.name for thread in threading.enumerate()]
    assert not {"headrace-draft", "headrace-npu"} & set(names)


def prompt_of(params: SamplingParams) -> str:
    return SHORT_PROMPT if params.max_tokens == SHORT.max_tokens else PROMPT


def said(answer: Completion) -> tuple[object, ...]:
    return answer.text, answer.token_ids, answer.finish_reason


# -- The same text --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "defer", "params"),
    [("npu", "off", GREEDY), ("npu", "on", WARM), ("cpu", "on", WARM)],
    ids=["in-line", "deferred", "cpu"],
)
def test_the_text_is_that_without_a_draft(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    device: str,
    defer: str,
    params: SamplingParams,
) -> None:
    library = {"npu_library": None} if device == "cpu" else {}
    run = opened(draft_device=device, defer=defer, **library)
    answer = run.llm.generate(PROMPT, replace(params, speculate=2))
    assert said(answer) == said(expected(params))
    assert answer.speculation is not None and len(answer.token_ids) == 200
    # The NPU's window is far smaller than what this target sees, so it is often wrong.
    least = 100 if device == "cpu" else 1
    assert sum(answer.speculation.sources["draft"].accepted) >= least
    assert run.drafter.counts.failures == 0
    assert not run.told("failed")
    if device == "npu":
        assert run.npu.counters.runs > 200 and run.npu.counters.main_flushes > 10
        states = [lane.state for lane in run.drafter._lanes]
        wrapped = max(s.num_evicted for s in states)
        assert wrapped >= 3 * RING.window, "the ring went round three times"


@pytest.mark.parametrize("defer", ["off", "on"])
def test_a_stream_of_the_same_window(
    opened: Callable[..., Run],
    npu_bundle: Path,
    shared_cache: Path,
    defer: str,
) -> None:
    """The target forgets what the draft forgets: a twin that sees the same is nearly always right,
    and what it drafted becomes text, eviction after eviction.
    """
    run = opened(defer=defer)
    with LLM(npu_bundle, cache=shared_cache, draft_device="none") as alone:
        warm = [replace(WARM, seed=seed, top_k=10 * seed) for seed in (5, 6)]
        for params in [GREEDY, WARM] if defer == "on" else warm:
            expected, found = (
                streamed(llm, p)
                for llm, p in ((alone, replace(params, speculate="off")), (run.llm, params))
            )
            assert said(found) == said(expected)
            counts = found.speculation
            assert counts is not None and counts.accepted > 0.5 * counts.proposed, counts
    assert run.drafter.counts.rows_true > 100, run.drafter.counts
    assert max(lane.state.num_evicted for lane in run.drafter._lanes) >= 3 * RING.window


def streamed(llm: LLM, params: SamplingParams) -> Completion:
    g = RING
    with llm.session("stream", sinks=g.sinks, window=g.window, unit=g.unit) as stream:
        stream.feed("the pump is")
        return stream.generate(" on", params)


def test_requests_side_by_side(
    opened: Callable[..., Run], expected: Callable[[SamplingParams], Completion]
) -> None:
    """A lane each, bound in turn."""
    run = opened(lanes=3, defer="on")
    wanted = [replace(SHORT, seed=seed) for seed in range(3)]
    answers = [run.llm.generate(SHORT_PROMPT, params, stream=True) for params in wanted]
    for _ in range(SHORT.max_tokens + 5):
        for answer in answers:
            next(answer, None)
    for params, answer in zip(wanted, answers, strict=True):
        assert said(answer.completion) == said(expected(params))
    assert run.npu.counters.binds > 10


# -- Faults ---------------------------------------------------------------------------------------

FORGIVEN = ["run:+{}:-1", "run:+{}:-2", "run:+{}:-3", f"hang:+{{}}:{3 * TIMEOUT_MS}"]
"""The same run is tried again, or ends after all: nobody hears of it."""

OUTAGES = [
    "run:+{}:-1:2",
    "run:+{}:-2:2",
    "run:+{}:-5",
    "nan:+{}",
    "lost:+{}:3",
    "run:+{}:-1:2 create_mem:+1:3",
    "run:+{}:-1:2 init:-1:2",
]
"""The CPU drafts until the NPU is back."""


def answer_in_time(run: Run, expected: Callable[[SamplingParams], Completion], seed: int) -> None:
    """No request waits for the NPU longer than a run may take, once tried again."""
    params = replace(SHORT, seed=seed)
    start = time.perf_counter()
    answer = run.llm.generate(SHORT_PROMPT, params)
    assert time.perf_counter() - start < 2 * TIMEOUT_MS / 1000 + 5
    assert said(answer) == said(expected(params))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", FORGIVEN)
def test_a_fault_that_passes_at_random_moments(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
    fault: str,
) -> None:
    chance = random.Random(fault)
    run = opened(defer="on")
    for number in range(1, 6):
        moment = chance.randint(1, 25)
        last = run.npu.counters.runs + moment
        double.play(fault.format(moment))
        limit = time.monotonic() + BACK_S
        while not (run.npu.counters.runs >= last if "hang" in fault else is_forgiven(run, number)):
            assert time.monotonic() < limit
            answer_in_time(run, expected, number)
    assert run.drafter.counts.switches == run.drafter.counts.failures == 0
    assert run.told("failed") == []


def is_forgiven(run: Run, times: int) -> bool:
    assert run.npu.counters.retries <= times
    return run.npu.counters.retries == times


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", OUTAGES)
def test_an_outage_at_random_moments(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
    fault: str,
) -> None:
    """The text goes on, one line tells of it, and one of the NPU's return."""
    chance = random.Random(fault)
    run = opened(defer=chance.choice(["on", "off"]))
    counts = run.drafter.counts
    for number in range(1, 6):
        double.play(fault.format(chance.randint(1, 25)))
        limit = time.monotonic() + BACK_S
        while counts.returns < number:
            assert time.monotonic() < limit, (fault, counts, run.lines)
            answer_in_time(run, expected, number)
        assert counts.switches == number
    answer_in_time(run, expected, 0)
    assert run.npu.counters.runs > 0
    assert len(run.told("NPU", "failed")) == 5, run.lines
    assert len(run.told("back on the NPU")) == 5, run.lines
    assert all("\n" not in line for line in run.lines)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("defer", ["off", "on"])
def test_a_device_that_is_lost_for_good(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
    defer: str,
) -> None:
    run = opened(defer=defer)
    double.play("lost:+17:1000000")
    limit = time.monotonic() + BACK_S
    while double.calls("rknn_init") <= 3:
        assert time.monotonic() < limit, "it is tried again and again"
        answer_in_time(run, expected, 1)
    assert run.drafter.counts.switches == 1 and run.drafter.counts.returns == 0
    assert len(run.told("NPU", "failed")) == 1, run.lines
    assert not isinstance(run.drafter.model.backend, RknnBackend)
    assert run.drafter.broken is None


def test_a_run_that_does_not_end(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is given up, and what the NPU may still write to is given back when it ends."""
    monkeypatch.setattr(drafter_module, "HANG_S", 0.3)
    run = opened(defer="on")
    double.play("hang:+5:3000")
    limit = time.monotonic() + BACK_S
    while run.drafter.broken is None:
        assert time.monotonic() < limit
        answer_in_time(run, expected, 1)
    answer_in_time(run, expected, 2)
    assert len(run.told("not asked any more", "longer than 0.3 s")) == 1, run.lines
    run.llm.close()
    for thread in threading.enumerate():
        if thread.name == "headrace-draft":
            assert double.held != {}, "it waits for the run"
            thread.join(10)
    assert double.held == {}


@pytest.mark.usefixtures("impatient")
def test_it_is_opened_once_a_return(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the draft is too busy to take it back at once: a second opening would close what
    drafts.
    """
    run = opened(defer="on")
    monkeypatch.setattr(candidate_module, "FIRST_PAUSE_S", 0.0)
    inits = double.calls("rknn_init")
    double.play("run:+5:-1:2")
    cpu = run.drafter.candidates.all[-1].opened
    assert cpu is not None
    forward = cpu.model.backend.forward

    def slow(rows: Any) -> Any:
        time.sleep(0.02)
        return forward(rows)

    monkeypatch.setattr(cpu.model.backend, "forward", slow)
    limit = time.monotonic() + BACK_S
    while run.drafter.counts.returns < 1:
        assert time.monotonic() < limit
        answer_in_time(run, expected, 1)
    for seed in range(3):
        answer_in_time(run, expected, seed)
    assert double.calls("rknn_init") == inits + 1
    assert run.drafter.counts.returns == 1


# -- Loading --------------------------------------------------------------------------------------


def test_refused_at_load_it_is_the_cpus(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
) -> None:
    double.play("init:-6")
    run = opened(draft_device="auto")
    assert len(run.told("the draft runs on the CPU", "the model is invalid")) == 1, run.lines
    answer_in_time(run, expected, 0)
    assert len(run.told("CPU")) == 1 and double.calls("rknn_init") == 1, "nothing comes of it later"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["init:-3:2", "create_mem:9"])
def test_absent_at_load_it_may_come_later(
    opened: Callable[..., Run],
    expected: Callable[[SamplingParams], Completion],
    double: Double,
    fault: str,
) -> None:
    double.play(fault)
    run = opened(draft_device="auto")
    assert len(run.told("the draft runs on the CPU")) == 1
    limit = time.monotonic() + BACK_S
    while run.drafter.counts.returns < 1:
        assert time.monotonic() < limit
        answer_in_time(run, expected, 0)
    assert run.npu.counters.runs >= 0
    answer_in_time(run, expected, 1)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("init:-3", NpuDeviceError), ("driver:0.9.2", NpuError), ("create_mem:9", NpuError)],
)
def test_asked_for_by_name_it_must_be_there(
    opened: Callable[..., Run], double: Double, fault: str, kind: type[NpuError]
) -> None:
    double.play(fault)
    with pytest.raises(kind):
        opened(draft_device="npu")
    assert double.held == {}


def test_a_load_that_fails_later_gives_the_npu_back(
    opened: Callable[..., Run], double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, placement: object, *, takes_turns: bool) -> None:
        raise BundleError(f"{path}: of no use")

    monkeypatch.setattr(load, "load_session", fail)  # of the draft's: the target's is loaded
    with pytest.raises(BundleError, match="of no use"):
        opened(draft_device="auto")
    assert double.calls("rknn_init") == 1 and double.held == {}


def test_without_a_library(opened: Callable[..., Run], tmp_path: Path) -> None:
    nowhere = tmp_path / "librknnrt.so"
    with pytest.raises(NpuMissingError):
        opened(draft_device="npu", npu_library=nowhere)
    run = opened(draft_device="auto", npu_library=nowhere)
    assert len(run.told("the draft runs on the CPU", f"{nowhere}: ", "cannot be loaded")) == 1
    for folder in NPU_LIBRARY_FOLDERS:
        assert not Path(folder, NPU_LIBRARY_NAME).exists(), "this machine has one"
    run = opened(draft_device="auto", npu_library=None)
    assert run.told("NPU") == ["the draft runs on the CPU: there is no NPU"]


def test_a_cache_that_cannot_be_written(npu_bundle: Path, double: Double, tmp_path: Path) -> None:
    """What passes cost is measured each time then."""
    settings: dict[str, Any] = {"cache": tmp_path, "draft_device": "npu", "lanes": 1}
    (tmp_path / "npu").touch()  # so that no folder can be made there
    for _ in range(2):
        lines: list[str] = []
        LLM(npu_bundle, npu_library=double.path, say=lines.append, **settings).close()
        assert any(line.startswith("measuring") for line in lines)
