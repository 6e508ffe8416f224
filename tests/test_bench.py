"""`headrace bench`: what it prints, and that its figures mean what they say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Self

import pytest
from commandline import CommandLine
from tiny_checkpoints import TINY
from tiny_pairs import edit_json, pair

from headrace import LLM, SamplingParams
from headrace.errors import ContextFullError, ExactnessError
from headrace.runtime.bench import Bench, distinct_4grams, follow, lengths
from headrace.runtime.pace import Acceptance
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


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama as its own draft, with a long context."""
    folder = tmp_path_factory.mktemp("twins")
    source = shutil.copytree(TINY / "llama", folder / "source")
    edit_json(source / "config.json", max_position_embeddings=100_000)
    return pair(folder / "bundle", source, target=source).path


@pytest.fixture(scope="module")
def drafted(twins: Path, shared_cache: Path) -> Iterator[LLM]:
    """It proposes four tokens whatever they cost, so its draft is always asked."""
    with LLM(twins, cache=shared_cache, lanes=1, ctx=2048, speculate=4) as llm:
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
    assert found["draft_pass_ms"] is None
    for figures in found["workloads"]:
        check(figures)
        assert figures["speedup_over_lookups"] is None
        assert figures["lookups_tokens_per_s"] is None
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
    for name in ("look-ups", "draft pass"):
        assert name not in result.out


def test_a_draft_is_compared_with_look_ups(command: CommandLine, twins: Path) -> None:
    result = command("bench", twins, *SMALL, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["draft_pass_ms"] > 0
    for figures in found["workloads"]:
        check(figures)
        assert figures["speedup_over_lookups"] > 0 < figures["lookups_tokens_per_s"]


def test_a_draft_in_the_table(command: CommandLine, twins: Path) -> None:
    result = command("bench", twins, *SMALL, "--exactness", "tree")
    assert result.code == 0, result.err
    assert "over look-ups" in result.out
    assert re.search(r"a draft pass of one row +\d+\.\d\d ms, \d+% of the target's", result.out)


def test_a_draft_that_is_left_out_is_not_compared(command: CommandLine, twins: Path) -> None:
    result = command("bench", twins, *SMALL, "--draft-device", "none", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["draft_pass_ms"] is None
    assert {figures["speedup_over_lookups"] for figures in found["workloads"]} == {None}


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


@pytest.mark.parametrize("liar", ["all", "lookup"])
def test_texts_that_differ_are_an_error(
    drafted: LLM, liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = drafted.generate

    def lying(prompt: list[int], params: SamplingParams, **options: Any) -> Any:
        answer = real(prompt, params, **options)
        is_lie = params.speculate != "off" and params.sources == liar
        return _Lie(answer) if is_lie else answer

    monkeypatch.setattr(drafted, "generate", lying)
    with pytest.raises(ExactnessError, match=r"free prose, prompt 1: .* differ from token 6 on"):
        Bench(drafted, [workload(drafted, "free prose", max_tokens=8)]).run(1)


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


class Watch:
    """What a bench asks of a model, and which memories learn from it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked: list[tuple[str, Any]] = []
        self.taught: dict[str, set[Acceptance]] = {}
        generate, note = llm.generate, Acceptance.note

        def watched(prompt: list[int], params: SamplingParams, **options: Any) -> Any:
            answer = generate(prompt, params, **options)
            arm = "plain" if params.exactness else "padded"
            if params.speculate != "off":
                arm = "speculated" if params.sources == "all" else "lookups"
            self._asked.append((arm, answer))
            return answer

        def noted(memory: Acceptance, *outcome: Any, **more: Any) -> None:
            arm, answer = self._asked[-1]
            if not answer.has_ended:  # it is no teacher-forced pass
                self.taught.setdefault(arm, set()).add(memory)
            note(memory, *outcome, **more)

        monkeypatch.setattr(llm, "generate", watched)
        monkeypatch.setattr(Acceptance, "note", noted)

    def of(self, arm: str) -> list[Completion]:
        return [answer.completion for name, answer in self._asked if name == arm]

    def sources_of(self, arm: str) -> set[str]:
        counts = [answer.speculation for answer in self.of(arm)]
        return {source for count in counts if count is not None for source in count.sources}

    def speeds_of(self, arm: str) -> list[float]:
        return [answer.timings.decode_tokens_per_s for answer in self.of(arm)]


def test_look_ups_alone_take_turns_with_the_others(
    drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(drafted, monkeypatch)
    (figures,) = Bench(drafted, [workload(drafted, "continue a log", prompts=2)]).run(3)
    for arm in ("speculated", "lookups", "plain", "padded"):
        assert len(watch.of(arm)) == 2 * (3 + 1)
    assert "draft" in watch.sources_of("speculated")
    assert watch.sources_of("lookups") == {"session"}

    ours, others = watch.speeds_of("speculated"), watch.speeds_of("lookups")
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    # Two prompts in turns, the first of each to warm up.
    assert figures.speedup_over_lookups == pytest.approx(
        geometric_mean([median(ratios[2::2]), median(ratios[3::2])])
    )
    assert figures.lookups_tokens_per_s == pytest.approx(
        geometric_mean([median(others[2::2]), median(others[3::2])])
    )


def test_no_arm_learns_from_another(drafted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remembers over all prompts what became of its own proposals, and of no others."""
    shared = drafted.engine.speculation
    assert shared is not None
    watch = Watch(drafted, monkeypatch)
    Bench(drafted, [workload(drafted, "continue a log", prompts=2)]).run(1)
    assert set(watch.taught) == {"speculated", "lookups"}
    assert watch.taught["speculated"] == {shared.pace.acceptance}
    (of_lookups,) = watch.taught["lookups"]
    assert of_lookups is not shared.pace.acceptance
    assert drafted.engine.speculation is shared


def test_nothing_is_added_where_not_both_are_asked(
    drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(drafted, "free prose", max_tokens=8)
    (prompt,) = work.prompts
    alone = replace(prompt, params=replace(prompt.params, sources="draft"))
    (figures,) = Bench(drafted, [replace(work, prompts=[alone])]).run(1)
    assert figures.speedup_over_lookups is None
    assert drafted.engine.speculation is not None
    monkeypatch.setattr(drafted.engine.speculation.drafter, "broken", "a pass took too long")
    (figures,) = Bench(drafted, [work]).run(1)
    assert figures.speedup_over_lookups is None


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
