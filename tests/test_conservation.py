"""Ten thousand random operations: no block is lost, and none is ever in two private hands."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hands import assert_all_is_back, audit, ids, params, said, watchdog
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.errors import ContextFullError, PoolFullError
from headrace.runtime.answer import Answer
from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from headrace.runtime.engine import Engine
from headrace.runtime.prefix import PrefixCache, Root
from headrace.runtime.ring import RingLayout, RingState
from headrace.runtime.session import Session

ROOT = Root("f16", "exact", "model")


@dataclass(eq=False)
class Owner:
    """A session: its table, and for each block whether it was written by it alone."""

    layout: RingLayout | None
    table: BlockTable = field(default_factory=BlockTable)
    num_tokens: int = 0
    text: int = 0
    """Owners of the same text have the same tokens."""

    @property
    def state(self) -> RingState:
        return RingState(self.layout or RingLayout(16, 16 * 10**6, 16), self.num_tokens)

    def token_ids(self) -> list[int]:
        return [self.text * 1000 + i for i in range(self.num_tokens)]


class Blocks:
    """Sessions and streams that share a pool. `hands` is the shadow: who holds which block."""

    done: ClassVar[Counter[str]] = Counter()

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        size = self.chance.randint(6, 40)
        self.pool = BlockPool(size)
        self.cache = PrefixCache(self.pool)
        self.owners: list[Owner] = []
        self.hands: dict[int, set[Owner]] = {i: set() for i in range(size)}

    def any_owner(self) -> Owner:
        return self.chance.choice(self.owners)

    def hand(self, owner: Owner, before: list[int]) -> None:
        """Writes into the shadow what an operation has done to an owner's table."""
        now = owner.table.block_ids
        assert len(set(now)) == len(now)
        for block_id in set(before) - set(now):
            self.hands[block_id].remove(owner)
        for block_id in set(now) - set(before):
            self.hands[block_id].add(owner)

    def open(self) -> None:
        text, num_tokens = self.chance.randrange(3), self.chance.randrange(100)
        is_stream = self.chance.random() < 0.4
        self.done["open"] += 1
        owner = Owner(RingLayout(16, 32, 16) if is_stream else None, text=text)
        tokens = [text * 1000 + i for i in range(min(num_tokens, 48 if is_stream else num_tokens))]
        found = self.cache.match(ROOT, tokens)
        self.done["match"] += bool(found)
        owner.table = BlockTable(found, len(found) * BLOCK_TOKENS)
        owner.num_tokens = owner.table.num_slots
        self.owners.append(owner)
        self.hand(owner, [])

    def grow(self) -> None:
        """Allocates, evicting what nobody holds; inserts what became full; lets a ring turn."""
        owner = self.any_owner()
        before, state = owner.table.block_ids.copy(), owner.state
        num_tokens = min(self.chance.randint(1, 48), state.room)
        available = self.pool.counts.available
        missing = owner.table.missing_blocks(state.num_slots + num_tokens)
        cached = self.pool.num_cached
        grown = owner.table.grow(state.num_slots + num_tokens, self.cache.allocate)
        assert grown == (missing <= available)
        if not grown:
            self.done["refused"] += 1
            return
        self.done["grow"] += 1
        self.done["evict"] += self.pool.num_cached < cached
        for block_id in owner.table.block_ids[len(before) :]:
            assert not self.hands[block_id], f"block {block_id} is in two private hands"
        self.hand(owner, before)
        first = state.num_slots // BLOCK_TOKENS
        for block_id in owner.table.block_ids[first:]:
            assert self.hands[block_id] == {owner}, f"a write into another's block {block_id}"
        owner.num_tokens += num_tokens
        if not state.num_evictions and first < owner.table.num_full_blocks:
            before = owner.table.block_ids.copy()
            known = owner.token_ids()
            owner.table.block_ids = self.cache.insert(ROOT, known, before, first)
            self.done["insert"] += 1
            self.hand(owner, before)
        _, eviction = state.commit(num_tokens)
        if eviction is not None:
            before = owner.table.block_ids.copy()
            owner.table.evict(self.pool, eviction.source_entries, eviction.destination_entries)
            self.done["ring"] += 1
            self.hand(owner, before)

    def fork(self) -> None:
        owner = self.any_owner()
        forked = owner.table.fork(self.pool, self.cache.allocate)
        if forked is None:
            self.done["refused"] += 1
            return
        self.done["fork"] += 1
        copy = Owner(owner.layout, forked.table, owner.num_tokens, owner.text)
        shared = set(owner.table.block_ids) & set(forked.table.block_ids)
        assert shared == set(owner.table.block_ids[: owner.table.num_full_blocks])
        self.owners.append(copy)
        self.hand(copy, [])

    def drop(self) -> None:
        """Parked and dropped: its tokens stay, and it starts again from what is still known."""
        owner = self.any_owner()
        if owner.layout is not None:
            return
        self.done["drop"] += 1
        before = owner.table.block_ids.copy()
        owner.table.release(self.pool)
        self.hand(owner, before)
        found = self.cache.match(ROOT, owner.token_ids())
        owner.table = BlockTable(found, len(found) * BLOCK_TOKENS)
        owner.num_tokens = owner.table.num_slots
        self.hand(owner, [])

    def free(self) -> None:
        owner = self.any_owner()
        self.done["free"] += 1
        before = owner.table.block_ids.copy()
        owner.table.release(self.pool)
        self.hand(owner, before)
        self.owners.remove(owner)

    def conserved(self) -> None:
        self.cache.check()
        counts = self.pool.check()
        assert counts.total == self.pool.num_blocks
        for block_id, hands in self.hands.items():
            assert self.pool.holders(block_id) == len(hands)
        for owner in self.owners:
            for block_id in owner.table.block_ids[owner.table.num_full_blocks :]:
                assert self.hands[block_id] == {owner}
                assert not self.pool.is_indexed(block_id)


