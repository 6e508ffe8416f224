"""What the prefix cache saves: time to the first token and blocks, against it switched off.

    python benchmarks/prefix.py BUNDLE [--rounds 7] [--json]

A round is a shared prompt that is new in it, and sessions one after another that each add tokens of
their own, generate, and stay open. Rounds with and without the cache alternate in one process, and
ratios are taken round by round. The first session of a round computes the shared prompt:
`ttft_cut` compares the median session, `ttft_cut_all` the sum over all, the first one included.
The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM, SamplingParams
from headrace.runtime.blocks import blocks_for


@dataclass(frozen=True)
class Load:
    shared: int
    own: int
    generated: int
    sessions: int

    @property
    def session_len(self) -> int:
        return self.shared + self.own + self.generated


@dataclass(frozen=True)
class Round:
    first_token_s: list[float]
    """By session."""
    held_blocks: int
    """While all sessions were open."""
    answers: list[tuple[int, ...]]


def run_round(llm: LLM, load: Load, number: int) -> Round:
    ids = np.random.default_rng(number).integers(
        100, llm.bundle.manifest.config.vocab_size, load.shared + load.sessions * load.own
    )
    shared, own = ids[: load.shared], np.split(ids[load.shared :], load.sessions)
    params = SamplingParams(
        temperature=1.0, seed=number, max_tokens=load.generated, ignore_eos=True
    )
    with ExitStack() as stack:
        sessions = [stack.enter_context(llm.session()) for _ in own]
        answers = [
            session.generate([*shared.tolist(), *each.tolist()], params)
            for session, each in zip(sessions, own, strict=True)
        ]
        held = llm.engine.stats.blocks.held
    llm.engine.check()
    return Round(
        [answer.timings.first_token_s for answer in answers],
        held,
        [answer.token_ids for answer in answers],
    )


def compare(off: LLM, on: LLM, load: Load, num_rounds: int) -> dict[str, Any]:
    run_round(off, load, 0), run_round(on, load, 0)  # not counted
    pairs = []
    for number in range(1, 1 + num_rounds):
        pair = (run_round(off, load, number), run_round(on, load, number))
        assert pair[0].answers == pair[1].answers, "the cache changes no token"
        pairs.append(pair)
        print(f"round {number} of {num_rounds}", file=sys.stderr)
    medians, sums = (
        [1 - float(measure(b.first_token_s) / measure(a.first_token_s)) for a, b in pairs]
        for measure in (np.median, np.sum)
    )
    ratios = [b.held_blocks / a.held_blocks for a, b in pairs]
    return {
        "ttft_cut": float(np.median(medians)),
        "ttft_cut_range": [min(medians), max(medians)],
        "ttft_cut_all": float(np.median(sums)),
        "ttft_cut_all_range": [min(sums), max(sums)],
        "kv_ratio": float(np.median(ratios)),
        "kv_ratio_range": [min(ratios), max(ratios)],
        "held_blocks": {"off": pairs[-1][0].held_blocks, "on": pairs[-1][1].held_blocks},
        "ttft_ms_median": {
            name: 1e3 * float(np.median([pair[which].first_token_s for pair in pairs]))
            for which, name in enumerate(("off", "on"))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--shared", type=int, default=256, help="tokens of the shared prompt")
    parser.add_argument("--own", type=int, default=96, help="tokens that each session adds")
    parser.add_argument("--generated", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = Load(args.shared, args.own, args.generated, args.sessions)
    config: dict[str, Any] = {
        "target_threads": args.threads,
        "ctx": load.session_len,
        "pool": load.sessions * blocks_for(load.session_len) * 16,
    }
    with LLM(args.bundle, **config, prefix_cache=False) as off, LLM(args.bundle, **config) as on:
        result = {
            "bundle": on.bundle.manifest.name,
            "rounds": args.rounds,
            "load": vars(load),
            **compare(off, on, load, args.rounds),
        }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
