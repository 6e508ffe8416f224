"""The engine: sequences in lanes, prefilled in chunks and decoded token by token."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np

from headrace.errors import ContextFullError, UsageError
from headrace.runtime.backend import Backend
from headrace.runtime.batch import F32, LaneRows, chain
from headrace.runtime.sampling import Choice, Sampler


class Engine:
    """Owns the lanes of a backend and what is in them. Threads may share it: passes take turns."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._closed = False
        self._held: list[list[int]] = [[] for _ in range(backend.facts.lanes)]
        self._free = list(range(backend.facts.lanes))
        """Least recently used first."""

    @contextmanager
    def lane(self, token_ids: Sequence[int]) -> Iterator[Lane]:
        """A lane for one sequence, given back when the block ends.

        The free lane that already holds the longest beginning of `token_ids` is taken; among
        equals the emptiest, then the least recently used. Raises UsageError when all are taken.
        """
        index = self._take(token_ids)
        try:
            yield Lane(self, self._held[index], index)
        finally:
            with self._lock:
                self._free.append(index)

    def _take(self, token_ids: Sequence[int]) -> int:
        with self._lock:
            if not self._free:
                raise UsageError(
                    f"all {len(self._held)} lanes are in use; finish or close an answer first, "
                    "or load the bundle with more lanes"
                )
            index = max(self._free, key=lambda i: self._fitness(i, token_ids))
            self._free.remove(index)
            return index

    def _fitness(self, index: int, token_ids: Sequence[int]) -> tuple[int, int]:
        held = self._held[index]
        return _common_prefix(held, token_ids), -len(held)

    def run(self, rows: LaneRows) -> F32:
        """Logits [wanted, V] of one pass, the caller's own. Raises UsageError once closed."""
        with self._lock:
            if self._closed:
                raise UsageError("the model of this answer is closed; load the bundle again")
            # Copied under the lock: the next pass, perhaps another thread's, writes over them.
            return self.backend.forward([rows]).copy()

    def close(self) -> None:
        """Closes the backend, after the pass that is running; may be called again."""
        with self._lock:
            self._closed = True
            self.backend.close()


class Lane:
    """One sequence's place in the arena."""

    def __init__(self, engine: Engine, held: list[int], index: int) -> None:
        self._engine, self._index = engine, index
        self._facts = engine.backend.facts
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
        for start in range(known, len(token_ids), self._facts.max_rows):
            chunk = token_ids[start : start + self._facts.max_rows]
            row = self._pass(chunk, (len(chunk) - 1,))[0]
        return row, len(token_ids) - known

    def rows(self, token_ids: Sequence[int]) -> Iterator[F32]:
        """Logits [V] after each of `token_ids`, from an empty lane; each valid until the next."""
        self._held.clear()
        width = self._facts.max_wanted
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
        logits = self._engine.run(rows)
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
