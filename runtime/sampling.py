"""From one row of logits to one token: pure functions, chained once per request.

The order is Hugging Face's: penalties and bias on the logits, then temperature, top-k, top-p,
min-p. Each filter sees the probabilities renormalised over what the one before it kept, and
always keeps the best token; among equals the lowest id is the better one. What survives is drawn
from with the noise of `headrace.runtime.noise`, so a token is a function of the row, the tokens
before it, the seed and the position, and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelOutputError, UsageError
from headrace.runtime.noise import draw
from headrace.runtime.request import SamplingParams

Row = NDArray[np.float32]

GREEDY_BELOW = 1e-5
"""Temperatures below it mean the best token: float32 scores would overflow."""


_FEW = 2048
"""Scores that are sorted without further ado."""


class TokenCounts:
    """How often each token is in the output, and which are in the prompt.

    One path at a time: `push` a token to go down, `pop` to come back up, each in constant time,
    so rows along several branches can be sampled one after another.
    """

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int] = ()) -> None:
        self._path: list[int] = []
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._num_prompt = len(self._slots)
        self._ids = np.fromiter(self._slots, np.int64, self._num_prompt)
        self._counts = np.zeros(self._num_prompt, np.float32)
        for token_id in output_ids:
            self.push(token_id)

    def push(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._grow()
        self._ids[slot] = token_id
        self._counts[slot] += 1
        self._path.append(token_id)

    def pop(self) -> int:
        """Take back the last `push`; returns its token."""
        token_id = self._path.pop()
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        # First uses are undone in reverse order, so an unused slot is always the last one.
        if self._counts[slot] == 0 and slot >= self._num_prompt:
            del self._slots[token_id]
            assert slot == len(self._slots)
        return token_id

    def __len__(self) -> int:
        """Length of the output."""
        return len(self._path)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and output [n]; a view, valid until the next push."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Occurrences in the output of each of `ids` [n]; 0 for tokens of the prompt only."""
        return self._counts[: len(self._slots)]

    def _grow(self) -> None:
        extra = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(extra, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(extra, np.float32)])


def penalize(
    row: Row, counts: TokenCounts, *, repeat: float = 1.0, presence: float = 0.0,
    frequency: float = 0.0,
) -> Row:  # fmt: skip
    """Logits [V] with the penalties of `SamplingParams`; a copy.

    `repeat` is Keskar et al., "CTRL", 2019, in Hugging Face's form.
    """
    row = row.copy()
    logits = row[counts.ids]  # [n]
    if repeat != 1.0:
        logits = np.where(logits > 0, logits / np.float32(repeat), logits * np.float32(repeat))
    logits -= np.float32(frequency) * counts.counts
    logits -= np.float32(presence) * (counts.counts > 0)
    row[counts.ids] = logits
    return row


def add_bias(row: Row, token_ids: NDArray[np.int64], bias: Row) -> Row:
    """Logits [V] with `bias` [n] added to those of the distinct `token_ids` [n]; a copy."""
    row = row.copy()
    row[token_ids] += bias
    return row


@dataclass(frozen=True)
class Candidates:
    """The tokens that may be drawn."""

    ids: NDArray[np.uint32]
    """[n], ascending."""
    scores: Row
    """[n], log-probabilities up to a constant: the largest is 0; -inf is never drawn."""

    def log_probs(self) -> NDArray[np.float64]:
        """[n], normalised over the candidates."""
        scores = self.scores.astype(np.float64)
        normalised: NDArray[np.float64] = scores - math.log(np.exp(scores).sum())
        return normalised

    def _at(self, index: NDArray[np.intp]) -> Candidates:
        return Candidates(self.ids[index], self.scores[index])


