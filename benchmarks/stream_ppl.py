"""Perplexity of a long text: a stream, a plain sliding window, full attention, recomputed windows.

    python benchmarks/stream_ppl.py BUNDLE --text english --text FILE [--plot OUT.png] [--json]

`--text english` is CPython's own manual (pydoc_data.topics): prose paragraphs, each once. A file is
read as it is. The plot needs matplotlib, `pip install headrace[bench]`. What is compared:

ring        a stream of the runtime: sinks, window, eviction in units
plain       the slots of sinks and window as one window without sinks, keys at absolute positions too
full        everything so far is seen, until the context ends
recomputed  every `--sample` tokens, what the ring holds is computed anew as a prompt of its own, and
            the next 16 tokens are scored after it

Every token is scored after those before it. Intervals hold 95 % of 10,000 bootstrap resamples. The
last line of --json is one object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import stream_figures as figures

from headrace import LLM
from headrace.models.manifest import Bundle
from headrace.runtime.batch import F32, I64, LaneRows, chain
from headrace.runtime.ring import RingLayout, RingState
from headrace.runtime.sampling import log_normalizer

F64 = npt.NDArray[np.float64]

SCORED = 16
"""Tokens that are scored after a recomputed window; the ring evicts nothing meanwhile."""


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


# texts


def english() -> str:
    """Paragraphs of the manual that ships with CPython, each once and on one line.

    Headings, code and grammar are left out: they are underlined or indented.
    """
    from pydoc_data.topics import topics

    paragraphs = (p for topic in topics.values() for p in topic.split("\n\n"))
    prose = (" ".join(p.split()) for p in paragraphs if p[:1].isalpha() and "***" not in p)
    return "\n\n".join(dict.fromkeys(p for p in prose if len(p) > 80))


def token_ids(llm: LLM, text: str, most: int) -> I64:
    content = english() if text == "english" else Path(text).read_text("utf-8", errors="replace")
    ids = np.array(llm.encode(content)[:most], np.int64)
    if len(ids) < most:
        say(f"{text}: has only {len(ids)} tokens")
    return ids


# what is compared; each fills nll[i], token i's negative log-probability after those before it


class Progress:
    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.start = what, total, time.perf_counter()
        self.told = self.start

    def at(self, done: int) -> None:
        now = time.perf_counter()
        if now - self.told > 20 or done >= self.total:
            self.told = now
            say(f"{self.what}: {done} of {self.total}, {done / (now - self.start):.0f} a second")


def scores(ids: I64, rows: Iterator[F32], num_rows: int, what: str) -> F64:
    nll = np.full(len(ids), np.nan)
    progress = Progress(what, num_rows)
    for i, row in enumerate(rows):
        nll[i + 1] = log_normalizer(row) - float(row[ids[i + 1]])
        if (i + 1) % 32 == 0 or i + 1 == num_rows:
            progress.at(i + 1)
    return nll


def sequence_nll(llm: LLM, ids: I64, layout: RingLayout | None, what: str) -> F64:
    """Through the runtime's own sequence: a stream, or without a layout a context that ends."""
    sequence = llm.engine.sequence() if layout is None else llm.engine.stream(layout)
    num_rows = len(ids) - 1 if layout else min(len(ids) - 1, llm.capacity)
    sequence.append(ids[:num_rows].tolist())
    try:
        with llm.engine.request(sequence, 0):
            return scores(ids, sequence.rows(), num_rows, what)
    finally:
        llm.engine.close_sequence(sequence)


def plain_rows(llm: LLM, ids: I64, window: int, unit: int) -> Iterator[F32]:
    """Logits after each of `ids` in a window that keeps no sinks.

    The runtime refuses such a stream, so lane 0 is driven directly; no sequence may be open.
    """
    backend, held = llm.backend, np.empty(window + unit, np.int64)
    past = done = oldest = 0
    while done < len(ids):
        num_rows = min(window + unit - past, len(ids) - done, backend.facts.max_wanted)
        positions = np.arange(done, done + num_rows)
        wanted = tuple(range(num_rows))
        part = ids[done : done + num_rows]
        yield from backend.forward([LaneRows(0, part, positions, past, wanted, held[:past])])
        held[past : past + num_rows] = positions
        past, done = past + num_rows, done + num_rows
        if past == window + unit:
            backend.arena.move(0, range(window, past), range(oldest, oldest + unit))
            held[oldest : oldest + unit] = held[window:]
            past, oldest = window, (oldest + unit) % window


