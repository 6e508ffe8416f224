"""`headrace bench`: what it prints, and that its figures mean what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from commandline import CommandLine

from headrace import LLM, SamplingParams
from headrace.errors import ContextFullError, ExactnessError
from headrace.runtime.bench import Bench, distinct_4grams, follow, lengths
from headrace.runtime.request import Completion, SourceCounts, SpeculationCounts
from headrace.runtime.tree import Tree
from headrace.runtime.verify import Accepted
from headrace.runtime.workloads import Workload, Writer, built_in_logs

NAMES = ["continue a log", "digest a log", "answer in JSON", "free prose", "adversarial"]

SMALL = ("--rounds", "1", "--max-tokens", "12", "--ctx", "640")


@pytest.fixture(scope="module")
def llm(endless_bundle: Path, shared_cache: Path) -> Iterator[LLM]:
    with LLM(endless_bundle, cache=shared_cache, lanes=1, ctx=2048) as llm:
        yield llm


def workload(llm: LLM, name: str, max_tokens: int = 32, prompts: int = 1) -> Workload:
    made = Writer(llm.tokenizer, llm.capacity, max_tokens).workloads(built_in_logs())
    found = next(w for w in made if w.name == name)
    return replace(found, prompts=found.prompts[:prompts])


def test_json_and_plot(
    command: CommandLine, endless_bundle: Path, corpus: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    log, plot = tmp_path / "plant.log", tmp_path / "speed.png"
    log.write_text(corpus.read_text() * 20)
    result = command(
        "bench", endless_bundle, "--logs", corpus, log, *SMALL, "--json", "--plot", plot
    )
    assert result.code == 0, result.err
    found = json.loads(result.out.splitlines()[-1])
    assert [w["workload"] for w in found["workloads"]] == NAMES
    assert found["logs"] == ["corpus", "plant.log"]
    for figures in found["workloads"]:
        check(figures)
    assert plot.read_bytes().startswith(b"\x89PNG")


def check(figures: dict[str, Any]) -> None:
    names = ("speedup", "speedup_over_padded", "allowed_speedup", "plain_tokens_per_s")
    assert all(figures[name] > 0 for name in names), figures
    assert figures["padded_tokens_per_s"] > 0 < figures["speculated_tokens_per_s"]
    assert 1 <= figures["tokens_per_pass"] <= 12
    assert 1 <= figures["teacher_forced_tokens_per_pass"] <= 12
    assert 0 < figures["distinct_4grams"] <= 1
    assert 0 <= figures["accepted"] <= figures["proposed"]
    assert sum(figures["proposed_by_source"].values()) == figures["proposed"]
    assert len(figures["speedups"]) == figures["prompts"]


def test_too_small_a_model(command: CommandLine, twin_bundle: Path) -> None:
    """The twins hold 128 tokens."""
    result = command("bench", twin_bundle, *SMALL[:4])
    assert result.code == 1
    assert "the context holds 128 tokens" in result.complaint


def test_trees_have_nothing_padded(command: CommandLine, endless_bundle: Path) -> None:
    result = command("bench", endless_bundle, *SMALL, "--exactness", "tree", "--json")
    assert result.code == 0, result.err
    for figures in json.loads(result.out)["workloads"]:
        assert figures["speedup_over_padded"] is None
        assert figures["speedup"] > 0


def test_table(command: CommandLine, endless_bundle: Path) -> None:
    result = command("bench", endless_bundle, *SMALL)
    assert result.code == 0, result.err
    for name in (*NAMES, "teacher-forced", "distinct 4-grams", "c(T) of T rows"):
        assert name in result.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--logs", "missing.log"], 2, "--logs: missing.log cannot be read"),
        (["--ctx", "64"], 1, "raise --ctx"),
        (["--speculate", "off"], 2, "nothing to compare"),
        (["extra.log"], 2, "logs are given with --logs"),
        (["--plot", "no/such/folder/a.png"], 2, "--plot: no/such/folder/a.png cannot be written"),
    ],
)
def test_errors_are_one_line(
    command: CommandLine, endless_bundle: Path, arguments: list[str], code: int, words: str
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    result = command("bench", endless_bundle, *arguments)
    assert result.code == code, result.err
    assert words in result.complaint


def test_a_log_of_few_lines_is_refused(
    command: CommandLine, endless_bundle: Path, tmp_path: Path
) -> None:
    log = tmp_path / "short.log"
    for text in ("", "one line\n", "x" * 5000):
        log.write_text(text)
        result = command("bench", endless_bundle, *SMALL, "--logs", log)
        assert result.code == 2
        assert "short.log: got" in result.complaint


def test_without_matplotlib_one_line(
    command: CommandLine, endless_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = command("bench", endless_bundle, "--plot", "a.png")
    assert result.code == 2
    assert result.complaint == "--plot needs matplotlib: pip install 'headrace[bench]'"


def test_look_ups_always_mislead_the_adversarial(llm: LLM) -> None:
    """Something is found nearly everywhere, and next to nothing of it is right."""
    misleading = workload(llm, "adversarial", max_tokens=120, prompts=4)
    passes = tried = kept = 0
    for prompt in misleading.prompts:
        answer = llm.generate(prompt.token_ids, replace(prompt.params, speculate=2))
        counts = answer.speculation
        assert counts is not None
        passes += counts.passes - 1
        tried += sum(source.proposed[0] for source in counts.sources.values())
        kept += counts.accepted
        assert set(answer.token_ids) <= set(prompt.params.logit_bias)
        assert distinct_4grams(answer.token_ids) > 0.9
    assert tried > 0.85 * passes  # the index forgets some
    assert kept < 0.1 * tried, (kept, tried)


def test_prompts_are_the_same_every_time_and_fit(llm: LLM) -> None:
    for max_tokens in (8, 128, 600):
        writer = Writer(llm.tokenizer, llm.capacity, max_tokens)
        made = writer.workloads(built_in_logs())
        assert made == writer.workloads(built_in_logs())
        for work in made:
            assert len(work.prompts) >= 3
            assert len({tuple(p.token_ids) for p in work.prompts}) == len(work.prompts)
            for prompt in work.prompts:
                assert len(prompt.token_ids) + max_tokens <= llm.capacity
                assert 0 < len(prompt.given) <= max_tokens
    with pytest.raises(ContextFullError, match="raise --ctx"):
        Writer(llm.tokenizer, llm.capacity, 2000)


def test_texts_that_differ_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llm.generate

    def lying(prompt: list[int], params: SamplingParams, **options: Any) -> Any:
        answer = real(prompt, params, **options)
        return answer if params.speculate == "off" else _Lie(answer)

    monkeypatch.setattr(llm, "generate", lying)
    with pytest.raises(ExactnessError, match=r"free prose, prompt 1: .* differ from token 6 on"):
        Bench(llm, [workload(llm, "free prose", max_tokens=8)]).run(1)


class _Lie:
    """An answer whose sixth token is not what it was."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._answer.close()

    def __iter__(self) -> Iterator[object]:
        return iter(self._answer)

    @property
    def completion(self) -> Completion:
        real: Completion = self._answer.completion
        ids = (*real.token_ids[:5], real.token_ids[5] ^ 1, *real.token_ids[6:])
        return replace(real, token_ids=ids)


