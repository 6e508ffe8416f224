"""What a process occupies, and which pages of a file it maps and holds."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.runtime.memory import FileRange, LockedPages, mapped_ranges, usage

PAGE = mmap.PAGESIZE


def test_usage_counts_what_is_touched() -> None:
    before = usage()
    # A mapping of its own: numpy's would come from heap that earlier tests have touched.
    size = 32 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * size)
        after = usage()
    assert after.rss_anon - before.rss_anon > size * 0.9
    assert after.vm_hwm >= after.rss_anon + after.rss_file
    assert before.rss_file > 0 <= before.swap


def locked() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmLck" in x)
    return int(line.split()[1]) * 1024


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a process without root rights can reach, as pytest's own are not."""
    folder = Path("/var/tmp") / f"headrace-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def test_mapped_ranges_are_sorted_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    path.write_bytes(bytes(10 * PAGE))
    assert mapped_ranges(path) == ()
    with path.open("rb") as file:
        maps = [
            mmap.mmap(file.fileno(), count * PAGE, prot=mmap.PROT_READ, offset=first * PAGE)
            for first, count in ((7, 2), (0, 3), (2, 2))
        ]
    assert mapped_ranges(path) == (FileRange(0, 4 * PAGE), FileRange(7 * PAGE, 2 * PAGE))
    for pages in maps:
        pages.close()
    assert mapped_ranges(path) == ()


def test_pages_are_locked_until_closed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * PAGE + 1))
    pages = LockedPages(path, [FileRange(0, PAGE), FileRange(3 * PAGE, 2 * PAGE)])
    assert locked() == pages.nbytes == 3 * PAGE
    pages.close()
    pages.close()
    assert locked() == 0


REFUSED = """
import os, resource, sys
from pathlib import Path
from headrace.errors import HeadraceError
from headrace.runtime.memory import FileRange, LockedPages
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setuid(65534)
try:
    LockedPages(Path(sys.argv[1]), [FileRange(0, 1 << 20)])
except HeadraceError as error:
    print(error)
"""


def test_a_refusal_names_the_limit(open_folder: Path) -> None:
    path = open_folder / "weights"
    path.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", REFUSED, str(path)]
    message = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "cannot lock 1024 KiB of weights" in message
    assert "the limit is 64 KiB" in message and "ulimit -l" in message
