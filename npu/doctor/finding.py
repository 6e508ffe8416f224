"""What an examination asks for and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import BundleError
from headrace.models.npu_io import NpuIo

Status = Literal["pass", "warn", "fail"]

MIN_LIBRARY = "2.3.2"
"""Of the runtime library, where no bundle says more: the version that its binding is written for."""

_LANES = 4
"""Sequences that a draft may hold at once, each with main inputs of its own."""


@dataclass(frozen=True)
class Finding:
    """One line about a board."""

    name: str
    status: Status
    found: str
    remedy: str | None = None
    """A command or an act that mends it; None only where nothing has to be mended."""

    def __post_init__(self) -> None:
        assert (self.remedy is None) == (self.status == "pass"), self


@dataclass(frozen=True)
class Needs:
    """What a bundle's draft needs of a board, or any draft."""

    library_version: str = MIN_LIBRARY
    """The runtime library must be at least as new."""
    platform: str | None = None
    """The chip that the draft was compiled for; None if there is no draft."""
    num_buffers: int = 0
    """Buffers in the NPU's memory, each of which takes a file descriptor."""
    npu_bytes: int = 0
    """Weights and buffers, which cannot be swapped."""
    library: Path | None = None
    """A path of this machine instead of where the loader looks."""

    @classmethod
    def of_draft(cls, io: NpuIo, model_bytes: int, library: Path | None = None) -> Needs:
        """Raises BundleError if `io` has values of another kind than it should."""
        try:
            # Variants share inputs of the same size; outputs are each one's own.
            inputs = {(t.name, int(t.size)) for variant in io.variants for t in variant.inputs}
            outputs = [int(t.size) for variant in io.variants for t in variant.outputs]
            main = [size for name, size in inputs if name.startswith("main.")]
            others = [size for name, size in inputs if not name.startswith("main.")]
        except (AttributeError, TypeError, ValueError) as error:
            raise BundleError(f"the draft's inputs cannot be read: {error}; export it again") from (
                error
            )
        return cls(
            library_version=str(io.toolkit)[:64],
            platform=str(io.platform)[:64],
            num_buffers=len(outputs) + len(others) + _LANES * len(main),
            npu_bytes=model_bytes + sum(outputs) + sum(others) + _LANES * sum(main),
            library=library,
        )


def passed(name: str, found: str) -> Finding:
    return Finding(name, "pass", found)


def warned(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warn", found, remedy)


def failed(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "fail", found, remedy)
