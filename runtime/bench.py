"""The benchmark of speculation: the same model on the same prompts, with proposals and without.

The ways to decode take turns in one process, so that each round's ratios are of one machine in one
mood: `speculated` as the model was loaded; `lookups`, the same without its draft; `padded`, one exact
row a pass; and `plain`, one unpadded row a pass, which is the fastest that there is without
proposals. A ratio is one of decode speeds, a prompt's is the median over rounds, a workload's the
geometric mean over prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import fmean, geometric_mean, median
from typing import Any

from headrace.errors import ExactnessError, UsageError
from headrace.runtime.llm import LLM
from headrace.runtime.pace import Pace, PassCosts
from headrace.runtime.prior import SharedIndex
from headrace.runtime.propose import Proposal
from headrace.runtime.request import MAX_PROPOSED, Completion, SpeculationCounts
from headrace.runtime.sampling import Sampler
from headrace.runtime.speculate import Speculation, Speculator, Text
from headrace.runtime.tree import ROOT, Tree
from headrace.runtime.verify import Accepted
from headrace.runtime.workloads import Prompt, Workload

Step = Callable[[], None]


@dataclass(frozen=True)
class Run:
    """One answer's decoding: what comes after the first token, which belongs to the prompt."""

    completion: Completion
    passes_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.completion.timings.decode_tokens_per_s

    @property
    def num_passes(self) -> int:
        counts = self.completion.speculation
        return counts.passes - 1 if counts else self.completion.timings.decode_tokens

    @property
    def host_s(self) -> float:
        """Neither in passes of the target nor waiting for the draft."""
        counts = self.completion.speculation
        waited = counts.draft_wait_s if counts else 0.0
        return self.completion.timings.decode_s - self.passes_s - waited


