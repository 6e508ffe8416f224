"""The law of speculation: proposals change how many passes a text takes, and not the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import CommandLine
from exported import smollm2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.errors import ModelOutputError, UsageError
from headrace.models.plantlog import sample_log
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.pace import Origin, costs_of
from headrace.runtime.propose import Proposal
from headrace.runtime.request import MAX_PROPOSED, Completion
from headrace.runtime.sampling import Sampler
from headrace.runtime.sequence import Sequence
from headrace.runtime.session import Session
from headrace.runtime.speculate import Speculator, Text
from headrace.runtime.tree import Tree

LOOP = [7, 8, 9, 10, 11] * 5
"""A prompt that repeats itself, so that much is found."""


@pytest.fixture(scope="module")
def plain(endless_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(endless_bundle, cache=shared_cache, lanes=2, ctx=512, speculate="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def eager(endless_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(endless_bundle, cache=shared_cache, lanes=2, ctx=512, speculate=8) as llm:
        yield llm


def said(answer: Completion) -> tuple[object, ...]:
    """All of an answer that must not depend on speculation."""
    return answer.text, answer.token_ids, answer.logprobs, answer.finish_reason, answer.stop_reason


class Oracle(Speculator):
    """Proposes the text it was told, spoilt at one place: it is told the truth and lies."""

    truth: tuple[int, ...] = ()
    lie_at = 0

    def propose(self, most: int) -> Proposal:
        self._read()
        done = self._own.num_tokens - len(LOOP)
        chain = list(self.truth[done : done + min(most, MAX_PROPOSED)])
        if self.lie_at < len(chain):
            chain[self.lie_at] = max(1, chain[self.lie_at]) - 1 or 2
        return Proposal.chain(chain, [Origin("oracle")] * len(chain))


def with_oracle(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, truth: tuple[int, ...], lie_at: int
) -> None:
    def speculator(sequence: Sequence, sampler: Sampler, num_new: int) -> Speculator:
        text = Text(LOOP, sequence.length, num_new, sequence.exactness)
        shared = llm.engine.speculation
        assert shared is not None
        oracle = Oracle(shared, text, sampler, llm.engine.facts, lambda: 1)
        oracle.truth, oracle.lie_at = truth, lie_at
        return oracle

    monkeypatch.setattr(llm.engine, "speculator", speculator)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 90),
    st.sampled_from(["a", "x y x y x y x", "pump 3 low, pump 3 low, pump"]),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_speculated_equals_plain(
    plain: LLM, eager: LLM, seed: int, temperature: float, num: int, prompt: str
) -> None:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=num, logprobs=2, repeat_penalty=1.05
    )
    assert said(eager.generate(prompt, params)) == said(plain.generate(prompt, params))


@pytest.mark.parametrize("lie_at", [0, 1, 5, MAX_PROPOSED])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_any_proposal_gives_the_same_text(
    plain: LLM, eager: LLM, monkeypatch: pytest.MonkeyPatch, lie_at: int, temperature: float
) -> None:
    """Right, wrong at once, and wrong after a while."""
    params = SamplingParams(
        temperature=temperature, seed=5, max_tokens=60, logprobs=1, ignore_eos=True
    )
    alone = plain.generate(LOOP, params)
    with_oracle(eager, monkeypatch, alone.token_ids, lie_at)
    answer = eager.generate(LOOP, params)
    assert said(answer) == said(alone)
    assert answer.speculation is not None
    passes = answer.speculation.passes
    assert passes == 1 + -(-59 // (lie_at + 1)), "each pass gives what was right, and one more"
    assert answer.speculation.accepted == 60 - passes


@pytest.mark.parametrize("cut", ["stop", "eos", "max_tokens"])
def test_an_end_inside_a_proposal_cuts_it_there(
    plain: LLM, eager: LLM, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """And the context holds what was given out, and no more."""
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=40, ignore_eos=True)
    whole = plain.generate(LOOP, params)
    if cut == "stop":
        middle = len(whole.text) // 2
        params = replace(params, stop=(whole.text[middle : middle + 3],))
    elif cut == "eos":
        end = plain.tokenizer.eos_ids[0]
        params = replace(params, ignore_eos=False, logit_bias={end: 9.0})
        whole = plain.generate(LOOP, params)
    else:
        params = replace(params, max_tokens=7)
    with_oracle(eager, monkeypatch, whole.token_ids, MAX_PROPOSED)
    rests = []
    for llm in (plain, eager):
        with llm.session() as session:
            first = session.generate(LOOP, params)
            rests.append((said(first), session.num_tokens))
            assert session.num_tokens == len(LOOP) + len(first.token_ids)
    assert rests[0] == rests[1]


def wraps(llm: LLM) -> Session:
    return llm.session("stream", sinks=16, window=32, unit=16)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wrapped_stream_is_the_same(
    plain: LLM, eager: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Over three wraps; proposals are rejected where the next eviction is near, too."""
    params = SamplingParams(
        temperature=temperature, seed=2, max_tokens=160, logprobs=0, ignore_eos=True
    )
    with wraps(plain) as alone:
        expected = alone.generate(LOOP, params)
        after = alone.generate([1, 2], params)
    for lie_at in (0, 3, MAX_PROPOSED):
        with_oracle(eager, monkeypatch, expected.token_ids, lie_at)
        with wraps(eager) as stream:
            assert said(stream.generate(LOOP, params)) == said(expected)
            monkeypatch.setattr(eager.engine, "speculator", lambda *_: None)
            assert said(stream.generate([1, 2], params)) == said(after)


