"""Deferred against in-line drafting on an RK3588, simulated from published speeds of its parts.

    python benchmarks/deferral_sim.py [--tokens 20000] [--contention 1.0 1.15 1.3]
                                      [--distilled] [--acceptance P ...] [--plot OUT.png] [--json]

A draft of 0.5B and a target of 1.5B, one on the NPU and one on the four A76 cores, both ways round.
With --distilled the draft is one that `headrace distill` makes of that target, on the NPU.
In-line (Leviathan et al., 2023): draft k tokens, verify them in a pass of k + 1 rows, and so on; one
device waits for the other. Deferred: while the target verifies, the draft extends the likeliest
outcomes (all accepted and its own guess of the bonus token; rejected at depth j and its runner-up
there). The branch that the verdict matches is the head start of the next proposal.

Events are ends of draft steps and of target passes. Every drafted token is right with the same
probability, the acceptance, if those before it are; so is the guess of the bonus token. The last
accepted token, where the draft has not read it, rides along with its next step at no cost. Sampling
and transfers take no time. The contention multiplies what both devices take while both run: they
share the DRAM. Times are milliseconds. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

# What a pass costs

WEIGHTS_05B, WEIGHTS_15B = 0.494e9, 1.544e9
"""Of Qwen2.5; the head is the embedding, so every pass reads all of them."""

WEIGHTS_DISTILLED = 4 * (WEIGHTS_15B - 151_936 * 1536) / 28 + 16_384 * 1536
"""Four of the 28 layers of the 1.5B, and 16,384 rows of its head."""

# Fit of Rockchip's table for the RK3588 (rknn-llm v1.3.0, benchmark.md: w8a8, three cores, full
# clocks): 41.6 tokens/s of Qwen2 0.5B, 16.7 of Qwen2.5 1.5B and the models between.
NPU_FIXED_MS, NPU_MS_PER_GB = 8.1, 32.2

# The toolkit's cycle model: 8 rows cost 1.5 % more than one.
NPU_ROW = 0.015 / 7

# The same table: a prompt of 128 tokens takes 146 ms (0.5B) and 378 ms (1.5B). Rows cost no less.
NPU_ROW_MS_05B, NPU_ROW_MS_15B = 146 / 128, 378 / 128

# llama.cpp on four A76 cores with LPDDR5 (invisiofficial/rk-llama.cpp, issue 9): Gemma 4 E2B, which
# reads about 2.3e9 weights a token, 7.7 tokens/s in Q8_0 (34 bytes for 32 weights: 18.8 GB/s) and
# 12.4 in Q4_0 (18 bytes: 16.0 GB/s); the mean of both.
CPU_GB_PER_S = (7.7 * 2.3 * 34 / 32 + 12.4 * 2.3 * 18 / 32) / 2

# Bytes of an int4 bundle: layers of 4 bits, with a float32 scale and 4 bits of zero point for 32
# weights, and a head of 8 bits with a scale.
LAYER_BYTES, HEAD_BYTES = 0.5 + 4.5 / 32, 1 + 4 / 32
HEAD_05B, HEAD_15B = 151_936 * 896, 151_936 * 1536

# Rows of one pass, and its cost as a multiple of one row's: onnxruntime 1.32 on x86-64, geometry of
# the 1.5B. No A76 has been measured; llama.cpp's prompts of 512 there (56.1 tokens/s) cost 0.22 a row,
# and this table 0.27.
CPU_ROWS = {1: 1.0, 2: 1.14, 3: 1.34, 4: 1.60, 6: 2.1, 8: 2.3, 12: 3.5, 16: 5.1}

CONTENTION = (1.0, 1.15, 1.3)
"""Not published. Alone, the NPU reads 20 GB/s for the 0.5B and 27 for the 1.5B, and the CPU 17. If the
31 of NPU_MS_PER_GB is all that the DRAM gives, the two together want 1.2 or 1.4 times that."""

RUNNER_UP = 0.35
"""How often a rejected token's runner-up is what the target chose. An assumption: Medusa's heads (Cai
et al., 2024) are right in about 60 % of cases and have the token among their best five in over 80 %,
so four runners-up share half of the misses, and the first has the largest part of that."""

MAX_K = 12
"""Longest proposal that is tried, so that CPU_ROWS covers its k + 1 rows."""

Cost = Callable[[int], float]
"""Milliseconds of a pass, by its rows."""


def npu(num_weights: float, row_ms: float) -> Cost:
    """Weight traffic until the rows' own work takes longer."""
    one = NPU_FIXED_MS + NPU_MS_PER_GB * num_weights / 1e9
    return cache(lambda rows: max(one * (1 + NPU_ROW * (rows - 1)), rows * row_ms))


