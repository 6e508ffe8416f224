"""Laws of answers: streamed equals whole, resumed equals fresh, seeds repeat, lanes do not mix."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.errors import BundleError, ContextFullError, ExactnessError, UsageError
from headrace.models.config import ModelConfig
from headrace.models.manifest import Bundle, Manifest
from headrace.models.rope import plain
from headrace.runtime.answer import Answer
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.exactness import Machine, require_exact
from headrace.runtime.llm import runtime_config

HOT = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
PROMPT = "pump 3 reports low flow"


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, cache=shared_cache, lanes=2) as loaded:
        yield loaded


def end_with(llm: LLM) -> int:
    return llm.tokenizer.eos_ids[0]


def test_streamed_equals_whole(llm: LLM) -> None:
    whole = llm.generate(PROMPT, HOT)
    answer = llm.generate(PROMPT, HOT, stream=True)
    deltas = list(answer)
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(i for d in deltas for i in d.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert answer.completion.token_ids == whole.token_ids


@given(st.integers(0, 2**64 - 1), st.sampled_from([0.3, 1.0, 3.0]), st.integers(1, 30))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_seed_repeats_its_answer(llm: LLM, seed: int, temperature: float, n: int) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=n, logprobs=2)
    first, second = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    assert first.token_ids == second.token_ids
    assert first.logprobs == second.logprobs


def test_a_random_seed_is_reported_and_repeats(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=20)
    first, other = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    assert first.seed is not None
    assert first.seed != other.seed
    again = SamplingParams(temperature=2.0, max_tokens=20, seed=first.seed)
    assert llm.generate(PROMPT, again).token_ids == first.token_ids


def test_a_second_turn_equals_a_fresh_start(
    llm: LLM, tiny_bundle: Path, shared_cache: Path
) -> None:
    """What a lane still holds is used again, and changes no bit."""
    short = SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=3)
    messages = [{"role": "user", "content": "a"}]
    first = llm.chat(messages, short)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "b"}]
    second = llm.chat(messages, short)
    with LLM(tiny_bundle, cache=shared_cache) as fresh:
        alone = fresh.chat(messages, short)
    assert second.timings.prefill_tokens < alone.timings.prefill_tokens
    assert (second.token_ids, second.logprobs) == (alone.token_ids, alone.logprobs)


def test_two_answers_at_once_are_as_if_alone(llm: LLM) -> None:
    alone = [llm.generate(p, HOT).token_ids for p in (PROMPT, "another line")]
    answers = [llm.generate(p, HOT, stream=True) for p in (PROMPT, "another line")]
    for _ in zip_longest(*answers):
        pass
    assert [a.completion.token_ids for a in answers] == alone


def test_threads_are_as_if_alone(llm: LLM) -> None:
    """A pass writes its inputs into a binding that others use as well."""
    prompts = (PROMPT, "another line")
    alone = [llm.generate(p, HOT).token_ids for p in prompts]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(30):
            together = list(pool.map(lambda p: llm.generate(p, HOT).token_ids, prompts))
            assert together == alone


def test_unrelated_conversations_are_remembered(tiny_bundle: Path, shared_cache: Path) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(tiny_bundle, cache=shared_cache, lanes=2) as two:
        for first in (True, False, False):
            for prompt in ([5] * 40, [9] * 40):
                computed = two.generate(prompt, params).timings.prefill_tokens
                assert computed == (40 if first else 8)  # two whole blocks are known


def test_switched_off_the_prefix_cache_finds_nothing(tiny_bundle: Path, shared_cache: Path) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(tiny_bundle, cache=shared_cache, prefix_cache=False) as off:
        assert [off.generate([5] * 40, params).timings.prefill_tokens for _ in range(2)] == [40, 40]
        assert off.engine.check().cached == 0
        with pytest.raises(UsageError, match="prefix cache is off"):
            off.pin([5] * 40)


def test_time_before_the_first_piece_is_asked_for_does_not_count(llm: LLM) -> None:
    answer = llm.generate(PROMPT, HOT, stream=True)
    time.sleep(0.5)
    assert answer.result().timings.prefill_s < 0.5


def test_an_answer_of_a_closed_model_says_so(tiny_bundle: Path, shared_cache: Path) -> None:
    with LLM(tiny_bundle, cache=shared_cache) as closing:
        answer = closing.generate(PROMPT, HOT, stream=True)
        next(answer)
    with pytest.raises(UsageError, match="closed"):
        next(answer)


def test_a_closed_answer_ends_at_once(llm: LLM) -> None:
    held = [llm.generate(PROMPT, HOT, stream=True) for _ in range(2)]
    for answer in held:
        next(answer)
    held[0].close()
    assert len(held[0].completion.token_ids) == 1
    assert llm.generate(PROMPT, HOT).token_ids[:1] == held[0].completion.token_ids
    with held[1]:
        pass
    assert list(held[1]) == []
    assert llm.engine.stats.blocks.held == 0


def test_more_answers_than_lanes_take_turns(llm: LLM) -> None:
    prompts = [f"line {i}" for i in range(5)]
    alone = [llm.generate(p, HOT).token_ids for p in prompts]
    answers = [llm.generate(p, HOT, stream=True) for p in prompts]
    for _ in zip_longest(*answers):
        pass
    assert [a.completion.token_ids for a in answers] == alone


def test_a_dropped_answer_gives_its_blocks_back(llm: LLM) -> None:
    answer: Answer | None = llm.generate(PROMPT, HOT, stream=True)
    assert answer is not None
    next(answer)
    assert llm.engine.stats.blocks.held > 0
    answer = None
    assert llm.engine.stats.blocks.held == 0


def test_scored_equals_generated(llm: LLM) -> None:
    """The same bits, though a score takes many rows a pass and an answer one."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30, logprobs=0, ignore_eos=True)
    prompt = llm.tokenizer.encode(PROMPT)
    answer = llm.generate(prompt, params)
    scored = llm.score([*prompt, *answer.token_ids])
    assert answer.logprobs is not None
    given_tokens = scored.tokens[len(prompt) - 1 :]
    assert [t.logprob for t in given_tokens] == [t.logprob for t in answer.logprobs]


