"""`headrace prior`."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.commands.terminal import Reporter, print_facts, reporter, size
from headrace.errors import UsageError
from headrace.intact import sha256
from headrace.models.manifest import TOKENIZER, Bundle

if TYPE_CHECKING:
    from headrace.runtime.prior_file import PriorFacts
    from headrace.runtime.tokenizer import Tokenizer

_PIECE_CHARS = 1 << 18
"""Of a text at a time: while a tokenizer is at it, it takes many times its memory."""
_LINE_CHARS = 1 << 14
"""A line that is longer than this may be cut."""


@click.group(name="prior", no_args_is_help=False)
def command() -> None:
    """Index texts like those in service, so that what they repeat is proposed.

    A prior finds where the last tokens of an answer or a log stood in these texts, and proposes
    what came after them. It changes how fast text comes, never the text.
    """


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="PRIOR",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to make. It appears when it is complete.",
)
@click.option(
    "--bundle",
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    required=True,
    help="The model that the prior is for; its tokenizer cuts the texts.",
)
@click.option("--force", is_flag=True, help="Replace PRIOR if it exists.")
def build(files: tuple[Path, ...], output: Path, bundle: Path, force: bool) -> None:
    """Make a prior of FILES.

    Each file is one text in UTF-8; what is not UTF-8 in it is replaced. Nothing is proposed across
    the end of a file. The last file counts most: of what occurs more than once, the last place is
    found.
    """
    started = time.monotonic()
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already; choose another name or give --force")
    for path in files:
        _check_text(path)
        if output.exists() and path.samefile(output):
            raise UsageError(f"{output} is one of the texts; choose another name for the prior")
    opened = Bundle.open(bundle)

    from headrace.runtime.load import load_tokenizer
    from headrace.runtime.prior_file import write_prior

    tokenizer = load_tokenizer(opened)
    identity = opened.manifest.files[TOKENIZER].sha256
    # Of the bundle's files the prior depends on this one alone.
    where = opened.file(TOKENIZER)
    opened.verify(lambda path, record: path != where or sha256(path) == record.sha256)
    with reporter() as report:
        facts = write_prior(output, _documents(files, tokenizer, report), identity)
    seconds = time.monotonic() - started
    print_facts(str(output), [*_rows(facts), ("time", f"{seconds:.1f} s")])


@command.command()
@click.argument("prior", type=click.Path(path_type=Path))
def inspect(prior: Path) -> None:
    """Show what is in PRIOR.

    All of it is read, and compared with its checksum; exit code 1 if it was damaged.
    """
    from headrace.runtime.prior_file import verify_prior

    print_facts(str(prior), _rows(verify_prior(prior)))


def _rows(facts: PriorFacts) -> list[tuple[str, str]]:
    return [
        ("tokens", f"{facts.num_tokens:,}"),
        ("texts", f"{facts.num_documents:,}"),
        ("size", f"{size(facts.num_bytes)} ({facts.num_bytes:,} bytes)"),
        ("tokenizer", facts.tokenizer_sha256),
    ]


def _check_text(path: Path) -> None:
    """Raises UsageError for a file that cannot be read, or is empty."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise UsageError(f"{path} is empty; a prior needs texts")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be read: {error.strerror}")


def _documents(
    files: Sequence[Path], tokenizer: Tokenizer, report: Reporter
) -> Iterator[Sequence[int]]:
    """The token ids of each file."""
    report.stage("reading the texts", len(files))
    for path in files:
        tokens = array("I")
        for piece in _pieces(path):
            tokens.extend(tokenizer.encode(piece, bos=False))
        yield tokens
        report.advance()
    report.stage("indexing")


def _pieces(path: Path) -> Iterator[str]:
    """A file's text, cut at ends of lines so that a long one takes no more memory than a short."""
    try:
        # newline="": ends of lines stay what they are
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            while piece := file.read(_PIECE_CHARS) + file.readline(_LINE_CHARS):
                yield piece
    except OSError as error:
        raise _unreadable(path, error) from error
