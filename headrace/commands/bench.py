"""`headrace bench`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import headrace
from headrace.commands.figures import say_if_broken
from headrace.commands.flags import PLACEMENT, runtime_config, runtime_flags
from headrace.commands.run import require_writable
from headrace.commands.terminal import print_facts, print_table, reporter, say
from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.runtime.bench import Figures
    from headrace.runtime.llm import LLM
    from headrace.runtime.workloads import Log

_PLOT_SUFFIXES = (".png", ".pdf", ".svg")

_SHOWN_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


@click.command(name="bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("more_logs", nargs=-1, metavar="", type=click.Path(path_type=Path))
@click.option(
    "--logs",
    metavar="FILES...",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Logs to make prompts of, instead of the built-in generated one.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    help="How often each prompt is answered in each way. Default: 3.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=8),
    default=128,
    help="Tokens of each answer; end tokens do not end it. Default: 128.",
)
@runtime_flags(
    "ctx",
    "pool",
    *PLACEMENT,
    "exactness",
    "speculate",
    "defer",
    "prior",
    "ram",
    "reserve",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw the speed-ups (PNG, PDF or SVG, by the name's end). Needs matplotlib.",
)
def command(
    bundle: Path,
    more_logs: tuple[Path, ...],
    logs: tuple[Path, ...],
    rounds: int,
    max_tokens: int,
    as_json: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Measure what speculation gains on this machine.

    The model of BUNDLE answers prompts of five kinds, with speculation and without it in turns:
    it continues a log, lists its notable lines, makes JSON of it, writes prose, and says what no
    look-up can know. Beside the speed-up over the fastest plain decoding, which pads no rows,
    stands what tells whether to believe it: how much an answer repeats itself (distinct 4-grams),
    and tokens per pass if the model said what the log really says (teacher-forced, look-ups only).
    Where a draft proposes as well, "over look-ups" is what it adds to them.

    Exit code 1 if speculation changed a text that it promised to leave as it is.
    """
    config = runtime_config(flags)
    if config.speculate == "off":
        raise UsageError("--speculate off leaves nothing to compare; use auto or a number")
    if more_logs and not logs:
        raise UsageError(f"got {more_logs[0]} beside BUNDLE; logs are given with --logs")
    texts = [read_log(path) for path in (*logs, *more_logs)]
    if plot is not None:
        _require_matplotlib()
        if plot.suffix not in _PLOT_SUFFIXES:
            raise UsageError(
                f"--plot: got {plot.name}, allowed are names that end with "
                f"{', '.join(_PLOT_SUFFIXES)}"
            )
        require_writable("--plot", plot)

    from headrace.runtime.bench import Bench
    from headrace.runtime.llm import LLM
    from headrace.runtime.workloads import Writer, built_in_logs

    sources = texts or built_in_logs()
    with LLM(bundle, config, say=say) as llm, reporter() as report:
        writer = Writer(llm.tokenizer, llm.capacity, max_tokens)
        bench = Bench(llm, writer.workloads(sources))
        report.stage(f"answering, {rounds} rounds and one to warm up", bench.num_steps(rounds))
        figures = bench.run(rounds, report.advance)
        about = {
            **_about(llm),
            "logs": [log.name for log in sources],
            "rounds": rounds,
            "max_tokens": max_tokens,
        }
        say_if_broken(llm)
    if as_json:
        workloads = [f.to_json() for f in figures]
        print(json.dumps({**about, "workloads": workloads}, ensure_ascii=False), flush=True)
    else:
        _print(figures, about)
    if plot is not None:
        _plot(figures, about, plot)


def read_log(path: Path) -> Log:
    """What is not UTF-8 in a log is replaced. Raises UsageError."""
    from headrace.runtime.workloads import Log

    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--logs: {path} cannot be read: {error.strerror}") from error
    return Log(path.name, [line for line in text.splitlines() if line.strip()])


