"""What can be chosen about an export; light, so that `headrace export --help` needs no library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError

QUANTS = ("keep", "int8", "int4", "f32")

_LAYERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


PLATFORMS = ("rk3588",)
NPU_QUANTS = ("fp16", "w8a8")


@dataclass(frozen=True)
class NpuOptions:
    """How the draft is compiled for an NPU."""

    platform: str = "rk3588"
    """One of PLATFORMS."""
    quant: str = "fp16"
    """One of NPU_QUANTS."""
    ctx: int | None = None
    """Tokens that a lane's main inputs hold; None goes by the model."""


@dataclass(frozen=True)
class DraftOptions:
    """What the draft is made of."""

    source: str
    """A checkpoint, named as the target's."""
    layers: tuple[int, ...] | None = None
    """The layers to keep, in this order; None keeps all."""
    quant: str | None = None
    """As the target's; None goes by the draft's own source."""
    vocab_keep: int | None = None
    """Tokens that its head keeps, the most frequent ones of `vocab_corpus`; None keeps all."""
    vocab_corpus: tuple[Path, ...] = ()
    """UTF-8 texts like those in service."""
    npu: NpuOptions | None = None
    """Compile it for an NPU as well."""


@dataclass(frozen=True)
class ExportOptions:
    """How to export; the command line takes its defaults from here."""

    quant: str | None = None
    """One of QUANTS; None is `keep` for GGUF and `int4` for float weights."""
    kv: str = "f16"
    """Of target and draft."""
    name: str | None = None
    calibrate: Path | None = None
    """A text like those in service, for the int4 search and an int8 cache; None is a built-in one."""
    force: bool = False
    """Keep a bundle that fails its parity check."""
    draft: DraftOptions | None = None


def parse_layers(text: str) -> tuple[int, ...]:
    """`0,1,5` or `0-3` or both mixed, in the given order; raises UsageError."""
    layers: list[int] = []
    for part in text.split(","):
        match = _LAYERS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(
                f"draft_layers: got {text!r}, expected layer numbers such as 0,1,2,3 or 0-3"
            )
        layers += range(first, last + 1)
    return tuple(layers)
