"""Speculation: what is proposed to the target for a pass, and what became of it.

A pass reads the weights once, however many rows it has, so tokens that are likely to come are
computed together with the last one ("speculative decoding", Leviathan et al., 2023). The target
chooses its token at each of these places as it would have without a proposal, noise included
(sampling.py: noise is a function of seed, position and token), and keeps the proposed tokens as far
as they are what it chose. So the text does not depend on what was proposed, or whether anything was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.runtime.pace import Pace
from headrace.runtime.prior import MAX_MATCH, NgramIndex
from headrace.runtime.request import SpeculationCounts


@dataclass(frozen=True)
class Proposal:
    """A chain of tokens that may come next."""

    token_ids: tuple[int, ...] = ()
    sureness: int = 0
    """How many tokens before it agree with the place where it was found."""


class Speculator:
    """Proposes for one request, from what its own tokens repeat."""

    def __init__(self, pace: Pace, token_ids: Sequence[int], num_new: int) -> None:
        """Begins after `token_ids`, for up to `num_new` tokens."""
        self._pace = pace
        self._index = NgramIndex.holding(len(token_ids) + num_new)
        self._tail: list[int] = []
        self._unread = list(token_ids)
        """Not indexed yet: a long prompt must not hold up the first token, which needs no proposal."""
        self._counts = [0, 0, 0]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that have become text."""
        self._unread += token_ids

    def _read(self) -> None:
        self._index.extend(self._unread)
        self._tail = [*self._tail, *self._unread][-MAX_MATCH:]
        self._unread.clear()

    def propose(self, most: int) -> Proposal:
        """Up to `most` tokens, as many as promise the most tokens a second."""
        self._read()
        most = min(most, self._pace.limit)
        match = self._index.propose(self._tail, most) if most > 0 else None
        if match is None:
            return Proposal()
        length = self._pace.length(match.length, len(match.continuation))
        return Proposal(match.continuation[:length], match.length)

    def judged(self, proposal: Proposal, num_accepted: int) -> None:
        """What the target kept of a proposal."""
        num_proposed = len(proposal.token_ids)
        for i, count in enumerate((1, num_proposed, num_accepted)):
            self._counts[i] += count
        self._pace.note(proposal.sureness, num_proposed, num_accepted)

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(*self._counts)
