"""Decode and prefill speed of a bundle, alone or in alternation with llama.cpp on the same GGUF.

    python benchmarks/decode.py BUNDLE [--peer llama.cpp --gguf FILE] [--json]

Needs headrace; the peer needs the package llama-cpp-python, which is no dependency. Figures are
medians over passes at a context of `--context` tokens. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace import LLM
from headrace.runtime import memory
from headrace.runtime.batch import chain


class Side(Protocol):
    """One of the two that are compared."""

    def prefill(self, num_tokens: int) -> float:
        """Seconds for a prompt of this many tokens, from an empty context."""
        ...

    def decode(self, token_id: int) -> float:
        """Seconds for one more token, logits at hand."""
        ...


class Headrace:
    def __init__(self, bundle: Path, ctx: int, threads: int) -> None:
        before = memory.usage()
        self.llm = LLM(
            bundle, ctx=ctx, target_threads=threads, say=lambda m: print(m, file=sys.stderr)
        )
        after = memory.usage()
        self.grown_anon = after.rss_anon - before.rss_anon
        self.grown_file = after.rss_file - before.rss_file
        self.backend = self.llm.backend
        self.past = 0
        self.host_s: list[float] = []

    def prefill(self, num_tokens: int) -> float:
        ids = np.arange(300, 300 + num_tokens)
        width = self.backend.facts.max_rows
        start = time.perf_counter()
        for past in range(0, num_tokens, width):
            part = ids[past : past + width]
            self.backend.forward([chain(0, part, past, (len(part) - 1,))])
        self.past = num_tokens
        return time.perf_counter() - start

    def decode(self, token_id: int) -> float:
        inside = self.backend.seconds_in_passes
        start = time.perf_counter()
        row = self.backend.forward([chain(0, np.array([token_id]), self.past, (0,))])[0]
        row.argmax()
        seconds = time.perf_counter() - start
        self.host_s.append(seconds - (self.backend.seconds_in_passes - inside))
        self.past += 1
        return seconds


class LlamaCpp:
    def __init__(self, gguf: Path, ctx: int, threads: int) -> None:
        import llama_cpp

        self.model = llama_cpp.Llama(
            str(gguf), n_ctx=ctx, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def prefill(self, num_tokens: int) -> float:
        self.model.reset()
        ids = list(range(300, 300 + num_tokens))
        start = time.perf_counter()
        self.model.eval(ids)
        return time.perf_counter() - start

    def decode(self, token_id: int) -> float:
        start = time.perf_counter()
        self.model.eval([token_id])
        row = np.ctypeslib.as_array(self.model._ctx.get_logits(), shape=(self.model.n_vocab(),))
        row.argmax()
        return time.perf_counter() - start


@dataclass
class Figures:
    prefill_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)

    def measure(self, side: Side, context: int, tokens: int) -> None:
        self.prefill_s.append(side.prefill(context))
        self.decode_s += [side.decode(400 + i) for i in range(tokens)]

    def to_json(self, context: int) -> dict[str, float]:
        return {
            "prefill_tokens_per_s": context / float(np.median(self.prefill_s)),
            "decode_tokens_per_s": 1 / float(np.median(self.decode_s)),
            "decode_ms_median": 1e3 * float(np.median(self.decode_s)),
            "decode_ms_min": 1e3 * min(self.decode_s),
        }


def run(args: argparse.Namespace) -> dict[str, Any]:
    ctx = args.context + args.tokens + 16
    ours = Headrace(args.bundle, ctx, args.threads)
    sides: dict[str, Side] = {"headrace": ours}
    if args.peer:
        sides["llama.cpp"] = LlamaCpp(args.gguf, ctx, args.threads)
    figures = {name: Figures() for name in sides}
    for side in sides.values():  # a round that is not counted
        side.prefill(args.context)
        side.decode(1)
    ours.host_s.clear()
    per_round: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(args.rounds):
        for name, side in sides.items():
            figures[name].measure(side, args.context, args.tokens)
        if args.peer:
            a, b = figures["headrace"], figures["llama.cpp"]
            per_round["prefill"].append(b.prefill_s[-1] / a.prefill_s[-1])
            last = [np.median(f.decode_s[-args.tokens :]) for f in (a, b)]
            per_round["decode"].append(float(last[1] / last[0]))
    result: dict[str, Any] = {
        "bundle": ours.llm.bundle.manifest.name,
        "quant": ours.llm.bundle.manifest.quant,
        "context": args.context,
        "threads": args.threads,
        "rounds": args.rounds,
        **{name: f.to_json(args.context) for name, f in figures.items()},
        "host_ms_median": 1e3 * float(np.median(ours.host_s)),
        "load_rss_anon_mib": ours.grown_anon / 2**20,
        "load_rss_file_mib": ours.grown_file / 2**20,
        "rss_anon_mib": memory.usage().rss_anon / 2**20,
        "arena_mib": ours.backend.arena.num_bytes / 2**20,
    }
    if args.peer:
        # Medians of the rounds' own ratios: both sides of a round had the same machine.
        result["ratio"] = {name: float(np.median(v)) for name, v in per_round.items()}
        result["ratio_range"] = {name: [min(v), max(v)] for name, v in per_round.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--peer", choices=["llama.cpp"])
    parser.add_argument("--gguf", type=Path, help="the peer's model")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.peer and not args.gguf:
        parser.error("--peer needs --gguf FILE")
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
