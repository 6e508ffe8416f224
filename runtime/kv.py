"""The pool's arrays: keys and values by block, and their ways into a lane and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from headrace.models.config import ModelConfig, Rope
from headrace.models.iospec import KV_POOL_BYTES
from headrace.models.rope import F32, cos_sin, rotate
from headrace.runtime.arena import KV, Arena
from headrace.runtime.blocks import BLOCK_TOKENS
from headrace.runtime.halves import F16, Halves
from headrace.runtime.pages import resident

_POOL_DTYPES = {"f16": np.float16, "f32": np.float32, "int8": np.int8}


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool, known before it is allocated."""

    config: ModelConfig
    kv: str
    num_blocks: int

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What the arena's values are rounded to already, so that a block loses nothing."""
        return np.dtype(_POOL_DTYPES[self.kv])

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.config.kv_values_per_token * KV_POOL_BYTES[self.kv]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class PoolArrays:
    """Keys and values of all blocks, one allocation. Which block is whose, `BlockPool` knows."""

    def __init__(self, shape: PoolShape) -> None:
        """Allocates it, resident and zeroed. Raises MemoryError."""
        self.shape = shape
        config = shape.config
        heads = (2, config.num_layers, config.num_kv_heads)
        memory = resident(shape.num_bytes).view(shape.dtype)
        self._blocks: KV | None = memory.reshape(
            shape.num_blocks, *heads, BLOCK_TOKENS, config.head_dim
        )
        self._rotation = SinkRotation(config, shape.kv)
        self._halves = Halves(self._blocks.shape[1:]) if shape.dtype == np.float16 else None

    @property
    def blocks(self) -> KV:
        """[num_blocks, 2, layers, kv_heads, 16, head_dim], keys first."""
        assert self._blocks is not None, "the pool is closed"
        return self._blocks

    def store(
        self, block_id: int, arena: Arena, lane: int, entry: int, num_rows: int = BLOCK_TOKENS
    ) -> None:
        """Copies the first rows of a block from a lane, where it is entry `entry` of the table."""
        rows = arena.rows(lane, entry * BLOCK_TOKENS, num_rows)
        block = self.blocks[block_id][..., :num_rows, :]
        if self._halves is not None:
            self._halves.store(cast(F32, rows), cast(F16, block))
        else:
            block[...] = rows

    def load(
        self, block_id: int, arena: Arena, lane: int, entry: int, num_rows: int = BLOCK_TOKENS
    ) -> None:
        """The way back."""
        rows = arena.rows(lane, entry * BLOCK_TOKENS, num_rows)
        block = self.blocks[block_id][..., :num_rows, :]
        if self._halves is not None:
            self._halves.load(cast(F16, block), cast(F32, rows))
        else:
            rows[...] = block

    def load_sinks(self, block_ids: list[int], arena: Arena, lane: int, shift: int) -> None:
        """Fills a lane's first slots from a stream's sink blocks, keys rotated `shift` further.

        From the blocks each time, whose keys stand at positions 0, 1, …: rotating the lane's own
        again and again would add up its roundings.
        """
        for entry, block_id in enumerate(block_ids):
            self.load(block_id, arena, lane, entry)
            keys = arena.rows(lane, entry * BLOCK_TOKENS, BLOCK_TOKENS)[0]
            keys[...] = self._rotation.shifted(keys, shift)

    def copy_rows(self, source: int, destination: int, num_rows: int) -> None:
        """The first rows of one block to another."""
        self.blocks[destination][..., :num_rows, :] = self.blocks[source][..., :num_rows, :]

    def close(self) -> None:
        """Drops the memory; nothing may use it afterwards."""
        self._blocks = None


class SinkRotation:
    """Rotates cached keys to later positions, with each layer's own RoPE.

    A rotation by p followed by one of `shift` is one of p + shift (Su et al., 2021), so a cached
    key needs no unrotated original. Following Xiao et al., 2023 (StreamingLLM), but at absolute
    positions: the sinks move instead of the window.
    """

    def __init__(self, config: ModelConfig, kv: str) -> None:
        self._round = _ROUNDING[kv]
        kinds = [config.rope if t == "full" else config.rope_local for t in config.layer_types]
        # YaRN's factor on cos and sin is in the cached keys already.
        self._ropes = [
            dataclasses.replace(rope or config.rope, attention_scaling=1.0) for rope in kinds
        ]

    def shifted(self, keys: KV, shift: int) -> KV:
        """Keys [layers, kv_heads, rows, head_dim] of an arena, `shift` positions later."""
        by_rope: dict[Rope, tuple[F32, F32]] = {
            rope: cos_sin(rope, np.array([shift])) for rope in dict.fromkeys(self._ropes)
        }
        cos, sin = (
            np.stack([by_rope[rope][which] for rope in self._ropes])[:, None]
            for which in (0, 1)  # [layers, 1, 1, head_dim / 2]
        )
        return self._round(rotate(keys.astype(np.float32), cos, sin))


def _round_f16(x: F32) -> KV:
    return x.astype(np.float16)


def _round_f32(x: F32) -> KV:
    return x


def _round_int8(x: F32) -> npt.NDArray[np.int8]:
    """Both channels of a RoPE pair have one step (`Observation.kv_scales`), so codes rotate as the
    keys themselves do; sized to the pair's norm, it leaves nothing to clip but the rounding.
    """
    return np.clip(np.rint(x), -127, 127).astype(np.int8)


_ROUNDING = {"f16": _round_f16, "f32": _round_f32, "int8": _round_int8}
