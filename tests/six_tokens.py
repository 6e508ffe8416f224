"""A language of six tokens, in which what speculation does to a text can be counted out.

Logits are random tables by the last two tokens. Everything else is the product's own: samplers,
noise, guessers, trees and rules. Used by tests/test_verify.py and benchmarks/lossless.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from headrace.models.vocab_map import NO_TOKEN, VocabMap
from headrace.runtime.guess import Guesser, Head
from headrace.runtime.pace import Origin
from headrace.runtime.propose import Proposal, merged
from headrace.runtime.request import Accept, SamplingParams
from headrace.runtime.sampling import Candidates, Row, Sampler, TokenCounts
from headrace.runtime.tree import ROOT, Tree
from headrace.runtime.verify import Rule, Sibling, stages

F64 = npt.NDArray[np.float64]

SIZE = 6
PROMPT = (2, 4)

SAMPLINGS: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.5},
    "top-k": {"temperature": 1.3, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.6, "min_p": 0.25},
    "penalties": {
        "temperature": 1.0,
        "repeat_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
    },
    "all": {"temperature": 0.9, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.2},
}


def sampler_of(sampling: str, seed: int = 0) -> Sampler:
    # Checking the same params for every seed would be most of a test's time.
    sampler = copy(_unseeded(sampling))
    sampler.seed = seed
    return sampler


@cache
def _unseeded(sampling: str) -> Sampler:
    return Sampler(SamplingParams.resolve({**SAMPLINGS[sampling], "seed": 0}), PROMPT, SIZE)


@dataclass(frozen=True, eq=False)
class Language:
    """A target and a draft of it."""

    target: npt.NDArray[np.float32]
    """[6, 6, 6] logits behind two tokens."""
    draft: npt.NDArray[np.float32]
    """[6, 6, m] of the draft's own tokens."""
    vocab_map: VocabMap

    @classmethod
    def random(cls, seed: int, *, likeness: float = 0.6, num_draft: int = SIZE) -> Language:
        """Whose draft is the target by `likeness` and noise by the rest; with `num_draft` below
        6 some tokens are missing from it, and the others have other ids.
        """
        rng = np.random.default_rng(seed)
        target = rng.normal(0, 1.2, (SIZE, SIZE, SIZE))
        blurred = likeness * target + (1 - likeness) * rng.normal(0, 1.2, target.shape)
        tokens = np.arange(SIZE) if num_draft == SIZE else rng.permutation(SIZE)[:num_draft]
        to_draft = np.full(SIZE, NO_TOKEN, np.int32)
        to_draft[tokens] = np.arange(num_draft)
        vocab_map = VocabMap(tokens.astype(np.int32), to_draft)
        draft = blurred[:, :, tokens]
        return cls(target.astype(np.float32), draft.astype(np.float32), vocab_map)

    def row(self, text: Sequence[int]) -> Row:
        row: Row = self.target[text[-2], text[-1]]
        return row

    def draft_row(self, text: Sequence[int]) -> Row:
        """In the draft's tokens."""
        row: Row = self.draft[text[-2], text[-1]]
        return row

    def draft_row_of_target(self, text: Sequence[int]) -> Row:
        row = np.full(SIZE, -np.inf, np.float32)
        row[self.vocab_map.to_target] = self.draft_row(text)
        return row


# decoding as an answer does


Proposer = Callable[[Sequence[int], int], Proposal]
"""From the text and how many tokens may be proposed."""


def nothing(text: Sequence[int], most: int) -> Proposal:
    return Proposal()


def decode(
    language: Language, sampler: Sampler, rule: Rule, propose: Proposer, num: int
) -> tuple[int, ...]:
    """The output: `answer._Request` without a model."""
    text, counts = list(PROMPT), sampler.counts()
    while len(counts) < num:
        proposal = propose(text, num - len(counts) - 1)
        node: int | None = ROOT
        while node is not None and len(counts) < num:
            siblings = proposal.siblings(node, proposal.tree)
            choice, kept = rule(sampler, language.row(text), len(text), counts, siblings)
            counts.push(choice.token_id)
            text.append(choice.token_id)
            node = None if kept is None else kept.node
    return tuple(text[len(PROMPT) :])


class Drafter:
    """A draft model's chains, or with `width` 2 each place's second guess beside the first."""

    def __init__(
        self, language: Language, sampler: Sampler, accept: Accept, width: int = 1, length: int = 3
    ) -> None:
        self.guesser = Guesser(sampler, accept, Head.of(language.vocab_map))
        self._language, self._width, self._length = language, width, length
        self._num_read = len(PROMPT)

    def __call__(self, text: Sequence[int], most: int) -> Proposal:
        self.guesser.follow(text[self._num_read :])
        self._num_read = len(text)
        tokens, parents, path = list[int](), list[int](), list[int]()
        drawn: list[Candidates | None] = []
        parent = ROOT
        for _ in range(min(self._length, most)):
            row = self._language.draft_row([*text, *path])
            guesses = self.guesser.guess(row, len(text) + len(path), path)[: self._width]
            first = len(tokens)
            tokens += [g.token_id for g in guesses]
            parents += [parent] * len(guesses)
            drawn += [g.drawn_from for g in guesses]
            parent = first
            path.append(guesses[0].token_id)
        origins = (Origin("draft"),) * len(tokens)
        return Proposal(Tree(tuple(tokens), tuple(parents)), origins, tuple(drawn))


