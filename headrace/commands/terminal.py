"""What commands print with: tables on stdout, all else on stderr; bars only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from headrace.sizes import show_size as size

__all__ = ["console", "print_facts", "print_table", "reporter", "say", "size"]

_PIPE_WIDTH = 200
"""Columns where there is no terminal that has a width."""


def say(message: str) -> None:
    """A line on stderr about what goes on."""
    print(message, file=sys.stderr, flush=True)


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_facts(title: str, facts: Sequence[tuple[str, str]], *, stderr: bool = False) -> None:
    """A table of names and values."""
    print_table(title, ("", ""), facts, stderr=stderr)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: frozenset[int] = frozenset(),
    stderr: bool = False,
) -> None:
    """`numbers` are the indices of the columns that stand right."""
    table = Table(
        box=SIMPLE_HEAD if any(columns) else None,
        show_header=any(columns),
        pad_edge=False,
    )
    for index, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if index in numbers else "left",
            overflow="fold",
            no_wrap=not index,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    target = console(stderr=stderr)
    if title:
        # as a table's own title it would be folded to the table's width
        target.print(title, soft_wrap=True)
    target.print(table)


class Reporter(Protocol):
    """`headrace.export.build.Reporter`, entered and left."""

    def stage(self, title: str, steps: int | None = None) -> None: ...
    def advance(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def reporter() -> Reporter:
    """Bars on a terminal, lines elsewhere; both on stderr."""
    return _Bars() if sys.stderr.isatty() else _Lines()


class _Lines:
    def stage(self, title: str, steps: int | None = None) -> None:
        say(title)

    def advance(self) -> None:
        """A line a step would be too many."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to take down."""


class _Bars:
    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console(stderr=True),
        )
        self._task: TaskID | None = None

    def stage(self, title: str, steps: int | None = None) -> None:
        self._finish()
        self._task = self._progress.add_task(title, total=steps)

    def advance(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        self._progress.stop()

    def _finish(self) -> None:
        if self._task is None:
            return
        total = self._progress.tasks[self._task].total or 1
        self._progress.update(self._task, total=total, completed=total)
