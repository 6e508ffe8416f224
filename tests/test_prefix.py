"""The prefix cache: what it hands out was computed from exactly the tokens asked for."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import UsageError
from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from headrace.runtime.prefix import Hash, PrefixCache, PrefixCounters, Root, chained
from headrace.runtime.ring import RingLayout, RingState

ROOT = Root("f16", "exact", "model")
OTHER_ROOTS = (
    Root("int8", "exact", "model"),
    Root("f16", "tree", "model"),
    Root("f16", "exact", ""),
)


def colliding(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """A hash with four values."""
    return bytes([chained(parent, token_ids)[0] % 4])


def tokens_of(*names: int) -> list[int]:
    """Sixteen tokens for each name."""
    return [name * 100 + i for name in names for i in range(BLOCK_TOKENS)]


def cached_chain(cache: PrefixCache, pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Blocks of a session that computed `token_ids` and was closed."""
    known = cache.match(ROOT, token_ids)
    added = cache.allocate(len(token_ids) // BLOCK_TOKENS - len(known))
    assert added is not None
    block_ids = cache.insert(ROOT, token_ids, [*known, *added], start=len(known))
    pool.free_many(block_ids)
    return block_ids


@dataclass(eq=False)
class Session:
    """A session of the machine below; a stream has a layout."""

    root: Root
    layout: RingLayout | None = None
    table: BlockTable = field(default_factory=BlockTable)
    token_ids: list[int] = field(default_factory=list)
    inserted: int = 0

    @property
    def state(self) -> RingState:
        """A session that is no stream is one that never evicts."""
        return RingState(self.layout or RingLayout(16, 16 * 10**6, 16), len(self.token_ids))


Content = tuple[Root, tuple[int, ...]]
"""What a full block was computed from: all tokens up to its end."""


class CacheMachine(RuleBasedStateMachine):
    """Sessions and streams over one cache. `contents` knows what each block was computed from."""

    @initialize(
        size=st.sampled_from([8, 16, 40]), hash_block=st.sampled_from([chained, chained, colliding])
    )
    def start(self, size: int, hash_block: Hash) -> None:
        self.pool = BlockPool(size)
        self.cache = PrefixCache(self.pool, hash_block)
        self.contents: dict[int, Content | None] = dict.fromkeys(range(size))
        self.sessions: list[Session] = []
        self.pins: dict[tuple[Root, tuple[int, ...]], list[int]] = {}

    def a_session(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.sessions))

    def advance(self, session: Session, token_ids: list[int]) -> None:
        """Appends tokens in passes that cross no eviction, until the pool has no block left."""
        while token_ids:
            state = session.state
            num_rows = min(state.room, len(token_ids))
            if not session.table.grow(state.num_slots + num_rows, self.cache.allocate):
                return
            for block_id in session.table.block_ids[state.num_slots // BLOCK_TOKENS :]:
                assert self.pool.holders(block_id) == 1, f"a write into shared block {block_id}"
                assert not self.pool.is_indexed(block_id)
                self.contents[block_id] = None
            session.token_ids += token_ids[:num_rows]
            del token_ids[:num_rows]
            self.write_through(session, state, num_rows)

    def write_through(self, session: Session, before: RingState, num_rows: int) -> None:
        """Full blocks may be indexed; then the ring turns."""
        table = session.table
        for entry in range(before.num_slots // BLOCK_TOKENS, table.num_full_blocks):
            last = before.num_tokens - before.num_slots + (entry + 1) * BLOCK_TOKENS
            if last <= session.state.layout.capacity:
                seen = (session.root, tuple(session.token_ids[:last]))
                self.contents[table.block_ids[entry]] = seen
        if before.num_evictions == 0:
            indexable = session.state.num_indexable_blocks
            table.block_ids = self.cache.insert(
                session.root,
                session.token_ids[: indexable * BLOCK_TOKENS],
                table.block_ids,
                start=session.inserted,
            )
            session.inserted = indexable
        _, eviction = before.commit(num_rows)
        if eviction is not None:
            table.evict(self.pool, eviction.source_entries, eviction.destination_entries)

    @rule(
        root=st.sampled_from([ROOT, ROOT, *OTHER_ROOTS]),
        names=st.lists(st.integers(0, 1), max_size=5),
        rest=st.sampled_from([0, 0, 5]),
        layout=st.sampled_from([None, None, RingLayout(16, 32, 16), RingLayout(16, 64, 32)]),
    )
    def open(self, root: Root, names: list[int], rest: int, layout: RingLayout | None) -> None:
        token_ids = tokens_of(*names) + [7] * rest
        session = Session(root, layout)
        usable = min(session.state.layout.capacity - 1, len(token_ids))
        before, known = self.cache.counters, self.cache.num_known(root, token_ids[:usable])
        found = self.cache.match(root, token_ids[:usable])
        assert len(found) == known
        after = self.cache.counters
        assert after.hit_blocks - before.hit_blocks == known
        assert after.missed_blocks - before.missed_blocks == usable // BLOCK_TOKENS - known
        for entry, block_id in enumerate(found):
            seen = tuple(token_ids[: (entry + 1) * BLOCK_TOKENS])
            assert self.contents[block_id] == (root, seen), "a hit on other tokens"
        session.table = BlockTable(found, known * BLOCK_TOKENS)
        session.token_ids = token_ids[: known * BLOCK_TOKENS]
        session.inserted = known
        self.sessions.append(session)
        self.advance(session, token_ids[known * BLOCK_TOKENS :])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), name=st.integers(0, 1), size=st.sampled_from([1, 11, 16, 40, 70]))
    def extend(self, data: st.DataObject, name: int, size: int) -> None:
        session = self.a_session(data)
        token_ids = (tokens_of(name) * 6)[len(session.token_ids) % BLOCK_TOKENS :]
        self.advance(session, token_ids[:size])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session = self.a_session(data)
        fork = session.table.fork(self.pool, self.cache.allocate)
        if fork is not None:
            if fork.copy is not None:
                self.contents[fork.copy.destination] = None
            copy = Session(session.root, session.layout, fork.table, session.token_ids.copy())
            copy.inserted = session.inserted
            self.sessions.append(copy)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = self.a_session(data)
        session.table.release(self.pool)
        self.sessions.remove(session)

    @precondition(lambda self: any(session.layout is None for session in self.sessions))
    @rule(data=st.data())
    def drop_and_return(self, data: st.DataObject) -> None:
        """A session's tokens stay, and what the cache still has is not computed again."""
        session = data.draw(st.sampled_from([s for s in self.sessions if s.layout is None]))
        session.table.release(self.pool)
        self.sessions.remove(session)
        names = [token_ids // 100 for token_ids in session.token_ids[::BLOCK_TOKENS]]
        self.open(session.root, names, 0, None)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        cached, free = self.pool.num_cached, self.pool.num_free
        assert self.cache.evict(count) == min(count, cached)
        assert self.pool.num_free == free + min(count, cached)

    @rule(count=st.integers(1, 12))
    def take_and_give_back(self, count: int) -> None:
        """All that is not held can be had, and more cannot."""
        available = self.pool.counts.available
        block_ids = self.cache.allocate(count)
        assert (block_ids is not None) == (count <= available)
        for block_id in block_ids or ():
            self.contents[block_id] = None
        self.pool.free_many(block_ids or ())

    @rule(
        root=st.sampled_from([ROOT, OTHER_ROOTS[0]]), names=st.lists(st.integers(0, 1), max_size=3)
    )
    def pin(self, root: Root, names: list[int]) -> None:
        token_ids = tokens_of(*names)
        known = self.cache.num_known(root, token_ids)
        assert self.cache.pin(root, token_ids) == known * BLOCK_TOKENS
        self.pins[root, tuple(token_ids)] = self.cache.match(root, token_ids)
        self.pool.free_many(self.pins[root, tuple(token_ids)])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        root, token_ids = data.draw(st.sampled_from(list(self.pins)))
        del self.pins[root, token_ids]
        self.cache.unpin(root, token_ids)
        with pytest.raises(UsageError, match="not pinned"):
            self.cache.unpin(root, token_ids)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.cache.check()
        hands: Counter[int] = Counter()
        for session in self.sessions:
            hands.update(session.table.block_ids)
            assert session.table.num_slots == session.state.num_slots
        for pinned in self.pins.values():
            hands.update(pinned)
        assert {i: self.pool.holders(i) for i in hands} == hands
        assert self.pool.counts.held == len(hands)

    @invariant()
    def pins_stay_known(self) -> None:
        if not hasattr(self, "pool"):
            return
        for (root, token_ids), pinned in self.pins.items():
            assert self.cache.num_known(root, token_ids) >= len(pinned)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=120,
    stateful_step_count=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(20)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool)