def test_score_of_a_text(llm: LLM) -> None:
    score = llm.score(PROMPT)
    assert len(score.tokens) == len(llm.tokenizer.encode(PROMPT)) - 1
    assert score.perplexity > 1
    assert score.to_json()["num_tokens"] == len(score.tokens)
    with pytest.raises(UsageError, match="at least two"):
        llm.score("a"[:0])


def test_an_end_token_ends_the_answer_and_is_not_text(llm: LLM) -> None:
    for end in llm.tokenizer.eos_ids:
        done = llm.generate(PROMPT, SamplingParams(logit_bias={end: 100.0}))
        assert (done.text, done.finish_reason, done.stop_reason) == ("", "stop", end)
        assert done.token_ids == (end,)
    assert len(llm.tokenizer.eos_ids) == 2
    end = end_with(llm)
    ignored = SamplingParams(logit_bias={end: 100.0}, ignore_eos=True, max_tokens=5)
    assert llm.generate(PROMPT, ignored).token_ids == (end,) * 5


def test_a_stop_string_cuts_the_text_where_it_stands(llm: LLM) -> None:
    whole = llm.generate(PROMPT, HOT).text
    assert len(whole) > 8
    for stop in (whole[2:4], whole[5:8], whole[:1]):
        params = SamplingParams(
            temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, stop=(stop,)
        )
        done = llm.generate(PROMPT, params)
        assert done.text == whole[: whole.index(stop)]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)


