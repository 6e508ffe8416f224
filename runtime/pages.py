"""Anonymous memory that is resident from the start, for arena and pool."""

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
    # Python's default is a shared mapping, which the kernel accounts as a file's pages.
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{num_bytes >> 20} MiB of keys and values cannot be mapped") from error
    with contextlib.suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    # Writing, since reading would map the kernel's one page of zeros.
    memory[:: mmap.PAGESIZE] = 0
    return memory
