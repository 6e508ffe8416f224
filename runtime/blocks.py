"""The block pool and block tables: which block is whose, in integers alone.

A block is in one of three states. `free` blocks may be allocated. `held` blocks have at least one
holder. `cached` blocks have no holder, but the prefix cache still finds their contents; it may
evict them.

              allocate              free, not indexed
      free ────────────────▶ held ────────────────────▶ free
        ▲                    │  ▲
        │ unindex       free,│  │ share
        │            indexed ▼  │
        └────────────────── cached
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.errors import BlockUnderflowError, DoubleFreeError, ForeignBlockError, PoolError

BLOCK_TOKENS = 16
"""Tokens whose keys and values one block holds."""

Allocate = Callable[[int], Sequence[int] | None]
"""So many blocks, all or None: `BlockPool.allocate_many`, or `PrefixCache.allocate`."""


def blocks_for(num_slots: int) -> int:
    """Blocks that `num_slots` slots take up."""
    return -(-num_slots // BLOCK_TOKENS)


class _Bitmap:
    """A set of small integers: words of bits, and above them one word that says which are not 0."""

    # with 256 bits, both levels stay short integers up to about 100,000 blocks
    WORD_BITS = 256

    def __init__(self, size: int) -> None:
        """All of 0 .. size - 1."""
        full, rest = divmod(size, self.WORD_BITS)
        self._words = [(1 << self.WORD_BITS) - 1] * full + [(1 << rest) - 1] * (rest > 0)
        self._summary = (1 << len(self._words)) - 1
        self.count = size

    def pop_lowest(self) -> int:
        """There must be one."""
        summary = self._summary
        index = (summary & -summary).bit_length() - 1
        word = self._words[index]
        lowest = word & -word
        word ^= lowest
        self._words[index] = word
        if not word:
            self._summary = summary & (summary - 1)
        self.count -= 1
        return index * self.WORD_BITS + lowest.bit_length() - 1

    def add(self, value: int) -> None:
        index, bit = divmod(value, self.WORD_BITS)
        self._words[index] |= 1 << bit
        self._summary |= 1 << index
        self.count += 1

    def __iter__(self) -> Iterator[int]:
        for index, word in enumerate(self._words):
            while word:
                yield index * self.WORD_BITS + (word & -word).bit_length() - 1
                word &= word - 1


@dataclass(frozen=True)
class PoolCounts:
    """How many blocks of a pool are in which state."""

    free: int
    held: int
    cached: int

    @property
    def total(self) -> int:
        return self.free + self.held + self.cached

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones, and cached ones once evicted."""
        return self.free + self.cached


