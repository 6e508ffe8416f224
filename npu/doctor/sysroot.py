"""Reads files below a root folder: `/`, or a copy of parts of a board's file system.

Nothing here writes, waits or raises for what a file holds: what cannot be read is as good as absent.
Links are followed inside the root, so that a copy never shows the facts of the machine it lies on.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 1 << 18
"""Of a text; the longest that matters is /proc/cpuinfo."""

_MOST_LINKS = 40
"""As the kernel has it."""

_CHUNK = 1 << 20

_MOST_SEARCHED = 1 << 26
"""Of a library; Rockchip's have less than 10 MB."""

_ELF_MACHINES = {3: "i686", 40: "armhf", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


@dataclass(frozen=True)
class Sysroot:
    """The files below `root`. Paths are absolute ones of the system examined."""

    root: Path

    def resolve(self, path: str) -> Path | None:
        """Where `path` is on this machine, its links followed; None if there is no such file."""
        todo = [part for part in reversed(path.split("/")) if part]
        done: list[str] = []
        num_links = 0
        while todo:
            part = todo.pop()
            if part in (".", ".."):
                if part == ".." and done:
                    done.pop()
                continue
            place = self.root.joinpath(*done, part)
            try:
                is_link = stat.S_ISLNK(place.lstat().st_mode)
                target = os.readlink(place) if is_link else ""
            except (OSError, ValueError):
                return None
            if not is_link:
                done.append(part)
                continue
            num_links += 1
            if num_links > _MOST_LINKS:
                return None
            if target.startswith("/"):
                done.clear()
            todo += [part for part in reversed(target.split("/")) if part]
        return self.root.joinpath(*done)

    def text(self, path: str) -> str:
        """The beginning of a file without NULs and outer space; empty if it cannot be read."""
        data = _head(self.resolve(path), _MOST_BYTES)
        return data.replace(b"\0", b"\n").decode("utf-8", errors="replace").strip()

    def line(self, path: str) -> str:
        """The beginning of a file that holds a line; empty if it cannot be read."""
        return one_line(self.text(path))

    def number(self, path: str) -> int | None:
        """A file that holds one whole number."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None

    def tail(self, path: str) -> str:
        """The end of a file, such as a log."""
        place = self.resolve(path)
        with contextlib.suppress(OSError), _opened(place) as file:
            os.lseek(file, max(0, os.fstat(file).st_size - _CHUNK), os.SEEK_SET)
            return os.read(file, _CHUNK).decode("utf-8", errors="replace")
        return ""

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted as people count."""
        place = self.resolve(folder)
        try:
            found = os.listdir(place) if place is not None else []
        except OSError:
            return []
        return sorted(found, key=lambda n: ([int(d) for d in re.findall(r"[0-9]{1,9}", n)], n))

    def exists(self, path: str) -> bool:
        return self.resolve(path) is not None

    def stat(self, path: str) -> os.stat_result | None:
        place = self.resolve(path)
        with contextlib.suppress(OSError):
            return place.lstat() if place is not None else None
        return None

    def real_name(self, path: str) -> str:
        """The last part of what a link leads to; empty if there is none."""
        place = self.resolve(path)
        return "" if place is None else place.name


def one_line(text: str) -> str:
    """The beginning of a text, fit for a table whatever it holds."""
    return "".join(c if c.isprintable() else " " for c in text[:120]).strip()


def elf_machine(place: Path | None) -> str | None:
    """The processor that a program or library is for; None if it is neither."""
    head = _head(place, 20)
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _ELF_MACHINES.get(machine, f"machine {machine}")


def first_match(place: Path, pattern: re.Pattern[bytes], *, longest: int = 256) -> bytes | None:
    """What the first group of `pattern` is in a file, read piece by piece.

    A match longer than `longest` may be missed.
    """
    with contextlib.suppress(OSError), _opened(place) as file:
        kept = b""
        for _ in range(_MOST_SEARCHED // _CHUNK):
            piece = os.read(file, _CHUNK)
            if match := pattern.search(kept + piece):
                return match[1]
            if not piece:
                break
            kept = piece[-longest:]
    return None


@contextlib.contextmanager
def _opened(place: Path | None) -> Iterator[int]:
    """A file's descriptor. Raises OSError, also for what is no regular file."""
    if place is None:
        raise FileNotFoundError
    # Opening a pipe would wait for its other end otherwise.
    file = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("not a regular file")
        yield file
    finally:
        os.close(file)


def _head(place: Path | None, most: int) -> bytes:
    """The first bytes of a file; empty if it cannot be read."""
    data = b""
    with contextlib.suppress(OSError), _opened(place) as file:
        # /proc gives a page at a time
        while len(data) < most and (piece := os.read(file, most - len(data))):
            data += piece
    return data
