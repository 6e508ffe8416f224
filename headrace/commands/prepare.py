"""`headrace prepare`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from headrace.commands.flags import PLACEMENT, runtime_config, runtime_flags
from headrace.commands.terminal import say, size
from headrace.models.manifest import Bundle
from headrace.paths import cache_dir

_MEASURED_CTX = 1024
"""Passes are measured behind 512 tokens; a longer lane would only take memory."""


@click.command(name="prepare")
@click.argument("bundle", type=click.Path(path_type=Path))
@runtime_flags(*PLACEMENT)
def command(bundle: Path, **flags: Any) -> None:
    """Make a bundle's weights ready for this machine.

    They go into the cache folder: HEADRACE_CACHE, or headrace/ in the user's cache, together with
    what a pass costs here, which speculation goes by. Without this the first command that loads
    BUNDLE does it, and starts later for it.
    """
    config = runtime_config(flags)

    from headrace.runtime.llm import LLM
    from headrace.runtime.load import prepare_draft, prepare_target, verify

    opened, cache = Bundle.open(bundle), cache_dir()
    verify(opened, cache, say)
    found = [prepare_target(opened, cache, config.target_placement().threads, say)]
    if opened.draft is not None:
        found.append(prepare_draft(opened, cache, config.draft_placement()[0].threads, say))
    ctx = min(_MEASURED_CTX, opened.manifest.config.max_position)
    with LLM(bundle, dataclasses.replace(config, lanes=1, ctx=ctx, exactness="tree"), say=say):
        pass  # it has measured what was not known
    if not any(prepared.built for prepared in found):
        say("prepared already")
    for prepared in found:
        print(f"{prepared.folder}  {size(prepared.nbytes)}")
