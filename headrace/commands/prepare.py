"""`headrace prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.commands.flags import runtime_config, runtime_flags
from headrace.commands.terminal import say, size
from headrace.models.manifest import Bundle
from headrace.paths import cache_dir


@click.command(name="prepare")
@click.argument("bundle", type=click.Path(path_type=Path))
@runtime_flags("target_threads")
def command(bundle: Path, **flags: Any) -> None:
    """Make a bundle's weights ready for this machine.

    They go into the cache folder: HEADRACE_CACHE, or headrace/ in the user's cache. Without this
    the first command that loads BUNDLE does it, and starts later for it.
    """
    config = runtime_config(flags)

    from headrace.runtime.load import prepare_target, verify

    opened, cache = Bundle.open(bundle), cache_dir()
    verify(opened, cache, say)
    prepared = prepare_target(opened, cache, config.target_placement().threads, say)
    if not prepared.built:
        say("prepared already")
    print(f"{prepared.folder}  {size(prepared.nbytes)}")
