"""A draft model changes how many passes an answer takes and nothing else, whatever it does."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tiny_pairs import NUM_TOKENS, VOCAB_SIZE, pair, permuted

from headrace import LLM, SamplingParams
from headrace.runtime import drafter as drafter_module
from headrace.runtime.backend import LaneBackend
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.draft_mode import DraftMode, ModeChoice, modes_of
from headrace.runtime.drafter import Drafter
from headrace.runtime.request import Accept, Completion, LogitBias
from headrace.runtime.trace import Trace

PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2, seed=4)
WARM = SamplingParams(
    max_tokens=60, ignore_eos=True, logprobs=2, seed=4, temperature=0.9, repeat_penalty=1.1
)
PROMPT = "the pump is"


def said(answer: Completion) -> tuple[object, ...]:
    return answer.text, answer.token_ids, answer.logprobs, answer.finish_reason


@pytest.fixture(scope="module")
def plain(twin_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(twin_bundle, cache=shared_cache, lanes=4, speculate="off") as llm:
        yield llm


@pytest.fixture(params=["off", "on"])
def drafted(twin_bundle: Path, shared_cache: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """In-line and deferred; it proposes four tokens whatever they cost."""
    with LLM(twin_bundle, cache=shared_cache, lanes=4, speculate=4, defer=request.param) as llm:
        yield llm


def drafter_of(llm: LLM) -> Drafter:
    speculation = llm.engine.speculation
    assert speculation is not None and speculation.drafter is not None
    return speculation.drafter


class Faulty:
    """A draft's backend with something done to its logits."""

    def __init__(self, inner: LaneBackend, spoil: Callable[[F32], F32]) -> None:
        self._inner, self._spoil = inner, spoil

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        return self._spoil(self._inner.forward(rows))


def spoil(llm: LLM, monkeypatch: pytest.MonkeyPatch, how: Callable[[F32], F32]) -> None:
    model = drafter_of(llm).model
    monkeypatch.setattr(model, "backend", Faulty(model.backend, how))


@pytest.mark.parametrize("params", [PARAMS, WARM], ids=["greedy", "warm"])
def test_a_perfect_draft_is_nearly_always_accepted(
    plain: LLM, drafted: LLM, params: SamplingParams
) -> None:
    expected = plain.generate(PROMPT, params)
    for _ in range(3):  # late proposals are chance; three answers without any are not
        answer = drafted.generate(PROMPT, params)
        assert said(answer) == said(expected)
    counts = answer.speculation
    assert counts is not None and "draft" in counts.sources
    assert counts.accepted >= 0.8 * counts.proposed
    assert counts.passes <= 40


