"""Where headrace keeps what it can make again: models it fetched, bundles and prepared weights."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder, not necessarily existing: HEADRACE_CACHE, else headrace/ in the XDG cache.

    An empty variable counts as unset, and so does a relative XDG_CACHE_HOME, as XDG demands.
    """
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "headrace"
