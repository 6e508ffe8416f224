"""Sizes of memory as people write and read them."""

from __future__ import annotations

import re

from headrace.errors import UsageError

Bytes = int
"""A size in bytes."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_MAX = 1 << 50


def parse_size(text: str) -> Bytes:
    """Bytes of `4GiB`, `1.8GiB`, `512MiB`, `4GB` (powers of 1,000) or `1048576`.

    Raises UsageError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"got {text!r}, expected a size such as 4GiB, 1.8GiB, 512MiB, 4GB or a number of bytes"
        )
    size = float(match[1]) * unit
    if size > _MAX:
        raise UsageError(f"got {text!r}, allowed are sizes up to 1024TiB")
    return int(match[1]) * unit if match[1].isdigit() else round(size)


def show_size(num_bytes: Bytes) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def exact_size(num_bytes: Bytes) -> str:
    """As `parse_size` reads it, without loss."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes and not num_bytes % unit:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)