@pytest.mark.parametrize("params", [PARAMS, WARM], ids=["greedy", "warm"])
def test_a_draft_that_is_always_wrong(
    plain: LLM, drafted: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(drafted, monkeypatch, lambda logits: -logits)
    answer = drafted.generate(PROMPT, params)
    assert said(answer) == said(plain.generate(PROMPT, params))
    counts = answer.speculation
    assert counts is not None
    draft = counts.sources["draft"]
    assert sum(draft.proposed) > 50 and sum(draft.accepted) < 0.2 * sum(draft.proposed)
    assert counts.wasted >= sum(draft.proposed) - sum(draft.accepted)


def test_by_default_it_is_hardly_asked_any_more(
    twin_bundle: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(twin_bundle, cache=shared_cache) as llm:
        spoil(llm, monkeypatch, lambda logits: -logits)
        for _ in range(3):
            answer = llm.generate(PROMPT, PARAMS)
        assert answer.speculation is not None
        draft = answer.speculation.sources.get("draft")
        assert draft is None or sum(draft.proposed) <= 4


def raising(logits: F32) -> F32:
    raise RuntimeError("no such device")


def not_a_number(logits: F32) -> F32:
    return np.full_like(logits, np.nan)


@pytest.mark.parametrize("how", [raising, not_a_number])
def test_a_draft_that_fails_is_given_up(
    plain: LLM, drafted: LLM, how: Callable[[F32], F32], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(drafted, monkeypatch, how)
    answer = drafted.generate(PROMPT, PARAMS)
    assert said(answer) == said(plain.generate(PROMPT, PARAMS))
    drafter = drafter_of(drafted)
    assert drafter.counts.failures == drafter_module.MAX_FAILURES
    assert drafter.broken is not None and "3 errors in a row, the last: " in drafter.broken
    assert answer.speculation is not None and answer.speculation.accepted == 0
    assert said(drafted.generate(PROMPT, WARM)) == said(plain.generate(PROMPT, WARM))


def test_one_failure_is_forgiven(plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter(range(1_000_000))
    spoil(drafted, monkeypatch, lambda logits: raising(logits) if next(passes) == 5 else logits)
    for _ in range(3):
        answer = drafted.generate(PROMPT, PARAMS)
        assert said(answer) == said(plain.generate(PROMPT, PARAMS))
    assert drafter_of(drafted).counts.failures == 1
    assert drafter_of(drafted).broken is None
    assert answer.speculation is not None and answer.speculation.accepted > 10


def test_a_draft_that_hangs_holds_nothing_up(
    plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = threading.Event()

    def hang(logits: F32) -> F32:
        freed.wait(60)
        return logits

    monkeypatch.setattr(drafter_module, "HANG_S", 0.05)
    spoil(drafted, monkeypatch, hang)
    expected = plain.generate(PROMPT, PARAMS)
    start = time.perf_counter()
    try:
        for _ in range(3):
            assert said(drafted.generate(PROMPT, PARAMS)) == said(expected)
        assert time.perf_counter() - start < 30, "the hang takes 60 s"
        drafter = drafter_of(drafted)
        assert 1 <= drafter.counts.late <= 3, "no request asks again before it was answered"
        assert drafter.broken is not None and "took longer" in drafter.broken
        start = time.perf_counter()
        drafted.close()
        assert time.perf_counter() - start < 10
    finally:
        freed.set()


def test_a_draft_slower_than_it_was_measured_is_let_be(
    plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was waited for is learned, late answers among it."""
    drafter = drafter_of(drafted)
    drafter.step_s = 0.001

    def slow(logits: F32) -> F32:
        time.sleep(0.1)
        return logits

    spoil(drafted, monkeypatch, slow)
    auto = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2, seed=4, speculate="auto")
    for _ in range(3):
        answer = drafted.generate(PROMPT, auto)
        assert said(answer) == said(plain.generate(PROMPT, PARAMS))
    assert answer.speculation is not None
    assert drafter.counts.late <= 6, "of 180 passes"
    assert answer.speculation.draft_wait_s < 0.3


def test_a_model_that_nobody_closes_ends_with_the_program(
    twin_bundle: Path, shared_cache: Path
) -> None:
    program = f"""
from headrace import LLM, SamplingParams
llm = LLM({str(twin_bundle)!r}, cache={str(shared_cache)!r}, speculate=4, defer="on")
print(len(llm.generate({PROMPT!r}, SamplingParams(max_tokens=20, ignore_eos=True)).token_ids))
"""
    for end in ("", "del llm\n", "import sys; sys.exit(0)\n"):
        done = subprocess.run(
            [sys.executable, "-c", program + end], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


def test_more_requests_than_lanes_do_without(plain: LLM, drafted: LLM) -> None:
    """And a lane comes back when its request has ended, or nobody has it any more."""
    expected = plain.generate(PROMPT, PARAMS)
    answers = [drafted.generate(PROMPT, PARAMS, stream=True) for _ in range(6)]
    for _ in range(70):
        for answer in answers:
            next(answer, None)
    assert all(said(answer.completion) == said(expected) for answer in answers)
    del answer, answers
    later = drafted.generate(PROMPT, PARAMS)
    assert later.speculation is not None and later.speculation.accepted > 10


def test_sessions_side_by_side(plain: LLM, drafted: LLM) -> None:
    prompts = ["the pump", "a valve is", "x y x y", "low low low"]
    answers: dict[str, Completion] = {}

    def run(prompt: str) -> None:
        answers[prompt] = drafted.generate(prompt, WARM)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for prompt in prompts:
        assert said(answers[prompt]) == said(plain.generate(prompt, WARM))


def test_streams_wrap_with_a_draft(plain: LLM, drafted: LLM) -> None:
    ends = []
    for llm in (plain, drafted):
        with llm.session("stream", sinks=16, window=32, unit=16) as stream:
            stream.feed(PROMPT)
            answer = stream.generate(" on", SamplingParams(max_tokens=150, ignore_eos=True))
            ends.append((answer.token_ids, stream.generate(" so", PARAMS).token_ids))
    assert ends[0] == ends[1]


def test_deferral_computes_ahead(twin_bundle: Path, shared_cache: Path) -> None:
    trace = Trace()
    with LLM(twin_bundle, cache=shared_cache, speculate=4, defer="on", trace=trace) as llm:
        slow = llm.backend.forward

        def forward(rows: Sequence[LaneRows]) -> F32:
            time.sleep(0.02)
            return slow(rows)

        llm.backend.forward = forward  # type: ignore[method-assign]
        answer = llm.generate(PROMPT, PARAMS)
        counts = drafter_of(llm).counts
        assert answer.speculation is not None
        assert counts.head_starts >= 5
        assert counts.head_start_hits >= 0.8 * counts.head_starts, (
            "a perfect draft knows the outcome"
        )
        assert counts.rows_true <= counts.rows
        assert counts.busy_s > 0 and counts.idle_s > 0
    spans = trace.to_json()["traceEvents"]
    assert isinstance(spans, list)
    passes = [s for s in spans if s.get("cat") == "target"]
    drafts = [s for s in spans if s.get("cat") == "draft"]
    overlapping = [
        d
        for d in drafts
        if any(p["ts"] <= d["ts"] and d["ts"] + d["dur"] <= p["ts"] + p["dur"] for p in passes)
    ]
    assert len(overlapping) > len(drafts) / 3, "draft passes within passes of the target"


ALL_MODES = modes_of("auto", takes_turns=False)


@pytest.mark.parametrize("fastest", ALL_MODES)
@pytest.mark.parametrize("slow", [1.2, 1.5, 10.0])
def test_the_fastest_mode_is_taken(fastest: DraftMode, slow: float) -> None:
    """Passes give one to four tokens, by chance."""
    choice, chance = ModeChoice(ALL_MODES), random.Random(5)
    taken: Counter[DraftMode] = Counter()
    spent = least = 0.0
    for number in range(6000):
        mode = choice.mode
        seconds = 0.1 if mode is fastest else 0.1 * slow
        choice.note(mode, chance.randint(1, 4), seconds)
        if number >= 1000:
            taken[mode] += 1
            spent, least = spent + seconds, least + 0.1
    assert spent < 1.03 * least
    assert all(taken.values()), "the others are tried again now and then"


def test_a_mode_that_becomes_the_fastest_is_taken() -> None:
    choice = ModeChoice(ALL_MODES)
    for fastest in (*ALL_MODES, *ALL_MODES):
        modes = []
        for _ in range(3000):
            modes.append(choice.mode)
            choice.note(choice.mode, 2, 0.1 if choice.mode is fastest else 0.13)
        assert Counter(modes[-500:])[fastest] > 450


def test_a_text_of_another_kind_changes_no_mode() -> None:
    """Speeds differ by text more than by mode, so a mode is held against what was just before."""
    choice = ModeChoice([DraftMode.IN_LINE, DraftMode.UNASKED])
    wrong = 0
    for number in range(20_000):
        tokens = 4 if number // 500 % 2 else 1
        wrong += choice.mode is DraftMode.UNASKED
        choice.note(choice.mode, tokens, 0.1 if choice.mode is DraftMode.IN_LINE else 0.12)
    assert wrong < 1_000


@pytest.mark.parametrize("slow", [1.05, 1.3, 10.0])
def test_a_short_run_loses_little_to_trials(slow: float) -> None:
    """Once it is known that a draft does not pay, which takes one phase."""
    choice = ModeChoice([DraftMode.IN_LINE, DraftMode.UNASKED])
    spent = least = 0.0
    for number in range(400):
        seconds = 0.1 * slow if choice.mode is DraftMode.IN_LINE else 0.1
        choice.note(choice.mode, 1, seconds)
        if number >= 32:
            spent, least = spent + seconds, least + 0.1
    assert spent < 1.025 * least


def test_what_defer_allows() -> None:
    deferred, in_line, unasked = ALL_MODES
    assert modes_of("auto", takes_turns=True) == (in_line, unasked)
    for takes_turns in (False, True):
        assert modes_of("on", takes_turns=takes_turns) == (deferred, unasked)
        assert modes_of("off", takes_turns=takes_turns) == (in_line, unasked)


def test_what_the_others_give_is_told() -> None:
    choice = ModeChoice(ALL_MODES)
    seconds = {DraftMode.DEFERRED: 0.2, DraftMode.IN_LINE: 0.15, DraftMode.UNASKED: 0.1}
    for _ in range(200):
        choice.note(choice.mode, 2, seconds[choice.mode])
    assert str(choice) == "not asked: 20.0 tokens/s, deferred 0.50 of that, in-line 0.67 of that"


def test_one_outlier_is_soon_forgotten() -> None:
    choice = ModeChoice([DraftMode.IN_LINE, DraftMode.UNASKED])
    modes = []
    for number in range(400):
        is_slow = number < 16  # e.g. beside other requests
        in_line_s = 1.0 if is_slow else 0.1
        modes.append(choice.mode)
        choice.note(choice.mode, 2, in_line_s if choice.mode is DraftMode.IN_LINE else 0.13)
    assert Counter(modes[150:])[DraftMode.IN_LINE] > 200


@pytest.mark.parametrize("speculate", [4, "auto"])
def test_a_fixed_number_asks_a_draft_that_does_not_pay(
    speculate: int | Literal["auto"],
    twin_bundle: Path,
    shared_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked again now and then, the more rarely the dearer it is; a number asks it before
    each pass.
    """
    proposed = passes = 0
    with LLM(twin_bundle, cache=shared_cache, speculate=speculate) as llm:
        draft = drafter_of(llm).model.backend
        forward = draft.forward

        def slow(rows: Sequence[LaneRows]) -> F32:
            time.sleep(0.002)
            return forward(rows)

        monkeypatch.setattr(draft, "forward", slow)
        params = replace(PARAMS, max_tokens=400, sources="draft")
        while not proposed and passes < 20_000:
            counts = llm.generate(PROMPT, params).speculation
            assert counts is not None
            proposed, passes = proposed + counts.proposed, passes + counts.passes
    asked = proposed / passes
    assert asked > 2 if speculate == 4 else 0 < asked < 0.5


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("is_trimmed", [False, True], ids=["whole", "trimmed"])
def test_a_draft_with_other_ids(
    accept: Accept, is_trimmed: bool, tmp_path: Path, shared_cache: Path, corpus: Path
) -> None:
    """The target's twin with its tokens renumbered, and with few of them in its head."""
    new_ids = np.random.default_rng(3).permutation(VOCAB_SIZE)
    source = permuted("llama", tmp_path / "draft", new_ids)
    keep = 260 if is_trimmed else None
    bundle = pair(tmp_path / "pair", source, keep=keep, corpus=[corpus] if keep else []).path
    # Rows of the target's head that are no token: the draft could not read them.
    no_tokens = LogitBias({token_id: -100.0 for token_id in range(NUM_TOKENS, VOCAB_SIZE)})
    params = replace(WARM, accept=accept, temperature=0.0, logit_bias=no_tokens)
    with LLM(bundle, cache=shared_cache, speculate="off") as llm:
        expected = llm.generate(PROMPT, replace(params, accept="coupled"))
    with LLM(bundle, cache=shared_cache, speculate=4) as llm:
        answer = llm.generate(PROMPT, params)
        warm = llm.generate(PROMPT, replace(params, temperature=0.8))
    assert said(answer) == said(expected)
    for found in (answer, warm):
        assert found.speculation is not None
        # A token that the draft cannot say is never accepted, all others are.
        assert found.speculation.accepted > (10 if is_trimmed else 30)
