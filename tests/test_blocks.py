"""The block pool against a shadow of it: no block in two private hands, none lost."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from headrace.errors import (
    BlockUnderflowError,
    DoubleFreeError,
    ForeignBlockError,
    HeadraceError,
    PoolError,
)
from headrace.runtime.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    PoolCounts,
    blocks_for,
)

OPERATIONS = settings(
    max_examples=120,
    stateful_step_count=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
"""Together at least 10,000 random operations."""


class PoolMachine(RuleBasedStateMachine):
    """Single blocks: what may be done with each is known from a count of its holders."""

    @initialize(size=st.sampled_from([1, 7, 40, 300]))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.holders: Counter[int] = Counter()
        self.indexed: set[int] = set()
        self.cached: list[int] = []

    def free_ids(self) -> list[int]:
        return [
            i for i in range(self.pool.num_blocks) if not self.holders[i] and i not in self.cached
        ]

    @rule()
    def allocate(self) -> None:
        lowest = next(iter(self.free_ids()), None)
        assert self.pool.allocate() == lowest
        if lowest is not None:
            self.holders[lowest] = 1

    @rule(wanted=st.integers(0, 12))
    def allocate_many(self, wanted: int) -> None:
        free = self.free_ids()
        expected = tuple(free[:wanted]) if wanted <= len(free) else None
        assert self.pool.allocate_many(wanted) == expected
        self.holders.update(expected or ())

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        if not self.holders[block_id] and block_id not in self.cached:
            with pytest.raises(PoolError, match="is free"):
                self.pool.share(block_id)
            return
        self.pool.share(block_id)
        self.holders[block_id] += 1
        if block_id in self.cached:
            self.cached.remove(block_id)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        if block_id in self.cached:
            with pytest.raises(BlockUnderflowError):
                self.pool.free(block_id)
        elif not self.holders[block_id]:
            with pytest.raises(DoubleFreeError):
                self.pool.free(block_id)
        else:
            self.pool.free(block_id)
            self.holders[block_id] -= 1
            if not self.holders[block_id] and block_id in self.indexed:
                self.cached.append(block_id)

    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        if self.holders[block_id] and block_id not in self.indexed:
            self.pool.index(block_id)
            self.indexed.add(block_id)
        else:
            with pytest.raises(PoolError):
                self.pool.index(block_id)

    @precondition(lambda self: self.indexed)
    @rule(data=st.data())
    def unindex(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.indexed)))
        self.pool.unindex(block_id)
        self.indexed.remove(block_id)
        if block_id in self.cached:
            self.cached.remove(block_id)

    @rule(distance=st.integers(1, 5), above=st.booleans())
    def foreign_ids(self, distance: int, above: bool) -> None:
        block_id = self.pool.num_blocks - 1 + distance if above else -distance
        for call in (self.pool.free, self.pool.share, self.pool.index, self.pool.holders):
            with pytest.raises(ForeignBlockError, match=f"block {block_id} "):
                call(block_id)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = sum(1 for count in self.holders.values() if count)
        expected = PoolCounts(len(self.free_ids()), held, len(self.cached))
        assert self.pool.check() == self.pool.counts == expected
        assert expected.total == self.pool.num_blocks
        assert self.pool.oldest_cached() == next(iter(self.cached), None)


TestPool = PoolMachine.TestCase
TestPool.settings = OPERATIONS


class TablesMachine(RuleBasedStateMachine):
    """Sessions that grow, fork, park-and-drop and close; each slot remembers who wrote it."""

    @initialize(size=st.integers(1, 40))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.rows: dict[int, list[int]] = {i: [0] * BLOCK_TOKENS for i in range(size)}
        """What each block of the pool contains."""
        self.sessions: list[tuple[BlockTable, list[int]]] = []
        """A table, and what its slots must contain."""
        self.clock = 0

    def write(self, table: BlockTable, texts: list[int], past: int) -> None:
        for slot in range(past, table.num_slots):
            block_id = table.block_ids[slot // BLOCK_TOKENS]
            assert self.pool.holders(block_id) == 1, f"a write into shared block {block_id}"
            self.clock += 1
            self.rows[block_id][slot % BLOCK_TOKENS] = self.clock
            texts.append(self.clock)

    @rule()
    def open(self) -> None:
        self.sessions.append((BlockTable(), []))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), added=st.integers(0, 50))
    def grow(self, data: st.DataObject, added: int) -> None:
        table, texts = data.draw(st.sampled_from(self.sessions))
        past, free = table.num_slots, self.pool.num_free
        missing = table.missing_blocks(past + added)
        assert table.grow(past + added, self.pool.allocate_many) == (missing <= free)
        assert table.num_slots == past + (added if missing <= free else 0)
        self.write(table, texts, past)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, texts = data.draw(st.sampled_from(self.sessions))
        before = self.pool.counts
        fork = table.fork(self.pool, self.pool.allocate_many)
        if fork is None:
            assert table.partial_rows and not before.free
            assert self.pool.counts == before
            return
        assert before.free - self.pool.num_free == (fork.copy is not None)
        if fork.copy is not None:
            assert fork.copy.num_rows == table.partial_rows
            assert fork.table.block_ids[fork.copy.entry] == fork.copy.destination
            copied = self.rows[fork.copy.source][: fork.copy.num_rows]
            self.rows[fork.copy.destination][: fork.copy.num_rows] = copied
        self.sessions.append((fork.table, texts.copy()))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Its tokens stay; on return they are computed again, into other blocks."""
        table, texts = data.draw(st.sampled_from(self.sessions))
        table.release(self.pool)
        if table.grow(len(texts), self.pool.allocate_many):
            texts.clear()
            self.write(table, texts, 0)
        else:
            self.sessions.remove((table, texts))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sessions) - 1))
        table, _ = self.sessions.pop(index)
        table.release(self.pool)
        table.release(self.pool)
        assert table.num_blocks == table.num_slots == 0

    @invariant()
    def every_session_keeps_its_own(self) -> None:
        if not hasattr(self, "pool"):
            return
        hands: Counter[int] = Counter()
        for table, texts in self.sessions:
            assert table.num_blocks == blocks_for(table.num_slots)
            assert table.unused_rows == table.num_blocks * BLOCK_TOKENS - len(texts)
            hands.update(table.block_ids)
            rows = [row for block_id in table.block_ids for row in self.rows[block_id]]
            assert rows[: len(texts)] == texts
            if table.partial_rows:
                assert self.pool.holders(table.block_ids[-1]) == 1
        assert {i: self.pool.holders(i) for i in hands} == hands
        assert self.pool.check().held == len(hands)