def test_leaves_go_before_parents_and_the_oldest_first(pool: BlockPool, cache: PrefixCache) -> None:
    stem, first = tokens_of(1, 2), tokens_of(1, 2, 3, 4)
    second = tokens_of(1, 2, 5)
    cached_chain(cache, pool, first)
    cached_chain(cache, pool, second)
    left = []
    while cache.evict(1):
        known = (cache.num_known(ROOT, first), cache.num_known(ROOT, second))
        left.append((*known, cache.num_known(ROOT, stem)))
    assert left == [(3, 3, 2), (2, 3, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0)]
    assert cache.counters.evicted_blocks == 5 and cache.counters.evicted_tokens == 80


def test_a_match_makes_blocks_recent(pool: BlockPool, cache: PrefixCache) -> None:
    one, other = tokens_of(1, 2), tokens_of(3, 4)
    cached_chain(cache, pool, one)
    cached_chain(cache, pool, other)
    pool.free_many(cache.match(ROOT, one))
    cache.evict(2)
    assert (cache.num_known(ROOT, one), cache.num_known(ROOT, other)) == (2, 0)


def test_what_was_matched_is_not_evicted_for_the_rest(pool: BlockPool, cache: PrefixCache) -> None:
    """The matched prefix is the oldest in the pool, and the pool is full of cached blocks."""
    old = cached_chain(cache, pool, tokens_of(1, 2))
    cached_chain(cache, pool, tokens_of(*range(10, 28)))
    assert pool.num_free == 0
    matched = cache.match(ROOT, tokens_of(1, 2, 3))
    rest = cache.allocate(18)
    assert matched == old and rest is not None and not set(rest) & set(old)
    assert cache.allocate(1) is None


