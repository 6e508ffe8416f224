"""`headrace rknn-env`."""

from __future__ import annotations

import click

from headrace.commands.export import export_libraries
from headrace.commands.terminal import reporter


@click.command(name="rknn-env")
@click.option(
    "--python",
    metavar="PATH",
    help="A Python 3.11 or 3.12 to make it with. Default: this one, else one that is on PATH.",
)
@click.option("--check", is_flag=True, help="Let the toolkit compile and run a toy.")
def command(python: str | None, check: bool) -> None:
    """Make the environment of Rockchip's toolkit, which compiles drafts for the NPU.

    The toolkit needs other versions of several libraries than headrace does, so it gets a virtual
    environment of its own, 625 MB in the cache folder: HEADRACE_CACHE, or headrace/ in the user's
    cache. It is made once, with pip; later runs find it. Only a PC that compiles needs it.
    """
    with export_libraries(), reporter() as report:
        from headrace.export import rknn, rknn_env

        found = rknn_env.make_env(python, report)
        if check:
            rknn.self_test(report)
    print(found)
