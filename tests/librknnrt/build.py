"""Compiles the double."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror")
LINK = ("-fvisibility=hidden", "-Wl,-z,nodelete", "-pthread", "-ldl")


def missing(compiler: str = "cc") -> str | None:
    """Why the double cannot be built here; None if it can."""
    return None if shutil.which(compiler) else f"no compiler {compiler}: the double is in C"


def build(folder: Path, compiler: str = "cc", extra: tuple[str, ...] = ()) -> Path:
    """librknnrt.so in a folder, with the Python file that it looks for beside itself."""
    library = folder / "librknnrt.so"
    sources = [str(path) for path in sorted(HERE.glob("*.c"))]
    command = [compiler, *FLAGS, *extra, "-o", str(library), *sources, *LINK]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.copy(HERE / "rknn_compute.py", folder)
    return library