def heat(row: Row, temperature: float) -> Row:
    """Scores [V]: logits over temperature, shifted so that the largest is 0.

    Raises ModelOutputError if the largest logit is not finite or any is NaN.
    """
    scores = row - checked_best(row.max())
    if temperature != 1.0:
        scores /= np.float32(temperature)
    if temperature > 1.0:
        # a difference of the smallest numbers would vanish, and what is not the best be as good
        scores[(scores == 0) & (row < row.max())] = -np.finfo(np.float32).smallest_subnormal
    return scores


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    """The k best. Fan et al., "Hierarchical neural story generation", ACL 2018."""
    if k == 0 or k >= len(candidates.ids):
        return candidates
    return candidates._at(_largest(candidates.scores, k))


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest best tokens whose probabilities reach p.

    Holtzman et al., "The curious case of neural text degeneration", ICLR 2020.
    """
    if p >= 1.0:
        return candidates
    scores = candidates.scores
    weights = np.exp(scores)  # [n]
    goal = p * float(weights.sum())
    if goal <= 1.0:  # the best token's weight
        return candidates._at(_largest(scores, 1))
    for floor in (1e-3, 1e-5):
        # Nearly always a few tokens reach the goal; all that are better than one of them are here.
        likely = np.flatnonzero(weights >= np.float32(floor * goal))
        if weights[likely].sum(dtype=np.float64) >= goal:
            k, kth = _nucleus(scores[likely], weights[likely], goal)
            return candidates._at(likely[_first_k(scores[likely], kth, k)])
    k, kth = _nucleus(scores, weights, goal)
    return candidates._at(_first_k(scores, kth, k))


def keep_min_p(candidates: Candidates, p: float) -> Candidates:
    """Those at least p times as probable as the best one.

    Nguyen et al., "Turning up the heat: min-p sampling", 2024.
    """
    if p == 0.0:
        return candidates
    return candidates._at(np.flatnonzero(candidates.scores >= np.float32(math.log(p))))


def log_normalizer(row: Row) -> float:
    """log(sum(exp(row))): `row[i] - log_normalizer(row)` is the model's log-probability of i.

    Raises ModelOutputError if the largest logit is not finite or any is NaN.
    """
    best = checked_best(row.max())
    return float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))


def best_tokens(row: Row, n: int) -> NDArray[np.intp]:
    """Ids of the n largest logits, best first, the lower id first among equals."""
    ids = _largest(row, min(n, len(row)))
    best_first: NDArray[np.intp] = ids[np.argsort(-row[ids], kind="stable")]
    return best_first


def _largest(scores: Row, k: int) -> NDArray[np.intp]:
    """Ascending indices of the k largest values above -inf; the first ones among equals."""
    if k == 0:
        return np.empty(0, np.intp)
    if k == 1:
        best = int(scores.argmax())
        return np.array([best] if scores[best] > -math.inf else [], np.intp)
    near = np.flatnonzero(scores >= _at_most_kth(scores, k))
    values = scores[near]
    kth = np.partition(values, len(values) - k)[len(values) - k]
    return near[_first_k(values, kth, k)]


def _first_k(scores: Row, kth: np.float32, k: int) -> NDArray[np.intp]:
    """Ascending indices of the k largest, given the k-th of them; -inf is left out."""
    if kth == -math.inf:
        return np.flatnonzero(scores > kth)
    chosen = scores > kth
    equal = np.flatnonzero(scores == kth)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _nucleus(scores: Row, weights: Row, goal: float) -> tuple[int, np.float32]:
    """How many of the largest weights reach `goal`, and the score of the last of them."""
    if len(scores) <= _FEW:
        order = np.argsort(scores)[::-1]
        reached = np.cumsum(weights[order], dtype=np.float64)
        place = min(int(np.searchsorted(reached, goal)), len(order) - 1)
        return place + 1, scores[order[place]]
    # Sixteenths of a nat, so that only the one in which the sum is reached needs sorting.
    steps = np.minimum(scores * np.float32(-16), np.float32(1023)).astype(np.int16)
    sums = np.cumsum(np.bincount(steps, weights))
    last = min(int(np.searchsorted(sums, goal)), len(sums) - 1)
    border = np.flatnonzero(steps == last)
    border = border[np.argsort(scores[border])[::-1]]
    below = float(sums[last - 1]) if last else 0.0
    reached = below + np.cumsum(weights[border], dtype=np.float64)
    place = min(int(np.searchsorted(reached, goal)), len(border) - 1)
    return int(np.count_nonzero(steps < last)) + place + 1, scores[border[place]]


def _at_most_kth(scores: Row, k: int) -> float:
    """A bound that the k-th largest reaches: the k-th largest of the maxima of disjoint groups."""
    group = min(64, len(scores) // (4 * k))
    if group < 2:
        return -math.inf
    num_groups = len(scores) // group
    maxima = scores[: group * num_groups].reshape(group, num_groups).max(axis=0)
    return float(np.partition(maxima, num_groups - k)[num_groups - k])


def checked_best(best: np.float32) -> np.float32:
    """A row's largest logit; raises ModelOutputError if it is not finite."""
    # NaN is the maximum of every row that holds one.
    if not math.isfinite(best):
        raise ModelOutputError(
            f"the model's largest logit is {best}, allowed are finite numbers; "
            "the bundle may be damaged: export it again"
        )
    return best


