"""What a request asks for and what it gets back: records only, no behaviour.

`SamplingParams` has one field per command line flag (`--top-k` is `top_k`); the command line, the
Python API and the server all build it, so every range is checked in one place.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, cast, get_args

from headrace.errors import UsageError

FinishReason = Literal["stop", "length"]

Accept = Literal["coupled", "rejection"]
Exactness = Literal["exact", "tree"]
Speculate = Literal["auto", "off"] | int
Sources = Literal["all", "lookup", "draft"]

MAX_PROPOSED = 16
"""Tokens of a proposal at most."""

MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    above_low: bool = False
    whole: bool = False
    optional: bool = False

    def check(self, name: str, value: object) -> float | int | None:
        """`value` as float or int; raises UsageError for anything outside the range."""
        if value is None and self.optional:
            return None
        number: Any = value  # numbers.Real says nothing to a type checker
        if isinstance(value, Integral if self.whole else Real) and not isinstance(value, bool):
            at_least = number > self.low if self.above_low else number >= self.low
            if at_least and number <= self.high:  # both false for NaN
                return int(number) if self.whole else float(number)
        raise UsageError(f"{name}: got {_shown(value)}, allowed is {self}")

    def __str__(self) -> str:
        noun = "a whole number" if self.whole else "a number"
        low = f"above {self.low:g}" if self.above_low else f"from {self.low:g}"
        return f"{noun} {low}" + ("" if self.high == math.inf else f" to {_plain(self.high)}")


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_ALLOWED: Mapping[str, _Range] = {
    "temperature": _Range(0, 100),
    "top_k": _Range(0, math.inf, whole=True),
    "top_p": _Range(0, 1, above_low=True),
    "min_p": _Range(0, 1),
    "repeat_penalty": _Range(0, 10, above_low=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "seed": _Range(0, 2**64 - 1, whole=True, optional=True),
    "max_tokens": _Range(1, math.inf, whole=True),
    "logprobs": _Range(0, 50, whole=True, optional=True),
}
_BIAS = _Range(-100, 100)
_TOKEN_ID = _Range(0, 2**32 - 1, whole=True)

MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
"""What a model's generation_config may set (`--sampling model`)."""


class LogitBias(Mapping[int, float]):
    """An immutable, hashable mapping from token id to what is added to its logit."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._values = dict(sorted(bias.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises UsageError for a value out of range.

    The order of the steps is that of `headrace.runtime.sampling`.
    """

    temperature: float = 0.0
    """0 (or below 1e-5) takes the best token."""
    top_k: int = 0
    """Keep the k best tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest best tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Drop tokens less probable than this times the best one's probability."""
    repeat_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it is in the output."""
    seed: int | None = None
    """Repeats an answer; unless set, it is drawn at random and reported."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before them."""
    max_tokens: int = 512
    """Tokens of the answer at most."""
    logprobs: int | None = None
    """Report each token's log-probability and those of this many alternatives, 0 to 50."""
    logit_bias: Mapping[int, float] = LogitBias({})
    """Token id to what is added to its logit, -100 to 100."""
    ignore_eos: bool = False
    """Go on to `max_tokens` past the model's end tokens."""
    accept: Accept = "coupled"
    """How proposed tokens are accepted: `coupled` gives the text that there is without them,
    `rejection` another one of the same distribution."""
    exactness: Exactness | None = None
    """`exact` promises the same bits however rows are grouped, `tree` the distribution and may
    propose trees; unless set, the loaded model's. A session keeps that of its start."""
    speculate: Speculate | None = None
    """How much to propose: `auto`, `off`, or 1 to 16 tokens; unless set, the loaded model's."""
    sources: Sources = "all"
    """Who proposes: `lookup` is what the text, the recent stream and the prior repeat."""

    def __post_init__(self) -> None:
        one_of("accept", self.accept, Accept)
        one_of("sources", self.sources, Sources)
        if self.exactness is not None:
            one_of("exactness", self.exactness, Exactness)
        if self.speculate is not None:
            object.__setattr__(self, "speculate", checked_speculate(self.speculate))
        for name, allowed in _ALLOWED.items():
            object.__setattr__(self, name, allowed.check(name, getattr(self, name)))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos: got {_shown(self.ignore_eos)}, allowed is true or false")

    @classmethod
    def resolve(
        cls, user: Mapping[str, object], model_defaults: Mapping[str, float] | None = None
    ) -> SamplingParams:
        """Params from what the user set, the rest from the model, the rest from our defaults.

        A user's None means "not set". `model_defaults` holds names of MODEL_FIELDS only. Raises
        UsageError for an unknown name or a value out of range, whoever gave it.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        _refuse_unknown(user, known, "sampling parameter")
        _refuse_unknown(model_defaults or {}, MODEL_FIELDS, "sampling default of the model")
        values: dict[str, Any] = dict(model_defaults or {})
        if "top_k" in values and float(values["top_k"]).is_integer():
            values["top_k"] = int(values["top_k"])  # JSON knows one kind of number
        values.update((name, value) for name, value in user.items() if value is not None)
        return cls(**values)

    def seeded(self) -> SamplingParams:
        """These params with a seed: their own, or a random one short enough to type again."""
        if self.seed is not None:
            return self
        return dataclasses.replace(self, seed=secrets.randbits(32))


def one_of(name: str, value: object, kinds: Any) -> None:
    """Raises UsageError unless `value` is one of a Literal's."""
    known = get_args(kinds)
    if value not in known:
        words = f"{', '.join(known[:-1])} and {known[-1]}"
        raise UsageError(f"{name}: got {_shown(value)}, allowed are {words}")


