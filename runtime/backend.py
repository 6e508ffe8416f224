"""The seam between the engine and what runs a model: ONNX Runtime, or for a draft the NPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.runtime.arena import KV, Arena
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.exactness import most_padding, padded_rows


@dataclass(frozen=True)
class BackendFacts:
    """What a backend can hold and do. The engine asks these and never the backend's name."""

    vocab_size: int
    """Token ids that it reads."""
    num_logits: int
    """Columns of its logits: fewer than `vocab_size` where a draft's head was trimmed."""
    lanes: int
    capacity: int
    """Tokens a lane can hold."""
    max_rows: int
    """Rows a lane may add in one pass."""
    max_wanted: int
    """Rows in one pass whose logits can be returned."""
    least_rows: int
    """Rows that a pass of `exact` lanes has at least, padding included."""
    row_multiple: int
    """Slots in use after a pass of `exact` lanes are a multiple of it (exactness.py)."""

    @property
    def most_padding(self) -> int:
        """Rows that padding may add to a lane's own."""
        return most_padding(self.row_multiple)

    def computed_rows(self, past: int, num_rows: int, *, exact: bool) -> int:
        """Rows that a pass computes for these behind `past` others."""
        return (
            padded_rows(past, num_rows, self.row_multiple, self.least_rows) if exact else num_rows
        )


class KvMemory(Protocol):
    """Lanes' keys and values, wherever they are."""

    def read(self, lane: int, start: int, num_rows: int) -> KV:
        """A copy of slots from `start` on, [2, layers, kv_heads, num_rows, head_dim]."""
        ...

    def write(self, lane: int, start: int, rows: KV) -> None:
        """The way back."""
        ...

    def gather(self, lane: int, sources: Sequence[int], start: int) -> None:
        """Slots `sources` become `start`, `start` + 1, …; the others behind those hold nothing any
        more, and neither do the sources.
        """
        ...

    def move(self, lane: int, source: range, destination: range) -> None:
        """Slots become others, as many, that do not overlap; the sources hold nothing any more."""
        ...


class LaneBackend(Protocol):
    """Runs passes over one model whose KV it owns."""

    @property
    def facts(self) -> BackendFacts: ...

    @property
    def arena(self) -> KvMemory: ...

    @property
    def seconds_in_passes(self) -> float:
        """Time spent inside the runtime library since the start, for host-overhead figures."""
        ...

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        """Runs one pass over consecutive lanes, one entry each; an entry may have no rows.

        Returns:
            logits [number of wanted rows, num_logits], in the order of `rows` and `wanted`. The
            memory is the backend's and holds until the next call.
        """
        ...

    def close(self) -> None: ...


class Backend(LaneBackend, Protocol):
    """One with an arena that blocks are staged into and parked from: the target's."""

    @property
    def arena(self) -> Arena:
        """Where its lanes' keys and values are."""
        ...