@dataclass(frozen=True)
class Sample:
    """What the ring holds when it has `state.num_tokens` tokens, and the tokens scored then."""

    state: RingState
    context: I64
    """Indices of the tokens it holds, in the text's order."""
    scored: I64
    """Indices of the tokens that are scored: their logits come from rows computed in `state`."""


def samples(layout: RingLayout, num_tokens: int, every: int) -> list[Sample]:
    """One each `every` tokens, with the tail filled differently from one to the next."""
    num_scored, found = min(SCORED, layout.unit), []
    for i, start in enumerate(range(every, num_tokens, every)):
        state = RingState(layout, start + i * num_scored % layout.unit)
        while state.room < num_scored:
            state = RingState(layout, state.num_tokens + 1)
        if state.num_tokens + num_scored < num_tokens:
            scored = np.arange(state.num_tokens, state.num_tokens + num_scored) + 1
            found.append(Sample(state, np.sort(state.slot_tokens()), scored))
    return found


def recomputed_nll(llm: LLM, ids: I64, sample: Sample) -> F64:
    """Of the scored tokens, after a prompt of what the ring holds, at positions 0, 1, …"""
    prompt, width = ids[sample.context], llm.backend.facts.max_rows
    for past in range(0, len(prompt), width):
        llm.backend.forward([chain(0, prompt[past : past + width], past)])
    wanted = tuple(range(len(sample.scored)))
    rows = llm.backend.forward([chain(0, ids[sample.scored - 1], len(prompt), wanted)])
    targets = ids[sample.scored]
    return np.array([log_normalizer(r) - float(r[t]) for r, t in zip(rows, targets, strict=True)])


def measure(llm: LLM, text: str, args: argparse.Namespace) -> figures.Measured:
    layout: RingLayout = args.layout
    name = Path(text).name
    ids = token_ids(llm, text, args.tokens)
    ring = sequence_nll(llm, ids, layout, f"{name}: ring")
    num_slots = layout.tail_start // layout.unit * layout.unit
    rows = plain_rows(llm, ids[:-1], num_slots, layout.unit)
    plain = scores(ids, rows, len(ids) - 1, f"{name}: plain window")
    full = sequence_nll(llm, ids, None, f"{name}: full attention")
    chosen = samples(layout, len(ids), args.sample)
    progress = Progress(f"{name}: recomputed windows", len(chosen))
    recomputed = []
    for i, sample in enumerate(chosen):
        recomputed.append(recomputed_nll(llm, ids, sample))
        progress.at(i + 1)
    return figures.Measured(
        text=name,
        layout=layout,
        ring=ring,
        plain=plain,
        full=full,
        sampled_at=np.array([s.state.num_tokens for s in chosen]),
        evicted=np.array([s.state.num_evicted for s in chosen]),
        sampled_ring=np.array([ring[s.scored] for s in chosen]),
        sampled_again=np.array(recomputed),
        ids_sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    with LLM(args.bundle, ctx=args.ctx, lanes=1, target_threads=args.threads, say=say) as llm:
        measured = []
        for text in args.text:
            measured.append(measure(llm, text, args))
            say(f"{measured[-1].text}: {json.dumps(figures.summary(measured[-1]))}")
        manifest = llm.bundle.manifest
    if args.plot:
        figures.plot(measured, args.plot)
    return {
        "bundle": manifest.name,
        "quant": manifest.quant,
        "kv": manifest.kv,
        "sinks": args.sinks,
        "window": args.window,
        "unit": args.unit,
        "sample": args.sample,
        "scored": min(SCORED, args.unit),
        "context": args.ctx,
        "python": platform.python_version(),
        "texts": [figures.to_json(m) for m in measured],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--text", action="append", nargs="+", required=True, help="`english` or a file; repeatable"
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--sinks", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--unit", type=int, default=64)
    parser.add_argument("--sample", type=int, default=128, help="tokens between two recomputations")
    parser.add_argument("--ctx", type=int, help="where full attention ends; the trained limit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.text = [text for texts in args.text for text in texts]
    args.layout = RingLayout(args.sinks, args.window, args.unit)
    if args.tokens < args.layout.capacity + args.window:
        parser.error(f"--tokens {args.tokens}: too few for the ring to go round once")
    if args.sample < 1:
        parser.error(f"--sample {args.sample}: at least 1")
    if args.plot:
        figures.require_matplotlib()
    if args.ctx is None:
        args.ctx = Bundle.open(args.bundle).manifest.config.max_position
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return
    for text in result["texts"]:
        figures.show(text)


if __name__ == "__main__":
    main()