@dataclass(frozen=True)
class Figures:
    """Of a workload."""

    workload: str
    prompts: int
    prompt_tokens: float
    """On average."""
    speedup: float
    """Over `plain`."""
    speedup_over_padded: float | None
    """None unless the model runs as exact."""
    speedup_over_lookups: float | None
    """What the draft adds; None unless it is asked beside the look-ups."""
    allowed_speedup: float | None
    """What the costs of the passes alone would give for what was proposed and accepted, with a
    free host; None unless all proposals are chains."""
    speedups: tuple[float, ...]
    """By prompt."""
    tokens_per_pass: float
    teacher_forced_tokens_per_pass: float
    """Of look-ups alone when the text is the given one, not the model's."""
    distinct_4grams: float
    """Share of different ones in the speculated answers: a text that loops flatters look-ups."""
    plain_tokens_per_s: float
    padded_tokens_per_s: float | None
    lookups_tokens_per_s: float | None
    speculated_tokens_per_s: float
    passes: int
    proposed: int
    accepted: int
    proposed_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    target_ms_per_pass: float
    draft_wait_ms_per_pass: float
    host_ms_per_pass: float
    plain_ms_per_pass: float
    plain_host_ms_per_pass: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """Rounds over workloads on a loaded model."""

    def __init__(self, llm: LLM, workloads: Sequence[Workload]) -> None:
        """Raises UsageError for a model that was loaded without speculation."""
        self._llm, self._workloads = llm, workloads
        self._is_exact = llm.config.exactness == "exact"
        shared = llm.engine.speculation
        if shared is None:
            raise UsageError("speculate: got 'off', which leaves nothing to compare; use auto or N")
        self._shared = shared
        self._arms: dict[str, dict[str, Any]] = {
            "speculated": {},
            "plain": {"speculate": "off", "exactness": "tree"},
        }
        if self._is_exact:
            self._arms["padded"] = {"speculate": "off"}
        # What is accepted of look-ups is another share where a draft proposes the rest of the
        # tokens, and an arm that knew what another one learned of the same text would foresee it.
        self._without_draft = replace(shared, pace=self._forgetful_pace(), drafter=None)
        if self._asks_both():
            self._arms["lookups"] = {"sources": "lookup"}
        self._runs: dict[tuple[str, int, str], list[Run]] = {}

    def _asks_both(self) -> bool:
        """Whether look-ups and a draft propose."""
        drafter = self._shared.drafter
        prompts = chain.from_iterable(workload.prompts for workload in self._workloads)
        return (
            drafter is not None
            and drafter.broken is None
            and all(prompt.params.sources == "all" for prompt in prompts)
        )

    def _forgetful_pace(self) -> Pace:
        """One that knows what passes cost, and nothing of what was accepted."""
        return Pace(PassCosts(dict(enumerate(self._shared.pace.costs().tolist(), 1))))

    def num_steps(self, rounds: int) -> int:
        """How often `step` of `run` is called."""
        return (rounds + 1) * sum(len(workload.prompts) for workload in self._workloads)

    def run(self, rounds: int, step: Step = lambda: None) -> list[Figures]:
        """One round to warm up, and those that count, workload by workload: the pace is measured as
        it is when a model has work of one kind, but not twice in a row the same.

        Raises ExactnessError where the texts of exact decoding with and without proposals differ.
        Nobody else may use the model meanwhile.
        """
        for workload in self._workloads:
            for number in range(rounds + 1):
                for i, prompt in enumerate(workload.prompts):
                    runs = self._round(workload.name, i, prompt, turn=number + i)
                    for arm, run in runs.items() if number else ():
                        self._runs.setdefault((workload.name, i, arm), []).append(run)
                    step()
        return [self._figures(workload) for workload in self._workloads]

    def _round(self, name: str, index: int, prompt: Prompt, turn: int) -> dict[str, Run]:
        arms = list(self._arms)
        first = turn % len(arms)
        runs = {arm: self._answer(prompt, arm) for arm in (*arms[first:], *arms[:first])}
        for arm in ("speculated", "lookups"):
            if self._is_exact and arm in runs:
                a, b = (runs[one].completion.token_ids for one in (arm, "padded"))
                _require_same(a, b, f"{name}, prompt {index + 1}")
        return runs

    def _answer(self, prompt: Prompt, arm: str) -> Run:
        params = replace(prompt.params, **self._arms[arm])
        backend, passes_s = self._llm.backend, 0.0
        with (
            self._speculating(arm),
            self._llm.generate(prompt.token_ids, params, stream=True) as answer,
        ):
            for i, _ in enumerate(answer):
                if not i:
                    passes_s = backend.seconds_in_passes
        return Run(answer.completion, backend.seconds_in_passes - passes_s)

    @contextmanager
    def _speculating(self, arm: str) -> Iterator[None]:
        """With the arm's own memory of what was accepted."""
        engine = self._llm.engine
        engine.speculation = self._without_draft if arm == "lookups" else self._shared
        try:
            yield
        finally:
            engine.speculation = self._shared

    def _figures(self, workload: Workload) -> Figures:
        name, prompts = workload.name, range(len(workload.prompts))
        arms = {arm: [self._runs[name, i, arm] for i in prompts] for arm in self._arms}
        speculated = list(chain.from_iterable(arms["speculated"]))
        plain = list(chain.from_iterable(arms["plain"]))
        num_passes = sum(run.num_passes for run in speculated)
        waited_s = sum(_counts(run).draft_wait_s for run in speculated)
        padded, lookups = arms.get("padded"), arms.get("lookups")
        return Figures(
            workload=name,
            prompts=len(prompts),
            prompt_tokens=fmean(len(prompt.token_ids) for prompt in workload.prompts),
            speedup=_speedup(arms["speculated"], arms["plain"]),
            speedup_over_padded=_speedup(arms["speculated"], padded) if padded else None,
            speedup_over_lookups=_speedup(arms["speculated"], lookups) if lookups else None,
            allowed_speedup=self._allowed(speculated) if self._is_exact else None,
            speedups=tuple(_ratios(arms["speculated"], arms["plain"])),
            tokens_per_pass=sum(len(run.completion.token_ids) for run in speculated)
            / sum(_counts(run).passes for run in speculated),
            teacher_forced_tokens_per_pass=self._teacher_forced(workload),
            distinct_4grams=fmean(distinct_4grams(run.completion.token_ids) for run in speculated),
            plain_tokens_per_s=_speed(arms["plain"]),
            padded_tokens_per_s=_speed(padded) if padded else None,
            lookups_tokens_per_s=_speed(lookups) if lookups else None,
            speculated_tokens_per_s=_speed(arms["speculated"]),
            passes=sum(_counts(run).passes for run in speculated),
            proposed=sum(_counts(run).proposed for run in speculated),
            accepted=sum(_counts(run).accepted for run in speculated),
            proposed_by_source=_by_source(speculated, "proposed"),
            accepted_by_source=_by_source(speculated, "accepted"),
            target_ms_per_pass=1e3 * sum(run.passes_s for run in speculated) / num_passes,
            draft_wait_ms_per_pass=1e3 * waited_s / num_passes,
            host_ms_per_pass=1e3 * sum(run.host_s for run in speculated) / num_passes,
            plain_ms_per_pass=1e3 * fmean(run.passes_s / run.num_passes for run in plain),
            plain_host_ms_per_pass=1e3 * fmean(run.host_s / run.num_passes for run in plain),
        )

    def _allowed(self, runs: Sequence[Run]) -> float:
        costs, facts = self._shared.pace.costs(), self._llm.engine.facts
        # Where a pass begins, none of them remembers: behind anything, on the whole.
        pasts = range(facts.row_multiple)
        seconds = 0.0
        for run in runs:
            for length, number in lengths(_counts(run)).items():
                rows = [facts.computed_rows(past, 1 + length, exact=True) for past in pasts]
                seconds += number * fmean(costs[r - 1] for r in rows)
        tokens = sum(run.completion.timings.decode_tokens for run in runs)
        return float(tokens * costs[0] / seconds)

    def _teacher_forced(self, workload: Workload) -> float:
        """Tokens per pass of look-ups in the given texts, by a pace that knows nothing yet."""
        fresh = replace(self._without_draft, pace=self._forgetful_pace(), recent=SharedIndex())
        given = [prompt for prompt in workload.prompts if prompt.given]
        num_passes = sum(self._passes_of(prompt, fresh) for prompt in given)
        return sum(len(prompt.given) for prompt in given) / num_passes

    def _passes_of(self, prompt: Prompt, shared: Speculation) -> int:
        facts, params = self._llm.engine.facts, replace(prompt.params, sources="lookup")
        sampler = Sampler(params, prompt.token_ids, facts.vocab_size)
        exactness = self._llm.config.exactness
        text = Text(prompt.token_ids, len(prompt.token_ids), len(prompt.given), exactness)
        speculator = Speculator(shared, text, sampler, facts, lambda: 1)
        return sum(1 for _ in _forced(speculator, prompt.given))


