"""Where a prompt comes from: the command line, a pipe, or nowhere."""

from __future__ import annotations

import os
import sys

from headrace.errors import UsageError

STDIN = "-"


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def given_prompt(argument: str | None) -> str | None:
    """The prompt of the command line or else of stdin; None where a person sits at stdin.

    One newline at the end of stdin is not part of the prompt. Raises UsageError for an empty
    prompt or one that is not UTF-8.
    """
    if argument is None and stdin_is_terminal():
        return None
    if argument is None or argument == STDIN:
        prompt = read_stdin("the prompt on stdin").removesuffix("\n")
    else:
        prompt = _typed(argument)
    if not prompt.strip():
        raise UsageError("the prompt is empty; give one as PROMPT or on stdin")
    return prompt


def _typed(argument: str) -> str:
    """An argument as it was typed, even if Python could not decode it; raises UsageError."""
    try:
        argument.encode()
        return argument
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("PROMPT is not valid UTF-8") from error


def read_stdin(what: str) -> str:
    """All of stdin; raises UsageError, which names it as `what`, if it is not UTF-8."""
    data = b"" if sys.stdin is None else sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 (byte {error.start} of {len(data)})") from error
