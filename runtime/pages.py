"""Anonymous memory by the page: resident from the start (arena, pool), or only once written."""

from __future__ import annotations

import contextlib
import errno
import mmap

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


def resident(num_bytes: int) -> U8:
    """Zeroed page-aligned memory [num_bytes], all of it resident. Raises MemoryError.

    Freed with the last array over it. Huge pages are asked for; the kernel may have none.
    """
    mapping = _map(num_bytes)
    with contextlib.suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    # Writing, since reading would map the kernel's one page of zeros.
    memory[:: mmap.PAGESIZE] = 0
    return memory


def untouched(num_bytes: int) -> U8:
    """Zeroed page-aligned memory [num_bytes] that takes up nothing where it is only read.

    The heap promises no such thing: it clears memory that it has handed out before. Raises
    MemoryError.
    """
    return np.frombuffer(_map(num_bytes), np.uint8)


def _map(num_bytes: int) -> mmap.mmap:
    # Python's default is a shared mapping, which the kernel accounts as a file's pages.
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{num_bytes >> 20} MiB of memory cannot be mapped") from error
