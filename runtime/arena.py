"""The arena: contiguous KV of all lanes, one allocation, what the graph reads and writes."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES, SPARE_SLOTS


@dataclass(frozen=True, eq=False)
class Arena:
    """KV of `lanes` sequences of at least `capacity` tokens, and each lane's spare slots."""

    keys: list[npt.NDArray[np.generic]]
    """One per layer, [lanes, kv_heads, slots, head_dim], views of one mapping."""
    values: list[npt.NDArray[np.generic]]
    capacity: int
    """Tokens a lane can hold."""
    slots: int
    """Slots a lane has, spare ones included."""
    num_bytes: int

    @classmethod
    def allocate(cls, config: ModelConfig, kv: str, lanes: int, capacity: int) -> Arena:
        """Maps page-aligned zeroed memory; pages become resident as slots are written."""
        slots = -(-capacity // 16) * 16 + SPARE_SLOTS
        shape = (2, config.num_layers, lanes, config.num_kv_heads, slots, config.head_dim)
        dtype = np.dtype(KV_DTYPES[kv])
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        # Python's default is a shared mapping, which the kernel accounts as a file's pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, dtype).reshape(shape)
        return cls(list(whole[0]), list(whole[1]), capacity, slots, num_bytes)