def cpu(num_weights: float, num_head: float) -> Cost:
    num_bytes = (num_weights - num_head) * LAYER_BYTES + num_head * HEAD_BYTES
    one = num_bytes / CPU_GB_PER_S / 1e6
    return cache(lambda rows: one * relative_cost(rows))


def relative_cost(rows: int) -> float:
    """CPU_ROWS with straight lines between its entries."""
    below = max(known for known in CPU_ROWS if known <= rows)
    above = min(known for known in CPU_ROWS if known >= rows)
    share = (rows - below) / (above - below) if above > below else 0.0
    return CPU_ROWS[below] + share * (CPU_ROWS[above] - CPU_ROWS[below])


@dataclass(frozen=True)
class Placement:
    name: str
    draft: Cost
    target: Cost
    branches: int
    """Lines that one draft step may extend: several where rows are cheap."""


def placements(branches: int, is_distilled: bool = False) -> list[Placement]:
    if is_distilled:
        target, row_ms = (
            cpu(WEIGHTS_15B, HEAD_15B),
            NPU_ROW_MS_15B * WEIGHTS_DISTILLED / WEIGHTS_15B,
        )
        draft = npu(WEIGHTS_DISTILLED, row_ms)
        return [Placement("distilled draft NPU, target CPU", draft, target, branches)]
    npu_05b, npu_15b = npu(WEIGHTS_05B, NPU_ROW_MS_05B), npu(WEIGHTS_15B, NPU_ROW_MS_15B)
    cpu_05b, cpu_15b = cpu(WEIGHTS_05B, HEAD_05B), cpu(WEIGHTS_15B, HEAD_15B)
    return [
        Placement("draft NPU, target CPU", npu_05b, cpu_15b, branches),
        Placement("draft CPU, target NPU", cpu_05b, npu_15b, 1),
    ]


def expected_tokens(acceptance: float, k: int) -> float:
    """Of one pass over k drafted tokens: (1 - a^(k+1)) / (1 - a)."""
    return sum(acceptance**i for i in range(k + 1))


def inline_rate(placement: Placement, acceptance: float, k: int) -> float:
    """Tokens a millisecond; k = 0 is plain decoding."""
    ms = k * placement.draft(1) + placement.target(k + 1)
    return expected_tokens(acceptance, k) / ms


# The simulation

DRAFT, TARGET = "draft", "target"


class Machine:
    """Two devices, each with at most one pass under way."""

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self.left: dict[str, float] = {}
        """What is left of the passes under way, in ms of a device that runs alone."""
        self.now = 0.0
        self.busy = {DRAFT: 0.0, TARGET: 0.0}
        self.idle = {DRAFT: 0.0, TARGET: 0.0}

    def start(self, device: str, work: float) -> None:
        assert device not in self.left
        self.left[device] = work

    def next(self) -> str:
        """Goes on to the next end of a pass; returns its device."""
        # Both go on equally slowly, so the one with less left ends first.
        device = min(self.left, key=self.left.__getitem__)
        work = self.left[device]
        ms = work * (self.contention if len(self.left) == 2 else 1.0)
        for each in (DRAFT, TARGET):
            (self.busy if each in self.left else self.idle)[each] += ms
        self.left = {d: left - work for d, left in self.left.items() if d != device}
        self.now += ms
        return device


