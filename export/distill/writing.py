"""Texts by the target itself: chats that it makes up, answers, and continuations of a corpus.

A chat model that is shown nothing but the opening of a user's turn writes what users ask it (Xu et
al., 2024, Magpie), so its own questions cost no corpus. All texts of a batch are written side by
side, a token of each a pass; tokens that are not the model's to choose are put in their places, and
what the target thinks of each token falls off on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.export.distill.decoder import Cache, Decoder
from headrace.export.distill.labels import Labelled, best, labelled
from headrace.export.text import Text
from headrace.models.chat_template import render

TEMPERATURE = 0.8

_DAY = datetime(2026, 1, 1)
"""What a template is told that today is: a run that is resumed writes the same on any day."""

_MARKS = ("QUESTIONONE", "ANSWERONE", "QUESTIONTWO")


@dataclass(frozen=True)
class ChatForm:
    """What a chat template puts around the words of a chat."""

    opening: list[int]
    """Token ids before the first question."""
    to_answer: list[int]
    """Between a question and its answer."""
    to_question: list[int]
    """Between an answer and the next question."""
    ends: frozenset[int]
    """Tokens that end an answer or a question."""

    @classmethod
    def of(cls, text: Text) -> ChatForm | None:
        """None for a model without a chat template, or with one that is no plain frame."""
        source = text.source
        if source.chat_template is None or not source.eos_ids:
            return None
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": m} for r, m in zip(roles, _MARKS, strict=True)]
        names = {"bos_token": source.bos_id, "eos_token": source.eos_ids[0]}
        variables: dict[str, object] = {
            name: "" if token is None else text.inner.id_to_token(token)
            for name, token in names.items()
        }
        try:
            whole = render(
                source.chat_template, messages, variables | {"strftime_now": _DAY.strftime}
            )
        except UsageError:  # e.g. it allows one question
            return None
        if any(whole.count(mark) != 1 for mark in _MARKS):
            return None
        parts: list[list[int]] = []
        for mark in _MARKS:
            part, found, whole = whole.partition(mark)
            if not found:
                return None
            parts.append(text.pieces(part))
        opening, to_answer, to_question = parts
        if source.add_bos and source.bos_id is not None and opening[:1] != [source.bos_id]:
            opening = [source.bos_id, *opening]
        return cls(opening, to_answer, to_question, frozenset(source.eos_ids))


class Script:
    """One text on its way: what stands fixed in it, and what follows where the model ends a turn."""

    def __init__(self, opening: Iterable[int], turns: Callable[[], Sequence[int]] | None) -> None:
        """`turns` gives what comes after each end; without it an end is a token like others."""
        self._fixed = deque(opening)
        self._turns = turns

    def next(self) -> int | None:
        """The token that must come; None where the model chooses."""
        return self._fixed.popleft() if self._fixed else None

    def ended(self, token: int) -> None:
        """The model has chosen `token`, which ends a turn."""
        if self._turns is not None:
            after = self._turns()
            self._fixed.extend(after[1:] if after[:1] == [token] else after)


def chat(form: ChatForm, questions: Iterable[Sequence[int]] = ()) -> Script:
    """Questions that are given, then such as the model makes up, each with the model's answer."""
    given = deque(questions)
    first = list(given.popleft()) + form.to_answer if given else []
    is_answer = bool(first)

    def turns() -> list[int]:
        nonlocal is_answer
        if not is_answer:
            is_answer = True
            return form.to_answer
        if given:
            return [*form.to_question, *given.popleft(), *form.to_answer]
        is_answer = False
        return form.to_question

    return Script([*form.opening, *first], turns)


@torch.no_grad()
def write(
    model: Decoder,
    head: Tensor,
    scripts: Sequence[Script],
    length: int,
    ends: frozenset[int],
    seed: int,
) -> Labelled:
    """Writes `length` tokens of each script, drawn at TEMPERATURE from the most likely ones.

    The same seed gives the same texts. `head` is [V, D].
    """
    random = torch.Generator().manual_seed(seed)
    cache = Cache.empty(model.config, len(scripts), length)
    ids: list[Tensor] = []
    tops: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    drawn: list[int] = [0] * len(scripts)
    for place in range(length):
        if place:
            weights = (values[-1].float() / TEMPERATURE).exp()
            choice = torch.multinomial(weights, 1, generator=random)
            drawn = tops[-1].gather(-1, choice)[:, 0].tolist()
        tokens = []
        for script, choice_id in zip(scripts, drawn, strict=True):
            fixed = script.next()
            tokens.append(choice_id if fixed is None else fixed)
            if fixed is None and choice_id in ends:
                script.ended(choice_id)
        ids.append(torch.tensor(tokens))
        states.append(model.extend(ids[-1][:, None], cache)[:, 0])  # [B, D]
        top, log_probs = best(states[-1], head)
        tops.append(top)
        values.append(log_probs)
    return labelled(*(torch.stack(part, 1) for part in (ids, tops, values, states)))
