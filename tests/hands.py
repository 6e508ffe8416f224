"""What tests of sessions and the engine share: an audit of all blocks, and backends with a hook."""

from __future__ import annotations

import faulthandler
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace import LLM, SamplingParams
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.blocks import BLOCK_TOKENS, PoolCounts
from headrace.runtime.engine import Engine
from headrace.runtime.request import Completion

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=2, ignore_eos=True)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=5, max_tokens=num_tokens, logprobs=2, ignore_eos=True
    )


def ids(num_tokens: int, start: int = 0) -> list[int]:
    """Token ids of the tiny model, other ones for another start."""
    return [20 + (start * 7 + i * i + 3 * i) % 200 for i in range(num_tokens)]


def said(completion: Completion) -> tuple[object, ...]:
    """What must be the same bits."""
    return completion.token_ids, completion.text, completion.logprobs


def audit(engine: Engine) -> PoolCounts:
    """Every held block is held exactly as often as tables and pins hold it, and no more is held
    than was reserved. While no other thread is within a commit.
    """
    counts = engine.check()
    with engine.lock:
        room, pool = engine._room, engine.pool
        hands: Counter[int] = Counter()
        for sequence in room.sequences:
            table = sequence.table
            assert len(set(table.block_ids)) == table.num_blocks, "a block twice in one table"
            assert table.num_slots == sequence.state.num_slots
            hands.update(table.block_ids)
        for pinned in engine.cache._pins.values():
            hands.update(pinned)
        held = {i: pool.holders(i) for i in range(pool.num_blocks) if pool.holders(i)}
        assert held == dict(hands)
        for sequence in room.sequences:
            table = sequence.table
            for block_id in table.block_ids[table.num_full_blocks :]:
                assert hands[block_id] == 1, f"block {block_id} is in two private hands"
                assert not pool.is_indexed(block_id)
            if room.is_admitted(sequence):
                assert table.num_blocks <= sequence.worst_case
        assert room.num_reserved <= pool.num_blocks
    return counts


def assert_all_is_back(llm: LLM) -> None:
    """Nobody holds, reserves or waits for anything."""
    stats = llm.engine.stats
    assert audit(llm.engine).held == stats.reserved_blocks == 0
    assert not llm.engine._room._queue and not llm.engine._lanes._queue
    assert not llm.engine.passes._waiting and llm.engine.passes._running is None


class Hooked:
    """A backend that calls `hook` before each pass."""

    def __init__(self, llm: LLM, hook: Callable[[Sequence[LaneRows]], object]) -> None:
        self._backend, self._hook = llm.backend, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        self._hook(rows)
        return self._backend.forward(rows)


@contextmanager
def hooked(llm: LLM, hook: Callable[[Sequence[LaneRows]], object]) -> Iterator[None]:
    passes = llm.engine.passes
    before, passes._backend = passes._backend, Hooked(llm, hook)
    try:
        yield
    finally:
        passes._backend = before


class Once:
    """A hook that raises `error` at one pass, the `at`-th from now."""

    def __init__(self, error: BaseException, at: int = 0) -> None:
        self.error, self.left = error, at

    def __call__(self, rows: Sequence[LaneRows]) -> None:
        self.left -= 1
        if self.left == -1:
            raise self.error


class Gate:
    """A hook that stops each pass until `open` is called."""

    def __init__(self) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()

    def __call__(self, rows: Sequence[LaneRows]) -> None:
        self.entered.set()
        assert self._opened.wait(20)

    def wait(self) -> None:
        assert self.entered.wait(20)

    def open(self) -> None:
        self._opened.set()


@contextmanager
def watchdog(seconds: float = 60) -> Iterator[None]:
    """Ends the whole run, with every thread's stack, if its block hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def in_threads(*work: Callable[[], object]) -> list[BaseException | None]:
    """Runs them at once; what each raised."""
    errors: list[BaseException | None] = [None] * len(work)

    def run(index: int) -> None:
        try:
            work[index]()
        except BaseException as error:  # noqa: BLE001  an interrupt, too
            errors[index] = error

    with watchdog():
        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return errors


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)
