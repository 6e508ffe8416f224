"""`headrace plan`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.commands.flags import runtime_config, runtime_flags
from headrace.commands.terminal import print_facts, print_table, say, size
from headrace.errors import MemoryLimitError
from headrace.models.manifest import Bundle
from headrace.paths import cache_dir
from headrace.runtime.blocks import BLOCK_TOKENS
from headrace.runtime.config import RuntimeConfig
from headrace.sizes import exact_size

if TYPE_CHECKING:
    from headrace.runtime.bill import Facts
    from headrace.runtime.plan import Plan, Wish


@click.command(name="plan")
@click.argument("bundle", type=click.Path(path_type=Path))
@runtime_flags(
    *("ram", "reserve", "ctx", "lanes", "pool", "mlock", "exactness", "draft_device", "npu_library")
)
@click.option("--sessions", type=int, help="Ask for a pool that so many sessions fit at once.")
@click.option(
    "--window",
    type=int,
    help="Ask about endless streams that keep so many last tokens, instead of sessions that end "
    "when their context is full. Lanes are made as long as that needs, unless --ctx is given.",
)
@click.option("--sinks", type=int, help="A stream's first tokens, which stay. Default: 64.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, **flags: Any) -> None:
    """Show what a model takes of the memory, before it is loaded.

    An itemised bill for BUNDLE with the settings given, what remains of --ram less --reserve, how
    many sessions fit, the longest window of a stream that fits, and the flags of `headrace run`
    that realise it. Exit code 1, with what is missing, when it does not fit.

    Without --ram the limit is the memory available on this machine now. Prepared bundles are
    measured; for others, say those meant for a board, some items are estimated; `--draft-device npu`
    counts a draft that will be on that board's NPU.
    """
    as_json = flags.pop("as_json")
    asked = {name: flags.pop(name) for name in ("sessions", "window", "sinks")}
    config = runtime_config(flags)

    from headrace.runtime import plan as planning
    from headrace.runtime.bill import Facts, limit_here

    wish = planning.Wish(**{name: value for name, value in asked.items() if value is not None})
    facts = Facts.of(Bundle.open(bundle), cache_dir())
    limit = limit_here(facts, config)
    plan = planning.plan(facts, config, wish, limit)
    run_line = shlex.join(["headrace", "run", str(bundle), *_run_flags(plan.config)])
    if as_json:
        print(json.dumps(_json(plan, facts, run_line), indent=1))
    else:
        if not facts.overhead.is_measured:
            say(
                "not prepared on this machine: some items are estimated; run `headrace prepare`"
                " where the model is to run, and `headrace plan` there, for measured ones"
            )
        _print(bundle, plan, wish, run_line)
    _require(plan, wish)


def _require(plan: Plan, wish: Wish) -> None:
    """Raises MemoryLimitError if the plan does not hold what was asked for."""
    if not plan.bill.fits:
        ways = " or ".join(plan.remedies)
        advice = f"{ways} would fit" if ways else "no --lanes, --ctx or --pool makes it fit"
        raise MemoryLimitError(
            f"{size(plan.shortfall)} short: {size(plan.bill.needed)} are needed and "
            f"{plan.bill.limit.words} is {size(max(0, plan.bill.limit.num_bytes))}; {advice}"
        )
    if wish.sessions is not None and plan.num_sessions < wish.sessions:
        least = wish.sessions * plan.session_blocks * BLOCK_TOKENS
        raise MemoryLimitError(
            f"the pool holds {plan.num_sessions} of {wish.sessions} sessions at their fullest; "
            f"use --pool {least}, or leave --pool out"
        )


def _run_flags(config: RuntimeConfig) -> list[str]:
    """The flags that differ from what `run` does by itself."""
    flags = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name != "cache":
            flags.append(f"--{field.name.replace('_', '-')}")
            if value is not True:
                is_size = field.name in ("ram", "reserve")
                flags.append(exact_size(value) if is_size else str(value))
    return flags


def _print(bundle: Path, plan: Plan, wish: Wish, run_line: str) -> None:
    bill = plan.bill
    rows = [
        (
            line.name,
            size(line.num_bytes),
            "file pages" if line.is_file else "anonymous",
            line.basis,
            line.note,
        )
        for line in bill.lines
    ]
    columns = ("item", "size", "kind", "size is", "for")
    print_table(str(bundle), columns, rows, numbers=frozenset((1,)))
    facts = [
        ("file pages", f"{size(bill.file_pages)}, which the kernel may drop and read again"),
        ("anonymous", size(bill.anonymous)),
        ("total", size(bill.total)),
        ("limit", f"{size(max(0, bill.limit.num_bytes))}: {bill.limit.words}"),
        ("remaining" if bill.fits else "short by", size(abs(bill.remaining))),
        ("sessions", _sessions(plan, wish)),
        ("largest window", _window(plan, wish)),
    ]
    if bill.fits:
        facts.append(("run it with", run_line))
    print_facts("", facts)


def _sessions(plan: Plan, wish: Wish) -> str:
    kind = f"streams of window {wish.window:,}" if wish.window else "full contexts"
    words = f"{plan.num_sessions} {kind} in the pool"
    if plan.max_sessions > plan.num_sessions:
        pool = plan.max_sessions * plan.session_blocks * BLOCK_TOKENS
        words += f"; {plan.max_sessions} with --pool {pool}"
    return words


def _window(plan: Plan, wish: Wish) -> str:
    if plan.largest_window is None:
        return "no stream fits"
    num_streams = wish.sessions or plan.config.lanes
    return f"{plan.largest_window:,} tokens, for {num_streams} streams"


def _json(plan: Plan, facts: Facts, run_line: str) -> dict[str, Any]:
    bill = plan.bill
    return {
        "fits": bill.fits,
        "measured": facts.overhead.is_measured,
        "lines": [dataclasses.asdict(line) for line in bill.lines],
        "file_pages": bill.file_pages,
        "anonymous": bill.anonymous,
        "total": bill.total,
        "needed": bill.needed,
        "limit": bill.limit.num_bytes,
        "limit_is": bill.limit.words,
        "remaining": bill.remaining,
        "shortfall": plan.shortfall,
        "lanes": plan.config.lanes,
        "ctx": plan.ctx,
        "pool_blocks": plan.pool_blocks,
        "block_bytes": facts.block_bytes,
        "session_blocks": plan.session_blocks,
        "num_sessions": plan.num_sessions,
        "max_sessions": plan.max_sessions,
        "largest_window": plan.largest_window,
        "remedies": list(plan.remedies),
        "run": run_line,
    }
