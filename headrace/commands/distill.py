"""`headrace distill`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.commands.export import export_libraries, one_interrupt
from headrace.commands.terminal import print_facts, print_table, reporter, say, size
from headrace.errors import HeadraceError, StorageError, UsageError

if TYPE_CHECKING:
    from headrace.export.distill.evaluate import Figures
    from headrace.export.distill.options import Plan
    from headrace.export.distill.training import Progress

_MINUTES = {"": 1.0, "m": 1.0, "min": 1.0, "h": 60.0, "s": 1 / 60, "d": 1440.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


@click.command(name="distill")
@click.argument("target")
@click.argument("more_corpus", nargs=-1, metavar="", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="DRAFT_DIR",
    type=click.Path(path_type=Path),
    help="The folder to make. It must not exist; it appears when the training is done.",
)
@click.option(
    "--corpus",
    metavar="FILES...",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Texts like those in service, of any size, in UTF-8. Default: generated logs of many "
    "made-up systems, and requests.",
)
@click.option("--layers", metavar="N", type=int, help="Layers of the draft. Default: 4.")
@click.option(
    "--from",
    "parent",
    metavar="DRAFT_DIR",
    type=click.Path(path_type=Path),
    help="Go on from a draft of the same target, e.g. on the plant's own logs. Its layers stay, and "
    "its head as well unless --vocab-keep says otherwise.",
)
@click.option(
    "--vocab-keep",
    metavar="K",
    type=int,
    help="Let the draft's head keep the K tokens that the target expects most in the texts. "
    "Control tokens and single bytes are always among them. Default: all.",
)
@click.option("--tokens", metavar="N", type=int, help="Tokens to learn from.")
@click.option(
    "--time",
    metavar="TIME",
    help="About how long it may take, e.g. 60m or 8h; what that makes in tokens is measured once, "
    "at the start. Default: 60m.",
)
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Default: 0.")
@click.option(
    "--storage",
    type=click.Choice(["f16", "int8"]),
    help="How the draft's weights are kept: f16 can be trained on, int8 is half the size and what "
    "an export runs in any case. Default: f16.",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted run of DRAFT_DIR.")
@click.option(
    "--eval",
    "evaluated",
    metavar="DRAFT_DIR",
    type=click.Path(path_type=Path),
    help="Train nothing; measure this draft on the corpus and on chat answers.",
)
@click.option(
    "--no-speed",
    is_flag=True,
    help="With --eval: leave out what needs a clock, the costs and the speed-up on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="With --eval: print one JSON object.")
def command(
    target: str,
    more_corpus: tuple[Path, ...],
    output: Path | None,
    corpus: tuple[Path, ...],
    evaluated: Path | None,
    no_speed: bool,
    as_json: bool,
    time: str | None,
    **options: Any,
) -> None:
    """Train a draft for a target.

    TARGET is a .gguf file, a Hugging Face folder, or a hub id. The draft begins as a few of its
    layers and learns the target's own word on each token of texts: of the corpus, and of chats,
    answers and continuations that the target writes. Embeddings and vocabulary stay the target's.

    \b
      headrace distill TARGET -o DRAFT_DIR --time 60m --vocab-keep 16384
      headrace export TARGET -o BUNDLE --draft DRAFT_DIR
      headrace distill TARGET -o BETTER --from DRAFT_DIR --corpus plant.log --time 30m

    Ctrl-C leaves DRAFT_DIR.unfinished; --resume goes on from there to the same weights, bit for
    bit. --eval tells what a draft is worth: how often its proposals would be accepted, by kind of
    text and depth, and what that makes of the speed on this machine, where it shares the cores.
    """
    if more_corpus and not corpus:
        raise UsageError(f"got {more_corpus[0]} beside TARGET; texts are given with --corpus")
    files = (*corpus, *more_corpus)
    if evaluated is not None:
        asked = {**options, "time": time}.values()
        given = [value for value in asked if value is not None and value is not False]
        if output is not None or given:
            raise UsageError("--eval trains nothing; leave out -o and what belongs to a training")
        _evaluate(target, evaluated, files, no_speed, as_json)
        return
    if no_speed or as_json:
        raise UsageError("--no-speed and --json need --eval")
    if output is None:
        raise UsageError("-o DRAFT_DIR is missing: where the draft is to be written")
    minutes = _minutes(time)
    with train_libraries():
        from headrace.export.distill.options import DistillOptions
        from headrace.export.distill.run import distill, work_folder

        settings = DistillOptions(files, minutes=minutes, **options)
        try:
            with one_interrupt(), reporter() as report:
                done = distill(target, output, settings, report, _tell)
        except (KeyboardInterrupt, SystemExit, OSError, StorageError):
            if work_folder(output).is_dir():
                say(f"{work_folder(output)} holds what is done; go on with --resume")
            raise
    last = done.log[-1]
    print_facts(
        str(output),
        [
            ("begun as layers", ", ".join(map(str, done.layers))),
            ("head's coverage", f"{done.coverage:.1%} of what the target expects"),
            ("overlap, held out", f"{last.overlap:.3f}"),
            ("same first choice", f"{last.top1:.3f}"),
            ("peak memory", size(done.peak_bytes)),
            ("next", f"headrace export {target} -o BUNDLE --draft {output}"),
        ],
    )


def _tell(progress: Progress, plan: Plan) -> None:
    left_s = progress.seconds / progress.step * (plan.steps - progress.step)
    say(
        f"step {progress.step:,} of {plan.steps:,}: divergence {progress.loss:.3f}; on texts held "
        f"out overlap {progress.overlap:.3f}, same first choice {progress.top1:.3f}; "
        f"{_duration(left_s)} left"
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _minutes(text: str | None) -> float | None:
    """Minutes of `60m`, `1.5h`, `90`; raises UsageError."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    unit = _MINUTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"--time: got {text!r}, expected a time such as 60m, 1.5h or 90 (minutes)")
    return float(match[1]) * unit