@dataclass(eq=False)
class Line:
    """Drafted tokens in a row. A step may extend a line that was dropped while it ran."""

    length: int = 0


@dataclass(frozen=True)
class Mode:
    """How to draft."""

    k: int
    """Tokens to verify; deferred: the most that the target is made to wait for."""
    deferred: bool
    rate: float = 0.0
    """Tokens a millisecond that are known to be possible: what a millisecond of waiting is worth."""


@dataclass
class Counts:
    committed: int = 0
    drafted: int = 0
    used: int = 0
    """Drafted tokens that were accepted, and right guesses of the bonus token."""
    passes: int = 0
    hits: int = 0
    """Verdicts that found the next proposal begun."""


@dataclass
class Simulation:
    placement: Placement
    acceptance: float
    mode: Mode
    contention: float = 1.0
    runner_up: float = RUNNER_UP
    seed: int = 0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.machine, self.random = Machine(self.contention), random.Random(self.seed).random
        self.line = Line()
        """What follows the committed tokens; its first `proposed` are under verification."""
        self.proposed = 0
        self.rejected: list[Line] = []
        """[proposed]: goes on from the runner-up at that depth."""
        self.extending: Sequence[Line] = ()
        costs = [self.placement.target(n + 1) for n in range(MAX_K + 1)]
        self.values = [
            expected_tokens(self.acceptance, n) - self.mode.rate * cost
            for n, cost in enumerate(costs)
        ]

    def run(self, num_tokens: int) -> Simulation:
        while self.counts.committed < num_tokens:
            self.decide()
            if self.machine.next() == DRAFT:
                self.drafted()
            else:
                self.verdict()
        return self

    def decide(self) -> None:
        """Starts what is worth starting on the devices that are free."""
        if TARGET not in self.machine.left:
            length = self.worth_verifying()
            if length is not None:
                self.proposed, self.rejected = length, [Line() for _ in range(length)]
                self.machine.start(TARGET, self.placement.target(length + 1))
            elif DRAFT not in self.machine.left:
                self.extend([self.line])
        if self.mode.deferred and TARGET in self.machine.left and DRAFT not in self.machine.left:
            self.extend(self.worth_extending())

    def extend(self, lines: Sequence[Line]) -> None:
        if lines:
            self.extending = lines
            self.machine.start(DRAFT, self.placement.draft(len(lines)))

    def drafted(self) -> None:
        for line in self.extending:
            line.length += 1
        self.counts.drafted += len(self.extending)
        self.extending = ()

    def verdict(self) -> None:
        accepted = 0
        while accepted < self.proposed and self.random() < self.acceptance:
            accepted += 1
        self.counts.committed += accepted + 1
        self.counts.used += accepted
        self.counts.passes += 1
        self.line = self.head_start(accepted)
        self.counts.hits += self.line.length > 0

    def head_start(self, accepted: int) -> Line:
        """The line that goes on from the target's own token, maybe an empty one."""
        if accepted < self.proposed:
            return self.rejected[accepted] if self.random() < self.runner_up else Line()
        if self.line.length > accepted and self.random() < self.acceptance:
            self.counts.used += 1
            self.line.length -= accepted + 1
            return self.line
        return Line()

    def worth_verifying(self) -> int | None:
        """How many of the drafted tokens to verify now; None is to draft on first.

        In-line that is k. Deferred: what promises most tokens beyond those that the time it takes
        is worth, with the target waiting for up to k tokens.
        """
        ready = self.line.length
        if not self.mode.deferred:
            return self.mode.k if ready >= self.mode.k else None
        coming = int(any(line is self.line for line in self.extending))
        wait = self.machine.left.get(DRAFT, 0.0)
        best = max(range(min(ready, MAX_K) + 1), key=self.values.__getitem__)
        for length in range(ready + 1, max(self.mode.k, ready + coming) + 1):
            if length > MAX_K:
                break
            wait_for = wait + (length - ready - coming) * self.placement.draft(1)
            if self.values[length] - self.mode.rate * wait_for > self.values[best]:
                return None
        return best

    def outcomes(self) -> Iterator[tuple[float, Line]]:
        """Lines with the probability that their next token will be on the target's way."""
        a = self.acceptance
        if self.line.length <= self.proposed + MAX_K:
            yield a ** (self.line.length + 1), self.line
        for depth, line in enumerate(self.rejected):
            if line.length < MAX_K:
                yield a**depth * (1 - a) * self.runner_up * a ** (line.length + 1), line

    def worth_extending(self) -> list[Line]:
        """The likeliest lines; none where a step would cost more time than it promises to save.

        It saves what of it goes on beside the target's pass, if one of its tokens is of use. Where
        none is, the draft is late by what lies behind that pass; and contention delays the verdict.
        """
        ranked = sorted(self.outcomes(), key=lambda outcome: outcome[0], reverse=True)
        best = ranked[: self.placement.branches]
        if not best:
            return []
        step, left = self.placement.draft(len(best)), self.machine.left[TARGET]
        beside, late = min(step, left), max(0.0, step - left)
        guess = self.line if self.line.length == self.proposed else None
        useful = sum(
            self.worth_guessing(round(left / step)) if line is guess else probability
            for probability, line in best
        )
        saved = useful * beside - (1 - useful) * late
        return [line for _, line in best] if saved > (self.contention - 1) * beside else []

    def worth_guessing(self, num_steps: int) -> float:
        """Of a step that guesses the bonus token: the mean over the steps there is time for.

        The guess itself saves nothing, as the target tells the token anyway; those after it do.
        """
        after = sum(self.acceptance ** (self.proposed + 1 + i) for i in range(1, num_steps))
        return after / max(1, num_steps)

    def to_json(self) -> dict[str, float]:
        counts, machine = self.counts, self.machine
        return {
            "k": self.mode.k,
            "tokens_per_s": 1e3 * counts.committed / machine.now,
            "tokens_per_pass": counts.committed / counts.passes,
            "head_start_hits": counts.hits / counts.passes,
            "wasted": 1 - counts.used / counts.drafted if counts.drafted else 0.0,
            "draft_idle": machine.idle[DRAFT] / machine.now,
            "target_idle": machine.idle[TARGET] / machine.now,
        }


