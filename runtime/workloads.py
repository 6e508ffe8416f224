"""What speculation is measured on: prompts of five kinds, and what really comes after them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product

from headrace.errors import ContextFullError, UsageError
from headrace.models import plantlog
from headrace.runtime.request import SamplingParams
from headrace.runtime.tokenizer import Tokenizer

NUM_PROMPTS = 4
"""Of a workload, if there are no more logs than that."""

_LOG_LINES = 400

_LEAST_LOG_TOKENS = 128

_LOG_TOKENS = {"continue a log": 1024, "digest a log": 768, "answer in JSON": 384}
"""Of the log in a prompt, at most; and where a context is small, what it leaves."""

_ROOM_FOR_WORDS = 200
"""Tokens for instructions and chat template."""

_DIGEST = (
    "Here is a part of a log:\n\n{log}\nList its notable lines (warnings, errors, changes of state) "
    "word for word, one a line, in their order."
)
_JSON = (
    "Turn each line of this log into a JSON object on a line of its own, with the keys line, time "
    'and event: {{"line": 1, "time": "...", "event": "..."}}. Answer with the objects alone.\n\n{log}'
)
_NOTABLE = re.compile(
    "warn|error|fail|fatal|alarm|trip|exception|denied|invalid|refused|lost|broken", re.IGNORECASE
)
_TIME = re.compile(r"\S*(?:\d{6}|\d:\d\d|\d{4}-\d\d)\S*")

_PROSE = (
    ("Explain why the water level of a boiler is kept within narrow limits.", "Why does a boiler"),
    ("Tell the story of a canal lock on the morning after a storm.", "The morning after"),
    ("Write an instruction for those who run a pump house with two feed pumps.", "Two feed pumps"),
)
"""What is asked for, and where in `plantlog.calibration_text` somebody has written it."""

_LETTERS, _DECOY = "abcdefg", "z"


@dataclass(frozen=True)
class Log:
    """A text of lines."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Prompt:
    """What a model is asked."""

    token_ids: Sequence[int]
    given: Sequence[int]
    """What comes next in the real text, or what a program or a person would have answered."""
    params: SamplingParams


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: Sequence[Prompt]


def built_in_logs() -> list[Log]:
    """Stretches of the generated plant log."""
    seeds = range(NUM_PROMPTS)
    return [Log(f"plant log {i}", tuple(islice(plantlog.lines(i), _LOG_LINES))) for i in seeds]


