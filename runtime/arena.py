"""The arena: contiguous KV of all lanes, one allocation, what the graph reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES, SPARE_SLOTS
from headrace.runtime.blocks import BLOCK_TOKENS, blocks_for
from headrace.runtime.pages import resident

KV = npt.NDArray[np.generic]


@dataclass(frozen=True)
class ArenaShape:
    """Sizes of an arena, known before it is allocated."""

    config: ModelConfig
    kv: str
    """Cache type, a key of `KV_DTYPES`."""
    lanes: int
    capacity: int
    """Tokens a lane can hold."""

    @property
    def slots(self) -> int:
        """Slots a lane has, spare ones included."""
        return blocks_for(self.capacity) * BLOCK_TOKENS + SPARE_SLOTS

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(KV_DTYPES[self.kv])

    @property
    def num_bytes(self) -> int:
        return self.lanes * self.slots * self.config.kv_values_per_token * self.dtype.itemsize


class Arena:
    """KV of `lanes` sequences of at least `capacity` tokens, and each lane's spare slots."""

    def __init__(self, shape: ArenaShape) -> None:
        """Allocates it, resident and zeroed. Raises MemoryError."""
        self.shape = shape
        config = shape.config
        layered = (config.num_layers, shape.lanes, config.num_kv_heads, shape.slots)
        memory = resident(shape.num_bytes).view(shape.dtype)
        self._whole: KV | None = memory.reshape(2, *layered, config.head_dim)

    @property
    def capacity(self) -> int:
        return self.shape.capacity

    @property
    def slots(self) -> int:
        return self.shape.slots

    @property
    def num_bytes(self) -> int:
        return self.shape.num_bytes

    @property
    def whole(self) -> KV:
        """[2, layers, lanes, kv_heads, slots, head_dim], keys first."""
        assert self._whole is not None, "the arena is closed"
        return self._whole

    @cached_property
    def keys(self) -> list[KV]:
        """One per layer, [lanes, kv_heads, slots, head_dim], views of one mapping."""
        return list(self.whole[0])

    @cached_property
    def values(self) -> list[KV]:
        return list(self.whole[1])

    def rows(self, lane: int, start: int, num_rows: int) -> KV:
        """[2, layers, kv_heads, num_rows, head_dim] of one lane, a view."""
        return self.whole[:, :, lane, :, start : start + num_rows]

    def read(self, lane: int, start: int, num_rows: int) -> KV:
        """`rows`, a copy."""
        return self.rows(lane, start, num_rows).copy()

    def write(self, lane: int, start: int, rows: KV) -> None:
        """The way back."""
        self.rows(lane, start, rows.shape[3])[...] = rows

    def move(self, lane: int, source: range, destination: range) -> None:
        """Copies slots of a lane to others, as many, that do not overlap."""
        target = self.rows(lane, destination.start, len(destination))
        target[...] = self.rows(lane, source.start, len(source))

    def gather(self, lane: int, sources: Sequence[int], start: int) -> None:
        """Copies slots `sources` to `start`, `start` + 1, …; they may overlap."""
        if list(sources) == list(range(start, start + len(sources))):
            return
        # Advanced indexing copies before it assigns.
        self.rows(lane, start, len(sources))[...] = self.whole[
            :, :, lane, :, list(sources)
        ].transpose(1, 2, 3, 0, 4)

    def close(self) -> None:
        """Drops the memory; nothing may use it afterwards."""
        self.keys.clear()
        self.values.clear()
        self._whole = None
