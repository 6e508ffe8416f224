"""What sessions and streams cost on top of the passes, at a context of 1,024 tokens.

    python benchmarks/kv_cost.py BUNDLE [--steps 64] [--rounds 7] [--json]

Three sides take turns, a part of a round each: `forward` decodes with the bare backend in a lane of
its own, `session` with a sequence of the engine, `stream` with one that has wrapped and so evicts
every 64 tokens. A step is one token, its logits at hand. `commit_share` is the time in commits over
that of the steps; `staging_ms` what it takes to bring the sequence into a lane, `staging_share` that
over a turn, as if another waited for the lane at the end of each; `overhead_ms` the median step less
that of `forward`, by round. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM
from headrace.runtime.batch import F32, chain
from headrace.runtime.engine import Engine
from headrace.runtime.lanes import TURN_PASSES
from headrace.runtime.ring import RingLayout
from headrace.runtime.sequence import Sequence as Tokens

WINDOW = 960
"""Of the stream, whose context is 64 sinks, the window and up to 64 tokens more."""


@dataclass
class Part:
    """Steps of one side in one round."""

    steps_s: list[float] = field(default_factory=list)
    committing_s: float = 0.0
    in_pass_s: float = 0.0

    @property
    def step_ms(self) -> float:
        return 1e3 * float(np.median(self.steps_s))

    @property
    def commit_share(self) -> float:
        return self.committing_s / sum(self.steps_s)

    @property
    def host_share(self) -> float:
        return 1 - self.in_pass_s / sum(self.steps_s)


def some_tokens(num_tokens: int) -> list[int]:
    return [20 + i % 200 for i in range(num_tokens)]


def choose(logits: F32, proposed: Sequence[int]) -> list[int]:
    logits[0].argmax()
    return [30]


class Bare:
    """Decodes at slots `context` .. `context + steps - 1` of lane 0, over and over."""

    def __init__(self, llm: LLM, context: int) -> None:
        self.llm, self.context = llm, context
        ids = np.array(some_tokens(context))
        for past in range(0, context, 256):
            llm.backend.forward([chain(0, ids[past : past + 256], past)])

    def steps(self) -> Callable[[], None]:
        past = iter(range(self.context, self.llm.capacity))

        def step() -> None:
            token = np.array([30])
            self.llm.backend.forward([chain(0, token, next(past), (0,))])[0].argmax()

        return step


class Computed:
    """Decodes with a sequence; every part goes on where the last one ended, or from a fork."""

    def __init__(self, engine: Engine, sequence: Tokens, context: int) -> None:
        self.engine, self.sequence = engine, sequence
        sequence.append(some_tokens(context))
        with engine.request(sequence, 0):
            sequence.compute(leave=1)

    def part(self, steps: int) -> tuple[Part, float]:
        """The steps, and the seconds that staging took."""
        engine = self.engine
        sequence = self.sequence if self.sequence.is_stream else engine.fork(self.sequence)
        staging = engine.stats.seconds_staging

        def step() -> None:
            sequence.verify((), choose)

        with engine.request(sequence, steps + 1):
            step()
            staged = engine.stats.seconds_staging - staging
            part = timed(engine, step, steps)
        if sequence is not self.sequence:
            engine.close_sequence(sequence)
        return part, staged


def timed(engine: Engine, step: Callable[[], None], steps: int) -> Part:
    part = Part()
    committing, in_pass = engine.stats.seconds_committing, engine.backend.seconds_in_passes
    for _ in range(steps):
        start = time.perf_counter()
        step()
        part.steps_s.append(time.perf_counter() - start)
    part.committing_s = engine.stats.seconds_committing - committing
    part.in_pass_s = engine.backend.seconds_in_passes - in_pass
    return part


@dataclass
class Side:
    parts: list[Part] = field(default_factory=list)
    staged_s: list[float] = field(default_factory=list)

    def to_json(self, bare: Side) -> dict[str, float | list[float]]:
        over = [a.step_ms - b.step_ms for a, b in zip(self.parts, bare.parts, strict=True)]
        shares = [part.commit_share for part in self.parts]
        staging_ms = 1e3 * float(np.median(self.staged_s))
        step_ms = float(np.median([part.step_ms for part in self.parts]))
        return {
            "step_ms": step_ms,
            "host_share": float(np.median([part.host_share for part in self.parts])),
            "commit_share": float(np.median(shares)),
            "commit_share_range": [min(shares), max(shares)],
            "commit_us_per_step": 1e6
            * float(np.median([p.committing_s / len(p.steps_s) for p in self.parts])),
            "overhead_ms": float(np.median(over)),
            "overhead_ms_range": [min(over), max(over)],
            "staging_ms": staging_ms,
            "staging_share": staging_ms / (staging_ms + TURN_PASSES * step_ms),
        }


def compare(bare_llm: LLM, llm: LLM, context: int, steps: int, rounds: int) -> dict[str, Any]:
    bare = Bare(bare_llm, context)
    session = Computed(llm.engine, llm.engine.sequence(), context)
    layout = RingLayout(64, WINDOW)
    stream = Computed(llm.engine, llm.engine.stream(layout), layout.capacity + layout.unit)
    sides = {"forward": Side(), "session": Side(), "stream": Side()}
    for number in range(rounds + 1):
        step = bare.steps()
        step()
        parts = {"forward": (timed(bare_llm.engine, step, steps), 0.0)}
        parts |= {"session": session.part(steps), "stream": stream.part(steps)}
        for name, (part, staged_s) in parts.items():
            if number:  # the first round is not counted
                sides[name].parts.append(part)
                sides[name].staged_s.append(staged_s)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return {name: side.to_json(sides["forward"]) for name, side in sides.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64, help="tokens of each side a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config: dict[str, Any] = {"target_threads": args.threads, "ctx": args.context + args.steps + 64}
    with (
        LLM(args.bundle, **config, lanes=1) as bare,
        # One lane, so that session and stream must stage at every turn.
        LLM(args.bundle, **config, lanes=1, pool=3 * args.context + 512) as llm,
    ):
        result = {
            "bundle": llm.bundle.manifest.name,
            "context": args.context,
            "rounds": args.rounds,
            **compare(bare, llm, args.context, args.steps, args.rounds),
        }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:10} {value}")


if __name__ == "__main__":
    main()
