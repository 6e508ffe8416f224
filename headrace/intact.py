"""Whether files are still, byte for byte, what they were.

SHA-256 runs at about 1 GB/s, too slow for every start of a model of 1.7 GB, so a check that
succeeded is remembered by device, inode, size, mtime, ctime and boot. Every write through the file
system moves ctime, which nothing can set back; and after a boot all is hashed again, because a
power cut can damage flash without the file system noticing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def sha256(path: Path) -> str:
    """Hex digest of a file; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CheckMemory:
    """Remembers which files were found intact, in a small JSON file that may be lost any time."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def is_intact(
        self, path: Path, digest: str, on_hash: Callable[[], None] = lambda: None
    ) -> bool:
        """Whether `path` has this SHA-256. `on_hash` is called before hashing, which is left out
        when the file was checked before and has not been touched since. Raises OSError.
        """
        state = [digest, *_state(path)]
        known = self._load()
        if known.get(str(path)) == state:
            return True
        on_hash()
        if sha256(path) != digest:
            return False
        self._save({**known, str(path): state})
        return True

    def _load(self) -> dict[str, Any]:
        try:
            value = json.loads(self._note.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _save(self, known: dict[str, Any]) -> None:
        # Best effort: without the note the next check only takes longer.
        draft = self._note.with_name(f"{self._note.name}.{os.getpid()}")
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(known), encoding="utf-8")
            draft.replace(self._note)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _state(path: Path) -> list[Any]:
    """What changes when a file is written to, or the machine has been off."""
    found = path.stat()
    return [
        found.st_size,
        found.st_dev,
        found.st_ino,
        found.st_mtime_ns,
        found.st_ctime_ns,
        _boot_id(),
    ]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
