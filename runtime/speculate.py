"""Speculation: what is proposed to the target for a pass, and what became of it.

A pass reads the weights once, however many rows it has, so tokens that are likely to come are
computed together with the last one ("speculative decoding", Leviathan et al., 2023). They come from
the prior (what the text, the recent stream or a corpus repeats) and from the draft model. What the
target makes of them is in verify.py: the text does not depend on what was proposed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headrace.runtime.backend import BackendFacts
from headrace.runtime.draft_mode import DraftMode, ModeChoice
from headrace.runtime.drafter import SOURCE, Drafter, Pays, origins
from headrace.runtime.drafting import Drafting
from headrace.runtime.guess import Guess, Guesser
from headrace.runtime.pace import ANY, F64, Origin, Pace, Plan
from headrace.runtime.prior import MAX_MATCH, Match, NgramIndex, SharedIndex
from headrace.runtime.prior_file import PriorFile
from headrace.runtime.propose import Proposal, Room, best_chain, best_tree, planned
from headrace.runtime.request import (
    MAX_PROPOSED,
    Accept,
    DraftCounts,
    Exactness,
    SourceCounts,
    Speculate,
    SpeculationCounts,
)
from headrace.runtime.sampling import Sampler
from headrace.runtime.tree import ROOT, Tree
from headrace.runtime.verify import Accepted

_MATCH_STEPS = (3, 4, 8, 16, 32)
"""Match lengths from which a looked up token counts as surer."""

_ALTERNATIVES = 2
"""Continuations that are asked of an index where trees can be verified."""

_FORESEEN = 128
"""Tokens of an answer that are counted on, as far as it may become so long."""

_RETRY_PASSES = 64
"""Passes after which a draft that did not pay is asked again, at the earliest."""

_RETRY_SHARE = 0.01
"""Of all time, what that may take."""

_TRIES = 8
"""Passes in a row before which it is then asked: once it has read the text, each costs little."""

_OFTEN = 8
"""Tokens at most that it reads where it is asked before each pass."""


class Index(Protocol):
    """Where continuations are looked up."""

    def candidates(self, context: Sequence[int], most: int, count: int) -> list[Match]: ...


@dataclass
class Speculation:
    """What the requests of a model share."""

    pace: Pace
    speculate: Speculate
    """Unless a request says otherwise."""
    is_boundary: Callable[[int], bool]
    """Whether a segment ends with a token: punctuation, a line's end."""
    recent: SharedIndex
    """What sessions let others look up."""
    corpus: PriorFile | None = None
    drafter: Drafter | None = None

    def indexes(self) -> dict[str, Index]:
        """By the name of the source."""
        found: dict[str, Index] = {"stream": self.recent}
        return found if self.corpus is None else {**found, "corpus": self.corpus}

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()
        if self.corpus is not None:
            self.corpus.close()


@dataclass(frozen=True, eq=False)
class Text:
    """Where a request begins."""

    tokens: Sequence[int]
    """The last ones of the text, and all that is pending."""
    length: int
    """Tokens of the whole text."""
    num_new: int
    """Tokens that it may become longer."""
    exactness: Exactness


