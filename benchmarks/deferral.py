"""In-line against deferred drafting with draft and target on one core each, measured.

    python benchmarks/deferral.py PAIR [--target-cpus 0] [--draft-cpus 1] [--propose 3]
                                  [--tokens 96] [--rounds 5] [--plot out.png] [--json]

PAIR is a bundle with a draft. In turns, in one process: plain decoding without padding, padded, then
`--propose` tokens from the draft alone a pass, in-line and deferred. Speeds are tokens a second after
the first SKIPPED of an answer, while the draft reads the prompt; ratios are medians over the rounds. --plot draws what target, draft and host did in the last
round of each mode, on one time axis. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.models.plantlog import sample_log
from headrace.runtime.draft_mode import DraftMode, ModeChoice
from headrace.runtime.drafter import Drafter
from headrace.runtime.request import Completion, DraftCounts
from headrace.runtime.trace import TRACKS, Trace

SKIPPED = 64

MODES = {"in-line": DraftMode.IN_LINE, "deferred": DraftMode.DEFERRED}

Span = tuple[str, str, float, float]


def spans_of(trace: Trace) -> list[Span]:
    """(track, name, start, end), milliseconds."""
    events: Any = trace.to_json()["traceEvents"]
    return [
        (e["cat"], e["name"], e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000)
        for e in events
        if e["ph"] == "X"
    ]


def busy_share(spans: list[Span], track: str) -> float:
    """Of the time between the first and the last span; waiting for the draft is within a span."""
    whole = max(s[3] for s in spans) - min(s[2] for s in spans)
    signs = {"wait": -1}
    return sum(signs.get(s[1], 1) * (s[3] - s[2]) for s in spans if s[0] == track) / whole


@dataclass(frozen=True)
class Part:
    """An answer, and figures of what comes after its first tokens."""

    completion: Completion
    tokens: int
    passes: int
    tokens_per_s: float


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Span]]]:
    trace = Trace()
    with LLM(
        args.pair,
        lanes=1,
        ctx=1024,
        target_cpus=args.target_cpus,
        target_threads=1,
        draft_cpus=args.draft_cpus,
        draft_threads=1,
        trace=trace,
    ) as llm:
        speculation = llm.engine.speculation
        assert speculation is not None and speculation.drafter is not None, "no draft in the bundle"
        drafter = speculation.drafter
        base = {"max_tokens": SKIPPED + args.tokens, "ignore_eos": True}
        drafted = SamplingParams(**base, sources="draft", speculate=args.propose)
        plain = {
            "plain": SamplingParams(**base, speculate="off", exactness="tree"),
            "padded": SamplingParams(**base, speculate="off"),
        }
        prompt = sample_log(2)
        speeds: dict[str, list[float]] = {}
        last: dict[str, Part] = {}
        spans: dict[str, list[Span]] = {}
        counts: dict[str, DraftCounts] = {}
        for turn in range(args.rounds + 1):
            for mode, params in (*plain.items(), *((m, drafted) for m in MODES)):
                last[mode] = run(llm, drafter, prompt, params, mode, trace, spans, counts)
                if turn:  # the first warms up
                    speeds.setdefault(mode, []).append(last[mode].tokens_per_s)
        texts = {m: last[m].completion.token_ids for m in ("padded", *MODES)}
        assert len(set(texts.values())) == 1, "speculation changed the text"
    result: dict[str, Any] = {
        "draft_step_over_pass": drafter.step_s / speculation.pace.costs()[0],
        "tokens_per_s": {mode: statistics.median(found) for mode, found in speeds.items()},
        "speedup": {m: ratio(speeds[m], speeds["plain"]) for m in ("padded", *MODES)},
        "deferred_over_in_line": ratio(speeds["deferred"], speeds["in-line"]),
        "modes": {},
    }
    for mode in MODES:
        found = last[mode].completion.speculation
        assert found is not None
        result["modes"][mode] = {
            "tokens_per_pass": last[mode].tokens / last[mode].passes,
            "accepted": found.accepted,
            "proposed": found.proposed,
            "waited_s": found.draft_wait_s,
            "busy": {track: busy_share(spans[mode], track) for track in TRACKS},
            "draft": dataclasses.asdict(counts[mode]),
        }
    return result, spans


def run(
    llm: LLM,
    drafter: Drafter,
    prompt: str,
    params: SamplingParams,
    mode: str,
    trace: Trace,
    spans: dict[str, list[Span]],
    counts: dict[str, DraftCounts],
) -> Part:
    """One answer's end, its spans, and the draft's counts."""
    drafter.asked_modes = ModeChoice([MODES.get(mode, DraftMode.IN_LINE)])
    tokens = passes = 0
    with llm.generate(prompt, params, stream=True) as answer:
        skipped = 0
        while skipped < SKIPPED:
            skipped += len(next(answer).token_ids)
        trace.clear()
        before, start = dataclasses.replace(drafter.counts), time.perf_counter()
        for delta in answer:
            tokens, passes = tokens + len(delta.token_ids), passes + 1
        seconds = time.perf_counter() - start
    spans[mode], counts[mode] = spans_of(trace), drafter.counts.since(before)
    return Part(answer.completion, tokens, passes, tokens / seconds)


def ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def plot(path: Path, spans: dict[str, list[Span]], result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"host": "tab:gray", "target": "tab:blue", "draft": "tab:orange"}
    rows = [(mode, track) for mode in MODES for track in ("target", "draft", "host")]
    shown_ms = 600.0
    figure, axes = plt.subplots(figsize=(9, 3), dpi=100)
    for row, (mode, track) in enumerate(reversed(rows)):
        begin = min(s[2] for s in spans[mode] if s[0] == "target")
        bars = [
            (start - begin, end - start)
            for found, name, start, end in spans[mode]
            if found == track and name not in ("propose", "wait") and 0 <= start - begin < shown_ms
        ]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours[track])
    axes.set_yticks(range(len(rows)), [f"{mode}: {track}" for mode, track in reversed(rows)])
    axes.set_xlim(0, shown_ms)
    axes.set_xlabel("ms")
    speeds = result["tokens_per_s"]
    axes.set_title(", ".join(f"{mode} {speeds[mode]:.1f} tokens/s" for mode in ("plain", *MODES)))
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--target-cpus", default="0")
    parser.add_argument("--draft-cpus", default="1")
    parser.add_argument("--propose", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result, spans = measure(args)
    for mode, speed in result["tokens_per_s"].items():
        print(f"{mode:10} {speed:6.1f} tokens/s")
    for mode, found in result["modes"].items():
        busy = ", ".join(f"{track} {share:.0%}" for track, share in found["busy"].items())
        print(f"{mode:10} {found['tokens_per_pass']:.2f} tokens a pass; busy: {busy}")
    print(f"deferred over in-line {result['deferred_over_in_line']:.2f}")
    if args.plot:
        plot(args.plot, spans, result)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