def chain(tokens: Sequence[int]) -> Proposal:
    return Proposal.chain(tokens, [Origin("told")] * len(tokens))


def random_tree(rng: np.random.Generator, num_nodes: int) -> Proposal:
    """Whose siblings differ, as `merged` makes them."""
    offers = [chain(rng.integers(SIZE, size=3).tolist()) for _ in range(1 + num_nodes // 3)]
    return merged(offers)


# counting out


def without(candidates: Candidates, token_id: int) -> Candidates:
    scores = candidates.scores.copy()
    scores[candidates.ids == token_id] = -np.inf
    return Candidates(candidates.ids, scores)


def draws(q: Candidates, count: int) -> Iterator[tuple[float, list[Sibling]]]:
    """All ways to draw `count` siblings without replacement, and their probabilities."""
    if not count or not np.isfinite(q.scores).any():
        yield 1.0, []
        return
    for token_id, p in zip(q.ids.tolist(), np.exp(q.log_probs()), strict=True):
        if p > 0:
            for rest_p, rest in draws(without(q, token_id), count - 1):
                yield float(p) * rest_p, [Sibling(0, token_id, q), *rest]


def emitted(p: Candidates, siblings: Sequence[Sibling]) -> F64:
    """[6] what `rejection` says where these are proposed."""
    kept, rest = outcomes(p, siblings)
    for sibling, probability in zip(siblings, kept, strict=True):
        rest[sibling.token_id] += probability
    return rest


def outcomes(p: Candidates, siblings: Sequence[Sibling]) -> tuple[list[float], F64]:
    """Probability that each sibling is kept, and [6] of each token that comes in their place."""
    left, kept, rest = 1.0, list[float](), np.exp(p.log_probs())
    for stage in stages(p.ids, rest, siblings):
        kept.append(left * stage.kept)
        left *= 1 - stage.kept
        rest = stage.rest
    spread = np.zeros(SIZE)
    spread[p.ids] = left * rest
    return kept, spread


def plain_joint(language: Language, sampler: Sampler, num: int) -> F64:
    """[6] * num, probability of each output."""
    joint = np.zeros((SIZE,) * num)
    for tokens in product(range(SIZE), repeat=num):
        text, counts, p = list(PROMPT), sampler.counts(), 1.0
        for token_id in tokens:
            p *= spread(sampler.distribution(language.row(text), counts))[token_id]
            text.append(token_id)
            counts.push(token_id)
        joint[tokens] = p
    return joint


def spread(candidates: Candidates) -> F64:
    """[6]"""
    found = np.zeros(SIZE)
    found[candidates.ids] = np.exp(candidates.log_probs())
    return found


class Counted:
    """[6] * num of an output that is sped up by a drafted chain, by all draws and all verdicts."""

    def __init__(
        self, language: Language, sampler: Sampler, num: int, length: int, *, is_drawn: bool
    ) -> None:
        self._language, self._sampler = language, sampler
        self._num, self._length, self._is_drawn = num, length, is_drawn
        self.joint = np.zeros((SIZE,) * num)
        self._pass([], 1.0)

    def _counts(self, output: Sequence[int]) -> TokenCounts:
        return self._sampler.counts(output)

    def _target(self, output: Sequence[int]) -> Candidates:
        row = self._language.row([*PROMPT, *output])
        return self._sampler.distribution(row, self._counts(output))

    def _chains(
        self, output: list[int], length: int
    ) -> Iterator[tuple[float, tuple[Sibling, ...]]]:
        if not length:
            yield 1.0, ()
            return
        row = self._language.draft_row_of_target([*PROMPT, *output])
        q = self._sampler.distribution(row, self._counts(output))
        if not self._is_drawn:
            best = int(q.ids[q.scores.argmax()])
            first = [(1.0, [Sibling(0, best)])]
        else:
            first = list(draws(q, 1))
        for p, (sibling,) in first:
            for rest_p, rest in self._chains([*output, sibling.token_id], length - 1):
                yield p * rest_p, (sibling, *rest)

    def _pass(self, output: list[int], p: float) -> None:
        most = self._num - len(output) - 1
        for chain_p, siblings in self._chains(output, min(self._length, most)):
            self._verdict(output, p * chain_p, siblings)

    def _verdict(self, output: list[int], p: float, siblings: tuple[Sibling, ...]) -> None:
        if p == 0.0:
            return
        kept, instead = outcomes(self._target(output), siblings[:1])
        if len(output) == self._num - 1:
            self.joint[tuple(output)] += p * instead
            assert not siblings
            return
        for sibling, kept_p in zip(siblings, kept, strict=False):
            self._verdict([*output, sibling.token_id], p * kept_p, siblings[1:])
        for token_id in np.flatnonzero(instead).tolist():
            self._pass([*output, token_id], p * float(instead[token_id]))
