"""Law: near its end a lane computes what it computes elsewhere; padding stays within the lane."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams

LAST = SamplingParams(temperature=1.0, seed=5, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, cache=shared_cache, lanes=2) as loaded:
        yield loaded


@pytest.mark.parametrize("num_rows", [17, 18, 25])
def test_a_turn_that_padding_would_carry_beyond_the_lane(llm: LLM, num_rows: int) -> None:
    first = [20 + i for i in range(llm.capacity - 1 - num_rows)]
    second = [60 + i for i in range(num_rows)]
    with llm.session() as session:
        session.feed(first)
        in_two = session.generate(second, LAST)
    assert in_two.token_ids == llm.generate([*first, *second], LAST).token_ids


def test_a_full_lane_shares_no_pass_that_is_too_wide_for_it(llm: LLM) -> None:
    """One answer runs into the context's end while prompts of many widths come in beside it."""
    beginning = [30 + i for i in range(llm.capacity - 12)]
    prompts = [[40 + width + i for i in range(width)] for width in range(2, 24)]
    two = SamplingParams(max_tokens=2, ignore_eos=True)
    whole = llm.generate(beginning, LAST).token_ids
    alone = [llm.generate(prompt, two).token_ids for prompt in prompts]
    with ThreadPoolExecutor(1) as pool:
        for prompt, answer in zip(prompts, alone, strict=True):
            beside = pool.submit(llm.generate, beginning, LAST)
            while not beside.done():
                assert llm.generate(prompt, two).token_ids == answer
            assert beside.result().token_ids == whole
