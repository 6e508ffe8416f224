"""What `stream_ppl.py` makes of its measurements: figures with intervals, and the plot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.runtime.batch import I64
from headrace.runtime.ring import RingLayout

F64 = npt.NDArray[np.float64]

RESAMPLES = 10_000
MEAN_OVER = 512
"""Tokens of the curves' running mean."""
PARTS = 8
BLOCK = 128
"""Neighbouring tokens are alike, so blocks of them are resampled."""
DOT = 4
"""Samples to one dot of the plot: few tokens differ too much from one place to the next."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Negative log-probabilities of one text's tokens, NaN where there is none."""

    text: str
    layout: RingLayout
    ring: F64
    """[N]"""
    plain: F64
    full: F64
    sampled_at: I64
    """[samples] tokens that the ring had by then."""
    evicted: I64
    """[samples] tokens that it had evicted."""
    sampled_ring: F64
    """[samples, scored]"""
    sampled_again: F64
    """[samples, scored] the same tokens after a recomputed window."""
    ids_sha256: str

    @property
    def curves(self) -> dict[str, F64]:
        return {"ring": self.ring, "plain": self.plain, "full": self.full}

    @property
    def wraps(self) -> F64:
        """[samples] how often the ring went round by then."""
        return self.evicted / self.layout.window

    @property
    def log_ratios(self) -> F64:
        """[samples] of perplexities, ring to recomputed."""
        return (self.sampled_ring - self.sampled_again).mean(axis=1)


def interval(values: F64, statistic: Callable[[F64], F64]) -> list[float]:
    """The value of `statistic` and its 95 % interval when rows of `values` are resampled.

    `statistic` takes [resamples, n, …] and reduces all but the first axis.
    """
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), (RESAMPLES, len(values)))
    with np.errstate(invalid="ignore"):  # a slope through one place, drawn again and again
        low, high = np.nanquantile(statistic(values[picks]), [0.025, 0.975])
    return [float(x) for x in (statistic(values[None])[0], low, high)]


def mean_ratio(log_ratios: F64) -> list[float]:
    """exp of the mean, with its interval."""
    return interval(log_ratios, lambda x: np.exp(x.mean(axis=1)))


def slope(pairs: F64) -> F64:
    """[resamples] least-squares slope of pairs [resamples, n, 2]."""
    x, y = pairs[..., 0], pairs[..., 1]
    x = x - x.mean(axis=1, keepdims=True)
    return (x * y).sum(axis=1) / (x * x).sum(axis=1)


def perplexity(nll: F64) -> float | None:
    known = nll[~np.isnan(nll)]
    return float(np.exp(known.mean())) if len(known) else None


def by_parts(nll: F64) -> list[float | None]:
    """Perplexity of each eighth of the text; None where there is too little of it."""
    parts = np.array_split(nll[1:], PARTS)
    return [perplexity(p) if np.isnan(p).mean() < 0.5 else None for p in parts]


def by_wraps(m: Measured) -> list[dict[str, Any]]:
    """Ring to recomputed, before anything was evicted (0) and in each round of the ring."""
    rounds = np.ceil(m.wraps).astype(int)
    return [
        {
            "round": int(number),
            "samples": int((rounds == number).sum()),
            "ratio": mean_ratio(m.log_ratios[rounds == number]),
        }
        for number in np.unique(rounds)
    ]


def recomputed_figures(m: Measured) -> dict[str, Any]:
    after = m.evicted > 0
    before = np.abs(m.sampled_ring - m.sampled_again)[~after]
    pairs = np.stack([m.wraps[after], m.log_ratios[after]], axis=1)
    return {
        "samples": int(after.sum()),
        "scored_tokens": int(m.sampled_ring[after].size),
        "ring": perplexity(m.sampled_ring[after]),
        "recomputed": perplexity(m.sampled_again[after]),
        "ratio": mean_ratio(m.log_ratios[after]),
        "slope_per_wrap": interval(pairs, slope),
        "largest_difference_before_eviction": float(before.max()) if before.size else None,
        "by_round": by_wraps(m),
    }


def full_figures(m: Measured) -> dict[str, Any] | None:
    """Ring to full attention, from the first eviction to the end of full attention."""
    end = int((~np.isnan(m.full)).sum()) + 1
    log_ratios = (m.ring - m.full)[m.layout.capacity + 1 : end]
    num_blocks = len(log_ratios) // BLOCK
    if not num_blocks:
        return None
    blocks = log_ratios[: num_blocks * BLOCK].reshape(num_blocks, BLOCK).mean(axis=1)
    pairs = np.stack([np.arange(num_blocks) * BLOCK / m.layout.window, blocks], axis=1)
    return {
        "tokens": num_blocks * BLOCK,
        "ratio": mean_ratio(blocks),
        "slope_per_wrap": interval(pairs, slope),
    }


def plain_figures(m: Measured) -> dict[str, Any]:
    """The plain window against the ring, once both have evicted something."""
    start = m.layout.capacity + 1
    running = {name: running_perplexity(m.curves[name]) for name in ("ring", "plain")}
    return {
        "ring": perplexity(m.ring[start:]),
        "plain": perplexity(m.plain[start:]),
        "times": float(np.exp(np.nanmean((m.plain - m.ring)[start:]))),
        "highest_running_mean": {
            name: float(np.nanmax(curve[start:])) for name, curve in running.items()
        },
    }


def summary(m: Measured) -> dict[str, Any]:
    """The figures alone."""
    return {
        "text": m.text,
        "tokens": len(m.ring),
        "wraps": (len(m.ring) - m.layout.tail_start)
        // m.layout.unit
        * m.layout.unit
        / m.layout.window,
        "perplexity": {name: perplexity(nll) for name, nll in m.curves.items()},
        "by_eighths": {name: by_parts(nll) for name, nll in m.curves.items()},
        "ring_to_recomputed": recomputed_figures(m),
        "ring_to_full": full_figures(m),
        "plain_to_ring": plain_figures(m),
    }


