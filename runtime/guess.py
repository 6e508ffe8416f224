"""What a draft's logits say comes next, in the target's tokens and by the request's own rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.models.vocab_map import NO_TOKEN, VocabMap
from headrace.runtime.noise import drafting_seed, draw
from headrace.runtime.request import Accept
from headrace.runtime.sampling import Candidates, Row, Sampler, checked_best

MAX_GUESSES = 2
"""Tokens that are guessed for a place: the draft's choice, and its runner-up."""


@dataclass(frozen=True, eq=False)
class Guess:
    """A token that may come next."""

    token_id: int
    """The target's."""
    probability: float
    """Under the draft, with the request's sampling options; at temperature 0, at 1."""
    drawn_from: Candidates | None = None
    """See `verify.Sibling`."""


@dataclass(frozen=True, eq=False)
class Head:
    """Which of the target's tokens a draft's logits stand for."""

    columns: npt.NDArray[np.intp]
    """[n] columns that stand for one."""
    tokens: npt.NDArray[np.int32]
    """[n] the target's ids."""
    vocab_size: int
    """The target's."""

    @classmethod
    def of(cls, vocab_map: VocabMap) -> Head:
        columns = np.flatnonzero(vocab_map.to_target != NO_TOKEN)
        return cls(columns, vocab_map.to_target[columns], len(vocab_map.to_draft))

    @cached_property
    def is_same(self) -> bool:
        """Whether column i is token i."""
        all_ids = np.arange(self.vocab_size)
        return np.array_equal(self.columns, all_ids) and np.array_equal(self.tokens, all_ids)


class Guesser:
    """Guesses for one request. Sampling options apply along each path, as they do to the target."""

    def __init__(self, sampler: Sampler, accept: Accept, head: Head) -> None:
        self._sampler, self._head = sampler, head
        self._is_drawn = accept == "rejection" and not sampler.is_greedy
        # Drawn tokens must not know the noise that the target draws with; picked ones had better.
        self._seed = drafting_seed(sampler.seed) if self._is_drawn else sampler.seed
        self._counts = sampler.counts()

    def follow(self, token_ids: Iterable[int]) -> None:
        """Tokens that have become output."""
        for token_id in token_ids:
            self._counts.push(token_id)

    def guess(self, logits: Row, position: int, path: Sequence[int]) -> tuple[Guess, ...]:
        """The likeliest tokens at `position`, after the text and `path`, best first.

        Raises ModelOutputError for logits [draft's num_logits] that are no numbers.
        """
        self.follow(path)
        try:
            if self._sampler.is_greedy:
                return self._best(logits)
            return self._drawn(self._mapped(logits), position)
        finally:
            for _ in path:
                self._counts.pop()

    def _mapped(self, logits: Row) -> Row:
        if self._head.is_same:
            return logits
        row = np.full(self._head.vocab_size, -np.inf, np.float32)
        row[self._head.tokens] = logits[self._head.columns]
        return row

    def _best(self, logits: Row) -> tuple[Guess, ...]:
        # a head that was cut down is a fraction of the target's vocabulary
        row = logits[self._head.columns]
        if self._sampler.adjusts:
            row = self._sampler.adjusted(self._mapped(logits), self._counts)[self._head.tokens]
        guesses: list[Guess] = []
        total = 0.0
        for _ in range(MAX_GUESSES):
            best = int(row.argmax())
            if not guesses:
                top = float(checked_best(row[best]))
                total = float(np.exp(row - np.float32(top)).sum())
            probability = float(np.exp(float(row[best]) - top)) / total
            guesses.append(Guess(int(self._head.tokens[best]), probability))
            row[best] = -np.inf
        return tuple(g for g in guesses if g.probability > 0)

    def _drawn(self, row: Row, position: int) -> tuple[Guess, ...]:
        left = self._sampler.distribution(row, self._counts)
        guesses: list[Guess] = []
        for _ in range(min(MAX_GUESSES, len(left.ids))):
            if not np.isfinite(left.scores).any():
                break
            at = draw(left.scores, left.ids, self._seed, position)
            total = float(np.exp(left.scores).sum(dtype=np.float64))
            probability = float(np.exp(left.scores[at])) / total
            drawn_from = left if self._is_drawn else None
            guesses.append(Guess(int(left.ids[at]), probability, drawn_from))
            scores = left.scores.copy()
            scores[at] = -np.inf
            left = Candidates(left.ids, scores)
        return tuple(guesses)