class BlockPool:
    """Blocks 0 .. num_blocks - 1, all free at first. The lowest free id is allocated first.

    Safe to call from several threads; `lock` may be held to make several calls one. A call about
    one block that raises has changed nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.lock = threading.RLock()
        self._free = _Bitmap(num_blocks)
        self._holders = [0] * num_blocks
        self._indexed: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, the one that lost its last holder first is first."""

    @property
    def num_free(self) -> int:
        return self._free.count

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def counts(self) -> PoolCounts:
        with self.lock:
            free, cached = self.num_free, self.num_cached
        return PoolCounts(free, self.num_blocks - free - cached, cached)

    def holders(self, block_id: int) -> int:
        """Reference count; 0 for free and cached blocks."""
        self._require_own(block_id)
        return self._holders[block_id]

    def is_indexed(self, block_id: int) -> bool:
        return block_id in self._indexed

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def oldest_cached(self) -> int | None:
        """The cached block that lost its last holder first."""
        with self.lock:
            return next(iter(self._cached), None)

    def allocate(self) -> int | None:
        """A free block, now held once; None when no block is free."""
        with self.lock:
            if not self._free.count:
                return None
            block_id = self._free.pop_lowest()
            self._holders[block_id] = 1
            return block_id

    def allocate_many(self, num_blocks: int) -> tuple[int, ...] | None:
        """So many free blocks in rising order, or None when there are fewer."""
        with self.lock:
            if num_blocks > self._free.count:
                return None
            block_ids = tuple(self._free.pop_lowest() for _ in range(num_blocks))
            for block_id in block_ids:
                self._holders[block_id] = 1
            return block_ids

    def share(self, block_id: int) -> None:
        """Adds a holder to a held or cached block."""
        with self.lock:
            self._require_own(block_id)
            if not self._holders[block_id]:
                if block_id not in self._cached:
                    raise PoolError(f"block {block_id} is free and cannot be shared; allocate one")
                del self._cached[block_id]
            self._holders[block_id] += 1

    def free(self, block_id: int) -> None:
        """Takes one holder away; without holders the block is cached if indexed, else free."""
        with self.lock:
            self._require_own(block_id)
            holders = self._holders[block_id]
            if holders > 1:
                self._holders[block_id] = holders - 1
            elif holders:
                self._holders[block_id] = 0
                if block_id in self._indexed:
                    self._cached[block_id] = None
                else:
                    self._free.add(block_id)
            elif block_id in self._cached:
                raise BlockUnderflowError(
                    f"block {block_id} is cached: it has no holder to free it"
                )
            else:
                raise DoubleFreeError(f"block {block_id} is free already; it was freed twice")

    def free_many(self, block_ids: Sequence[int]) -> None:
        """Frees a table's blocks, the last first, so that tails are evicted before their parents.

        A wrong id raises after the ones behind it were freed.
        """
        with self.lock:
            for block_id in reversed(block_ids):
                self.free(block_id)

    def index(self, block_id: int) -> None:
        """Notes that the prefix cache finds a held block: it must outlive its last holder."""
        with self.lock:
            if not self.holders(block_id):
                raise PoolError(f"block {block_id} is not held and cannot be indexed")
            if block_id in self._indexed:
                raise PoolError(f"block {block_id} is indexed already")
            self._indexed.add(block_id)

    def unindex(self, block_id: int) -> None:
        """Takes `index` back; a cached block becomes free."""
        with self.lock:
            self._require_own(block_id)
            if block_id not in self._indexed:
                raise PoolError(f"block {block_id} is not indexed")
            self._indexed.remove(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.add(block_id)

    def check(self) -> PoolCounts:
        """Counts every block anew; raises PoolError unless free + held + cached == total."""
        with self.lock:
            free = set(self._free)
            held = {i for i, holders in enumerate(self._holders) if holders}
            cached = set(self._cached)
            counted = PoolCounts(len(free), len(held), len(cached))
            overlap = (free & held) | (free & cached) | (held & cached)
            if overlap or counted.total != self.num_blocks or counted != self.counts:
                raise PoolError(
                    f"blocks are not conserved: {counted} of {self.num_blocks}, "
                    f"kept as {self.counts}, in two states {sorted(overlap)}"
                )
            if not cached <= self._indexed <= held | cached:
                raise PoolError("the indexed blocks are not those that are cached and some held")
            return counted

    def _require_own(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ForeignBlockError(
                f"block {block_id} is not of this pool, whose ids are 0 to {self.num_blocks - 1}"
            )


@dataclass(frozen=True)
class BlockCopy:
    """Rows that a fork must own itself: the partly filled last block."""

    entry: int
    """Where in the table: slots from entry * 16 on."""
    source: int
    destination: int
    num_rows: int


@dataclass
class BlockTable:
    """A session's blocks in the order of its slots; slot i is row i % 16 of `block_ids[i // 16]`.

    The table holds each of its blocks once. Only the session that owns the table may use it.
    """

    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0
    """Slots in use: a session's tokens; a stream's `RingState.num_slots`."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def num_full_blocks(self) -> int:
        return self.num_slots // BLOCK_TOKENS

    @property
    def partial_rows(self) -> int:
        """Rows used of the partly filled last block; 0 when the last block is full."""
        return self.num_slots % BLOCK_TOKENS

    @property
    def unused_rows(self) -> int:
        """Rows allocated and not in use."""
        return self.num_blocks * BLOCK_TOKENS - self.num_slots

    def missing_blocks(self, num_slots: int) -> int:
        """Blocks to be added before `num_slots` slots can be in use."""
        return max(0, blocks_for(num_slots) - self.num_blocks)

    def grow(self, num_slots: int, allocate: Allocate) -> bool:
        """Puts `num_slots` slots in use, with the blocks they need; False: nothing was changed."""
        assert num_slots >= self.num_slots
        added = allocate(self.missing_blocks(num_slots))
        if added is None:
            return False
        self.block_ids += added
        self.num_slots = num_slots
        return True

    def fork(self, pool: BlockPool, allocate: Allocate) -> Fork | None:
        """A second table of the same slots. Full blocks are shared, a partly filled one is not.

        Returns:
            the table and the copy its owner must make before using it; None when no block could
            be had for the copy, and then nothing was changed.
        """
        full = self.block_ids[: self.num_full_blocks]
        own = allocate(1 if self.partial_rows else 0)
        if own is None:
            return None
        for block_id in full:
            pool.share(block_id)
        copies = (
            BlockCopy(len(full), self.block_ids[len(full)], block_id, self.partial_rows)
            for block_id in own
        )
        return Fork(BlockTable([*full, *own], self.num_slots), next(copies, None))

    def evict(self, pool: BlockPool, source: range, destination: range) -> None:
        """Moves a stream's full tail blocks to the entries of the oldest ones, which it frees.

        Args:
            source: the tail's entries, the last of the table.
            destination: as many entries before them.
        """
        assert source.stop == self.num_blocks and len(source) == len(destination)
        oldest = self.block_ids[destination.start : destination.stop]
        self.block_ids[destination.start : destination.stop] = self.block_ids[source.start :]
        del self.block_ids[source.start :]
        self.num_slots = source.start * BLOCK_TOKENS
        pool.free_many(oldest)

    def release(self, pool: BlockPool) -> None:
        """Frees all blocks and empties the table; of an empty one, nothing."""
        block_ids, self.block_ids, self.num_slots = self.block_ids, [], 0
        pool.free_many(block_ids)


@dataclass(frozen=True)
class Fork:
    """What `BlockTable.fork` made."""

    table: BlockTable
    copy: BlockCopy | None