def to_json(m: Measured) -> dict[str, Any]:
    """The figures and the curves, thinned out."""
    places = slice(MEAN_OVER, None, BLOCK)
    curves = {
        name: [None if np.isnan(v) else round(float(v), 4) for v in running_perplexity(nll)[places]]
        for name, nll in m.curves.items()
    }
    return {
        **summary(m),
        "ids_sha256": m.ids_sha256,
        "curves": {"first": MEAN_OVER, "step": BLOCK, "mean_over": MEAN_OVER, **curves},
        "sampled": {
            "at": m.sampled_at.tolist(),
            "ring": np.exp(m.sampled_ring.mean(axis=1)).round(4).tolist(),
            "recomputed": np.exp(m.sampled_again.mean(axis=1)).round(4).tolist(),
        },
    }


def running_perplexity(nll: F64) -> F64:
    """[N] over the last MEAN_OVER tokens; NaN where there are fewer."""
    totals = np.cumsum(np.concatenate([[0.0], np.nan_to_num(nll)]))
    known = np.cumsum(np.concatenate([[0], ~np.isnan(nll)]))
    curve = np.full(len(nll), np.nan)
    width = MEAN_OVER
    means = (totals[width:] - totals[:-width]) / width
    curve[width - 1 :] = np.where(known[width:] - known[:-width] == width, np.exp(means), np.nan)
    return curve


def show(text: dict[str, Any]) -> None:
    print(
        f"\n{text['text']}: {text['tokens']} tokens, the ring went round {text['wraps']:.1f} times"
    )
    for name, parts in text["by_eighths"].items():
        cells = (f"{p:9.2f}" if p is not None else "        -" for p in parts)
        print(f"  {name:6} by eighths {''.join(cells)}")
    again, full = text["ring_to_recomputed"], text["ring_to_full"]
    print(
        f"  ring to recomputed   {shown(again['ratio'])}, per wrap {shown(again['slope_per_wrap'])}"
    )
    if full:
        print(f"  ring to full         {shown(full['ratio'])}")
    print(f"  plain to ring        {text['plain_to_ring']['times']:.2f}")


def shown(values: list[float]) -> str:
    return "{:.4f} ({:.4f} to {:.4f})".format(*values)


# the plot

COLOURS = {"ring": "#0b6e8f", "plain": "#c8502d", "full": "#555555"}
LABELS = {
    "ring": "ring with sinks",
    "plain": "plain window, no sinks",
    "full": "full attention, to its limit",
}


def require_matplotlib() -> None:
    """Ends the program with one line unless it can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("--plot needs matplotlib, which is not installed: pip install 'headrace[bench]'")


def plot(measured: list[Measured], path: Path) -> None:
    """A column for each text: perplexity by position, and the ratio to a recomputed window below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2,
        len(measured),
        figsize=(5.2 * len(measured), 5.6),
        sharex="col",
        squeeze=False,
        gridspec_kw={"height_ratios": [3, 1]},
        layout="constrained",
    )
    for m, (curves, ratios) in zip(measured, axes.T, strict=True):
        plot_curves(curves, m)
        plot_ratios(ratios, m)
    axes[0, 0].set_ylabel(f"perplexity, mean over {MEAN_OVER} tokens")
    axes[1, 0].set_ylabel("ring / recomputed")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = len(labels) if len(measured) > 2 else 2
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def wrap_lines(axis: Any, m: Measured) -> None:
    for position in range(m.layout.capacity, len(m.ring), m.layout.window):
        axis.axvline(position, color="#dddddd", linewidth=0.6, zorder=0)


def plot_curves(axis: Any, m: Measured) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    wrap_lines(axis, m)
    for name in ("plain", "full", "ring"):
        curve = running_perplexity(m.curves[name])
        axis.plot(curve, color=COLOURS[name], label=LABELS[name], linewidth=1.2)
    at, ring, again = (pooled(a) for a in (m.sampled_at, m.sampled_ring, m.sampled_again))
    num_tokens = DOT * m.sampled_again.shape[1]
    label = f"recomputed windows, {num_tokens} tokens a dot"
    axis.plot(at, np.exp(again), ".", color="#222222", markersize=4, label=label)
    hollow = {"markerfacecolor": "none", "markeredgewidth": 0.8, "markersize": 6}
    label = "ring, on the same tokens"
    axis.plot(at, np.exp(ring), "o", color=COLOURS["ring"], label=label, **hollow)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_title(m.text, fontsize=10)


def pooled(values: F64 | I64) -> F64:
    """[samples / DOT] means of neighbouring samples."""
    groups = values[: len(values) // DOT * DOT].reshape(len(values) // DOT, -1)
    return groups.mean(axis=1)


def plot_ratios(axis: Any, m: Measured) -> None:
    """Each round's ratio with its interval, and the bound of 5 %."""
    wrap_lines(axis, m)
    axis.axhline(1, color="#888888", linewidth=0.8)
    axis.axhline(1.05, color="#888888", linewidth=0.8, linestyle="--")
    rounds = np.ceil(m.wraps).astype(int)
    for entry in by_wraps(m):
        at = m.sampled_at[rounds == entry["round"]].mean()
        middle, low, high = entry["ratio"]
        axis.plot([at, at], [low, high], color=COLOURS["ring"], linewidth=1)
        axis.plot(at, middle, "o", color=COLOURS["ring"], markersize=3)
    axis.set_xlabel("tokens of the text")