def _about(llm: LLM) -> dict[str, Any]:
    """What the figures depend on."""
    speculation = llm.engine.speculation
    assert speculation is not None
    costs, drafter = speculation.pace.costs(), speculation.drafter
    config, manifest = llm.config, llm.bundle.manifest
    return {
        "model": manifest.name,
        "quant": manifest.target.quant,
        "draft": None if llm.bundle.draft is None else llm.bundle.draft.quant,
        "headrace": headrace.__version__,
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "machine": platform.machine(),
        "target_threads": llm.placement.threads or os.cpu_count(),
        "target_cpus": config.target_cpus,
        "ctx": llm.capacity,
        "exactness": config.exactness,
        "speculate": config.speculate,
        "defer": config.defer,
        "pass_ms": {rows: 1e3 * float(s) for rows, s in enumerate(costs, 1)},
        "draft_pass_ms": None if drafter is None else 1e3 * drafter.candidates.opened.costs.of(1),
    }


def _print(figures: Sequence[Figures], about: dict[str, Any]) -> None:
    over_lookups: dict[str, Callable[[Figures], str]] = {}
    if any(f.speedup_over_lookups is not None for f in figures):
        over_lookups["over look-ups"] = lambda f: _number(f.speedup_over_lookups, ".2f")
    _print_columns(
        f"{about['model']}: tokens/s, and speed-up over plain decoding",
        figures,
        {
            "plain": lambda f: f"{f.plain_tokens_per_s:.1f}",
            "padded": lambda f: _number(f.padded_tokens_per_s, ".1f"),
            "speculated": lambda f: f"{f.speculated_tokens_per_s:.1f}",
            "speed-up": lambda f: f"{f.speedup:.2f}x",
            "by prompt": lambda f: f"{min(f.speedups):.2f}-{max(f.speedups):.2f}",
            "over padded": lambda f: _number(f.speedup_over_padded, ".2f"),
            **over_lookups,
            "allowed by c(T)": lambda f: _number(f.allowed_speedup, ".2f"),
        },
    )
    _print_columns(
        "What it comes from; milliseconds are those of a pass",
        figures,
        {
            "tokens per pass": lambda f: f"{f.tokens_per_pass:.2f}",
            "teacher-forced": lambda f: f"{f.teacher_forced_tokens_per_pass:.2f}",
            "distinct 4-grams": lambda f: f"{f.distinct_4grams:.0%}",
            "accepted": lambda f: f"{f.accepted:,} of {f.proposed:,}",
            "target ms": lambda f: f"{f.target_ms_per_pass:.2f}",
            "draft wait ms": lambda f: f"{f.draft_wait_ms_per_pass:.2f}",
            "host ms": lambda f: f"{f.host_ms_per_pass:.2f}",
            "target ms, plain": lambda f: f"{f.plain_ms_per_pass:.2f}",
            "host ms, plain": lambda f: f"{f.plain_host_ms_per_pass:.2f}",
        },
    )
    print_facts("", _facts(about))


def _facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    one, drafts = about["pass_ms"][1], about["draft_pass_ms"]
    costs = ", ".join(f"{t}: {about['pass_ms'][t] / one:.2f}" for t in _SHOWN_ROWS)
    of_draft = f"{drafts:.2f} ms, {drafts / one:.0%} of the target's" if drafts else None
    return [
        ("a pass of one row", f"{one:.2f} ms"),
        *([("a draft pass of one row", of_draft)] if of_draft else []),
        ("c(T) of T rows, relative", costs),
        ("threads", str(about["target_threads"])),
        ("logs", ", ".join(about["logs"])),
        ("rounds", f"{about['rounds']} of {about['max_tokens']} tokens"),
    ]


def _print_columns(
    title: str, figures: Sequence[Figures], columns: Mapping[str, Callable[[Figures], str]]
) -> None:
    rows = [(f.workload, *(show(f) for show in columns.values())) for f in figures]
    print_table(title, ("", *columns), rows, numbers=frozenset(range(1, 1 + len(columns))))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'headrace[bench]'")


def _plot(figures: Sequence[Figures], about: dict[str, Any], path: Path) -> None:
    """Bars of the speed-ups with their range over prompts. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    speedups = [f.speedup for f in figures]
    below = [f.speedup - min(f.speedups) for f in figures]
    above = [max(f.speedups) - f.speedup for f in figures]
    names = [f.workload for f in figures]
    axes.bar(names, speedups, yerr=[below, above], color="#0b6e8f", ecolor="#888888", capsize=3)
    axes.axhline(1, color="#c8502d", linewidth=1.2, label="plain decoding, no padding")
    axes.set_ylabel("times as fast")
    axes.set_title(f"{about['model']} {about['quant']}, {about['machine']}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
