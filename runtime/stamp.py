"""The stamp of a folder of derived files: what they were made for, and that they are still whole.

`stamp.json` holds the key the files were made under and every file's size and SHA-256. Hashing
runs at about 1 GB/s, too slow for each start of a model of 1.7 GB, so a check that succeeded is
remembered in `checked.json` by device, inode, size, mtime, ctime and boot. Every write through
the file system moves ctime, which nothing can set back; and after a boot all is hashed again,
because a power cut can damage flash without the file system noticing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

STAMP = "stamp.json"
CHECKED = "checked.json"

# Linux prints one block a core; the cores of one SoC differ. Extra flags cost a rebuild after a
# kernel update at worst, a missing one could pass off another machine's files as ours.
_CPU_FIELDS = frozenset(
    {
        "vendor_id",
        "cpu family",
        "model",
        "flags",
        "CPU implementer",
        "CPU architecture",
        "CPU variant",
        "CPU part",
        "Features",
        "isa",
        "uarch",
    }
)

Key = dict[str, Any]
"""What a folder was made for; must survive a round trip through JSON unchanged."""


def machine() -> Key:
    """What of this machine decides which kernels run: architecture, CPU models and features."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    facts = set()
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _CPU_FIELDS:
            facts.add(f"{name}: {' '.join(sorted(value.split()))}")
    return {"machine": platform.machine(), "cpu": sorted(facts) or [platform.processor()]}


def write_stamp(folder: Path, key: Key, names: Collection[str]) -> None:
    """Hashes the named files of a folder and writes its stamp; raises OSError."""
    files = {}
    state = _state(folder, names)
    for name in names:
        files[name] = {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
    with (folder / STAMP).open("w", encoding="utf-8") as file:
        json.dump({"key": key, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _remember(folder, state)


def stamped_key(folder: Path) -> Key | None:
    """The key a folder claims, or None when its stamp cannot be read."""
    stamp = _read_object(folder / STAMP)
    key = stamp.get("key") if stamp else None
    return key if isinstance(key, dict) else None


def is_whole(
    folder: Path, key: Key, names: Collection[str], on_hash: Callable[[], None] | None = None
) -> bool:
    """Whether the folder was made for `key` and holds exactly `names`, every byte as it was made.

    `on_hash` is called before hashing, which is left out when the files were checked before and
    have not been touched since. Remembers a success in the folder, if that can be written.
    """
    stamp = _read_object(folder / STAMP)
    if stamp is None or stamp.get("key") != key:
        return False
    files = stamp.get("files")
    if not isinstance(files, dict) or set(files) != set(names):
        return False
    try:
        state = _state(folder, files)
        if any(state["files"][name][0] != files[name]["size"] for name in files):
            return False
        if _read_object(folder / CHECKED) == state:
            return True
        if on_hash is not None:
            on_hash()
        if any(_sha256(folder / name) != files[name]["sha256"] for name in files):
            return False
    except (OSError, KeyError, TypeError):
        return False
    _remember(folder, state)
    return True


def _state(folder: Path, names: Collection[str]) -> Key:
    """What changes when a file is written to, or the machine has been off."""
    files = {}
    for name in names:
        found = (folder / name).stat()
        files[name] = [
            found.st_size,
            found.st_dev,
            found.st_ino,
            found.st_mtime_ns,
            found.st_ctime_ns,
        ]
    return {"boot": _boot_id(), "files": files}


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _remember(folder: Path, state: Key) -> None:
    """Best effort: without the note the next check only takes longer."""
    draft = folder / f"{CHECKED}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(state), encoding="utf-8")
        draft.replace(folder / CHECKED)
    except OSError:
        try:
            draft.unlink(missing_ok=True)
        except OSError:
            return


def _read_object(path: Path) -> Key | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