def test_a_full_context_ends_with_length(llm: LLM) -> None:
    prompt = list(range(20, 120))
    done = llm.generate(prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    assert done.finish_reason == "length"
    assert len(done.token_ids) == llm.capacity - len(prompt)
    last = llm.generate(list(range(20, 147)), SamplingParams(ignore_eos=True))
    assert len(last.token_ids) == 1


def test_a_prompt_that_does_not_fit_names_both_lengths(llm: LLM) -> None:
    with pytest.raises(ContextFullError, match=r"has 128 tokens.*holds 128"):
        llm.generate([5] * 128)
    with pytest.raises(ContextFullError, match=r"text has 130 tokens.*holds 128"):
        llm.score([5] * 130)
    assert len(llm.score([5] * 128).tokens) == 127


def test_refusals_of_the_api(llm: LLM, tiny_bundle: Path, tmp_path: Path) -> None:
    vocab = llm.bundle.manifest.config.vocab_size
    for bad in (-1, vocab):
        with pytest.raises(UsageError, match=f"got {bad}, allowed are 0 to {vocab - 1}"):
            llm.generate([5, bad])
    with pytest.raises(UsageError, match="at least one token"):
        llm.generate("")
    with pytest.raises(UsageError, match="at least one"):
        llm.chat([])
    with pytest.raises(UsageError, match="unknown setting 'lane'"):
        LLM(tiny_bundle, lane=3)
    for name, value in (
        ("ctx", 0),
        ("ctx", 10**9),
        ("lanes", 0),
        ("target_threads", -1),
        ("lanes", True),
    ):
        with pytest.raises(UsageError, match=name):
            LLM(tiny_bundle, runtime_config({name: value}))
    with pytest.raises(BundleError, match="no such bundle"):
        LLM(tmp_path / "none")


def test_misuse_from_python_is_one_line(llm: LLM, tiny_bundle: Path, shared_cache: Path) -> None:
    wrong: list[tuple[Callable[[Any], object], Any, str]] = [
        (llm.generate, 123, "whole token ids"),
        (llm.generate, [1.5, 2], "whole token ids"),
        (llm.generate, b"hi", "whole token ids"),
        (llm.generate, [True], "whole token ids"),
        (llm.generate, {1: 2}, "whole token ids"),
        (llm.score, ["a", "b"], "whole token ids"),
        (llm.chat, "a text", "mappings with role and content"),
        (llm.chat, ["a text"], "mappings with role and content"),
        (lambda params: llm.generate("a", params), {"seed": 1}, "allowed is a SamplingParams"),
    ]
    for call, argument, message in wrong:
        with pytest.raises(UsageError, match=message):
            call(argument)
    said = {"role": "user", "content": "a"}
    with pytest.raises(UsageError, match="'messages' is set by the chat itself"):
        llm.chat([said], template_args={"messages": 3})
    with pytest.raises(UsageError, match="as well"):
        LLM(tiny_bundle, RuntimeConfig(), lanes=3)
    ids = np.array(llm.tokenizer.encode(PROMPT))
    assert llm.score(ids.tolist()) == llm.score(ids)  # type: ignore[arg-type]  # not typed, but taken


def test_closing_frees_and_can_be_repeated(tiny_bundle: Path, shared_cache: Path) -> None:
    with LLM(tiny_bundle, cache=shared_cache) as loaded:
        loaded.generate(PROMPT, HOT)
        arena = weakref.ref(loaded.backend.arena.keys[0])
        loaded.close()
        assert arena() is None
        for call in (lambda: loaded.generate(PROMPT), lambda: loaded.score(PROMPT)):
            with pytest.raises(UsageError, match="closed"):
                call()


def test_default_context_is_the_smaller_of_trained_and_4096(llm: LLM) -> None:
    assert llm.capacity == llm.bundle.manifest.config.max_position == 128
    large = ModelConfig("llama", 9, 8, 8, 1, 1, 1, 8, 1e-5, 8192, plain(8, 1e4))
    assert RuntimeConfig().capacity(large) == 4096


def test_models_that_are_not_exact_here_are_refused() -> None:
    wide = ModelConfig("gemma3", 9, 8, 8, 1, 1, 1, 256, 1e-5, 8192, plain(256, 1e4))
    x86, arm = Machine("x86_64", 1), Machine("aarch64", 4)
    with pytest.raises(ExactnessError, match=r"head_dim 256.*--kv int8"):
        require_exact(wide, "int8", "f16", x86)
    require_exact(wide, "int8", "int8", x86)
    require_exact(wide, "int8", "f16", arm)


@pytest.mark.parametrize(
    ("columns", "holds"), [(24, True), (32, True), (40, False), (64, True), (100, False)]
)
def test_blocks_that_a_row_does_not_fill_are_refused_where_they_matter(
    columns: int, holds: bool
) -> None:
    model = ModelConfig("llama", 9, 64, columns, 1, 1, 1, 64, 1e-5, 8192, plain(64, 1e4))
    x86, arm = Machine("x86_64", 1), Machine("aarch64", 4)
    for quant, machine in (("int8", arm), ("keep", arm), ("int4", x86)):
        require_exact(model, quant, "f16", machine)
    if holds:
        require_exact(model, "int4", "f16", arm)
        return
    with pytest.raises(ExactnessError, match=rf"of {columns} columns.*--quant int8, or run with"):
        require_exact(model, "int4", "f16", arm)


@pytest.mark.parametrize("part", ["config", "kv", "inv_freq", "eos_ids"])
def test_an_edited_manifest_is_refused(tiny_bundle: Path, part: str) -> None:
    data = json.loads((tiny_bundle / "bundle.json").read_text())
    Manifest.from_json(data, tiny_bundle)
    edits: dict[str, Callable[[], None]] = {
        "config": lambda: data["target"]["config"].update(num_kv_heads=0),
        "kv": lambda: data["target"].update(kv="int8"),
        "inv_freq": lambda: data["target"]["config"]["rope"]["inv_freq"].__setitem__(0, 0.9),
        "eos_ids": lambda: data["tokenizer"].update(eos_ids=["a"]),
    }
    edits[part]()
    with pytest.raises(BundleError, match="damaged or edited"):
        Manifest.from_json(data, tiny_bundle)


def test_manifest_survives_json(tiny_bundle: Path) -> None:
    manifest = Bundle.open(tiny_bundle).manifest
    assert type(manifest).from_json(manifest.to_json(), tiny_bundle) == manifest