# The figures

PROBE_TOKENS = 4000
"""Of the runs that choose a k."""


def best_inline(placement: Placement, acceptance: float) -> Mode:
    rates = [inline_rate(placement, acceptance, k) for k in range(MAX_K + 1)]
    return Mode(rates.index(max(rates)), deferred=False, rate=max(rates))


def best_deferred(
    placement: Placement, acceptance: float, contention: float, runner_up: float
) -> Mode:
    """By short runs, each of which reckons with the best rate so far."""
    best = Mode(0, deferred=True, rate=best_inline(placement, acceptance).rate)
    k, reached = 0, 0.0
    for tried in range(MAX_K + 1):
        if tried > k + 3:
            break  # the rate has one peak
        mode = replace(best, k=tried)
        run = Simulation(placement, acceptance, mode, contention, runner_up).run(PROBE_TOKENS)
        rate = run.counts.committed / run.machine.now
        if rate > reached:
            k, reached = tried, rate
        best = replace(best, rate=max(best.rate, rate))
    return replace(best, k=k)


def point(placement: Placement, acceptance: float, args: argparse.Namespace) -> dict[str, Any]:
    """In-line and deferred at one acceptance."""

    def figures(mode: Mode, contention: float) -> dict[str, float]:
        settings = (placement, acceptance, mode, contention, args.runner_up, args.seed)
        return Simulation(*settings).run(args.tokens).to_json()

    modes = {c: best_deferred(placement, acceptance, c, args.runner_up) for c in args.contention}
    return {
        "placement": placement.name,
        "acceptance": acceptance,
        # One device at a time, so contention does not come in.
        "inline": figures(best_inline(placement, acceptance), 1.0),
        "deferred": [{"contention": c, **figures(mode, c)} for c, mode in modes.items()],
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    chosen = placements(args.branches, args.distilled)
    return {
        "tokens": args.tokens,
        "seed": args.seed,
        "runner_up": args.runner_up,
        "branches": args.branches,
        "draft_ms": {p.name: p.draft(1) for p in chosen},
        "target_ms": {p.name: p.target(1) for p in chosen},
        "plain_tokens_per_s": {p.name: 1e3 / p.target(1) for p in chosen},
        "points": [point(p, a, args) for p in chosen for a in args.acceptance],
    }


HEADER = (
    "accept.  mode           tokens/s  x plain   k  tokens/pass  head start  wasted"
    "  draft idle  target idle"
)


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, plain in result["plain_tokens_per_s"].items():
        draft, target = result["draft_ms"][name], result["target_ms"][name]
        lines += [
            "",
            f"{name}: draft step {draft:.1f} ms, target row {target:.1f} ms, plain {plain:.1f}/s",
            HEADER,
        ]
        for p in result["points"]:
            if p["placement"] == name:
                rows = {"in-line": p["inline"]}
                rows |= {f"deferred {d['contention']:.2f}": d for d in p["deferred"]}
                lines += [row(p["acceptance"], mode, f, plain) for mode, f in rows.items()]
    return "\n".join(lines[1:])


def row(acceptance: float, mode: str, f: dict[str, float], plain: float) -> str:
    return (
        f"{acceptance:7.1f}  {mode:14} {f['tokens_per_s']:8.1f} {f['tokens_per_s'] / plain:8.2f}"
        f" {f['k']:3}  {f['tokens_per_pass']:11.2f} {f['head_start_hits']:11.0%} {f['wasted']:7.0%}"
        f" {f['draft_idle']:11.0%} {f['target_idle']:12.0%}"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens a second over acceptance, a panel for each placement."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plains = result["plain_tokens_per_s"]
    figure, axes = pyplot.subplots(
        1,
        len(plains),
        figsize=(4 * len(plains), 3.6),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, (name, plain) in zip(axes[0], plains.items(), strict=True):
        points = [p for p in result["points"] if p["placement"] == name]
        x = [p["acceptance"] for p in points]
        axis.axhline(plain, color="#888888", linewidth=1, label="plain decoding")
        inline = [p["inline"]["tokens_per_s"] for p in points]
        axis.plot(x, inline, color="#c8502d", linewidth=1.2, label="in-line")
        for i, entry in enumerate(points[0]["deferred"]):
            y = [p["deferred"][i]["tokens_per_s"] for p in points]
            style, label = STYLES[i % len(STYLES)], f"deferred, contention {entry['contention']:g}"
            axis.plot(x, y, style, color="#0b6e8f", linewidth=1.2, label=label)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("acceptance of a drafted token")
    axes[0, 0].set_ylim(bottom=0)  # of all; later than all lines, as it ends the scaling
    axes[0, 0].set_ylabel("tokens/s, simulated")
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


STYLES = ("-", "--", ":")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="of every figure")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    parser.add_argument("--contention", type=float, nargs="+", default=CONTENTION)
    parser.add_argument("--runner-up", type=float, default=RUNNER_UP)
    parser.add_argument("--branches", type=int, default=4, help="lines of a draft step on the NPU")
    parser.add_argument("--distilled", action="store_true", help="a draft of the target's layers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("acceptance", "contention"):
        low, high = (0.0, 1.0) if name == "acceptance" else (1.0, 10.0)
        if not all(low <= value <= high for value in getattr(args, name)):
            parser.error(f"--{name}: {low:g} to {high:g}")
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            sys.exit("--plot needs matplotlib: pip install 'headrace[bench]'")
    result = run(args)
    if args.plot:
        plot(result, args.plot)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()