def test_a_given_text_that_repeats_the_prompt_takes_few_passes(llm: LLM) -> None:
    work = workload(llm, "continue a log", max_tokens=64)
    (prompt,) = work.prompts
    parrot = replace(prompt, given=prompt.token_ids[-200:-136])
    random = replace(prompt, given=[7, 9, 11, 8, 10, 12] + [i % 250 + 3 for i in range(0, 990, 17)])
    bench = Bench(llm, [replace(work, prompts=[p]) for p in (prompt, parrot, random)])
    figures = bench.run(1)
    real, repeated, unseen = (f.teacher_forced_tokens_per_pass for f in figures)
    assert repeated > real
    assert repeated > 4 * unseen
    assert unseen < 1.2


def test_follow() -> None:
    tree = Tree((5, 6, 7, 8), (-1, -1, 1, 2))
    assert follow(tree, [6, 7, 1, 2]) == Accepted((6, 7, 1), (1, 2))
    assert follow(tree, [9, 7]) == Accepted((9,), ())
    assert follow(tree, [6, 7, 8]) == Accepted((6, 7, 8), (1, 2))
    assert follow(Tree(), [3, 4]) == Accepted((3,), ())


def test_distinct_4grams() -> None:
    assert distinct_4grams([1, 2, 3]) == 1
    assert distinct_4grams([1, 2, 3, 4, 5]) == 1
    assert distinct_4grams([1, 1, 1, 1, 1, 1]) == pytest.approx(1 / 3)


def test_lengths_of_proposals() -> None:
    sources = {"session": SourceCounts((4, 2), (0, 0)), "draft": SourceCounts((1,), (0,))}
    counts = SpeculationCounts(passes=10, proposed=7, accepted=0, sources=sources)
    assert lengths(counts) == {0: 4, 1: 3, 2: 2}
