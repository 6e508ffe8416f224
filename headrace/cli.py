"""The command `headrace`: finds a command, runs it, and puts whatever went wrong in one line.

Exit codes: 0, 1 for errors, 2 for usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after
SIGHUP.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import click

import headrace
from headrace.errors import HeadraceError

COMMANDS = {
    "export": "Make a bundle from a checkpoint.",
    "distill": "Train a draft for a target.",
    "run": "Answer a prompt, or chat.",
    "inspect": "Show what is in a bundle or an ONNX file.",
    "plan": "Show what a model takes of the memory, before it is loaded.",
    "score": "Measure how well a model expects a text.",
    "prepare": "Make a bundle's weights ready for this machine.",
    "doctor": "Examine this board: NPU, drivers, clocks, memory, and what mends them.",
    "bench": "Measure what speculation gains on this machine.",
    "prior": "Index texts like those in service, so that what they repeat is proposed.",
    "check": "Check on this machine that speculation keeps its promises.",
    "rknn-env": "Make the environment of Rockchip's toolkit, which compiles drafts for the NPU.",
    "demo": "Export a small model with its draft, and let it answer and read a log.",
}
"""Each is `headrace.commands.<name>.command`, with `_` for `-`, imported on use: some are not for
the board.
"""


_NO_MEMORY = "not enough memory; a smaller --ctx or fewer --lanes need less"


class _Group(click.Group):
    """Commands by the table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"headrace.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(headrace.__version__, prog_name="headrace", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Deploys small language models on RK3588 boards: draft on the NPU, target on the CPU."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default this process's; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            # a terminal's encoding must not end an answer at its first emoji
            reconfigure(errors="replace")
    with _orderly_termination():
        try:
            code = cli.main(arguments, prog_name="headrace", standalone_mode=False)
            sys.stdout.flush()
            return int(code or 0)
        except click.Abort:
            return 128 + signal.SIGINT
        except BrokenPipeError:
            _drop_output()
            return 1
        except click.ClickException as error:
            return _complain(_with_hint(error), error.exit_code)
        except HeadraceError as error:
            return _complain(str(error), error.exit_code)
        except OSError as error:
            _drop_output()
            if error.errno == errno.ENOMEM:
                return _complain(_NO_MEMORY, 1)
            where = f"{error.filename}: " if error.filename is not None else ""
            return _complain(f"{where}{error.strerror or error}", 1)
        except MemoryError as error:
            return _complain(": ".join(filter(None, (_NO_MEMORY, str(error)))), 1)


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print("headrace:", " ".join(message.splitlines()), file=sys.stderr, flush=True)
    return code


def _with_hint(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message}; see `{context.command_path} --help`" if context else message


def _drop_output() -> None:
    """Lets what nobody can read go nowhere, or the interpreter would complain when it exits."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _orderly_termination() -> Iterator[None]:
    """SIGTERM and a terminal that is closed unwind as Ctrl-C does, so that nothing is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        # a second one must not cut the cleaning up short
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
