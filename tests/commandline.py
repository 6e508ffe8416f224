"""The command line as a process, at a pipe or at a terminal, and what must be true of its errors."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main

COMMAND = [sys.executable, "-W", "error", "-m", "headrace"]

# Ctrl-C reaches those whose controlling terminal it is typed at.
_AT_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from headrace.cli import main
sys.exit(main(sys.argv[1:]))
"""

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of an error; asserts that it is one."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("headrace:")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), self.err
        return lines[0].removeprefix("headrace: ")


class CommandLine:
    """Runs commands in this process, with a cache folder of its own."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture, self._patch = capture, patch

    def __call__(self, *arguments: str | Path, stdin: bytes = b"") -> Result:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capture.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *self._capture.readouterr())


@contextlib.contextmanager
def started(*arguments: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own with pipes, which does not outlive the block."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(command, **{**pipes, **options}) as child:
        try:
            yield child
        finally:
            child.kill()


def finish(child: subprocess.Popen[bytes]) -> Result:
    out, err = child.communicate(timeout=PATIENCE_S)
    return Result(child.returncode, (out or b"").decode(), (err or b"").decode())


class Terminal:
    """A command that believes to have a person at its stdin, stdout and stderr."""

    def __init__(self, *arguments: str | Path) -> None:
        self._fd, theirs = pty.openpty()
        self._child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _AT_TERMINAL, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self._waiting = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once the command waits for keys.

        Typed in the moment before Python begins to wait, it would be seen at the next key only.
        """
        status = Path(f"/proc/{self._child.pid}/status")
        switches, since = "", time.monotonic()
        while time.monotonic() - since < 0.2:
            now = re.findall("State:.*S|^voluntary.*", status.read_text(), re.MULTILINE)
            if len(now) < 2 or now[1] != switches:
                switches, since = now[-1], time.monotonic()
            time.sleep(0.01)
        self.type("\x03")

    def read_to(self, pattern: str) -> str:
        """All that was printed up to and with the first match of a regular expression."""
        limit = time.monotonic() + PATIENCE_S
        while not (match := re.search(pattern, self._waiting)):
            assert time.monotonic() < limit, f"no {pattern!r} in {self._waiting[-500:]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self._waiting += self._read()
        found, self._waiting = self._waiting[: match.end()], self._waiting[match.end() :]
        return found

    def code(self) -> int:
        """The exit code of a command that is about to end."""
        limit = time.monotonic() + PATIENCE_S
        while self._child.poll() is None:
            assert time.monotonic() < limit, "it goes on"
            if select.select([self._fd], [], [], 0.05)[0]:
                self._waiting += self._read()
        return self._child.returncode

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        os.close(self._fd)

    def _read(self) -> str:
        with contextlib.suppress(OSError):  # the other side is closed
            return os.read(self._fd, 65536).decode(errors="replace").replace("\r\n", "\n")
        time.sleep(0.05)
        return ""


@contextlib.contextmanager
def at_terminal(*arguments: str | Path) -> Iterator[Terminal]:
    terminal = Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.close()
