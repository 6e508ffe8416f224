"""Whether memory stays where it is while one stream goes on and forks of it come and go.

    python benchmarks/soak.py BUNDLE --text FILE... [--tokens 200000] [--seconds N] [--json]

One thread feeds the texts, over and over, to a stream. Every `--ask-every` tokens times `--forks`,
as many new threads fork it, ask, generate and close, and one more asks without a session, so that
the prefix cache fills up and evicts. Two runs, each with a model of its own and after a warm-up that
fills what fills up: bindings of all widths of a pass in all lanes, a prefix cache that evicts, rings
that have wrapped, the 256 blocks of RoPE rows, the allocator's arenas of as many threads.

1. `--tokens` tokens with RssAnon + VmSwap taken every `--every` tokens: a least-squares slope, and
   its 95 % interval from a moving-block bootstrap of the residuals (a tenth of the run a block,
   since what an allocator does now depends on what it did before).
2. `--trace-segments` rounds under tracemalloc, which slows everything and takes memory itself: the
   peak of each, and what is left at its end with no question under way. Here the questions take turns:
   how many of them sample in the same instant is chance, and would be most of a peak.

The last line of --json is one object. Exits with 1 unless memory is flat and no block is lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from soak_figures import Samples, Trace

from headrace import LLM, SamplingParams
from headrace.runtime.batch import chain
from headrace.runtime.engine import KvStats
from headrace.runtime.session import Session


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is put on a model."""

    tokens: int = 200_000
    """Of the first run, after its warm-up."""
    seconds: float = math.inf
    """The first run ends after this long, if that is sooner."""
    forks: int = 4
    window: int = 1024
    every: int = 1000
    """Tokens fed between two samples."""
    ask_every: int = 1000
    """Tokens of the stream to one question."""
    answer_len: int = 16
    warmup: int = 40_000
    """Tokens, with a round of questions after each sample's worth of them."""
    trace_segments: int = 10

    @property
    def round_len(self) -> int:
        """Tokens from one round of questions to the next."""
        return self.forks * self.ask_every


@dataclass(frozen=True)
class Report:
    load: Load
    rss: Samples
    trace: Trace
    asked: int
    stats: KvStats
    """After everything was closed."""

    @property
    def complaints(self) -> list[str]:
        slope = self.rss.slope()
        wrong = []
        if not slope.is_flat:
            wrong.append(f"RssAnon + VmSwap is not flat: {slope}")
        if not self.trace.is_flat:
            wrong.append(f"tracemalloc is not flat: {self.trace}")
        if self.stats.blocks.held:
            wrong.append(f"{self.stats.blocks.held} blocks are held though all was closed")
        return wrong

    def to_json(self) -> dict[str, Any]:
        return {
            "load": {k: v for k, v in dataclasses.asdict(self.load).items() if v != math.inf},
            "rss": self.rss.to_json(),
            "trace": self.trace.to_json(),
            "asked": self.asked,
            "stats": dataclasses.asdict(self.stats),
            "complaints": self.complaints,
        }


class Soak:
    """A stream under load. Close it to know whether every block came back."""

    def __init__(
        self, llm: LLM, token_ids: list[int], load: Load, *, takes_turns: bool = False
    ) -> None:
        """With `takes_turns` each question is answered before the next is asked."""
        self._llm, self._load, self._takes_turns = llm, load, takes_turns
        self._stream: Session = llm.session("stream", window=load.window)
        self._text, self._read = token_ids, 0
        self._askers: list[threading.Thread] = []
        self._errors: list[Exception] = []
        self._rounds = 0
        self.num_tokens = self.num_asked = 0

    def feed(self, num_tokens: int, *, round_len: int, seconds: float = math.inf) -> Iterator[int]:
        """Feeds so many tokens and asks at the start of every `round_len`; yields after each part."""
        end, until = self.num_tokens + num_tokens, time.perf_counter() + seconds
        ask_at = self.num_tokens
        while self.num_tokens < end and time.perf_counter() < until:
            if self.num_tokens >= ask_at:
                self._ask_round()
                ask_at += round_len
            part = min(self._load.every, end - self.num_tokens)
            self._stream.feed(self.read(part))
            self.num_tokens += part
            yield self.num_tokens

    def read(self, num_tokens: int) -> list[int]:
        """The text cycles. Not by `itertools.cycle`, which remembers all that it has seen."""
        places = range(self._read, self._read + num_tokens)
        self._read = places.stop % len(self._text)
        return [self._text[i % len(self._text)] for i in places]

    def _ask_round(self) -> None:
        self.rest()
        self._rounds += 1
        for number in range(self._load.forks + 1):
            question = self.read(12 + 9 * number)
            is_plain = number == self._load.forks
            asker = threading.Thread(target=self._ask, args=(question, self._rounds, is_plain))
            self._askers.append(asker)
            asker.start()
            if self._takes_turns:
                self.rest()

    def _ask(self, question: list[int], seed: int, is_plain: bool) -> None:
        params = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=self._load.answer_len, ignore_eos=True
        )
        try:
            if is_plain:
                self._llm.generate(question, params)
            else:
                with self._stream.fork() as fork:
                    fork.generate(question, params)
        except Exception as error:  # noqa: BLE001  raised where it is noticed
            self._errors.append(error)

    def rest(self) -> None:
        """Waits for the questions under way; raises what went wrong in one."""
        for asker in self._askers:
            asker.join()
            self.num_asked += 1
        self._askers.clear()
        if self._errors:
            raise self._errors[0]

    def close(self) -> KvStats:
        self.rest()
        self._stream.close()
        self._llm.engine.check()
        return self._llm.engine.stats


