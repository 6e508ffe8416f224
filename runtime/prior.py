"""The prior: what followed the last time these tokens were seen. Proposals without a model.

Plant logs repeat themselves, and answers repeat their question. An index of n-grams over past tokens
finds the latest place where the last ones stood before, and proposes what came after it ("prompt
lookup decoding", Saxena, 2023; "LLMA", Yang et al., 2023).

Memory is fixed: a ring of tokens, and for each order one table of places, addressed by a hash. Later
n-grams overwrite earlier ones, and a place is believed only when its tokens agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

ORDERS = (12, 6, 3)
"""Lengths of the n-grams that are indexed, the longest first."""

MAX_MATCH = 32
"""Matches are not measured beyond this; longer ones are no surer."""

DEFAULT_CAPACITY = 1 << 16

_EMPTY = -1
_MULTIPLIER = 0x9E3779B97F4A7C15  # Knuth's multiplicative hashing, 2^64 over the golden ratio
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Match:
    """An earlier place whose tokens agree with the last ones."""

    length: int
    """Tokens that agree, at most MAX_MATCH."""
    continuation: tuple[int, ...]
    """What came after it."""


class NgramIndex:
    """The last `capacity` tokens of a text, searchable by the n-grams they end with."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """`capacity` must be a power of two."""
        assert capacity & (capacity - 1) == 0
        self._mask = capacity - 1
        self._tokens = array("I", bytes(4 * capacity))
        """Token of place p at p & mask."""
        self._tables = [array("q", [_EMPTY]) * capacity for _ in ORDERS]
        self._size = 0

    @classmethod
    def holding(cls, num_tokens: int) -> NgramIndex:
        """One that holds so many tokens, or DEFAULT_CAPACITY if that is less."""
        return cls(min(DEFAULT_CAPACITY, 1 << max(8, (num_tokens - 1).bit_length())))

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far; the last `capacity` of them are searchable."""
        return self._size

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. About 3 microseconds each."""
        for token_id in token_ids:
            self._index_last()
            self._tokens[self._size & self._mask] = token_id
            self._size += 1

    def _index_last(self) -> None:
        """Indexes the n-grams that end with the last token, now that another one follows it."""
        last = self._size - 1
        for order, table in zip(ORDERS, self._tables, strict=True):
            if order <= self._size:
                table[self._hash(self._slice(last + 1 - order, last + 1)) & self._mask] = last

    def match(self, context: Sequence[int], most: int) -> Match | None:
        """The latest place that agrees with the longest end of `context`, by indexed orders.

        `context` needs to hold its last `MAX_MATCH` tokens only. Its tokens need not be in the
        index. Returns up to `most` tokens of continuation, at least one.
        """
        for order, table in zip(ORDERS, self._tables, strict=True):
            if order > len(context):
                continue
            place = table[self._hash(context[-order:]) & self._mask]
            length = self._agreement(context, place)
            if length >= order:
                after = self._slice(place + 1, min(place + 1 + most, self._size))
                if after:
                    return Match(length, tuple(after))
        return None

    def propose(self, context: Sequence[int], most: int) -> Match | None:
        """As `match`, but where a continuation reaches the end of the index, the context that it
        makes is looked up again: the way on out of a loop.
        """
        first = self.match(context, most)
        if first is None:
            return None
        tail, tokens = list(context[-MAX_MATCH:]), list(first.continuation)
        while len(tokens) < most:
            further = self.match([*tail, *tokens][-MAX_MATCH:], most - len(tokens))
            if further is None:
                break
            tokens += further.continuation
        return Match(first.length, tuple(tokens))

    def _agreement(self, context: Sequence[int], place: int) -> int:
        """Tokens before and at `place` that agree with the end of `context`."""
        if place == _EMPTY:
            return 0
        oldest = max(0, self._size - len(self._tokens))
        length = 0
        for token_id in reversed(context[-MAX_MATCH:]):
            at = place - length
            if at < oldest or self._tokens[at & self._mask] != token_id:
                break
            length += 1
        return length

    def _slice(self, start: int, stop: int) -> Sequence[int]:
        first, last = start & self._mask, stop & self._mask
        if start == stop or first < last:
            return self._tokens[first:last] if start != stop else ()
        return self._tokens[first:] + self._tokens[:last]

    @staticmethod
    def _hash(token_ids: Sequence[int]) -> int:
        key = 0
        for token_id in token_ids:
            key = ((key ^ token_id) * _MULTIPLIER) & _WORD
        return key >> 32
