"""Whether speculation keeps its promises here: the same prompts decoded plain and sped up, compared.

`coupled` with `exact` promises the text: token ids and log-probabilities must be the same bits. So
does `rejection` at temperature 0, where a distribution has one token. All else promises the
distribution. Of that, an answer says itself whether it holds: a token's place in its row's
cumulated probabilities, the likelier tokens first, is uniform in [0, 1) if it was drawn from that
row (the probability integral transform; Rosenblatt, 1952, for the parts of a text in turn), and
that its rows are the model's is seen by scoring the text.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.models.plantlog import QUESTIONS, sample_log
from headrace.runtime.fit import fit
from headrace.runtime.llm import LLM
from headrace.runtime.request import (
    Accept,
    Completion,
    Exactness,
    SamplingParams,
    Sources,
    Speculate,
    TokenLogprob,
)
from headrace.runtime.session import Session

F64 = npt.NDArray[np.float64]

NUM_BESIDE = 4
"""Answers at once where they are not alone."""

NUM_TOP = 16
"""Likeliest tokens of each row that are reported; the others count as one when a fit is judged."""

LEAST_FIT = 1e-6
"""Probability of a sample as unlikely as this or more: how often a check fails without a cause."""

MOST_GAP = 0.2
"""Nats between log-probabilities of trees' rows and of the same rows in chains, in the mean. They
differ by rounding, which quantised activations make larger (0.02 to 0.05 of SmolLM2 in int8); rows
of another context differ by one and more."""

_NUM_BINS = 16

SINKS, WINDOW, UNIT = 16, 32, 16
"""Of streams: so small that a short answer wraps."""


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str


def prompts(count: int) -> list[Prompt]:
    """Built-in ones: parts of a plant log, and prose."""
    found = []
    for i in range(count):
        log = sample_log(2 + i % 3, seed=i)
        kinds = [
            Prompt(f"log {i}", log),
            Prompt(f"prose {i}", _PROSE[i // 2 % len(_PROSE)]),
            Prompt(f"log {i}, half a line", log[: len(log) - 30]),
            Prompt(f"question {i}", f"{log}\nQuestion: {QUESTIONS[i % len(QUESTIONS)]}\nAnswer:"),
        ]
        found.append(kinds[i % len(kinds)])
    return found


_PROSE = (
    "A strainer is put before a pump because",
    "The night shift was quiet until the rain came. Then the operator heard",
    "Dear colleagues, from Monday on the cooling water will be",
    "There are three ways to measure the level of a tank. The first",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode."""

    accept: Accept
    exactness: Exactness
    source: Sources
    temperature: float
    mode: Literal["full", "stream"]
    is_beside: bool
    """Several answers at once, each in a session of its own, instead of one after another."""
    speculate: Speculate
    is_deferred: bool
    """The model was loaded with `defer` on, not off."""

    @property
    def promises_text(self) -> bool:
        return self.exactness == "exact" and (self.accept == "coupled" or not self.temperature)

    def params(self, seed: int, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=NUM_TOP,
            ignore_eos=True,
            accept=self.accept,
            exactness=self.exactness,
            speculate=self.speculate,
            sources=self.source,
        )

    def plain(self) -> Case:
        """The same without proposals."""
        return dataclasses.replace(
            self, accept="coupled", source="all", is_beside=False, speculate="off",
            is_deferred=False,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [
            self.accept,
            self.exactness,
            {"all": "both"}.get(self.source, self.source),
            self.mode,
            "beside" if self.is_beside else "alone",
            str(self.speculate),
        ]
        return " ".join([*words, "deferred"] if self.is_deferred else words)


def cases(*, has_draft: bool, is_exact: bool, strength: int) -> list[Case]:
    """A few in which every `strength` settings come together in every way that they can."""
    every = [
        case
        for case in _product()
        if (is_exact or case.exactness == "tree")
        and (case.source == "lookup" if not has_draft else True)
        # Without a draft's proposals there is nothing to defer.
        and (case.source != "lookup" or not case.is_deferred)
    ]
    missing = set().union(*(_parts(case, strength) for case in every))
    found: list[Case] = []
    while missing:
        best = max(every, key=lambda case: len(_parts(case, strength) & missing))
        missing -= _parts(best, strength)
        found.append(best)
    return sorted(found, key=lambda case: (case.is_deferred, not case.promises_text))


def _product() -> Iterator[Case]:
    ways: dict[str, tuple[Any, ...]] = {
        "accept": ("coupled", "rejection"),
        "exactness": ("exact", "tree"),
        "source": ("all", "draft", "lookup"),
        "temperature": (1.0, 0.0),
        "mode": ("full", "stream"),
        "is_beside": (False, True),
        "speculate": (6, "auto"),
        "is_deferred": (False, True),
    }
    for values in itertools.product(*ways.values()):
        yield Case(**dict(zip(ways, values, strict=True)))


def _parts(case: Case, strength: int) -> set[object]:
    return set(itertools.combinations(dataclasses.asdict(case).items(), strength))


@dataclass(frozen=True)
class Difference:
    """Where two answers part."""

    prompt: str
    position: int
    """In the answer, from 0."""
    plain: TokenLogprob | None
    """None where it has ended already."""
    found: TokenLogprob | None

    def __str__(self) -> str:
        return (
            f"{self.prompt}, token {self.position}: plain {_shown(self.plain)}, "
            f"found {_shown(self.found)}"
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _shown(token: TokenLogprob | None) -> str:
    if token is None:
        return "the end"
    return f"{token.text!r} (id {token.token_id}, logprob {token.logprob!r})"


def difference(prompt: Prompt, plain: Completion, found: Completion) -> Difference | None:
    """The first place at which tokens, log-probabilities or alternatives are not the same."""
    pairs = itertools.zip_longest(plain.logprobs or (), found.logprobs or ())
    for position, (a, b) in enumerate(pairs):
        if a != b:
            return Difference(prompt.name, position, a, b)
    return None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a case."""

    case: Case
    num_answers: int
    num_tokens: int
    num_accepted: int
    """Tokens that had been proposed."""
    num_same: int
    """Answers that are the plain ones to the bit."""
    first_difference: Difference | None
    fit: float | None = None
    """Probability that tokens which are drawn from their rows lie as unevenly as these; None
    where that is not what is promised."""
    gap: float | None = None
    """Nats in the mean between the log-probabilities of tokens and those that scoring the text
    gives: none in `exact`. A stream cannot be scored: those of the plain answer, as far as it is
    the same."""

    @property
    def holds(self) -> bool:
        if self.case.promises_text:
            return self.first_difference is None
        most_gap = 0.0 if self.case.exactness == "exact" else MOST_GAP
        return (self.fit is None or self.fit > LEAST_FIT) and (self.gap or 0.0) <= most_gap

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "holds": self.holds}


class Check:
    """Runs cases on the same prompts. Plain answers are made once and kept."""

    def __init__(self, texts: Sequence[Prompt], max_tokens: int, *, is_exact: bool = True) -> None:
        self.prompts, self._max_tokens = list(texts), max_tokens
        self._plain_exactness: Exactness = "exact" if is_exact else "tree"
        self._plain: dict[Case, list[Completion]] = {}

    def run(self, llm: LLM, case: Case) -> Result:
        """`llm` was loaded with the case's deferral."""
        plain = self.plain(llm, case)
        found = self.answers(llm, case)
        differences = list(map(difference, self.prompts, plain, found))
        judged: dict[str, float | None] = {}
        if not case.promises_text:
            again = self._scores(llm, found) if case.mode == "full" else _plain_scores(plain)
            judged["gap"] = _gap(found, again)
            judged["fit"] = _fit(found) if case.temperature else None
        return Result(
            case=case,
            num_answers=len(found),
            num_tokens=sum(len(answer.token_ids) for answer in found),
            num_accepted=sum(a.speculation.accepted for a in found if a.speculation is not None),
            num_same=differences.count(None),
            first_difference=next((d for d in differences if d is not None), None),
            **judged,
        )

    def plain(self, llm: LLM, case: Case) -> list[Completion]:
        plain = dataclasses.replace(case.plain(), exactness=self._plain_exactness)
        if plain not in self._plain:
            self._plain[plain] = self.answers(llm, plain)
        return self._plain[plain]

    def answers(self, llm: LLM, case: Case) -> list[Completion]:
        """One for each prompt, with its number as the seed."""
        numbers = range(len(self.prompts))
        jobs = [Job(case, self.prompts[i], i, self._max_tokens) for i in numbers]
        return run(llm, jobs, is_beside=case.is_beside)

    def _scores(self, llm: LLM, found: Sequence[Completion]) -> list[Sequence[TokenLogprob]]:
        """Of the texts that were found."""
        return [
            llm.score([*llm.encode(prompt.text), *a.token_ids]).tokens[-len(a.token_ids) :]
            for prompt, a in zip(self.prompts, found, strict=True)
        ]


@dataclass(frozen=True)
class Job:
    """An answer to make."""

    case: Case
    prompt: Prompt
    seed: int
    max_tokens: int

    def run(self, llm: LLM) -> Completion:
        with self._session(llm) as context:
            params = self.case.params(self.seed, self.max_tokens)
            return context.generate(self.prompt.text, params)

    def _session(self, llm: LLM) -> Session:
        exactness = self.case.exactness
        if self.case.mode == "full":
            return llm.session(exactness=exactness)
        return llm.session("stream", exactness=exactness, sinks=SINKS, window=WINDOW, unit=UNIT)


def run(llm: LLM, jobs: Sequence[Job], *, is_beside: bool) -> list[Completion]:
    """One after another, or four at once."""
    if not is_beside:
        return [job.run(llm) for job in jobs]
    with ThreadPoolExecutor(NUM_BESIDE) as threads:
        return list(threads.map(lambda job: job.run(llm), jobs))


def _plain_scores(plain: Sequence[Completion]) -> list[Sequence[TokenLogprob]]:
    return [answer.logprobs or () for answer in plain]


def _gap(found: Sequence[Completion], again: Sequence[Sequence[TokenLogprob]]) -> float:
    """Nats in the mean between log-probabilities, as far as the tokens are the same."""
    gaps: list[float] = []
    for answer, tokens in zip(found, again, strict=True):
        for mine, other in zip(answer.logprobs or (), tokens, strict=True):
            if mine.token_id != other.token_id:
                break
            gaps.append(abs(mine.logprob - other.logprob))
    return math.fsum(gaps) / max(1, len(gaps))


def _fit(found: Sequence[Completion]) -> float:
    """How well the places of all tokens fit to what is drawn."""
    levels = np.concatenate([level(a.logprobs or (), a.seed or 0) for a in found])
    counts = np.histogram(levels, _NUM_BINS, (0, 1))[0]
    return fit(counts, np.full(_NUM_BINS, len(levels) / _NUM_BINS))


def level(tokens: Sequence[TokenLogprob], seed: int) -> F64:
    """[n] of tokens drawn at temperature 1: uniform and independent if each came from its row.

    A token is somewhere in its own share of the cumulated probabilities. Those that are not among
    the reported ones share what is left.
    """
    shares = np.random.default_rng(seed).random(len(tokens))
    return np.array([_level(t, float(s)) for t, s in zip(tokens, shares, strict=True)])


def _level(token: TokenLogprob, share: float) -> float:
    before = 0.0
    for other in token.top:
        own = math.exp(other.logprob)
        if other.token_id == token.token_id:
            return min(before + share * own, 1 - 2**-53)
        before += own
    return min(before + share * max(0.0, 1 - before), 1 - 2**-53)