TestTables = TablesMachine.TestCase
TestTables.settings = OPERATIONS


def test_pool_errors_are_of_the_tree() -> None:
    for error in (BlockUnderflowError, DoubleFreeError, ForeignBlockError):
        assert issubclass(error, PoolError) and issubclass(error, HeadraceError)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 512, 70_000])
def test_every_block_is_had_once_in_rising_order(size: int) -> None:
    pool = BlockPool(size)
    assert pool.allocate_many(size) == tuple(range(size))
    assert pool.allocate() is None and pool.allocate_many(1) is None
    assert pool.allocate_many(0) == ()
    pool.free_many(range(size))
    assert pool.check() == PoolCounts(size, 0, 0)


def test_the_lowest_free_block_comes_first() -> None:
    pool = BlockPool(1000)
    pool.allocate_many(1000)
    for block_id in (999, 3, 600, 256):
        pool.free(block_id)
    assert [pool.allocate() for _ in range(5)] == [3, 256, 600, 999, None]


def test_the_tail_of_a_freed_table_is_the_oldest() -> None:
    pool = BlockPool(4)
    for block_id in pool.allocate_many(4) or ():
        pool.index(block_id)
    pool.free_many([2, 0, 3, 1])
    order = []
    while (oldest := pool.oldest_cached()) is not None:
        order.append(oldest)
        pool.unindex(oldest)
    assert order == [1, 3, 0, 2]


def test_check_tells_of_a_lost_block() -> None:
    pool = BlockPool(8)
    pool.allocate()
    pool._holders[0] = 0
    with pytest.raises(PoolError, match="not conserved"):
        pool.check()


def test_a_stream_moves_its_tail_without_new_blocks() -> None:
    pool = BlockPool(10)
    table = BlockTable()
    assert table.grow(8 * BLOCK_TOKENS, pool.allocate_many)
    fork = table.fork(pool, pool.allocate_many)
    assert fork is not None and fork.copy is None
    table.evict(pool, range(6, 8), range(2, 4))
    assert table.block_ids == [0, 1, 6, 7, 4, 5]
    assert table.num_slots == 6 * BLOCK_TOKENS
    assert fork.table.block_ids == list(range(8)), "the fork sees the stream as it was"
    fork.table.release(pool)
    assert pool.check() == PoolCounts(4, 6, 0)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_share_a_pool() -> None:
    """Each thread marks what it holds: a block marked twice would be in two private hands."""
    pool = BlockPool(64)
    owners: list[int | None] = [None] * pool.num_blocks
    faults: list[str] = []

    def work(me: int) -> None:
        chance = random.Random(me)
        mine: list[int] = []
        for _ in range(2_000):
            if chance.random() < 0.5:
                for block_id in pool.allocate_many(chance.randrange(4)) or ():
                    if owners[block_id] is not None:
                        faults.append(f"block {block_id}: {me} and {owners[block_id]}")
                    owners[block_id] = me
                    mine.append(block_id)
            elif mine:
                block_id = mine.pop(chance.randrange(len(mine)))
                pool.share(block_id)
                pool.free(block_id)
                owners[block_id] = None
                pool.free(block_id)
        for block_id in mine:
            owners[block_id] = None
        pool.free_many(mine)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.check() == PoolCounts(64, 0, 0)