def test_a_full_context_ends_as_it_would(plain: LLM, eager: LLM) -> None:
    params = SamplingParams(max_tokens=600, ignore_eos=True, logprobs=0)
    a, b = (llm.generate(LOOP * 4, params) for llm in (plain, eager))
    assert said(a) == said(b)
    assert len(b.token_ids) == 512 - len(LOOP) * 4
    assert b.speculation is not None and b.speculation.accepted > 0, b.speculation


def test_closed_early_leaves_what_was_given_out(eager: LLM) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with eager.session() as session:
        answer = session.generate(LOOP * 3, params, stream=True)
        given_out = 0
        while given_out < 90:
            given_out += len(next(answer).token_ids)
        answer.close()
        assert session.num_tokens == len(LOOP) * 3 + given_out
        assert len(answer.completion.token_ids) == given_out


def test_smollm2_says_the_same(shared_cache: Path) -> None:
    prompts = [sample_log(12), "A strainer is put before a pump because"]
    bundle = smollm2("int8", "f16").path
    cases = [(0.0, None), (0.8, 3)]
    answers: dict[object, list[tuple[object, ...]]] = {}
    for speculate in ("off", "auto", 6):
        with LLM(bundle, lanes=1, ctx=1024, speculate=speculate) as llm:
            answers[speculate] = []
            for prompt in prompts:
                for temperature, seed in cases:
                    params = SamplingParams(
                        temperature=temperature, seed=seed, max_tokens=48, logprobs=0
                    )
                    answers[speculate].append(said(llm.generate(prompt, params)))
    assert answers["auto"] == answers["off"]
    assert answers[6] == answers["off"]


@pytest.mark.parametrize("bad", ["fast", 0, 17, -1, True, 1.5, None])
def test_settings_that_are_not_known(bad: object) -> None:
    with pytest.raises(UsageError, match=r"speculate: got .* allowed are auto, off and 1 to 16"):
        RuntimeConfig(speculate=bad)  # type: ignore[arg-type]  # that is the point


def test_the_command_line_says_what_was_accepted(
    command: CommandLine, endless_bundle: Path
) -> None:
    texts = {}
    for speculate in ("off", "4"):
        result = command(
            "run", endless_bundle, "x y x y x y x y", "--raw", "--json", "--max-tokens", "60",
            "--speculate", speculate, "--ctx", "256",
        )  # fmt: skip
        assert result.code == 0, result.err
        texts[speculate] = json.loads(result.out)
    assert texts["off"]["speculation"] is None
    assert texts["4"]["speculation"]["passes"] <= 60
    assert texts["4"]["text"] == texts["off"]["text"]