def checked_speculate(value: Any) -> Speculate:
    """`value` as a Speculate, a number as text included; raises UsageError."""
    if isinstance(value, str) and value in ("auto", "off"):
        return cast(Speculate, value)
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    if is_whole and 1 <= number <= MAX_PROPOSED:
        return int(number)
    raise UsageError(f"speculate: got {value!r}, allowed are auto, off and 1 to {MAX_PROPOSED}")


def _refuse_unknown(
    given: Mapping[str, object], known: list[str] | tuple[str, ...], what: str
) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"unknown {what} {_shown(name)}; known are {', '.join(known)}")


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, tuple | list):
        raise UsageError(f"stop: got {_shown(stop)}, allowed are strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise UsageError(f"stop: got {len(strings)} strings, allowed are {MAX_STOP_STRINGS}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(f"stop: got {_shown(string)}, allowed are non-empty strings")
    return tuple(strings)


def _checked_bias(bias: object) -> LogitBias:
    if isinstance(bias, LogitBias):
        return bias
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias: got {_shown(bias)}, allowed is a map from token id to bias")
    checked = {}
    for token_id, value in bias.items():
        number = _BIAS.check(f"logit_bias of {_shown(token_id)}", value)
        checked[_TOKEN_ID.check("logit_bias token id", token_id)] = number
    return LogitBias(checked)  # type: ignore[arg-type]  # neither range is optional


@dataclass(frozen=True)
class Alternative:
    """A token that could have stood here, and its natural-log probability."""

    token_id: int
    text: str
    logprob: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer under the model's own distribution (`sampling.Choice`)."""

    token_id: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()
    """The best tokens at this place, best first; the chosen one may be among them."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Usage:
    """Token counts of a request, special tokens included."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total_tokens": self.total_tokens}


@dataclass(frozen=True)
class Timings:
    """Where the time of a request went, in seconds of wall clock."""

    prefill_tokens: int
    """Prompt tokens that were computed; those found in a cache are not among them."""
    prefill_s: float
    first_token_s: float
    """From the request's arrival to its first token."""
    decode_tokens: int
    """Tokens after the first, which prefill pays for."""
    decode_s: float
    target_s: float = 0.0
    """In passes of the target, those of the prompt included."""

    @property
    def prefill_tokens_per_s(self) -> float:
        return _rate(self.prefill_tokens, self.prefill_s)

    @property
    def decode_tokens_per_s(self) -> float:
        return _rate(self.decode_tokens, self.decode_s)

    def to_json(self) -> dict[str, Any]:
        rates = {
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }
        return {**dataclasses.asdict(self), **rates}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class SourceCounts:
    """Of one source: tokens by their depth in a proposal, the first element being depth 1."""

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass
class DraftCounts:
    """What the draft model did, for all requests together."""

    rows: int = 0
    """Of tokens that might come."""
    rows_true: int = 0
    """Of those, the ones that became text."""
    rows_text: int = 0
    """Of the text itself, to catch up."""
    head_starts: int = 0
    """Verdicts with deferral."""
    head_start_hits: int = 0
    """Those whose outcome had been computed already."""
    late: int = 0
    """Proposals that were not waited for."""
    failures: int = 0
    switches: int = 0
    """From a place that failed to another, as from the NPU to the CPU."""
    returns: int = 0
    """To a place that had failed."""
    busy_s: float = 0.0
    idle_s: float = 0.0
    """Waiting to be asked."""

    def since(self, before: DraftCounts) -> DraftCounts:
        """What was done after `before`."""
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(before)
        return DraftCounts(*(a - b for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True)
class SpeculationCounts:
    """What was proposed for the tokens of an answer."""

    passes: int
    """Passes of the target that gave tokens, the one of the prompt included."""
    proposed: int
    accepted: int
    sources: Mapping[str, SourceCounts] = dataclasses.field(default_factory=dict)
    """`session`, `stream` and `corpus` are looked up, `draft` is the draft model."""
    draft_wait_s: float = 0.0
    """Seconds that the draft model was waited for."""
    target_idle_s: float = 0.0
    """From the first token to the last, what was not spent in passes of the target."""
    draft: DraftCounts | None = None
    """Of the draft model while the answer was made; None without one."""

    @property
    def wasted(self) -> int:
        return self.proposed - self.accepted

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "wasted": self.wasted}


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer: what one pass gave, one token or several.

    `text` never changes later and may be empty.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last piece only."""

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "logprobs": [entry.to_json() for entry in self.logprobs],
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True)
class Completion:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or the end token that ended it; None when it ran into a length."""
    usage: Usage
    timings: Timings
    seed: int | None
    """Repeats this answer, together with the same prompt and params."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    speculation: SpeculationCounts | None = None
    """None where speculation is off."""
    exactness: Exactness = "exact"
    """What its text promises, `SamplingParams.exactness`."""
    accept: Accept = "coupled"

    def to_json(self) -> dict[str, Any]:
        """One JSON object; `logprobs` is there only if they were asked for."""
        answer: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": self.usage.to_json(),
            "timings": self.timings.to_json(),
            "seed": self.seed,
            "exactness": self.exactness,
            "accept": self.accept,
            "speculation": self.speculation.to_json() if self.speculation else None,
        }
        if self.logprobs is not None:
            answer["logprobs"] = [entry.to_json() for entry in self.logprobs]
        return answer
