"""Figures of an answer: what it took, and how likely its tokens were."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.commands.terminal import print_facts, print_table, say, size
from headrace.runtime import memory
from headrace.runtime.answer import Answer
from headrace.runtime.backend import Backend
from headrace.runtime.drafter import Drafter
from headrace.runtime.engine import Engine, KvStats
from headrace.runtime.request import Completion, SpeculationCounts, TokenLogprob

if TYPE_CHECKING:
    from headrace.runtime.llm import LLM


@dataclass(frozen=True)
class Measured:
    """An answer and how long the backend worked for its tokens after the first."""

    completion: Completion
    decode_passes_s: float

    @property
    def host_s_per_step(self) -> float | None:
        """Wall time of a pass after the first that was spent neither in the backend nor waiting
        for the draft; None without one.
        """
        timings, counts = self.completion.timings, self.completion.speculation
        waited_s = counts.draft_wait_s if counts else 0.0
        steps = counts.passes - 1 if counts else timings.decode_tokens
        return (timings.decode_s - self.decode_passes_s - waited_s) / steps if steps else None


def run_measured(answer: Answer, backend: Backend, write: Callable[[str], None]) -> Measured:
    """Runs an answer to its end, writing its text as it comes."""
    at_first_token: float | None = None
    for delta in answer:
        if at_first_token is None:
            at_first_token = backend.seconds_in_passes
        write(delta.text)
    assert at_first_token is not None, "an answer has at least one token"
    return Measured(answer.completion, backend.seconds_in_passes - at_first_token)


def print_stats(measured: Measured, engine: Engine) -> None:
    """On stderr. `engine` is asked as it is now, after the answer."""
    completion, now = measured.completion, memory.usage()
    timings, host_s = completion.timings, measured.host_s_per_step
    known = completion.usage.prompt_tokens - timings.prefill_tokens
    in_cache = f", {known:,} of them known already" if known else ""
    facts = [
        ("prompt tokens", f"{completion.usage.prompt_tokens:,}{in_cache}"),
        ("answer tokens", f"{completion.usage.completion_tokens:,} ({completion.finish_reason})"),
        ("time to first token", f"{timings.first_token_s * 1000:,.0f} ms"),
        ("prefill", f"{timings.prefill_tokens_per_s:,.1f} tokens/s"),
        ("decode", f"{timings.decode_tokens_per_s:,.1f} tokens/s"),
        ("host time per step", "no step" if host_s is None else f"{host_s * 1000:.2f} ms"),
        *_speculation_facts(completion),
        *_draft_facts(completion, engine),
        ("seed", str(completion.seed)),
        *kv_facts(engine.stats),
        ("memory, anonymous", size(now.rss_anon)),
        ("memory, file pages", size(now.rss_file)),
        ("memory, peak", size(now.vm_hwm)),
    ]
    print_facts("", facts, stderr=True)


def _speculation_facts(completion: Completion) -> list[tuple[str, str]]:
    counts, timings = completion.speculation, completion.timings
    if counts is None or not counts.passes:
        return []
    per_pass = completion.usage.completion_tokens / counts.passes
    words = f"{counts.accepted:,} of {counts.proposed:,} proposed tokens accepted"
    host_s = timings.first_token_s + timings.decode_s - timings.target_s - counts.draft_wait_s
    times = f"target {timings.target_s:.2f} s, waiting for the draft {counts.draft_wait_s:.2f} s"
    return [
        ("tokens per pass", f"{per_pass:.2f}; {words}, {counts.wasted:,} wasted"),
        *_source_facts(counts),
        ("where the time went", f"{times}, host {host_s:.2f} s"),
    ]


def _source_facts(counts: SpeculationCounts) -> list[tuple[str, str]]:
    facts = []
    for name, source in counts.sources.items():
        words = f"{sum(source.accepted):,} of {sum(source.proposed):,} accepted"
        if source.proposed[0]:
            words += f", first ones {source.accepted[0] / source.proposed[0]:.0%}"
        facts.append((f"  from {name}", words))
    return facts


def _draft_facts(completion: Completion, engine: Engine) -> list[tuple[str, str]]:
    """Of the draft while the answer was made, if there is one."""
    speculation = engine.speculation
    drafter = None if speculation is None else speculation.drafter
    counts = completion.speculation.draft if completion.speculation else None
    if speculation is None or drafter is None or counts is None:
        return []
    is_fixed = isinstance(speculation.speculate, int)
    modes = drafter.asked_modes if is_fixed else drafter.modes
    parts = [f"busy {counts.busy_s:.2f} s, idle {counts.idle_s:.2f} s"]
    if counts.head_starts:
        share = counts.head_start_hits / counts.head_starts
        parts.append(f"{share:.0%} of {counts.head_starts:,} head starts hit")
    rows = f"{counts.rows_true:,} of {counts.rows:,} rows became text"
    return [
        ("draft model", ", ".join([*parts, rows])),
        ("drafting", str(modes)),
        *_draft_troubles(drafter),
    ]


def say_if_broken(llm: LLM) -> None:
    """A draft that is not asked any more has had no part in what was measured since."""
    speculation = llm.engine.speculation
    drafter = None if speculation is None else speculation.drafter
    if drafter is not None and drafter.broken is not None:
        say(f"the draft was not asked to the end: {drafter.broken}")


def _draft_troubles(drafter: Drafter) -> list[tuple[str, str]]:
    counts = drafter.counts
    troubles = {
        "late": counts.late,
        "failures": counts.failures,
        "switches": counts.switches,
        "returns": counts.returns,
    }
    parts = [f"{name} {count:,}" for name, count in troubles.items() if count]
    if drafter.broken is not None:
        parts.append(f"not asked any more: {drafter.broken}")
    return [("draft troubles", ", ".join(parts))] if parts else []


def kv_facts(kv: KvStats) -> list[tuple[str, str]]:
    """The pool's state, and what was decided about it if anything was."""
    blocks, prefix = kv.blocks, kv.prefix
    decisions = {
        "waited for blocks": kv.waited_requests,
        "lent blocks": kv.lent_requests,
        "refused": kv.refused_requests,
        "sessions dropped": kv.dropped_sequences,
        "cached blocks evicted": prefix.evicted_blocks,
        "lane switches": kv.lane_switches,
    }
    taken = ", ".join(f"{name} {count:,}" for name, count in decisions.items() if count)
    held = f"{blocks.held:,} held ({kv.pinned_blocks:,} pinned)"
    state = f"{blocks.total:,} blocks: {held}, {blocks.cached:,} cached, {blocks.free:,} free"
    found = f"{prefix.hit_tokens:,} tokens found, {prefix.missed_tokens:,} not"
    facts = [("pool", state), ("prefix cache", found)]
    return [*facts, ("pool decisions", taken)] if taken else facts


def print_logprobs(tokens: tuple[TokenLogprob, ...], *, stderr: bool = False) -> None:
    """One row a token, with its alternatives if there are any."""
    columns = ["token", "id", "logprob"]
    if any(token.top for token in tokens):
        columns.append("alternatives")
    rows = [
        (shown(t.text), str(t.token_id), f"{t.logprob:.4f}", _alternatives(t))[: len(columns)]
        for t in tokens
    ]
    print_table("", columns, rows, numbers=frozenset((1, 2)), stderr=stderr)


def _alternatives(token: TokenLogprob) -> str:
    return "  ".join(f"{shown(other.text)} {other.logprob:.2f}" for other in token.top)


def shown(text: str) -> str:
    """A token's text on one line, quoted: spaces and newlines are what matters in it."""
    return json.dumps(text, ensure_ascii=not text.isprintable())