def test_costs_are_measured_once(plain: LLM, tmp_path: Path) -> None:
    path, told = tmp_path / "costs.json", list[str]()
    say = told.append
    first = costs_of(plain.backend, path, say)
    assert costs_of(plain.backend, path, say) == first
    assert len(told) == 1
    for damage in ("{", "[]", '{"2": "x"}', '{"2": 0.1}'):
        path.write_text(damage)
        assert costs_of(plain.backend, path, say).seconds.keys() == first.seconds.keys()
    assert len(told) == 5
    assert np.isfinite(first.table(MAX_PROPOSED)).all()


def sources_of(answer: Completion) -> set[str]:
    assert answer.speculation is not None
    return set(answer.speculation.sources)


def test_what_streams_were_fed_is_looked_up_by_others(
    endless_bundle: Path, shared_cache: Path
) -> None:
    """And what a chat was told only if it is allowed; no text is changed by it."""
    told = list(range(40, 80))
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    settings: dict[str, Any] = {"cache": shared_cache, "lanes": 2, "ctx": 512}
    for mode, shares, is_known in (
        ("stream", None, True),
        ("stream", False, False),
        ("full", None, False),
        ("full", True, True),
    ):
        sizes: dict[str, int] = {"window": 128} if mode == "stream" else {}
        with LLM(endless_bundle, speculate=8, **settings) as llm:
            alone = llm.generate(told[:20], params)
            with llm.session(mode, shares_text=shares, **sizes) as session:  # type: ignore[arg-type]
                session.feed(told)
            answer = llm.generate(told[:20], params)
            # The answer's first token is the model's own; the prompt's end is what is looked up.
            index = llm.engine.speculation.recent  # type: ignore[union-attr]
            assert bool(index.candidates(told[:20], 4, 1)) == is_known
            assert said(answer) == said(alone)


def test_a_corpus_is_looked_up(
    endless_bundle: Path, shared_cache: Path, tmp_path: Path, command: CommandLine
) -> None:
    with LLM(endless_bundle, cache=shared_cache, ctx=512, speculate="off") as llm:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        plain = llm.generate("the pump", params)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(plain.text)
    prior = tmp_path / "corpus.prior"
    built = command("prior", "build", corpus, "-o", prior, "--bundle", endless_bundle)
    assert built.code == 0, built.err
    with LLM(endless_bundle, cache=shared_cache, ctx=512, speculate=8, prior=prior) as llm:
        # The same text from another start: only the corpus knows how it goes on.
        start = llm.encode("the pump") + list(plain.token_ids[:30])
        answer = llm.generate(start, params)
    assert "corpus" in sources_of(answer) or "session" in sources_of(answer)
    with LLM(endless_bundle, cache=shared_cache, ctx=512, speculate="off") as llm:
        assert llm.generate(start, params).token_ids == answer.token_ids
    refused = command("run", endless_bundle, "x", "--prior", corpus)
    assert refused.code == 1 and "Traceback" not in refused.err
    assert str(corpus) in refused.err and len(refused.err.strip().splitlines()) == 1


def test_a_request_says_how_much_and_from_where(plain: LLM, eager: LLM) -> None:
    base: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    off = eager.generate(LOOP, SamplingParams(**base, speculate="off"))
    assert off.speculation is None
    few = eager.generate(LOOP, SamplingParams(**base, speculate=1))
    assert few.speculation is not None
    assert all(len(c.proposed) == 1 for c in few.speculation.sources.values())
    assert off.token_ids == few.token_ids
    with pytest.raises(UsageError, match="the bundle has none"):
        eager.generate(LOOP, SamplingParams(**base, sources="draft"))
    with plain.session() as session:
        with pytest.raises(UsageError, match="loaded with speculate='off'"):
            session.generate(LOOP, SamplingParams(**base, speculate=4))
        assert session.num_tokens == 0, "nothing was changed"
    with pytest.raises(UsageError, match="loaded with speculate='off'"):
        plain.generate(LOOP, SamplingParams(**base, speculate=4))


