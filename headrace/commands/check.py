"""`headrace check`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from headrace.commands.export import export_libraries
from headrace.commands.figures import say_if_broken
from headrace.commands.flags import PLACEMENT, read_text_file, runtime_config, runtime_flags
from headrace.commands.terminal import Reporter, print_facts, print_table, reporter, say
from headrace.errors import UsageError
from headrace.paths import cache_dir
from headrace.runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from headrace.export.npu_check import Simulation
    from headrace.runtime.lossless import Case, Check, Prompt, Result


@click.command(name="check")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--lossless",
    is_flag=True,
    help="Decode prompts plain and speculated, and compare tokens and log-probabilities.",
)
@click.option(
    "--npu-sim",
    metavar="TEXT",
    type=click.Path(path_type=Path),
    help="Simulate the bundle's draft for the NPU on this UTF-8 text, and say how much of it the "
    "target would accept. Takes `headrace rknn-env`, and minutes.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A prompt in UTF-8, instead of the built-in ones. Repeatable.",
)
@click.option("--num-prompts", metavar="N", type=click.IntRange(1), default=4, show_default=True,
              help="Built-in prompts to decode.")  # fmt: skip
@click.option("--max-tokens", metavar="N", type=click.IntRange(2), default=32, show_default=True,
              help="Tokens of each answer.")  # fmt: skip
@click.option(
    "--thorough",
    is_flag=True,
    help="Try all that three settings can be together, not two: more than twice as many rows.",
)
@runtime_flags(
    "ctx",
    "lanes",
    "pool",
    *PLACEMENT,
    "prior",
    "ram",
    "reserve",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(
    bundle: Path,
    lossless: bool,
    npu_sim: Path | None,
    prompts: tuple[Path, ...],
    num_prompts: int,
    max_tokens: int,
    thorough: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Check on this machine that speculation keeps its promises.

    --lossless decodes prompts plain and in many speculated ways. Where the same text is promised, tokens and
    log-probabilities must be the same bits; where the same distribution is, tokens must fit what
    they were drawn from, and log-probabilities be those of the text. Exits with 1 if a promise is
    broken.
    """
    if not lossless and npu_sim is None:
        raise UsageError("there is nothing to check; give --lossless or --npu-sim TEXT")
    if lossless and npu_sim is not None:
        raise UsageError("--lossless and --npu-sim are two checks; give one of them")
    config = runtime_config(flags)
    if npu_sim is not None:
        return _simulate(bundle, npu_sim, as_json)
    texts = [(str(path), read_text_file("--prompts", path)) for path in prompts]
    for name, text in texts:
        if not text.strip():
            raise UsageError(f"--prompts: {name} is empty")

    from headrace.runtime import lossless as law

    chosen = [law.Prompt(name, text) for name, text in texts] or law.prompts(num_prompts)
    with reporter() as report:
        results = list(_results(bundle, config, chosen, max_tokens, 3 if thorough else 2, report))
    broken = [result for result in results if not result.holds]
    if as_json:
        print(json.dumps({"holds": not broken, "cases": [r.to_json() for r in results]}))
    else:
        _print(results)
    for result in broken[:1]:
        say(f"broken: {result.case} at temperature {result.case.temperature:g}")
        if result.first_difference is not None:
            say(f"first difference: {result.first_difference}")
    return 1 if broken else 0


def _simulate(path: Path, text_file: Path, as_json: bool) -> int:
    text = read_text_file("--npu-sim", text_file)
    with export_libraries():
        from headrace.export.npu_check import simulate
        from headrace.models.manifest import Bundle
        from headrace.runtime.load import load_tokenizer, verify

        bundle = Bundle.open(path)
        verify(bundle, cache_dir(), say)
        ids = np.array(load_tokenizer(bundle).encode(text), np.int64)
        with reporter() as report:
            found = simulate(bundle, ids, report)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return 0
    print_facts(
        f"{path}: its draft on the NPU, simulated",
        [
            ("tokens of the text", f"{found.simulated.tokens:,}"),
            ("compiled in", f"{found.build_s:.0f} s"),
            ("accepted, greedy", _shares(found, "top1")),
            ("accepted, temperature 1", _shares(found, "overlap")),
        ],
    )
    return 0


def _shares(found: Simulation, which: str) -> str:
    simulated, by_ort = getattr(found.simulated, which), getattr(found.by_ort, which)
    return f"{simulated:.2%} of tokens; {by_ort:.2%} by ONNX Runtime in float32"


def _results(
    path: Path,
    config: RuntimeConfig,
    prompts: list[Prompt],
    max_tokens: int,
    strength: int,
    report: Reporter,
) -> Iterator[Result]:
    from headrace.models.manifest import Bundle
    from headrace.runtime import lossless as law
    from headrace.runtime.exactness import Machine, is_exact

    bundle = Bundle.open(path)
    manifest = bundle.manifest
    is_exact_here = is_exact(manifest.config, manifest.quant, manifest.kv, Machine.here())
    if not is_exact_here:
        say("this model is not bit-exact here: no text is promised, and none is checked")
    cases = law.cases(has_draft=bundle.draft is not None, is_exact=is_exact_here, strength=strength)
    check = law.Check(prompts, max_tokens, is_exact=is_exact_here)
    for is_deferred in (False, True):
        part = [case for case in cases if case.is_deferred == is_deferred]
        if not part:
            continue
        config = dataclasses.replace(
            config,
            exactness="exact" if is_exact_here else "tree",
            speculate="auto",
            defer="on" if is_deferred else "off",
        )
        yield from _part(path, config, check, part, report)


def _part(
    path: Path, config: RuntimeConfig, check: Check, cases: list[Case], report: Reporter
) -> Iterator[Result]:
    from headrace.runtime.llm import LLM

    with LLM(path, config, say=say) as llm:
        title = "deferred drafting" if config.defer == "on" else "in-line drafting"
        report.stage(f"{len(cases)} ways to decode, {title}", len(cases))
        for case in cases:
            yield check.run(llm, case)
            report.advance()
        say_if_broken(llm)


def _print(results: list[Result]) -> None:
    columns = [
        "accept", "exactness", "source", "tokens a pass", "drafting", "session", "answers", "temp.",
        "prompts", "tokens", "accepted", "identical", "compared", "verdict",
    ]  # fmt: skip
    print_table("", columns, list(map(_row, results)), numbers=frozenset((7, 8, 9, 10, 11)))


def _row(result: Result) -> list[str]:
    case = result.case
    return [
        case.accept,
        case.exactness,
        "both" if case.source == "all" else case.source,
        f"up to {case.speculate}" if case.speculate != "auto" else "auto",
        "deferred" if case.is_deferred else "in-line",
        case.mode,
        "at once" if case.is_beside else "alone",
        f"{case.temperature:g}",
        str(result.num_answers),
        f"{result.num_tokens:,}",
        f"{result.num_accepted:,}",
        f"{result.num_same} of {result.num_answers}",
        _compared(result),
        "holds" if result.holds else "BROKEN",
    ]


def _compared(result: Result) -> str:
    """What was compared, and how it came out."""
    if result.case.promises_text:
        return "tokens and logprobs, bit for bit"
    parts = [] if result.fit is None else [f"tokens fit rows p={result.fit:.2g}"]
    what = "scored" if result.case.mode == "full" else "plain"
    parts.append(f"logprobs {result.gap:.2g} from {what}")
    return ", ".join(parts)
