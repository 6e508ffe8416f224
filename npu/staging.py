"""Where the host puts what the NPU reads: native layouts as numpy views, and a lane's slots.

A lane's keys and values are in two places: the *main* inputs, one large buffer for each layer's
keys and values, and the *tail*, one small buffer for all layers. New rows go to the tail, which is
flushed at every step. When it has no room left, what belongs into main is written there, and main
is flushed, once in many steps: a flush of the CPU's cache takes whole buffers. Which tail entry is
which slot is a table of integers, so a rejected proposal, a branch that became text or an eviction
moves no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from headrace.errors import NpuModelError
from headrace.models.config import ModelConfig
from headrace.models.npu_io import NpuGeometry
from headrace.npu.abi import TYPES, TensorAttr, format_name

F32 = npt.NDArray[np.float32]
Native = npt.NDArray[np.generic]
"""[n, c1, h, w, c2]: channel c is at [.., c // c2, .., .., c % c2]."""

DTYPES = {"float16": np.float16, "int8": np.int8, "float32": np.float32}


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its buffer, by what the runtime answers to a query."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, int, int, int, int]
    """[n, c1, h, w, c2]"""
    strides: tuple[int, int, int, int, int]
    """Bytes, of the same axes."""
    size: int
    """Bytes of the buffer, padding included."""
    scale: float
    zero: int

    @classmethod
    def of(cls, attr: TensorAttr) -> Layout:
        """Raises NpuModelError for a layout that is none of the documented ones."""
        name, dims = attr.name.decode(errors="replace"), tuple(attr.dims[: attr.n_dims])
        fmt = format_name(attr.fmt)
        if attr.type not in TYPES or TYPES[attr.type] not in DTYPES:
            raise NpuModelError(f"{name}: of type {attr.type}, known are {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[TYPES[attr.type]])
        if fmt == "NC1HWC2" and len(dims) == 5:
            n, c1, h, w, c2 = dims
        elif fmt == "NHWC" and len(dims) == 4:
            (n, h, w, c2), c1 = dims, 1
        elif fmt == "NCHW" and len(dims) == 4:
            (n, c1, h, w), c2 = dims, 1
        else:
            n = c1 = h = w = c2 = 0
        if 0 in (n, c1, h, w, c2):
            raise NpuModelError(f"{name}: dims {dims} in layout {fmt}, which is not understood")
        stride, item = attr.w_stride or w, dtype.itemsize
        plane, most = h * stride, attr.size_with_stride // (n * c1 * c2 * item)
        if stride < w or plane > most:
            raise NpuModelError(
                f"{name}: {attr.size_with_stride} bytes and a row stride of {attr.w_stride} for "
                f"{dims} in layout {fmt}, which is not understood"
            )
        # Positions may be padded to four without the stride saying so; what else a buffer has
        # more lies behind the tensor.
        if plane < most == -(-plane // 4) * 4:
            plane = most
        column = c2 * item
        strides = (c1 * plane * column, plane * column, stride * column, column, item)
        return cls(
            name, dtype, (n, c1, h, w, c2), strides, attr.size_with_stride, attr.scale, attr.zp
        )

    def narrowed(self, width: int) -> Layout:
        """Its first columns: the others pad."""
        n, c1, h, _, c2 = self.shape
        return dataclasses.replace(self, shape=(n, c1, h, width, c2))

    def view(self, memory: npt.NDArray[np.uint8]) -> Native:
        view = np.ndarray(self.shape, self.dtype, memory.data, 0, self.strides)
        return cast(Native, view)

    def encode(self, x: F32) -> Native:
        if self.dtype != np.int8:
            return x.astype(self.dtype)
        codes: Native = np.clip(np.rint(x / self.scale) + self.zero, -128, 127).astype(np.int8)
        return codes

    def decode(self, x: Native) -> F32:
        if self.dtype != np.int8:
            return x.astype(np.float32)
        return ((x.astype(np.float32) - self.zero) * np.float32(self.scale)).astype(np.float32)

    def codes_as(self, other: Layout) -> bool:
        """Whether the same number has the same bits in both."""
        return (self.dtype, self.scale, self.zero) == (other.dtype, other.scale, other.zero)

    def recode(self, x: Native, source: Layout) -> Native:
        """Values of `source` as this tensor's."""
        return x if self.codes_as(source) else self.encode(source.decode(x))

    def split(self, rows: F32) -> F32:
        """Rows [w, c] as [c1, w, c2], channels padded with zeros."""
        _, c1, _, _, c2 = self.shape
        if rows.shape[1] != c1 * c2:
            padded = np.zeros((len(rows), c1 * c2), np.float32)
            padded[:, : rows.shape[1]] = rows
            rows = padded
        return rows.reshape(-1, c1, c2).transpose(1, 0, 2)

    def joined(self, columns: Native, num_channels: int) -> Native:
        """[c1, w, c2] as rows [w, c]."""
        rows = columns.transpose(1, 0, 2).reshape(columns.shape[1], -1)
        return rows[:, :num_channels]


class TailTable:
    """Which tail entry holds which slot of a lane. A slot without one is in main, if it is less
    than `main`, or holds nothing.
    """

    def __init__(self, main: int, num_entries: int) -> None:
        self.main = main
        self._free = list(range(num_entries))[::-1]
        self._entries: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def entry(self, slot: int) -> int | None:
        return self._entries.get(slot)

    def held(self) -> Iterable[tuple[int, int]]:
        """(slot, entry) of all."""
        return self._entries.items()

    def of_main(self) -> list[tuple[int, int]]:
        """(slot, entry) of those that main has a place for."""
        return [(slot, entry) for slot, entry in self._entries.items() if slot < self.main]

    def take(self, slots: Sequence[int]) -> list[int]:
        """Entries for slots that have none; there must be as many."""
        for slot in slots:
            assert slot not in self._entries
            self._entries[slot] = self._free.pop()
        return [self._entries[slot] for slot in slots]

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            entry = self._entries.pop(slot, None)
            if entry is not None:
                self._free.append(entry)

    def release_from(self, start: int, but: Sequence[int] = ()) -> None:
        """Slots from `start` on hold nothing any more."""
        self.release([slot for slot in self._entries if slot >= start and slot not in but])

    def rename(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """What `sources` have, all of them in the tail, `targets` have now."""
        moved = [self._entries.pop(slot) for slot in sources]
        self.release(targets)
        self._entries.update(zip(targets, moved, strict=True))


class LaneMemory:
    """Keys and values of one lane, where the NPU reads them."""

    def __init__(
        self,
        config: ModelConfig,
        geometry: NpuGeometry,
        tail: tuple[Layout, Native],
        mains: Sequence[tuple[Layout, Native]],
    ) -> None:
        """`mains` in the order of layers, keys before values."""
        self.table = TailTable(geometry.main, geometry.tail)
        self._heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._tail_layout, self._tail = tail
        self._mains = mains
        self.is_main_changed = False
        """Main was written to since it was flushed."""
        self._bytes_written = 0

    def take_bytes_written(self) -> int:
        """Since this was asked last."""
        num_bytes, self._bytes_written = self._bytes_written, 0
        return num_bytes

    def append(self, start: int, new: Native, layout: Layout, num_rows: int) -> None:
        """Rows that a pass has computed, for slots from `start` on."""
        entries = self.table.take(range(start, start + num_rows))
        rows = self._tail_layout.recode(new[:, :, 0, :num_rows], layout)
        self._tail[:, :, 0, entries] = rows
        self._bytes_written += rows.nbytes

    def make_room(self, num_rows: int) -> None:
        """Before a pass of so many rows: spills the tail if it must, or if main is flushed anyway."""
        if self.table.num_free < num_rows or self.is_main_changed:
            self._spill()
        assert self.table.num_free >= num_rows, "the tail has no room for a pass"

    def _spill(self, kept: Sequence[int] = ()) -> None:
        """Writes what belongs into main there, but for the slots `kept`."""
        spilled = [held for held in self.table.of_main() if held[0] not in kept]
        if not spilled:
            return
        slots, entries = (list(column) for column in zip(*spilled, strict=True))
        heads = self._heads
        for plane, (layout, main) in enumerate(self._mains):
            held = self._tail[plane * heads : (plane + 1) * heads, :, 0][:, :, entries]
            main[:, :, 0, slots] = layout.recode(held, self._tail_layout)
            self._bytes_written += held.nbytes
        self.table.release(slots)
        self.is_main_changed = True

    def read(self, start: int, num_rows: int) -> F32:
        """[2, layers, kv_heads, num_rows, head_dim]"""
        heads, planes = self._heads, len(self._mains)
        rows = np.empty((planes, heads, num_rows, self._head_dim), np.float32)
        for i in range(num_rows):
            entry = self.table.entry(start + i)
            for plane, (layout, main) in enumerate(self._mains):
                if entry is None:
                    held = layout.decode(main[:, :, 0, start + i])  # [kv_heads, c1, c2]
                else:
                    of_plane = self._tail[plane * heads : (plane + 1) * heads, :, 0, entry]
                    held = self._tail_layout.decode(of_plane)
                rows[plane, :, i] = held.reshape(heads, -1)[:, : self._head_dim]
        return rows.reshape(-1, 2, heads, num_rows, self._head_dim).swapaxes(0, 1)

    def write(self, start: int, rows: F32) -> None:
        """The way back, into main; to be flushed."""
        planes = rows.swapaxes(0, 1).reshape(len(self._mains), *rows.shape[2:])
        num_rows = rows.shape[3]
        for (layout, main), plane in zip(self._mains, planes, strict=True):
            for head, of_head in enumerate(plane):
                encoded = layout.encode(layout.split(of_head))
                main[head, :, 0, start : start + num_rows] = encoded
                self._bytes_written += encoded.nbytes
        self.table.release(range(start, start + num_rows))
        self.is_main_changed = True

    def gather(self, sources: Sequence[int], start: int) -> None:
        """Slots `sources` become `start`, `start` + 1, …, and what lies behind them nothing."""
        self.table.release_from(start, but=sources)
        self._into_tail(sources)
        self.table.rename(sources, range(start, start + len(sources)))

    def _into_tail(self, slots: Sequence[int]) -> None:
        """Proposals may have been spilled before their verdict came."""
        spilled = [slot for slot in slots if self.table.entry(slot) is None]
        if self.table.num_free < len(spilled):
            self._spill(kept=slots)
        for slot in spilled:
            (entry,) = self.table.take([slot])
            for plane, (layout, main) in enumerate(self._mains):
                of_plane = self._tail[plane * self._heads : (plane + 1) * self._heads, :, 0]
                held = self._tail_layout.recode(main[:, :, 0, slot], layout)
                of_plane[:, :, entry] = held
                self._bytes_written += held.nbytes

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slots `sources` become `targets`, and hold nothing themselves."""
        self._into_tail(sources)
        self.table.rename(sources, targets)

    def visible(self, past: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """(main, tail): which main slots hold something of the `past` slots in use [main], and each
        tail entry's slot, -1 for an entry that does not [tail].
        """
        in_main = np.arange(self.table.main) < past
        slots = np.full(self._tail.shape[3], -1, np.int64)
        for slot, entry in self.table.held():
            if slot < past:
                slots[entry] = slot
            if slot < self.table.main:
                in_main[slot] = False
        return in_main, slots