class Speculator:
    """Proposes for one request."""

    def __init__(
        self,
        shared: Speculation,
        text: Text,
        sampler: Sampler,
        facts: BackendFacts,
        num_lanes: Callable[[], int],
    ) -> None:
        """`facts` are the target's; `num_lanes` says how many lanes take part in passes now."""
        speculate = sampler.params.speculate or shared.speculate
        self._shared, self._pace = shared, shared.pace
        self._fixed = speculate if isinstance(speculate, int) else None
        self._num_left = text.num_new
        self._limit = self._fixed or MAX_PROPOSED
        self._accept: Accept = sampler.params.accept
        self._exact = text.exactness == "exact"
        self._facts, self._length = facts, text.length
        self._num_lanes = num_lanes
        self._own = NgramIndex.holding(len(text.tokens) + text.num_new)
        sources = sampler.params.sources
        self._indexes: dict[str, Index] = {"session": self._own, **shared.indexes()}
        if sources == "draft":
            self._indexes.clear()
        self._tail: list[int] = []
        self._unread = list(text.tokens)
        """Not indexed yet: a long prompt must not hold up the first token, which needs no proposal."""
        self._drafting: Drafting | None = None
        drafter = shared.drafter
        self._draft_before = replace(drafter.counts) if drafter is not None else None
        if drafter is not None and drafter.broken is None and sources != "lookup":
            guesser = Guesser(sampler, self._accept, drafter.head)
            self._drafting = Drafting(drafter, guesser, text.tokens, text.length)
        self._began: tuple[ModeChoice, DraftMode, float] | None = None
        """A pass that the draft promises something for: its mode, of which choice, and when."""
        self._is_wanted: bool | None = None
        """Whether the draft would be worth its time before the next pass, if it knew the text; None
        where nobody has thought about it."""
        self._passes = 0
        self._proposed: Counter[tuple[str, int]] = Counter()
        self._accepted: Counter[tuple[str, int]] = Counter()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that have become text."""
        self._unread += token_ids
        self._length += len(token_ids)
        self._num_left -= len(token_ids)
        if self._drafting is not None:
            self._drafting.extend(token_ids)

    def _room(self, most: int) -> Room:
        # The text's last token is in the pass; a ring evicts multiples of any machine's rows.
        past = self._length - 1
        rows = [
            self._facts.computed_rows(past, 1 + num, exact=self._exact) for num in range(most + 1)
        ]
        return Room(most, self._num_lanes(), tuple(rows), self._fixed)

    def propose(self, most: int) -> Proposal:
        """Up to `most` tokens, as many as promise the most tokens a second."""
        self._read()
        room = self._room(min(most, self._limit))
        if room.most <= 0:
            return Proposal()
        offers = self._look_up(room.most)
        best, plan = self._best(offers, room)
        drafted = self._draft(plan.tokens_per_s, room)
        if drafted is None:
            return best
        if drafted.is_sampled:
            # What was drawn is verified: leaving it out now would be a choice by its looks.
            return drafted
        return self._best([*offers, drafted], room)[0]

    def _best(self, offers: Sequence[Proposal], room: Room) -> tuple[Proposal, Plan]:
        best = best_chain if self._exact else best_tree
        return best(offers, self._pace, room)

    def _read(self) -> None:
        self._own.extend(self._unread)
        self._tail = [*self._tail, *self._unread][-MAX_MATCH:]
        self._unread.clear()

    def _look_up(self, most: int) -> list[Proposal]:
        count = 1 if self._exact else _ALTERNATIVES
        offers: list[Proposal] = []
        for source, index in self._indexes.items():
            for rank, match in enumerate(index.candidates(self._tail, most, count)):
                sureness = sum(match.length >= step for step in _MATCH_STEPS)
                tokens = match.continuation
                before = [self._tail[-1], *tokens[:-1]]
                offers.append(
                    Proposal.chain(
                        tokens,
                        [
                            Origin(source, min(rank, 1), sureness, self._shared.is_boundary(t))
                            for t in before
                        ],
                    )
                )
        return offers

    def _draft(self, tokens_per_s: float, room: Room) -> Proposal | None:
        """What the draft model proposes, if it promises more than `tokens_per_s`."""
        drafting, drafter = self._drafting, self._shared.drafter
        if drafting is None or drafter is None or drafter.broken is not None:
            return None
        is_possible = drafting.is_possible
        rates = self._pace.acceptance.rates([Origin(SOURCE)] * room.most)
        reach: F64 = np.cumprod(rates, dtype=np.float64)
        num_unread, read_s = drafting.num_unread, self._reading_s(drafting, drafter)
        plan = planned(self._pace, reach, room, drafter.wait_s, read_s)
        want = plan.num_tokens if plan.tokens_per_s > tokens_per_s or room.fixed else 0
        if not room.fixed:
            self._is_wanted = bool(want) or (
                planned(self._pace, reach, room, drafter.wait_s).tokens_per_s > tokens_per_s
            )
        modes = drafter.asked_modes if room.fixed else drafter.modes
        mode = modes.mode
        drafter.passes_unasked += 1
        if want:
            self._began = modes, mode, time.perf_counter()
        elif self._tries_again(drafting, drafter, room):
            want, mode = 1, drafter.asked_modes.mode
        if not want or mode is DraftMode.UNASKED or not is_possible:
            return None
        chain = drafting.ask(want, self._pays(want, drafter.step_s, tokens_per_s, room), mode)
        if chain is not None:
            drafter.passes_unasked = 0
        if self._began is not None and drafter.takes_turns and num_unread > _OFTEN:
            # what is read once for many passes is not what a mode costs in each
            modes, mode, began_s = self._began
            self._began = modes, mode, began_s + max(0.0, drafting.read_s - read_s)
        return self._drafted(chain) if chain else None

    def _reading_s(self, drafting: Drafting, drafter: Drafter) -> float:
        """Seconds that a pass pays for what the draft has to read."""
        if not drafter.takes_turns:  # it reads beside the target
            return 0.0
        num_left = min(max(self._num_left, 0), _FORESEEN)
        return drafter.demand.price_s(drafter.reading, drafting.num_unread, num_left)

    def _tries_again(self, drafting: Drafting, drafter: Drafter, room: Room) -> bool:
        """Whether a draft that does not pay is asked all the same, a few passes in a row."""
        if not drafter.tries:
            price_s = _TRIES * drafter.wait_s
            if drafter.takes_turns:
                price_s += drafter.reading.of(drafting.num_unread)
            row = room.rows[0] if room.rows else 1
            pass_s = float(self._pace.costs(room.lanes)[row - 1]) / room.lanes
            if drafter.passes_unasked < max(_RETRY_PASSES, price_s / (_RETRY_SHARE * pass_s)):
                return False
            drafter.tries = _TRIES
        drafter.tries -= 1
        return True

    def _pays(self, want: int, step_s: float, tokens_per_s: float, room: Room) -> Pays:
        """A token pays if it comes more surely than others would in the time that it takes."""
        if room.fixed or self._accept == "rejection":
            return Pays((0.0,) * want, 0.0)
        rows = np.arange(1, want + 2) if room.rows is None else np.array(room.rows[: want + 1])
        prices = np.diff(self._pace.costs(room.lanes)[rows - 1]) * tokens_per_s
        return Pays(tuple(prices.tolist()), step_s * tokens_per_s)

    def _drafted(self, chain: Sequence[tuple[Guess, ...]]) -> Proposal:
        """The first guesses as a chain, and where trees can be verified the others beside it."""
        tokens: list[int] = []
        parents: list[int] = []
        origins_: list[Origin] = []
        parent, before = ROOT, self._tail[-1]
        is_tree = not self._exact and self._accept == "coupled"
        drawn = []
        for guesses in chain:
            kept = guesses if is_tree else guesses[:1]
            first = len(tokens)
            tokens += [g.token_id for g in kept]
            parents += [parent] * len(kept)
            origins_ += origins(kept, before, self._shared.is_boundary)
            drawn += [g.drawn_from for g in kept]
            parent, before = first, kept[0].token_id
        return Proposal(Tree(tuple(tokens), tuple(parents)), tuple(origins_), tuple(drawn))

    def judged(self, proposal: Proposal, tree: Tree, accepted: Accepted) -> None:
        """What the target kept of a proposal, of which it saw `tree`."""
        self._passes += 1
        if self._is_wanted is not None and self._shared.drafter is not None:
            demand = self._shared.drafter.demand
            demand.note(len(accepted.token_ids), is_wanted=self._is_wanted)
            self._is_wanted = None
        if self._began is not None:
            modes, mode, began = self._began
            modes.note(mode, len(accepted.token_ids), time.perf_counter() - began)
            self._began = None
        for origin, depth in zip(proposal.origins, tree.depths, strict=False):
            self._proposed[origin.source, depth] += 1
        node = ROOT
        for token_id, kept in zip(accepted.token_ids, [*accepted.path, None], strict=True):
            for sibling in tree.children(node):
                is_kept = tree.token_ids[sibling] == token_id
                self._note(proposal.origins[sibling], tree.depths[sibling], is_kept)
                if is_kept:
                    break
            if kept is None:
                break
            self._accepted[proposal.origins[kept].source, tree.depths[kept]] += 1
            node = kept

    def _note(self, origin: Origin, depth: int, is_kept: bool) -> None:
        acceptance = self._pace.acceptance
        acceptance.note(origin, depth, accepted=is_kept)
        if origin.source == SOURCE and not origin.rank and origin.sureness != ANY:
            acceptance.note(Origin(SOURCE), depth, accepted=is_kept)

    def close(self) -> None:
        """The request has ended."""
        if self._drafting is not None:
            self._drafting.close()

    def counts(self, target_idle_s: float) -> SpeculationCounts:
        sources: dict[str, SourceCounts] = {}
        for source in dict.fromkeys(source for source, _ in self._proposed):
            depths = range(1, 1 + max(d for s, d in self._proposed if s == source))
            sources[source] = SourceCounts(
                tuple(self._proposed[source, depth] for depth in depths),
                tuple(self._accepted[source, depth] for depth in depths),
            )
        return SpeculationCounts(
            passes=self._passes,
            proposed=self._proposed.total(),
            accepted=self._accepted.total(),
            sources=sources,
            draft_wait_s=self._drafting.waited_s if self._drafting else 0.0,
            target_idle_s=target_idle_s,
            draft=self._draft_counts(),
        )

    def _draft_counts(self) -> DraftCounts | None:
        drafter, before = self._shared.drafter, self._draft_before
        return None if drafter is None or before is None else drafter.counts.since(before)