def _evaluate(
    target: str, draft: Path, files: tuple[Path, ...], no_speed: bool, as_json: bool
) -> None:
    with train_libraries(), reporter() as report:
        from headrace.commands.draft_worth import measure, print_worth
        from headrace.export.distill.evaluate import evaluate

        figures = evaluate(target, draft, files, report)
        worth = None if no_speed else measure(target, draft, files, report)
    if as_json:
        about: dict[str, Any] = {"draft": draft.name, "texts": [f.to_json() for f in figures]}
        if worth is not None:
            about["machine"] = worth.to_json(figures)
        print(json.dumps(about, ensure_ascii=False))
        return
    _print(figures)
    if worth is not None:
        print_worth(worth, figures)


def _print(figures: list[Figures]) -> None:
    columns = ("", "overlap", "same first choice", "coupled, T = 0.8", "coverage", "tokens")
    rows = [
        (
            f.name,
            f"{f.overlap:.3f}",
            f"{f.top1:.3f}",
            f"{f.coupled:.3f}",
            f"{f.coverage:.3f}",
            f"{f.tokens:,}",
        )
        for f in figures
    ]
    print_table("What is accepted", columns, rows, numbers=frozenset(range(1, 6)))
    depths = range(1, len(figures[0].by_depth) + 1)
    names = ("", *map(str, depths))
    reached = [(f.name, *(f"{p:.2f}" for p in f.by_depth)) for f in figures]
    passes = [(f.name, *(f"{f.tokens_per_pass(n):.2f}" for n in depths)) for f in figures]
    numbers = frozenset(depths)
    print_table("Accepted up to a depth, greedy", names, reached, numbers=numbers)
    print_table("Tokens per pass by length of the chain, greedy", names, passes, numbers=numbers)


@contextmanager
def train_libraries() -> Iterator[None]:
    """Says what to install where torch is missing; raises HeadraceError."""
    try:
        with export_libraries():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise HeadraceError(
            "distilling needs torch, which is not installed: pip install 'headrace[train]'"
        ) from error