@dataclass(frozen=True)
class Choice:
    """A chosen token.

    Log-probabilities are of the model's own distribution, the softmax of its untouched logits
    (no temperature, penalty, bias or filter), and None unless `params.logprobs` asks for them.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the `params.logprobs` best, best first."""


class Sampler:
    """The chain of one request. Its methods change nothing and may be called from any thread."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """`params` has a seed (`SamplingParams.seeded`). Raises UsageError for a biased token
        outside the vocabulary."""
        for token_id in params.logit_bias:
            if token_id >= vocab_size:
                raise UsageError(
                    f"logit_bias: got token id {token_id}, allowed are 0 to {vocab_size - 1}"
                )
        assert params.seed is not None or params.temperature < GREEDY_BELOW
        self.params = params
        self.prompt_ids = prompt_ids
        self.seed = params.seed or 0
        self.is_greedy = params.temperature < GREEDY_BELOW
        self._all_ids = np.arange(vocab_size, dtype=np.uint32)
        self._logit_steps = _logit_steps(params)
        self._filters = _filters(params)

    def counts(self, output_ids: Iterable[int] = ()) -> TokenCounts:
        """The path that `choose` wants, after `output_ids`."""
        return TokenCounts(self.prompt_ids, output_ids)

    def choose(self, row: Row, position: int, counts: TokenCounts) -> Choice:
        """The token at `position` (of the sequence, prompt included) given its logits [V].

        `counts` holds the output before that position and stays as it is. A logit of -inf is
        never chosen. Raises ModelOutputError if the largest logit is not finite or any is NaN.
        """
        assert row.shape == self._all_ids.shape and row.dtype == np.float32
        if self.is_greedy:
            token_id = self._best(row, counts)
        else:
            kept = self.distribution(row, counts)
            token_id = int(kept.ids[draw(kept.scores, kept.ids, self.seed, position)])
        return self.report(row, token_id)

    def report(self, row: Row, token_id: int) -> Choice:
        """The choice of a token, with the log-probabilities that are asked for."""
        num_top = self.params.logprobs
        return Choice(token_id) if num_top is None else _with_logprobs(row, token_id, num_top)

    def distribution(self, row: Row, counts: TokenCounts) -> Candidates:
        """What `choose` draws from; at temperature 0 the best token alone. Raises as it does."""
        if self.is_greedy:
            best = np.array([self._best(row, counts)], np.uint32)
            return Candidates(best, np.zeros(1, np.float32))
        row = self.adjusted(row, counts)
        candidates = Candidates(self._all_ids, heat(row, self.params.temperature))
        for keep in self._filters:
            candidates = keep(candidates)
        return candidates

    @property
    def adjusts(self) -> bool:
        """Whether there are penalties or bias."""
        return bool(self._logit_steps)

    def adjusted(self, row: Row, counts: TokenCounts) -> Row:
        """Logits [V] with penalties and bias; `row` itself where there are none."""
        for step in self._logit_steps:
            row = step(row, counts)
        return row

    def _best(self, row: Row, counts: TokenCounts) -> int:
        row = self.adjusted(row, counts)
        best = int(row.argmax())
        checked_best(row[best])
        return best


def _logit_steps(params: SamplingParams) -> list[Callable[[Row, TokenCounts], Row]]:
    steps: list[Callable[[Row, TokenCounts], Row]] = []
    repeat, presence = params.repeat_penalty, params.presence_penalty
    frequency = params.frequency_penalty
    if (repeat, presence, frequency) != (1.0, 0.0, 0.0):
        steps.append(partial(penalize, repeat=repeat, presence=presence, frequency=frequency))
    if params.logit_bias:
        token_ids = np.array(list(params.logit_bias), np.int64)
        bias = np.array(list(params.logit_bias.values()), np.float32)
        steps.append(lambda row, _: add_bias(row, token_ids, bias))
    return steps


def _filters(params: SamplingParams) -> list[Callable[[Candidates], Candidates]]:
    return [
        partial(keep_top_k, k=params.top_k),
        partial(keep_top_p, p=params.top_p),
        partial(keep_min_p, p=params.min_p),
    ]


def _with_logprobs(row: Row, token_id: int, num_top: int) -> Choice:
    log_total = log_normalizer(row)
    top = tuple((int(i), float(row[i]) - log_total) for i in best_tokens(row, num_top))
    return Choice(token_id, float(row[token_id]) - log_total, top)