def bind_widths(llm: LLM) -> None:
    """A pass of every width in all lanes; they must be empty. A backend keeps 64 bindings."""
    lanes = llm.backend.facts.lanes
    for width in (*range(2, 17), 32, 48, 64, 96, 128, 192, 256):
        row_ids = np.arange(1, 1 + min(width, llm.capacity))
        for first in range(lanes):
            for last in range(first, lanes):
                rows = [chain(lane, row_ids, 0, (0,)) for lane in range(first, last + 1)]
                llm.backend.forward(rows)


def fill_prefix_cache(llm: LLM, soak: Soak) -> None:
    one = SamplingParams(max_tokens=1)
    while not llm.engine.stats.prefix.evicted_blocks:
        llm.generate(soak.read(256), one)


def warm(llm: LLM, text: str, load: Load, *, takes_turns: bool = False) -> Soak:
    bind_widths(llm)
    soak = Soak(llm, llm.tokenizer.encode(text), load, takes_turns=takes_turns)
    fill_prefix_cache(llm, soak)
    _progress("warm-up", soak.feed(load.warmup, round_len=load.every))
    return soak


def run(open_llm: Callable[[], LLM], text: str, load: Load) -> Report:
    """Both runs, each with a model of its own."""
    samples = Samples()
    with open_llm() as llm:
        soak = warm(llm, text, load)
        samples.take(soak.num_tokens)
        for num_tokens in soak.feed(load.tokens, round_len=load.round_len, seconds=load.seconds):
            samples.take(num_tokens)
            if len(samples.tokens) % 20 == 0:
                _say(f"{num_tokens} tokens, {samples.num_bytes[-1] / 1e6:.2f} MB")
        stats = soak.close()
    _say(json.dumps(samples.to_json()))
    return Report(load, samples, trace(open_llm, text, load), soak.num_asked, stats)


def trace(open_llm: Callable[[], LLM], text: str, load: Load) -> Trace:
    figures = Trace([], [])
    tracemalloc.start()
    try:
        with open_llm() as llm:
            soak = warm(llm, text, load, takes_turns=True)
            for _ in range(load.trace_segments):
                tracemalloc.reset_peak()
                _progress("segment", soak.feed(load.round_len, round_len=load.round_len))
                soak.rest()
                figures.peaks.append(tracemalloc.get_traced_memory()[1])
                gc.collect()
                figures.left.append(tracemalloc.get_traced_memory()[0])
            soak.close()
    finally:
        tracemalloc.stop()
    return figures


def pool_tokens(load: Load) -> int:
    """A stream and its forks, and so little beside them that the prefix cache must evict."""
    stream = load.window + 2 * 64
    return (1 + load.forks) * stream + 256


def _progress(name: str, parts: Iterator[int]) -> None:
    num_tokens = 0
    for num_tokens in parts:  # noqa: B007
        pass
    _say(f"{name}: {num_tokens} tokens")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    doc = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--lanes", type=int, default=2, help="fewer than sequences: they switch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    for each in dataclasses.fields(Load):
        kind = float if each.name == "seconds" else int
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default)
    args = parser.parse_args()
    load = Load(**{each.name: getattr(args, each.name) for each in dataclasses.fields(Load)})
    config: dict[str, Any] = {"lanes": args.lanes, "target_threads": args.threads}
    config |= {"ctx": load.window + 2 * 64, "pool": pool_tokens(load)}
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in args.text)
    report = run(lambda: LLM(args.bundle, **config, say=_say), text, load)
    figures = {"bundle": args.bundle.name, **config, **report.to_json()}
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:12} {value}")
    sys.exit(bool(report.complaints))


if __name__ == "__main__":
    main()