def _forced(speculator: Speculator, given: Sequence[int]) -> Iterator[Accepted]:
    """What each pass gives when the model says what is given."""
    done, proposal = 0, Proposal()  # the first pass is the prompt's
    while done < len(given):
        accepted = follow(proposal.tree, given[done:])
        speculator.judged(proposal, proposal.tree, accepted)
        speculator.extend(accepted.token_ids)
        done += len(accepted.token_ids)
        yield accepted
        proposal = speculator.propose(min(MAX_PROPOSED, len(given) - done - 1))


def follow(tree: Tree, truth: Sequence[int]) -> Accepted:
    """The beginning of `truth` that a pass over `tree` gives."""
    tokens, path, node = list[int](), list[int](), ROOT
    for token_id in truth:
        tokens.append(token_id)
        kept = next((i for i in tree.children(node) if tree.token_ids[i] == token_id), None)
        if kept is None or len(tokens) == len(truth):
            break
        path.append(kept)
        node = kept
    return Accepted(tuple(tokens), tuple(path))


def distinct_4grams(token_ids: Sequence[int]) -> float:
    """The share of a text's 4-grams that are different; 1 for a text that has none."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def lengths(counts: SpeculationCounts) -> Counter[int]:
    """How many passes after the prompt's had proposals of each length, if all were chains."""
    reached: Counter[int] = Counter({0: counts.passes - 1})
    for source in counts.sources.values():
        reached.update(dict(enumerate(source.proposed, 1)))
    return Counter({n: reached[n] - reached[n + 1] for n in reached if reached[n]})


def _require_same(a: Sequence[int], b: Sequence[int], where: str) -> None:
    if a != b:
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        raise ExactnessError(
            f"{where}: the texts with and without speculation differ from token {at + 1} on; run "
            "with --exactness tree, and report this"
        )


def _counts(run: Run) -> SpeculationCounts:
    counts = run.completion.speculation
    assert counts is not None, "it was loaded with speculation"
    return counts


def _by_source(runs: Sequence[Run], what: str) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for run in runs:
        for source, found in _counts(run).sources.items():
            sums[source] += sum(getattr(found, what))
    return dict(sums)


def _speedup(ours: Sequence[Sequence[Run]], others: Sequence[Sequence[Run]]) -> float:
    return geometric_mean(_ratios(ours, others))


def _ratios(ours: Sequence[Sequence[Run]], others: Sequence[Sequence[Run]]) -> list[float]:
    """By prompt."""
    return [
        median(a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(ours, others, strict=True)
    ]


def _speed(runs: Sequence[Sequence[Run]]) -> float:
    return geometric_mean([median(run.tokens_per_s for run in of) for of in runs])
