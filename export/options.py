"""What can be chosen about an export; light, so that `headrace export --help` needs no library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

QUANTS = ("keep", "int8", "int4", "f32")


@dataclass(frozen=True)
class ExportOptions:
    """How to export; the command line takes its defaults from here."""

    quant: str | None = None
    """One of QUANTS; None is `keep` for GGUF and `int4` for float weights."""
    kv: str = "f16"
    name: str | None = None
    calibrate: Path | None = None
    """A text like those in service, for the int4 search and an int8 cache; None is a built-in one."""
    force: bool = False
    """Keep a bundle that fails its parity check."""
