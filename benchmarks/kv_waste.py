"""How much of the memory for keys and values holds none: sessions of mixed lengths, all open at once.

    python benchmarks/kv_waste.py BUNDLE [--sessions 64] [--json]

Two mixes of 20 to 1,500 tokens, seeded: lengths uniform, and log-uniform (many short ones). Every
session is fed tokens of its own, so that nothing is shared, into a pool that holds them all. A row
is a token's keys and values; waste is allocated rows that hold none, over allocated rows. The
pool's allocated rows are those of held blocks. Lanes are counted apart: they are a working copy, and
what is in one is in the pool as well, but for the last block's rows. Free blocks are no waste: any
session may have them. Preallocation gives every session 2,048 rows. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace import LLM
from headrace.runtime.blocks import BLOCK_TOKENS, blocks_for

PREALLOCATED = 2048
SHORTEST, LONGEST = 20, 1500
MIXES = ("uniform", "log-uniform")


@dataclass(frozen=True)
class Rows:
    """Rows of keys and values, one a token."""

    allocated: int
    used: int
    row_bytes: float

    @property
    def waste(self) -> float:
        return 1 - self.used / self.allocated

    @property
    def num_bytes(self) -> float:
        return self.allocated * self.row_bytes

    def __add__(self, other: Rows) -> Rows:
        allocated = self.allocated + other.allocated
        num_bytes = self.num_bytes + other.num_bytes
        return Rows(allocated, self.used + other.used, num_bytes / allocated)

    def to_json(self) -> dict[str, float]:
        return {
            "allocated": self.allocated,
            "used": self.used,
            "mb": self.num_bytes / 1e6,
            "waste": self.waste,
        }


def lengths(mix: str, num_sessions: int) -> list[int]:
    rng = np.random.default_rng(0)
    if mix == "uniform":
        drawn = rng.integers(SHORTEST, LONGEST, num_sessions, endpoint=True)
    else:
        drawn = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), num_sessions)).round()
    return [int(length) for length in drawn]


def measure(llm: LLM, session_lens: list[int]) -> dict[str, Rows]:
    """With all sessions open; closes them."""
    rng, config = np.random.default_rng(1), llm.bundle.manifest.config
    with ExitStack() as stack:
        sessions = [stack.enter_context(llm.session()) for _ in session_lens]
        for number, (session, length) in enumerate(zip(sessions, session_lens, strict=True)):
            # One more than is computed: a session's last token waits for what comes after it.
            session.feed(rng.integers(100, config.vocab_size, length + 1).tolist())
            if number % 8 == 7:
                print(f"{number + 1} of {len(session_lens)} sessions", file=sys.stderr)
        held = llm.engine.stats.blocks.held
        sequences = [session._sequence for session in sessions]
        in_lanes = sum(s.state.num_slots for s in sequences if s.lane is not None)
    llm.engine.check()
    pool, arena = llm.engine.arrays.shape, llm.backend.arena.shape
    used, pool_row = sum(session_lens), pool.block_bytes / BLOCK_TOKENS
    num_slots = arena.lanes * arena.slots
    rows = {
        "pool": Rows(held * BLOCK_TOKENS, used, pool_row),
        "lanes": Rows(num_slots, in_lanes, arena.num_bytes / num_slots),
    }
    rows["together"] = rows["pool"] + rows["lanes"]
    rows["preallocation"] = Rows(len(session_lens) * PREALLOCATED, used, pool_row)
    return rows


def table(result: dict[str, dict[str, Rows]]) -> str:
    lines = [f"{'mix':12} {'':14} {'rows':>10} {'used':>10} {'MB':>8} {'waste':>8}"]
    for mix, kinds in result.items():
        for kind, rows in kinds.items():
            figures = f"{rows.allocated:10,} {rows.used:10,} {rows.num_bytes / 1e6:8.1f}"
            lines.append(f"{mix:12} {kind:14} {figures} {rows.waste:8.2%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = {}
    for mix in MIXES:
        session_lens = lengths(mix, args.sessions)
        num_blocks = sum(blocks_for(length) for length in session_lens)
        with LLM(
            args.bundle,
            lanes=args.lanes,
            target_threads=args.threads,
            ctx=LONGEST + 2,
            # Room for the request that runs besides what the sessions before it hold.
            pool=(num_blocks + 2) * BLOCK_TOKENS,
        ) as llm:
            name = llm.bundle.manifest.name
            result[mix] = measure(llm, session_lens)
    if args.json:
        figures = {m: {k: r.to_json() for k, r in kinds.items()} for m, kinds in result.items()}
        print(json.dumps({"bundle": name, "sessions": args.sessions, **figures}))
    else:
        print(table(result))


if __name__ == "__main__":
    main()