def test_exactness_is_the_sequences_and_the_answers(eager: LLM) -> None:
    params = SamplingParams(max_tokens=8, exactness="tree")
    assert eager.generate(LOOP, params).exactness == "tree"
    assert eager.generate(LOOP, SamplingParams(max_tokens=8)).exactness == "exact"
    with eager.session(exactness="tree") as session:
        assert session.generate(LOOP, SamplingParams(max_tokens=8)).exactness == "tree"
        with session.fork() as fork:
            assert fork.generate([1], params).exactness == "tree"
    with eager.session() as session, pytest.raises(UsageError, match="this session was begun as"):
        session.generate(LOOP, params)
    known = eager.engine.cache.num_known
    assert known(eager.engine.root("tree"), LOOP) and known(eager.engine.root("exact"), LOOP)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_trees_leave_no_trace(
    plain: LLM, eager: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """float32 weights and padding aside, rows of a tree are those of a chain: the same tokens."""
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=3, ignore_eos=True, exactness="tree"
    )
    truth = plain.generate(LOOP, replace(params, exactness=None)).token_ids
    chance = np.random.default_rng(0)

    def propose(self: Oracle, most: int) -> Proposal:
        """The truth behind a wrong first sibling, with wrong branches all along it."""
        self._read()
        done = self._own.num_tokens - len(LOOP)
        ids: list[int] = []
        parents: list[int] = []
        parent = -1
        for token_id in truth[done : done + min(most, 5)]:
            ids += [int(chance.integers(3, 200)), token_id]
            parents += [parent, parent]
            parent = len(ids) - 1
        if len(ids) >= 2 and ids[0] == ids[1]:
            return Proposal()
        unique = [i for i in range(len(ids)) if i % 2 or ids[i] != ids[i + 1]]
        place = {old: new for new, old in enumerate(unique)} | {-1: -1}
        tree = Tree(tuple(ids[i] for i in unique), tuple(place[parents[i]] for i in unique))
        return Proposal(tree, (Origin("oracle"),) * len(tree), (None,) * len(tree))

    monkeypatch.setattr(Oracle, "propose", propose)
    with_oracle(eager, monkeypatch, truth, 0)
    answer = eager.generate(LOOP, params)
    assert answer.speculation is not None
    assert answer.token_ids == truth
    assert answer.speculation.passes <= 13, "five tokens and one a pass"
    with eager.session("stream", sinks=16, window=32, unit=16, exactness="tree") as stream:
        # Not the truth any more once something was evicted, so most of it is rejected there.
        assert len(stream.generate(LOOP, replace(params, max_tokens=120)).token_ids) == 120


def test_closing_a_model_with_a_corpus_ends_its_answers_in_one_line(
    endless_bundle: Path, shared_cache: Path, tmp_path: Path, command: CommandLine
) -> None:
    corpus, prior = tmp_path / "corpus.txt", tmp_path / "prior"
    corpus.write_text("x y x y " * 200)
    assert command("prior", "build", corpus, "-o", prior, "--bundle", endless_bundle).code == 0
    # A text will do for a path.
    llm = LLM(endless_bundle, cache=shared_cache, ctx=512, speculate=8, prior=str(prior))
    answer = llm.generate("x y x y x", SamplingParams(max_tokens=200, ignore_eos=True), stream=True)
    next(answer)
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        for _ in answer:
            pass


def test_an_error_in_a_pass_leaves_what_was_given_out(
    eager: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answer = eager.generate(LOOP * 3, params, stream=True)
    given_out = [t for _ in range(5) for t in next(answer).token_ids]
    forward = eager.backend.forward

    def spoilt(rows: Any) -> Any:
        logits = forward(rows)
        logits[min(1, len(logits) - 1) :] = np.nan
        return logits

    monkeypatch.setattr(eager.backend, "forward", spoilt)
    with pytest.raises(ModelOutputError):
        for delta in answer:
            given_out += delta.token_ids
    assert list(answer.completion.token_ids) == given_out
