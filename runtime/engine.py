"""The engine: sequences in lanes, prefilled in chunks and decoded token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np

from headrace.errors import ContextFullError, UsageError
from headrace.runtime.backend import Backend
from headrace.runtime.batch import F32, chain
from headrace.runtime.sampling import Choice, Sampler


class Engine:
    """Owns the lanes of a backend and what is in them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._held: list[list[int]] = [[] for _ in range(backend.facts.lanes)]
        self._free = set(range(backend.facts.lanes))

    @contextmanager
    def lane(self, token_ids: Sequence[int]) -> Iterator[Lane]:
        """A lane for one sequence, given back when the block ends.

        The free lane that already holds the longest beginning of `token_ids` is taken. Raises
        UsageError when all lanes are taken.
        """
        if not self._free:
            raise UsageError(
                f"all {len(self._held)} lanes are in use; finish or close an answer first, "
                "or load the bundle with more lanes"
            )
        index = max(sorted(self._free), key=lambda i: _common_prefix(self._held[i], token_ids))
        self._free.remove(index)
        try:
            yield Lane(self.backend, index, self._held[index])
        finally:
            self._free.add(index)


class Lane:
    """One sequence's place in the arena."""

    def __init__(self, backend: Backend, index: int, held: list[int]) -> None:
        self._backend, self._index = backend, index
        self._held = held
        """Tokens whose KV the first slots hold."""

    def prefill(self, token_ids: Sequence[int]) -> tuple[F32, int]:
        """Makes the lane hold exactly `token_ids`, at least one.

        Returns:
            the logits [V] after the last token, valid until the next pass, and how many tokens
            had to be computed.
        """
        known = min(_common_prefix(self._held, token_ids), len(token_ids) - 1)
        del self._held[known:]
        row: F32 = np.empty(0, np.float32)
        for start in range(known, len(token_ids), self._backend.facts.max_rows):
            chunk = token_ids[start : start + self._backend.facts.max_rows]
            row = self._pass(chunk, (len(chunk) - 1,))[0]
        return row, len(token_ids) - known

    def rows(self, token_ids: Sequence[int]) -> Iterator[F32]:
        """Logits [V] after each of `token_ids`, from an empty lane; each valid until the next."""
        self._held.clear()
        width = self._backend.facts.max_wanted
        for start in range(0, len(token_ids), width):
            chunk = token_ids[start : start + width]
            yield from self._pass(chunk, tuple(range(len(chunk))))

    def decode(self, token_id: int) -> F32:
        """Appends one token; returns the logits [V] after it, valid until the next pass."""
        row: F32 = self._pass((token_id,), (0,))[0]
        return row

    def _pass(self, token_ids: Sequence[int], wanted: tuple[int, ...]) -> F32:
        past = len(self._held)
        rows = chain(self._index, np.array(token_ids, np.int64), past, wanted)
        logits = self._backend.forward([rows])
        self._held += token_ids
        return logits


def require_room(prompt_len: int, capacity: int) -> None:
    """Raises ContextFullError unless a prompt leaves room for at least one token."""
    if prompt_len >= capacity:
        raise ContextFullError(
            f"the prompt has {prompt_len} tokens and the context holds {capacity}, one of them "
            "for the answer; shorten the prompt or raise --ctx"
        )


def generate(
    lane: Lane, row: F32, prompt_len: int, sampler: Sampler, capacity: int
) -> Iterator[Choice]:
    """Tokens after a prefilled prompt whose last logits are `row`, until the context is full."""
    counts = sampler.counts()
    for position in range(prompt_len, capacity):
        choice = sampler.choose(row, position, counts)
        counts.push(choice.token_id)
        yield choice
        if position + 1 < capacity:
            row = lane.decode(choice.token_id)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
