"""Folders: what headrace can make again, and where boards have the NPU's library."""

import os
from pathlib import Path

NPU_LIBRARY_NAME = "librknnrt.so"
NPU_LIBRARY_FOLDERS = (
    "/usr/local/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib",
    "/usr/lib",
)
"""Where the loader of Debian and Ubuntu looks."""


def cache_dir() -> Path:
    """The cache folder, not necessarily existing: HEADRACE_CACHE, else headrace/ in the XDG cache.

    An empty variable counts as unset, and so does a relative XDG_CACHE_HOME, as XDG demands.
    """
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "headrace"