def test_an_allocation_that_cannot_be_had_evicts_nothing(
    pool: BlockPool, cache: PrefixCache
) -> None:
    cached_chain(cache, pool, tokens_of(1, 2))
    assert cache.allocate(21) is None
    assert cache.num_known(ROOT, tokens_of(1, 2)) == 2


@pytest.mark.parametrize("other", OTHER_ROOTS)
def test_roots_share_nothing(pool: BlockPool, cache: PrefixCache, other: Root) -> None:
    cached_chain(cache, pool, tokens_of(1, 2))
    assert cache.match(other, tokens_of(1, 2)) == []
    own = pool.allocate_many(2)
    assert own is not None
    assert cache.insert(other, tokens_of(1, 2), own) == list(own)
    assert cache.match(other, tokens_of(1, 2)) == list(own) != cache.match(ROOT, tokens_of(1, 2))


def test_a_block_is_found_only_behind_its_parents(pool: BlockPool, cache: PrefixCache) -> None:
    cached_chain(cache, pool, tokens_of(1, 2))
    assert cache.num_known(ROOT, tokens_of(2)) == 0
    assert cache.num_known(ROOT, tokens_of(1, 2)[:31]) == 1
    assert cache.num_known(ROOT, tokens_of(1, 1, 2)) == 1