def test_ten_thousand_operations_lose_no_block_and_share_no_private_one() -> None:
    Blocks.done.clear()

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=20, deadline=None, phases=[Phase.generate])
    def run(seed: int) -> None:
        blocks = Blocks(seed)
        for _ in range(500):
            kinds = ["grow", "grow", "grow", "fork", "drop"] if blocks.owners else ["open"]
            kinds += ["free", "free"] if len(blocks.owners) > 8 else ["open"]
            getattr(blocks, blocks.chance.choice(kinds))()
            blocks.conserved()
            Blocks.done["operations"] += 1

    run()
    assert Blocks.done["operations"] >= 10_000
    for kind in ("open", "grow", "fork", "drop", "free", "match", "insert", "ring", "evict"):
        assert Blocks.done[kind] >= 100, Blocks.done


@dataclass(eq=False)
class Twin:
    """A session in the small pool, and the same one where there is room for all."""

    small: Session
    roomy: Session
    answers: tuple[Answer, Answer] | None = None

    def close(self) -> None:
        self.small.close()
        self.roomy.close()


class Sessions:
    """Sessions of a real model on two lanes and a small pool, and their twins without pressure."""

    small: LLM
    roomy: LLM
    done: ClassVar[Counter[str]] = Counter()

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        num_blocks = self.chance.choice([10, 12, 16])
        manifest = self.small.bundle.manifest
        self.small.engine = Engine(
            self.small.backend,
            manifest.config,
            manifest.kv,
            num_blocks,
            self.roomy.engine.root("exact"),
        )
        self.twins: list[Twin] = []
        self.pins: list[list[int]] = []

    def a_twin(self) -> Twin:
        return self.chance.choice(self.twins)

    def a_text(self, most: int) -> list[int]:
        return ids(self.chance.randint(1, most), self.chance.randrange(3))

    def both(self, twin: Twin, what: Any) -> None:
        """Does the same to both, with the same outcome; a refusal by the small pool undoes it."""
        if twin.answers is not None:
            self.end(twin)
        try:
            mine = what(twin.small)
        except ContextFullError:
            self.done["context full"] += 1
            with pytest.raises(ContextFullError):
                what(twin.roomy)
            self.forget(twin)
            return
        except PoolFullError:
            self.done["pool full"] += 1
            assert twin.small.num_tokens == twin.roomy.num_tokens
            return
        other = what(twin.roomy)
        assert (mine and said(mine)) == (other and said(other))
        assert twin.small.num_tokens == twin.roomy.num_tokens

    def forget(self, twin: Twin) -> None:
        twin.close()
        self.twins.remove(twin)

    def end(self, twin: Twin) -> None:
        assert twin.answers is not None
        for answer in twin.answers:
            answer.close()
        twin.answers = None

    def open(self) -> None:
        layout: dict[str, Any] = {"mode": "full"}
        if self.chance.random() < 0.3:
            layout = {"mode": "stream", "sinks": 16, "window": 32, "unit": 16}
        try:
            small = self.small.session(**layout)
        except PoolFullError:
            self.done["pool full"] += 1
            return
        self.done["open"] += 1
        self.twins.append(Twin(small, self.roomy.session(**layout)))

    def feed(self) -> None:
        text = self.a_text(40)
        self.both(self.a_twin(), lambda session: session.feed(text))

    def generate(self) -> None:
        prompt = self.a_text(20)
        self.both(self.a_twin(), lambda session: session.generate(prompt, params(5)))

    def answer(self) -> None:
        """An answer that is not read to its end: paused, or dropped in the middle."""
        twin = self.a_twin()
        if twin.answers is not None:
            self.end(twin)
        if twin.small.num_tokens > 80 and twin.small.mode == "full":
            return
        try:
            mine = twin.small.generate(ids(3), params(40), stream=True)
        except PoolFullError:
            return
        other = twin.roomy.generate(ids(3), params(40), stream=True)
        for _ in range(self.chance.randrange(6)):
            try:
                given = next(mine)
            except PoolFullError:  # a stream came before its first pass
                self.forget(twin)
                return
            assert given == next(other)
        if self.chance.random() < 0.6:
            twin.answers = mine, other

    def go_on(self) -> None:
        answering = [twin for twin in self.twins if twin.answers]
        if not answering:
            return
        twin = self.chance.choice(answering)
        assert twin.answers is not None
        try:
            mine = next(twin.answers[0], None)
        except PoolFullError:  # what it lent is a stream's or a pin's
            self.done["lent for good"] += 1
            self.forget(twin)
            return
        assert mine == next(twin.answers[1], None)

    def fork(self) -> None:
        twin = self.a_twin()
        try:
            small = twin.small.fork()
        except PoolFullError:
            assert twin.small.mode == "stream"
            self.done["pool full"] += 1
            return
        self.done["fork"] += 1
        self.twins.append(Twin(small, twin.roomy.fork()))

    def close(self) -> None:
        """Closed, or forgotten with all that belongs to it."""
        twin = self.a_twin()
        self.twins.remove(twin)
        if self.chance.random() < 0.5:
            twin.close()

    def pin(self) -> None:
        text = self.a_text(50)
        try:
            assert self.small.pin(text) == len(text) // 16 * 16
        except PoolFullError:
            self.done["pool full"] += 1
            return
        if text not in self.pins:
            self.pins.append(text)

    def unpin(self) -> None:
        text = self.chance.choice(self.pins)
        self.pins.remove(text)
        self.small.unpin(text)

    def operation(self) -> None:
        kinds = ["open"] if len(self.twins) < 8 else []
        kinds += ["feed", "generate", "answer", "answer", "go_on", "go_on"] if self.twins else []
        kinds += ["fork"] if 0 < len(self.twins) < 8 else []
        kinds += ["close"] if len(self.twins) > 3 else []
        kinds += ["pin"] if len(self.pins) < 2 else ["unpin"]
        kind = self.chance.choice(kinds)
        self.done[kind] += 1
        getattr(self, kind)()
        audit(self.small.engine)

    def end_all(self) -> None:
        for twin in self.twins:
            twin.close()
        self.twins.clear()
        for text in self.pins:
            self.small.unpin(text)
        stats = self.small.engine.stats
        self.done["dropped"] += stats.dropped_sequences
        self.done["evicted"] += stats.prefix.evicted_blocks
        self.done["lent"] += stats.lent_requests
        assert_all_is_back(self.small)


@pytest.fixture
def models(tiny_bundle: Path, shared_cache: Path) -> Iterator[tuple[LLM, LLM]]:
    with (
        LLM(tiny_bundle, cache=shared_cache, lanes=2) as small,
        LLM(tiny_bundle, cache=shared_cache, lanes=4, pool=8192) as roomy,
    ):
        yield small, roomy


def test_random_sessions_lose_no_block_and_change_no_bit(models: tuple[LLM, LLM]) -> None:
    Sessions.small, Sessions.roomy = models
    Sessions.done.clear()

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=12, deadline=None, phases=[Phase.generate])
    def run(seed: int) -> None:
        sessions = Sessions(seed)
        for _ in range(80):
            sessions.operation()
        sessions.end_all()

    with watchdog(300):
        run()
    for kind in ("fork", "go_on", "close", "unpin", "pool full", "dropped", "evicted", "lent"):
        assert Sessions.done[kind] >= 5, Sessions.done
