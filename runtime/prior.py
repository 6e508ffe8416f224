"""The prior: what followed the last time these tokens were seen. Proposals without a model.

Plant logs repeat themselves, and answers repeat their question. An index of n-grams over past tokens
finds the latest place where the last ones stood before, and proposes what came after it ("prompt
lookup decoding", Saxena, 2023; "LLMA", Yang et al., 2023).

Memory is fixed: a ring of tokens, and for each order one table of places, addressed by a hash. Later
n-grams overwrite earlier ones, and a place is believed only when its tokens agree. Texts that must
not run into each other have SEPARATOR between them: no n-gram with it is indexed, and continuations
stop before it.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ORDERS = (12, 6, 3, 2)
"""Lengths of the n-grams that are indexed, the longest first."""

MAX_MATCH = 32
"""Matches are not measured beyond this; longer ones are no surer."""

DEFAULT_CAPACITY = 1 << 16

INDEX_BYTES = 4 + 8 * len(ORDERS)
"""Memory of an index for each token of its capacity."""

SEPARATOR = (1 << 32) - 1
"""Between texts, where a token id would be. All token ids are less."""

MULTIPLIER = 0x9E3779B97F4A7C15
"""Of the hash: Knuth's multiplicative hashing, 2^64 over the golden ratio."""

_EMPTY = -1
_WORD = (1 << 64) - 1

_SLICE_TOKENS = 256
_PAUSE_S = 1e-5


def capacity_for(num_tokens: int) -> int:
    """Of an index that holds so many tokens; at most DEFAULT_CAPACITY."""
    return min(DEFAULT_CAPACITY, 1 << max(8, (num_tokens - 1).bit_length()))


@dataclass(frozen=True)
class Match:
    """An earlier place whose tokens agree with the last ones."""

    length: int
    """Tokens that agree, at most MAX_MATCH."""
    continuation: tuple[int, ...]
    """What came after it."""