def test_the_same_text_computed_twice_is_kept_once(pool: BlockPool, cache: PrefixCache) -> None:
    """Two sessions that started together; the second inserts what the first inserted."""
    token_ids = tokens_of(1, 2, 3)
    first, second = pool.allocate_many(3), pool.allocate_many(4)
    assert first is not None and second is not None
    assert cache.insert(ROOT, token_ids, first) == list(first)
    assert cache.insert(ROOT, token_ids, second) == [*first, second[3]]
    assert pool.check().held == 4
    assert [pool.holders(i) for i in first] == [2, 2, 2]


def test_generated_tokens_are_found_by_the_next_turn(pool: BlockPool, cache: PrefixCache) -> None:
    table, token_ids = BlockTable(), tokens_of(1)
    assert table.grow(16, cache.allocate)
    table.block_ids = cache.insert(ROOT, token_ids, table.block_ids)
    for token_id in tokens_of(2):
        token_ids.append(token_id)
        assert table.grow(len(token_ids), cache.allocate)
    table.block_ids = cache.insert(ROOT, token_ids, table.block_ids, start=1)
    assert cache.match(ROOT, [*token_ids, 5]) == table.block_ids
    assert cache.counters == PrefixCounters(hit_blocks=2)
    assert cache.counters.hit_tokens == 32


def test_pins_outlive_a_full_pool(pool: BlockPool, cache: PrefixCache) -> None:
    system = [*tokens_of(1, 2), 5, 6]
    assert cache.pin(ROOT, system) == 0, "nothing is known yet"
    cached_chain(cache, pool, tokens_of(1, 2))
    assert cache.pin(ROOT, system) == cache.pin(ROOT, system) == 32
    assert cache.num_pinned_blocks == 2
    assert cache.allocate(19) is None
    assert cache.allocate(18) is not None
    assert cache.num_known(ROOT, system) == 2
    cache.unpin(ROOT, system)
    assert pool.check().cached == 2


def test_blocks_a_stream_left_behind_can_be_had(pool: BlockPool, cache: PrefixCache) -> None:
    """It frees its oldest first, while it holds their children: those leave the index instead."""
    layout, table = RingLayout(16, 64, 32), BlockTable()
    token_ids = tokens_of(*range(layout.num_blocks))
    assert table.grow(layout.capacity, cache.allocate)
    table.block_ids = cache.insert(ROOT, token_ids, table.block_ids)
    _, eviction = RingState(layout).commit(layout.capacity)
    assert eviction is not None
    table.evict(pool, eviction.source_entries, eviction.destination_entries)
    assert cache.num_known(ROOT, token_ids) == layout.num_blocks, "they may still serve others"
    assert pool.counts.cached == 2
    assert cache.allocate(pool.num_free + 2) is not None
    assert cache.num_known(ROOT, token_ids) == 1, "the sinks"
    assert cache.counters.evicted_blocks == 2 and cache.counters.orphaned_blocks == 4
    cache.check()


def test_collisions_cost_hits_and_nothing_else() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, lambda parent, ids: b"")
    assert cached_chain(cache, pool, tokens_of(1, 2))
    assert cache.num_known(ROOT, tokens_of(1, 2)) == 1
    assert cache.match(ROOT, tokens_of(2)) == []
    assert pool.check().cached == 1


def test_threads_share_a_cache() -> None:
    """Sessions that start from two prompts, on four threads, in a pool that is always full."""
    pool = BlockPool(24)
    cache = PrefixCache(pool)
    contents: dict[int, list[int]] = {}
    faults: list[str] = []

    def work(me: int) -> None:
        chance = random.Random(me)
        for turn in range(300):
            names = [chance.randrange(2) for _ in range(4)] + [10 + me, turn]
            token_ids = tokens_of(*names)
            found = cache.match(ROOT, token_ids)
            for entry, block_id in enumerate(found):
                if contents[block_id] != names[: entry + 1]:
                    faults.append(f"{contents[block_id]} for {names[: entry + 1]}")
            added = cache.allocate(len(names) - len(found))
            if added is not None:
                for entry, block_id in enumerate(added, start=len(found)):
                    contents[block_id] = names[: entry + 1]
                found = cache.insert(ROOT, token_ids, [*found, *added], start=len(found))
            pool.free_many(found)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.check().held == 0
    cache.check()