class Writer:
    """Makes the workloads' prompts for one model. Deterministic."""

    def __init__(self, tokenizer: Tokenizer, capacity: int, max_tokens: int) -> None:
        """`capacity` holds prompt and answer. Raises ContextFullError if that is too small."""
        self._tokenizer, self._capacity = tokenizer, capacity
        self._num_new = max_tokens
        self._params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._room = capacity - max_tokens - _ROOM_FOR_WORDS
        if self._room < _LEAST_LOG_TOKENS:
            raise ContextFullError(
                f"the context holds {capacity} tokens, too few for a prompt and an answer of "
                f"{max_tokens}; {max_tokens + _ROOM_FOR_WORDS + _LEAST_LOG_TOKENS} would do: "
                "raise --ctx or lower --max-tokens"
            )

    def workloads(self, logs: Sequence[Log]) -> list[Workload]:
        """Raises UsageError for a log that is too short, ContextFullError."""
        # Where in its log each prompt begins, as a share: more than one if there are few logs.
        per_log = -(-NUM_PROMPTS // len(logs))
        places = [(log, (i + 1) / (per_log + 2)) for log in logs for i in range(per_log)]
        of_logs = {
            "continue a log": self._continue,
            "digest a log": self._digest,
            "answer in JSON": self._json,
        }
        made = [
            Workload(name, [self._fitting(write(*self._cut(name, *p))) for p in places])
            for name, write in of_logs.items()
        ]
        prose = [self._fitting(self._prose(*text)) for text in _PROSE]
        misleading = [self._adversarial(seed) for seed in range(NUM_PROMPTS)]
        return [*made, Workload("free prose", prose), Workload("adversarial", misleading)]

    def _cut(self, name: str, log: Log, place: float) -> tuple[list[str], list[str]]:
        """Lines of the log for a prompt, and those that follow them."""
        rest = log.lines[int(place * len(log.lines)) :]
        before = self._as_many(rest[: len(rest) // 2], min(self._room, _LOG_TOKENS[name]))
        if not before:
            raise UsageError(
                f"{log.name}: got {len(log.lines)} lines, of which none fits a prompt of "
                f"{self._room} tokens and has others after it; give longer logs of shorter lines"
            )
        return before, list(rest[len(before) : len(before) + self._num_new])

    def _as_many(self, lines: Sequence[str], num_tokens: int) -> list[str]:
        taken: list[str] = []
        for line in lines:
            num_tokens -= len(self._encode(f"{line}\n"))
            if num_tokens < 0:
                break
            taken.append(line)
        return taken

    def _continue(self, before: list[str], after: list[str]) -> Prompt:
        return Prompt(
            self._tokenizer.encode(_text(before)), self._given(_text(after)), self._params
        )

    def _digest(self, before: list[str], after: list[str]) -> Prompt:
        notable = [line for line in before if _NOTABLE.search(line)] or before
        return self._chat(_DIGEST.format(log=_text(before)), _text(notable))

    def _json(self, before: list[str], after: list[str]) -> Prompt:
        objects = [_object(i, line) for i, line in enumerate(before, 1)]
        return self._chat(_JSON.format(log=_text(before)), _text(objects))

    def _prose(self, request: str, start: str) -> Prompt:
        text = plantlog.calibration_text()
        return self._chat(request, text[text.index(start) :].partition("\n\n")[0])

    def _adversarial(self, seed: int) -> Prompt:
        """Every three letters that an answer can have stand in the prompt, and after each of them a
        letter that it cannot have: every look-up finds something, and it is wrong.

        The answer is drawn evenly from the letters, whatever the model, as a greedy one would fall
        into a loop, which look-ups can follow. They are still right by chance where three letters
        have come twice in the answer.
        """
        num = max(n for n in range(1, len(_LETTERS) + 1) if 4 * n**3 <= self._room)
        letters = [self._encode(letter)[-1] for letter in _LETTERS[:num]]
        decoy, draws = self._encode(_DECOY)[-1], random.Random(seed)
        triples = list(product(letters, repeat=3))
        draws.shuffle(triples)
        params = replace(
            self._params,
            temperature=100.0,
            top_k=num,
            logit_bias={letter: 100.0 for letter in letters},
            seed=seed,
        )
        ids = list(chain.from_iterable((*triple, decoy) for triple in triples))
        return Prompt(ids, draws.choices(letters, k=self._num_new), params)

    def _chat(self, request: str, given: str) -> Prompt:
        """As a chat if the model has a template for it."""
        if self._tokenizer.chat_template is None:
            ids = self._tokenizer.encode(f"{request}\n\n")
        else:
            ids = self._tokenizer.encode_chat([{"role": "user", "content": request}])
        return Prompt(ids, self._given(given), self._params)

    def _given(self, text: str) -> list[int]:
        return self._encode(text)[: self._num_new]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False)

    def _fitting(self, prompt: Prompt) -> Prompt:
        size = len(prompt.token_ids) + self._num_new
        if size > self._capacity:
            raise ContextFullError(
                f"a prompt and its answer have {size} tokens and the context holds "
                f"{self._capacity}; raise --ctx or lower --max-tokens"
            )
        return prompt


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _object(number: int, line: str) -> str:
    """What `_JSON` asks for."""
    time = _TIME.search(line)
    found, event = (time[0], line[time.end() :]) if time else ("", line)
    return json.dumps({"line": number, "time": found, "event": event.strip()})
