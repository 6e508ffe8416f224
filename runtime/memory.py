"""What this process occupies, and pinning the pages of a file that it has mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.closing import Closing
from headrace.errors import HeadraceError


@dataclass(frozen=True)
class MemoryUsage:
    """Figures of one process, in bytes."""

    rss_anon: int
    """Anonymous memory that is resident: heap, arenas, pools. Only swap could free it."""
    rss_file: int
    """Mapped file pages that are resident: the kernel may drop them and read them again."""
    vm_hwm: int
    """The most that was ever resident at once."""
    swap: int


def usage() -> MemoryUsage:
    """The figures of this process now, from /proc/self/status (Linux)."""
    fields: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return MemoryUsage(
        fields["RssAnon"], fields["RssFile"], fields["VmHWM"], fields.get("VmSwap", 0)
    )


def available() -> int:
    """Bytes that programs can still take without swapping, by the kernel's estimate (Linux)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63 - 1  # a kernel before 3.14 has no estimate, and nothing is refused


def trim() -> None:
    """Gives the pages of freed heap back to the system, where the C library can (glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


@dataclass(frozen=True, order=True)
class FileRange:
    """Bytes `offset` .. `offset + length` of a file, both whole pages; the file may end sooner."""

    offset: int
    length: int


def mapped_ranges(path: Path) -> tuple[FileRange, ...]:
    """The parts of a file that this process has mapped, sorted, overlaps merged."""
    merged: list[FileRange] = []
    for part in sorted(_mappings(str(path.resolve()))):
        last = merged[-1] if merged else None
        if last and part.offset <= last.offset + last.length:
            end = max(last.offset + last.length, part.offset + part.length)
            merged[-1] = FileRange(last.offset, end - last.offset)
        else:
            merged.append(part)
    return tuple(merged)


def _mappings(path: str) -> list[FileRange]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        # By path alone: on overlay file systems the inode shown here is not the one of stat.
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        if name == [path]:
            start, end = (int(address, 16) for address in span.split("-"))
            found.append(FileRange(int(offset, 16), end - start))
    return found


class LockedPages(Closing):
    """Parts of a file held in memory until `close`; also a context manager."""

    def __init__(self, path: Path, ranges: Sequence[FileRange]) -> None:
        """Reads the ranges in and locks them. Raises HeadraceError if the system refuses."""
        self._maps: list[mmap.mmap] = []
        self.nbytes = sum(part.length for part in ranges)
        _raise_soft_limit(self.nbytes)
        with path.open("rb") as file:
            try:
                for part in ranges:
                    self._lock(file.fileno(), part)
            except OSError as error:
                self.close()
                raise HeadraceError(_refusal(path, self.nbytes, error)) from error

    def _lock(self, fd: int, part: FileRange) -> None:
        # Shared and read-only: locking a private writable mapping, such as ONNX Runtime's own,
        # would first copy every page into anonymous memory.
        length = min(part.length, os.fstat(fd).st_size - part.offset)
        pages = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=part.offset)
        self._maps.append(pages)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Lets the kernel drop the pages again; may be called twice."""
        while self._maps:
            self._maps.pop().close()


def _raise_soft_limit(nbytes: int) -> None:
    """Lifts our own soft limit for locked memory as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < nbytes:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def _refusal(path: Path, nbytes: int, error: OSError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    return (
        f"cannot lock {nbytes // 1024} KiB of {path.name} in memory ({error.strerror}); the limit"
        f" is {allowed}: raise it with `ulimit -l`, LimitMEMLOCK= in the systemd unit, or memlock"
        " in /etc/security/limits.conf, or run without --mlock"
    )
