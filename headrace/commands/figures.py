"""Figures of an answer: what it took, and how likely its tokens were."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from headrace.commands.terminal import print_facts, print_table, size
from headrace.runtime import memory
from headrace.runtime.answer import Answer
from headrace.runtime.backend import Backend
from headrace.runtime.engine import KvStats
from headrace.runtime.request import Completion, TokenLogprob


@dataclass(frozen=True)
class Measured:
    """An answer and how long the backend worked for its tokens after the first."""

    completion: Completion
    decode_passes_s: float

    @property
    def host_s_per_token(self) -> float | None:
        """Wall time per decoded token that was not spent in the backend; None without one."""
        timings = self.completion.timings
        if not timings.decode_tokens:
            return None
        return (timings.decode_s - self.decode_passes_s) / timings.decode_tokens


def run_measured(answer: Answer, backend: Backend, write: Callable[[str], None]) -> Measured:
    """Runs an answer to its end, writing its text as it comes."""
    at_first_token: float | None = None
    for delta in answer:
        if at_first_token is None:
            at_first_token = backend.seconds_in_passes
        write(delta.text)
    assert at_first_token is not None, "an answer has at least one token"
    return Measured(answer.completion, backend.seconds_in_passes - at_first_token)


def print_stats(measured: Measured, kv: KvStats) -> None:
    """On stderr. `kv` is the engine's, after the answer."""
    completion, now = measured.completion, memory.usage()
    timings, host_s = completion.timings, measured.host_s_per_token
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
        ("seed", str(completion.seed)),
        *kv_facts(kv),
        ("memory, anonymous", size(now.rss_anon)),
        ("memory, file pages", size(now.rss_file)),
        ("memory, peak", size(now.vm_hwm)),
    ]
    print_facts("", facts, stderr=True)


def _speculation_facts(completion: Completion) -> list[tuple[str, str]]:
    counts = completion.speculation
    if counts is None or not counts.passes:
        return []
    per_pass = completion.usage.completion_tokens / counts.passes
    words = f"{counts.accepted:,} of {counts.proposed:,} proposed tokens accepted"
    return [("tokens per pass", f"{per_pass:.2f}; {words}")]


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
