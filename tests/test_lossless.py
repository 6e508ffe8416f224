"""SmolLM2 says the same with speculation and without: token ids and log-probabilities, bit for bit.

Eight prompts, from logs and prose, with 128 tokens each; two for each of full session and ring by
temperature 0 and 0.8. Each is decoded plain, alone, and then sped up. The ways between them bring
together all sources, in-line and deferred, alone and beside three other sessions: every pair of
those settings, not their product. Beside others four prompts are decoded, alone one or two; each
prompt is sped up in two ways at least. A ring of 16 sinks and 32 tokens wraps four times in an answer. The draft is
the one that was distilled from the target. A perfect one, the target itself, is as slow as the target:
two of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from exported import smollm2_distilled, smollm2_pair

from headrace import LLM
from headrace.runtime.lossless import UNIT, WINDOW, Case, Job, difference, prompts, run
from headrace.runtime.request import Completion

MAX_TOKENS = 128
PROMPTS = prompts(8)
GROUPS: list[dict[str, Any]] = [
    {"mode": mode, "temperature": temperature}
    for mode in ("full", "stream")
    for temperature in (0.0, 0.8)
]


def jobs(numbers: list[int], **way: Any) -> list[Job]:
    """Of prompts by their numbers."""
    return [
        Job(
            Case(accept="coupled", exactness="exact", **GROUPS[i % len(GROUPS)], **way),
            PROMPTS[i],
            i,
            MAX_TOKENS,
        )
        for i in numbers
    ]


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, LLM]]:
    """By `defer`."""
    bundle = smollm2_distilled().path
    with (
        LLM(bundle, lanes=4, ctx=512, defer="off") as inline,
        LLM(bundle, lanes=4, ctx=512, defer="on") as deferred,
    ):
        yield {"off": inline, "on": deferred}


@pytest.fixture(scope="module")
def plain(pair: dict[str, LLM]) -> list[Completion]:
    way = {"source": "all", "speculate": "off", "is_beside": False, "is_deferred": False}
    answers = run(pair["off"], jobs(list(range(8)), **way), is_beside=False)
    for answer in answers:
        assert len(answer.token_ids) == MAX_TOKENS >= 3 * WINDOW + UNIT
    return answers


def agree(llm: LLM, plain: list[Completion], numbers: list[int], **way: Any) -> int:
    """Asserts that answers are the plain ones; returns the proposed tokens in them, by source."""
    work = jobs(numbers, **way)
    accepted = 0
    for i, answer in zip(numbers, run(llm, work, is_beside=way["is_beside"]), strict=True):
        assert difference(PROMPTS[i], plain[i], answer) is None, str(work[0].case)
        assert answer.token_ids == plain[i].token_ids
        assert answer.speculation is not None
        accepted += answer.speculation.accepted
    return accepted


@pytest.mark.parametrize(
    ("source", "speculate", "numbers", "defer"),
    [
        ("lookup", 6, [0, 5], "off"),
        ("draft", 3, [1], "off"),
        ("all", "auto", [1, 4, 5, 6], "off"),
        ("all", 4, [2], "on"),
        ("draft", 3, [0, 3, 4, 7], "on"),
        ("lookup", "auto", [2, 3, 6, 7], "on"),
    ],
)
def test_text_and_logprobs_are_the_plain_ones(
    pair: dict[str, LLM],
    plain: list[Completion],
    source: str,
    speculate: object,
    numbers: list[int],
    defer: str,
) -> None:
    accepted = agree(
        pair[defer],
        plain,
        numbers,
        source=source,
        speculate=speculate,
        is_beside=len(numbers) > 2,
        is_deferred=defer == "on",
    )
    assert accepted > 0


def test_a_perfect_draft_is_accepted(plain: list[Completion]) -> None:
    """In the full session, nearly all that it proposes: its bits are not the target's."""
    bundle = smollm2_pair().path
    way: dict[str, Any] = {
        "source": "draft",
        "speculate": 8,
        "is_beside": False,
        "is_deferred": True,
    }
    with LLM(bundle, lanes=4, ctx=512, defer="on") as llm:
        assert agree(llm, plain, [1], **way) > 0.6 * MAX_TOKENS
        agree(llm, plain, [2], **way)
        # a prompt of few tokens: as slow as the target, it may not have read 200 of them before an
        # answer ends, on cores that share their arithmetic
        answers = [
            Job(
                Case(accept="coupled", exactness="exact", **GROUPS[2], **way | {"speculate": n}),
                PROMPTS[1],
                2,
                MAX_TOKENS,
            ).run(llm)
            for n in ("off", 8)
        ]
        assert difference(PROMPTS[1], *answers) is None
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].speculation is not None
        assert answers[1].speculation.accepted > 0
