"""The prefix cache: full blocks found again by the tokens they hold and all tokens before them.

A block's key is a hash of its parent's key and its own 16 token ids, as in vLLM (Kwon et al., 2023,
and its automatic prefix caching). Ids and parent are compared on a hit, so a collision costs a hit
and never gives wrong blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import UsageError
from headrace.runtime.blocks import BLOCK_TOKENS, BlockPool
from headrace.runtime.request import Exactness

Hash = Callable[[bytes, tuple[int, ...]], bytes]
"""Key of a block from its parent's key and its token ids."""


@dataclass(frozen=True)
class Root:
    """Where a chain of hashes starts: what must agree before keys and values can be shared."""

    kv: str
    """Cache type, a key of `KV_DTYPES`."""
    exactness: Exactness
    """How the rows were computed: other passes give other bits."""
    model: str
    """Identity of the weights."""


@dataclass(frozen=True)
class PrefixCounters:
    """What the cache did since it was made, in blocks; a block is 16 tokens."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    """Full blocks that were asked for and not found."""
    evicted_blocks: int = 0
    orphaned_blocks: int = 0
    """Blocks in use that can no longer be found, since one before them was evicted."""

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * BLOCK_TOKENS

    @property
    def missed_tokens(self) -> int:
        return self.missed_blocks * BLOCK_TOKENS

    @property
    def evicted_tokens(self) -> int:
        return self.evicted_blocks * BLOCK_TOKENS


@dataclass(eq=False)
class _Node:
    """A root, or a block that can be found; its children are the blocks that follow it."""

    key: bytes
    token_ids: tuple[int, ...] = ()
    block_id: int = -1
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    """By block id."""


def chained(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """The same in every process, unlike Python's own hashes of strings."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Finds blocks of a pool by token ids. Safe to call from several threads.

    Whoever inserts answers for the contents: block i of a chain holds the keys and values of
    tokens 16 i .. 16 i + 15 at those positions, each having seen exactly the tokens before it. Of
    a stream that is so for `RingState.num_indexable_blocks` blocks and no others.
    """

    def __init__(self, pool: BlockPool, hash_block: Hash = chained, *, is_on: bool = True) -> None:
        """Switched off, it takes in nothing, and so finds nothing."""
        self._pool, self._hash, self.is_on = pool, hash_block, is_on
        self._roots: dict[Root, _Node] = {}
        self._by_key: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._pins: dict[tuple[Root, tuple[int, ...]], list[int]] = {}
        self._counters = PrefixCounters()

    @property
    def counters(self) -> PrefixCounters:
        return self._counters

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found, held or not."""
        return len(self._by_block)

    @property
    def num_pinned_blocks(self) -> int:
        with self._pool.lock:
            return len({block_id for pinned in self._pins.values() for block_id in pinned})

    def match(self, root: Root, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest known beginning of `token_ids`, each now held once more.

        The caller frees them. They are held before this returns, so no eviction can take them.
        """
        with self._pool.lock:
            found = [node.block_id for node in self._walk(root, token_ids)]
            for block_id in found:
                self._pool.share(block_id)
            missed = len(token_ids) // BLOCK_TOKENS - len(found)
            self._count(hit_blocks=len(found), missed_blocks=missed)
            return found

    def num_known(self, root: Root, token_ids: Sequence[int]) -> int:
        """Blocks that `match` would find now. Holds and counts nothing."""
        with self._pool.lock:
            return sum(1 for _ in self._walk(root, token_ids))

    def insert(
        self, root: Root, token_ids: Sequence[int], block_ids: Sequence[int], start: int = 0
    ) -> list[int]:
        """Makes full blocks findable; the caller must hold them all, and goes on holding them.

        A block whose contents are known already is freed, and the known one held in its place.

        Args:
            token_ids: from the first token on; a partly filled block at the end is left out.
            block_ids: the blocks of these tokens; more may follow.
            start: entries before this are known to be inserted; no others are looked at.

        Returns:
            the blocks to use from now on, one for each of `block_ids`.
        """
        with self._pool.lock:
            kept = list(block_ids)
            if not self.is_on:
                return kept
            node = self._by_block.get(kept[start - 1]) if start else self._root(root)
            for entry in range(start, min(len(token_ids) // BLOCK_TOKENS, len(kept))):
                if node is None:
                    break
                ids = tuple(token_ids[entry * BLOCK_TOKENS : (entry + 1) * BLOCK_TOKENS])
                node = self._add(node, ids, kept[entry])
                if node is not None and node.block_id != kept[entry]:
                    self._pool.share(node.block_id)
                    self._pool.free(kept[entry])
                    kept[entry] = node.block_id
            return kept

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """So many blocks, of which some may be evicted for it; None, and no eviction, if too few.

        The pool's own `allocate_many` evicts nothing.
        """
        with self._pool.lock:
            if num_blocks > self._pool.counts.available:
                return None
            self.evict(num_blocks - self._pool.num_free)
            return self._pool.allocate_many(num_blocks)

    def evict(self, num_blocks: int) -> int:
        """Frees up to so many unreferenced blocks: tails first, the least recently used of them.

        A block was used when its last holder freed it. Returns how many were freed.
        """
        with self._pool.lock:
            for done in range(num_blocks):
                oldest = self._pool.oldest_cached()
                if oldest is None:
                    return done
                self._evict(self._last_unreferenced(self._by_block[oldest]))
            return max(0, num_blocks)

    def pin(self, root: Root, token_ids: Sequence[int]) -> int:
        """Holds the known blocks of a prefix until `unpin`. Twice is once; blocks that have become
        known since are added.

        Returns:
            the tokens pinned: fewer than asked for where blocks are not full or not known.
        """
        with self._pool.lock:
            pinned = self._pins.setdefault((root, tuple(token_ids)), [])
            for node in list(self._walk(root, token_ids))[len(pinned) :]:
                self._pool.share(node.block_id)
                pinned.append(node.block_id)
            return len(pinned) * BLOCK_TOKENS

    def unpin(self, root: Root, token_ids: Sequence[int]) -> None:
        """Takes `pin` back. Raises UsageError for a prefix that is not pinned."""
        with self._pool.lock:
            pinned = self._pins.pop((root, tuple(token_ids)), None)
            if pinned is None:
                raise UsageError(
                    f"this prefix of {len(token_ids)} tokens is not pinned; unpin exactly what was "
                    f"pinned ({len(self._pins)} prefixes are)"
                )
            self._pool.free_many(pinned)

    def check(self) -> None:
        """Asserts that index, chains and pool agree."""
        with self._pool.lock:
            self._pool.check()
            for block_id, node in self._by_block.items():
                assert node.block_id == block_id and self._pool.is_indexed(block_id), block_id
                assert self._by_key[node.key] is node, block_id
                parent = node.parent
                assert parent is not None and parent.children[block_id] is node, block_id
                assert parent.parent is None or self._by_block[parent.block_id] is parent, block_id
            indexed = sum(self._pool.is_indexed(i) for i in range(self._pool.num_blocks))
            assert len(self._by_key) == len(self._by_block) == indexed

    def _root(self, root: Root) -> _Node:
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = _Node(hashlib.blake2b(repr(root).encode()).digest())
        return node

    def _walk(self, root: Root, token_ids: Sequence[int]) -> Iterator[_Node]:
        """Known blocks from the start of `token_ids` on."""
        node: _Node | None = self._root(root)
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            assert node is not None
            ids = tuple(token_ids[start : start + BLOCK_TOKENS])
            node = self._child(node, ids, self._hash(node.key, ids))
            if node is None:
                return
            yield node

    def _child(self, parent: _Node, ids: tuple[int, ...], key: bytes) -> _Node | None:
        node = self._by_key.get(key)
        if node is None or node.parent is not parent or node.token_ids != ids:
            return None
        return node

    def _add(self, parent: _Node, ids: tuple[int, ...], block_id: int) -> _Node | None:
        """The node of a block, a new one if need be; None when its key is another block's."""
        key = self._hash(parent.key, ids)
        if key in self._by_key:
            return self._child(parent, ids, key)
        self._pool.index(block_id)
        node = _Node(key, ids, block_id, parent)
        self._by_key[key] = self._by_block[block_id] = parent.children[block_id] = node
        return node

    def _last_unreferenced(self, node: _Node) -> _Node:
        """The unreferenced node that is deepest below `node`; itself when all below are held.

        Sessions free tails first and so leave childless blocks, but a stream frees its oldest
        blocks first.
        """
        level, last = [node], node
        while level := [child for each in level for child in each.children.values()]:
            last = next((each for each in level if self._pool.is_cached(each.block_id)), last)
        return last

    def _evict(self, node: _Node) -> None:
        """Evicts a node's block. The blocks below it are held, and leave the index only."""
        if node.parent is not None:
            del node.parent.children[node.block_id]
        forgotten = [node]
        for each in forgotten:
            forgotten += each.children.values()
            del self._by_key[each.key], self._by_block[each.block_id]
            self._pool.unindex(each.block_id)
        self._count(evicted_blocks=1, orphaned_blocks=len(forgotten) - 1)

    def _count(self, **added: int) -> None:
        now = self._counters
        self._counters = replace(now, **{k: getattr(now, k) + n for k, n in added.items()})
