"""Faults of the NPU at random moments: the text must be what it is without a draft, every time.

    python benchmarks/npu_faults.py [--times 50] [--seconds 1200] [--seed 0] [--json]

A tiny target drafts for itself on the double of librknnrt while the double plays a fault, `--times` of
each kind, each in one of the next runs; streams and plain answers take turns, in-line and deferred,
greedy and at a temperature. After each fault the answers go on until the NPU is back. Counted are
texts that differ, outages that were not told of in one line, what was not given back when the model
was closed, what the double calls misuse, and the longest answer beside the longest without a fault.
A kind's faults end early when `--seconds` are over. The last line of --json is one object. Exits with
1 if anything of that is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from librknnrt import build as double_build  # folders and files of the tests
from npu_double import RING, Double, endless_twin

from headrace import LLM, SamplingParams
from headrace.npu.backend import RknnBackend
from headrace.runtime import candidate
from headrace.runtime.request import Completion

TIMEOUT_MS = 100
PROMPT = "the pump is at 4.2 bar"
MOST_TOKENS = 90
BACK_S = 60.0


@dataclass(frozen=True)
class Kind:
    """A fault; `{}` is the run that it happens in."""

    name: str
    script: str
    is_outage: bool = True


KINDS = (
    Kind("one failure", "run:+{}:-1", False),
    Kind("one time-out", "run:+{}:-2", False),
    Kind("slower than the time-out", f"hang:+{{}}:{3 * TIMEOUT_MS}", False),
    Kind("two failures", "run:+{}:-1:2"),
    Kind("two time-outs", "run:+{}:-2:2"),
    Kind("refused", "run:+{}:-5"),
    Kind("not a number", "nan:+{}"),
    Kind("lost, back after 3", "lost:+{}:3"),
    Kind("lost, no memory then", "lost:+{} create_mem:+1:3"),
    Kind("lost, refused then", "lost:+{} init:-1:2"),
)


@dataclass
class Found:
    """Of one kind."""

    kind: str
    faults: int = 0
    answers: int = 0
    other_texts: int = 0
    unseen: int = 0
    """Faults that were never noticed, or whose outage never ended."""
    lines: int = 0
    """Told of outages and returns; two for each of either."""
    expected_lines: int = 0
    longest_s: float = 0.0
    not_given_back: dict[str, int] = field(default_factory=dict)
    misuse: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        wrong = (self.other_texts, self.unseen, self.lines - self.expected_lines)
        return not any(wrong) and not self.not_given_back and not self.misuse


@dataclass(frozen=True)
class Question:
    """An answer that is asked for, and by what."""

    params: SamplingParams
    is_stream: bool

    def ask(self, llm: LLM, *, alone: bool = False) -> Completion:
        params = dataclasses.replace(self.params, speculate="off") if alone else self.params
        if not self.is_stream:
            return llm.generate(PROMPT, params)
        g = RING
        with llm.session("stream", sinks=g.sinks, window=g.window, unit=g.unit) as stream:
            stream.feed(PROMPT)
            return stream.generate(" on", params)


def questions(chance: random.Random) -> list[Question]:
    found = []
    for number in range(8):
        params = SamplingParams(
            max_tokens=chance.randint(20, MOST_TOKENS),
            ignore_eos=True,
            seed=number,
            temperature=0.8 * (number % 2),
            speculate=4,
        )
        found.append(Question(params, number % 4 < 2))
    return found


class Bench:
    """One kind of fault on one model."""

    def __init__(
        self,
        kind: Kind,
        llm: LLM,
        double: Double,
        lines: list[str],
        asked: Callable[[], tuple[Question, Completion]],
    ) -> None:
        self.kind, self.found = kind, Found(kind.name)
        self._llm, self._double, self._lines, self._asked = llm, double, lines, asked
        speculation = llm.engine.speculation
        assert speculation is not None and speculation.drafter is not None
        self._drafter = speculation.drafter

    def _answer(self) -> None:
        question, expected = self._asked()
        start = time.perf_counter()
        answer = question.ask(self._llm)
        self.found.longest_s = max(self.found.longest_s, time.perf_counter() - start)
        self.found.answers += 1
        self.found.other_texts += answer.token_ids != expected.token_ids

    def _is_over(self, retries: int, runs: int, outages: int) -> bool:
        if self.kind.is_outage:
            return self._drafter.counts.returns > outages
        backend = self._drafter.model.backend
        assert isinstance(backend, RknnBackend), "a fault that passes is no outage"
        is_hang = self.kind.script.startswith("hang")
        return backend.counters.runs >= runs if is_hang else backend.counters.retries > retries

    def fault(self, moment: int) -> None:
        backend = self._drafter.model.backend
        assert isinstance(backend, RknnBackend)
        before = (
            backend.counters.retries,
            backend.counters.runs + moment,
            self._drafter.counts.returns,
        )
        self._double.play(self.kind.script.format(moment))
        self.found.faults += 1
        limit = time.monotonic() + BACK_S
        while not self._is_over(*before):
            if time.monotonic() > limit:
                self.found.unseen += 1
                return
            self._answer()

    def end(self) -> None:
        """After the model was closed."""
        said = [line for line in self._lines if "failed" in line or "is back" in line]
        self.found.lines = len(said)
        self.found.expected_lines = 2 * self.found.faults * self.kind.is_outage
        self.found.not_given_back, self.found.misuse = self._double.held, self._double.violations
        self._double.reset()


def run(times: int, seconds: float, seed: int) -> tuple[list[Found], float]:
    """Of each kind, and the longest answer without a fault."""
    chance, found = random.Random(seed), list[Found]()
    candidate.FIRST_PAUSE_S, candidate.LAST_PAUSE_S = 0.01, 0.05
    defaults = RknnBackend.__init__.__kwdefaults__
    assert defaults is not None
    defaults["timeout_ms"] = TIMEOUT_MS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = endless_twin(folder)
        double = Double(double_build.build(folder))
        common: dict[str, Any] = {"cache": folder / "cache", "lanes": 1}
        wanted = questions(chance)
        with LLM(bundle, draft_device="none", **common) as llm:
            expected = [question.ask(llm, alone=True) for question in wanted]
        longest_s = 0.0
        for number, kind in enumerate(KINDS):
            lines: list[str] = []
            npu = {"draft_device": "npu", "npu_library": double.path}
            defer = "on" if number % 2 else "off"
            with LLM(bundle, say=lines.append, speculate=4, defer=defer, **npu, **common) as llm:
                for question in wanted:
                    start = time.perf_counter()
                    question.ask(llm)
                    longest_s = max(longest_s, time.perf_counter() - start)
                pairs = list(zip(wanted, expected, strict=True))
                bench = Bench(kind, llm, double, lines, lambda p=pairs: chance.choice(p))
                until = time.monotonic() + seconds / len(KINDS)
                while bench.found.faults < times and time.monotonic() < until:
                    bench.fault(chance.randint(1, 60))
            bench.end()
            found.append(bench.found)
            show(bench.found)
    return found, longest_s


def show(f: Found) -> None:
    print(
        f"{f.kind:26}{f.faults:7}{f.answers:9}{f.other_texts:13}{f.unseen:8}"
        f"{f.lines:8} of {f.expected_lines:<4}{len(f.misuse):7}{sum(f.not_given_back.values()):7}"
        f"{f.longest_s:11.2f}  {'ok' if f.is_right else 'WRONG'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50, help="faults of each kind")
    parser.add_argument("--seconds", type=float, default=1200.0, help="for all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    missing = double_build.missing()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    print(
        f"{'fault':26}{'played':>7}{'answers':>9}{'other texts':>13}{'unseen':>8}"
        f"{'lines':>8}{'':8}{'misuse':>7}{'leaks':>7}{'longest s':>11}"
    )
    found, longest_s = run(given.times, given.seconds, given.seed)
    is_right = all(f.is_right for f in found)
    print(f"longest answer without a fault {longest_s:.2f} s")
    if given.json:
        kinds = [dataclasses.asdict(f) for f in found]
        print(json.dumps({"right": is_right, "without_fault_s": longest_s, "kinds": kinds}))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
