"""What keeping account of KV blocks costs: microseconds a call of pool and prefix cache.

    python benchmarks/blocks.py [--blocks 100000] [--json]

Integers only, no model. Allocation takes the lowest free block of a pool that is in turn full,
empty and full of holes. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool
from headrace.runtime.prefix import PrefixCache, Root

ROUNDS = 5


def microseconds(call: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls * 1e6


def pool_figures(num_blocks: int) -> dict[str, float]:
    """The whole pool allocated, freed in random order, and used in between with holes."""
    pool, order = BlockPool(num_blocks), list(range(num_blocks))
    random.Random(0).shuffle(order)
    allocate = microseconds(pool.allocate, num_blocks)
    shared = iter(order)
    share = microseconds(lambda: pool.share(next(shared)), num_blocks)
    pool.free_many(order)
    freed = iter(order)
    free = microseconds(lambda: pool.free(next(freed)), num_blocks)
    pool.allocate_many(num_blocks)
    pool.free_many(order[: num_blocks // 2])
    holes = microseconds(pool.allocate, num_blocks // 2)
    pool.check()
    return {"allocate_us": allocate, "allocate_holes_us": holes, "share_us": share, "free_us": free}


def prefix_figures(num_blocks: int) -> dict[str, float]:
    """A session of 128 blocks inserted and matched; then all blocks, evicted one at a time."""
    root, pool = Root("f16", "exact", "benchmark"), BlockPool(num_blocks)
    cache, length = PrefixCache(pool), min(128, num_blocks)
    chains = [
        [chain * length * BLOCK_TOKENS + i for i in range(length * BLOCK_TOKENS)]
        for chain in range(num_blocks // length)
    ]
    insert = match = 0.0
    for token_ids in chains:
        blocks = pool.allocate_many(length) or ()
        start = time.perf_counter()
        cache.insert(root, token_ids, blocks)
        inserted = time.perf_counter()
        pool.free_many(cache.match(root, token_ids))
        match += time.perf_counter() - inserted
        insert += inserted - start
        pool.free_many(blocks)
    total = len(chains) * length
    evict = microseconds(lambda: cache.evict(1), total)
    cache.check()
    per_block = 1e6 / total
    return {
        "insert_us": insert * per_block,
        "match_and_free_us": match * per_block,
        "evict_us": evict,
    }


def measure(num_blocks: int) -> dict[str, float]:
    """The best of a few rounds of each figure, microseconds a block."""
    rounds = [pool_figures(num_blocks) | prefix_figures(num_blocks) for _ in range(ROUNDS)]
    return {name: round(min(each[name] for each in rounds), 3) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.blocks)
    if args.json:
        print(json.dumps({"num_blocks": args.blocks, **figures}))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value:6.2f}")


if __name__ == "__main__":
    main()