class NgramTables:
    """What an index is asked, wherever its memory lies: arrays, or views of a mapped file.

    A context needs to hold its last MAX_MATCH tokens only. They need not be in the index.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        tables: Sequence[Sequence[int]],
        size: int,
        id_limit: int = SEPARATOR,
    ) -> None:
        """`tokens` has the token of place p at p modulo the capacity.

        `tables` has, for each of ORDERS, `capacity` places (a power of two): at the hash of an
        n-gram modulo the capacity, where it ended last. Any number may stand in a table; one that
        is no place below `size` is no match. Ids from `id_limit` on end a continuation.
        """
        self._tokens = tokens
        self._tables = tables
        self._size = size
        self._id_limit = id_limit
        self._mask = len(tables[0]) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens so far, separators included; the last `capacity` of them are searchable."""
        return self._size

    def match(self, context: Sequence[int], most: int) -> Match | None:
        """The latest place that agrees with the longest end of `context`, by indexed orders.

        Returns up to `most` tokens of continuation, at least one.
        """
        return next(self._matches(context, most), None)

    def candidates(self, context: Sequence[int], most: int, count: int) -> list[Match]:
        """Up to `count` matches whose first tokens differ, the surest first.

        That is what `match` gives, then what shorter n-grams point at: a later place, after which
        something else came. There are at most as many as ORDERS. Where a continuation reaches the
        end of the index or of its text, the context that it makes is looked up again: the way on
        out of a loop.
        """
        found: dict[int, Match] = {}
        for match in self._matches(context, most):
            if len(found) == count:
                break
            if match.continuation[0] not in found:
                found[match.continuation[0]] = self._continued(context, match, most)
        return list(found.values())

    def _matches(self, context: Sequence[int], most: int) -> Iterator[Match]:
        """One for each place that the orders point at, the longest order first."""
        before = _EMPTY
        for order, table, key in self._by_order(_hashes(context[: -ORDERS[0] - 1 : -1])):
            place = table[key & self._mask]
            if place == before:
                continue
            length = self._agreement(context, place)
            if length >= order and (after := self._after(place, most)):
                before = place
                yield Match(length, after)

    def _by_order(self, hashes: Sequence[int]) -> Iterator[tuple[int, Any, int]]:
        """(order, table, hash) for what `_hashes` gives, the longest order first."""
        first = len(ORDERS) - len(hashes)
        return zip(ORDERS[first:], self._tables[first:], hashes, strict=True)

    def _continued(self, context: Sequence[int], first: Match, most: int) -> Match:
        if len(first.continuation) == most:
            return first
        tail, tokens = list(context[-MAX_MATCH:]), list(first.continuation)
        while len(tokens) < most:
            further = self.match([*tail, *tokens][-MAX_MATCH:], most - len(tokens))
            if further is None:
                break
            tokens += further.continuation
        return Match(first.length, tuple(tokens))

    def _agreement(self, context: Sequence[int], place: int) -> int:
        """Tokens before and at `place` that agree with the end of `context`."""
        oldest = max(0, self._size - self._mask - 1)
        if not oldest <= place < self._size:
            return 0
        length = 0
        for token_id in reversed(context[-MAX_MATCH:]):
            at = place - length
            if at < oldest or self._tokens[at & self._mask] != token_id:
                break
            length += 1
        return length

    def _after(self, place: int, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that follow `place` in its text."""
        after = self._slice(place + 1, min(place + 1 + most, self._size))
        if after and max(after) >= self._id_limit:
            end = next(i for i, token_id in enumerate(after) if token_id >= self._id_limit)
            return tuple(after[:end])
        return tuple(after)

    def _slice(self, start: int, stop: int) -> Sequence[int]:
        first, last = start & self._mask, stop & self._mask
        if start == stop or first < last:
            return self._tokens[first:last] if start != stop else ()
        return [*self._tokens[first:], *self._tokens[:last]]


class NgramIndex(NgramTables):
    """The last `capacity` tokens of a text, searchable by the n-grams they end with."""

    _tokens: array[int]
    _tables: list[array[int]]

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """`capacity` must be a power of two."""
        assert capacity & (capacity - 1) == 0
        tables = [array("q", [_EMPTY]) * capacity for _ in ORDERS]
        super().__init__(array("I", bytes(4 * capacity)), tables, size=0)
        self._text_len = 0
        """Tokens since the last separator."""

    @classmethod
    def holding(cls, num_tokens: int) -> NgramIndex:
        """One that holds so many tokens, or DEFAULT_CAPACITY if that is less."""
        return cls(capacity_for(num_tokens))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. About 3 microseconds each."""
        for token_id in token_ids:
            self._tokens[self._size & self._mask] = token_id
            self._index_last()
            self._size += 1
            self._text_len += 1

    def separate(self) -> None:
        """Ends the text, so that what comes is the start of another; nothing if none has begun."""
        if self._text_len:
            self._tokens[self._size & self._mask] = SEPARATOR
            self._size += 1
            self._text_len = 0

    def _index_last(self) -> None:
        """Indexes the n-grams that end with the last token, now that another one follows it."""
        last = self._size - 1
        start = last + 1 - min(ORDERS[0], self._text_len)
        if start > last:
            return
        for _, table, key in self._by_order(_hashes(self._slice(start, last + 1)[::-1])):
            table[key & self._mask] = last


class SharedIndex:
    """The last `capacity` tokens of many texts. Threads may share it; its memory is fixed."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """`capacity` must be a power of two. An index takes INDEX_BYTES a token of it."""
        self._index = NgramIndex(capacity)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held for a whole text, so that another's tokens do not come between its slices."""

    @property
    def num_tokens(self) -> int:
        return self._index.num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends one text, which no match and no continuation connects with the one before.

        Others may ask between its slices, and see what is there of it. The order of texts that
        several threads append at once is any.
        """
        with self._writing:
            with self._lock:
                # Before and not after the text, which an exception may have cut short.
                self._index.separate()
            for start in range(0, len(token_ids), _SLICE_TOKENS):
                if start:
                    # A lock is not fair: taken again at once, those who wait would not get it.
                    time.sleep(_PAUSE_S)
                with self._lock:
                    self._index.extend(token_ids[start : start + _SLICE_TOKENS])

    def candidates(self, context: Sequence[int], most: int, count: int) -> list[Match]:
        """As of NgramTables."""
        with self._lock:
            return self._index.candidates(context, most, count)


def _hashes(newest_first: Sequence[int]) -> list[int]:
    """32 bits of each n-gram of ORDERS that a text ends with, as far as it is long enough for them.

    From the text's last token backwards, so that one walk gives all of them;
    headrace.runtime.prior_file has the same for many at once.
    """
    key, found = 0, list[int]()
    for length, token_id in enumerate(newest_first, 1):
        key = ((key ^ token_id) * MULTIPLIER) & _WORD
        if length in ORDERS:
            found.insert(0, key >> 32)
    return found
