"""Runs headrace's Python files on the board's CPU, emulated."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import debian_tree

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Done:
    """What a process came to."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The object in its last line."""
        assert self.code == 0, f"exit code {self.code}: {self.err}"
        return json.loads(self.out.splitlines()[-1])


@dataclass(frozen=True)
class Board:
    """The emulated machine."""

    tree: Path
    home: Path
    """A folder for what it keeps between processes."""

    def __call__(self, *arguments: str | Path, timeout: float = 120, **variables: str) -> Done:
        """Runs its Python, and kills it with all that it started when it takes too long."""
        own = {
            "HOME": str(self.home),
            "HEADRACE_CACHE": str(self.home / "headrace"),
            "LANG": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, (self.tree / "site", debian_tree.ROOT))),
            # Debian and pip leave compiling to us; the checkout stays as it is.
            "PYTHONPYCACHEPREFIX": str(self.tree / "pycache"),
            "PYTHONSAFEPATH": "1",
        }
        process = subprocess.Popen(
            [str(self.tree / "usr/bin/python"), *map(str, arguments)],
            env={**own, **variables},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            _end(process)
        return Done(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    """Kills its group, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def board_in(home: Path) -> Board:
    """Makes the tree where there is none yet; `home` must exist."""
    reason = debian_tree.problem()
    assert reason is None, reason
    return Board(debian_tree.obtain(), home)
