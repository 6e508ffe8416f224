"""RknnBackend: the draft on the NPU, keys and values in memory that it reads in place.

A pass writes embeddings, positions and masks, flushes them and the tail, runs the variant that its
rows fit in, and puts the new keys and values into the tail. Implements `runtime.backend.LaneBackend`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import NpuDeviceError, NpuModelError, NpuTimeoutError
from headrace.models.npu_io import NpuFiles, NpuIo, main_names
from headrace.models.rope import RopeTable
from headrace.npu.librknnrt import CORES, Buffer, CoreMask, Flag, Library, Versions
from headrace.npu.staging import F32, LaneMemory, Native
from headrace.npu.variants import Variant, open_variant, same_layouts
from headrace.runtime.backend import BackendFacts
from headrace.runtime.batch import LaneRows

TIMEOUT_MS = 2000
"""Of one run; the longest, a chunk of a long text, takes a few tens of milliseconds."""


@dataclass
class NpuCounters:
    """Since the backend was opened."""

    runs: int = 0
    retries: int = 0
    """Runs that failed once and then succeeded."""
    bytes_written: int = 0
    """Into buffers that the NPU reads."""
    bytes_flushed: int = 0
    """Of whole buffers, either way."""
    main_flushes: int = 0
    lane_binds: int = 0


class RknnBackend:
    """Passes of one lane at a time."""

    def __init__(
        self,
        model: NpuFiles,
        library: Library,
        *,
        lanes: int,
        cores: CoreMask = CoreMask.AUTO,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Loads the model and allocates all buffers; whatever fails, all of it is given back.

        Raises NpuError.
        """
        self._model, self._config, self._io = model, model.config, model.io
        self._geometry, self._timeout_ms = model.io.geometry, timeout_ms
        self._embeddings = mapped(model)
        self._ropes = [RopeTable(self._config.rope)]
        if self._config.rope_local is not None:
            self._ropes.append(RopeTable(self._config.rope_local))
        self.counters = NpuCounters()
        self.seconds_in_passes = 0.0
        self.versions: Versions
        self._lanes: list[_Lane] = []
        with ExitStack() as stack:
            self._variants = self._open(library, cores, lanes, stack)
            self._stack = stack.pop_all()
        g = self._geometry
        self.arena = _Arena(self._lanes)
        self.facts = BackendFacts(
            vocab_size=self._config.vocab_size,
            num_logits=self._config.num_logits,
            lanes=lanes,
            capacity=g.main + g.tail,
            max_rows=max(g.rows),
            max_wanted=max(g.rows),
            least_rows=1,
            most_padding=0,
            exact=False,
        )

    @property
    def version(self) -> str:
        """Of library and driver."""
        return f"{self.versions.library} {self.versions.driver}"

    def _open(
        self, library: Library, cores: CoreMask, num_lanes: int, stack: ExitStack
    ) -> list[Variant]:
        flags = Flag.PRIOR_MEDIUM | Flag.DISABLE_FLUSH_INPUT | Flag.DISABLE_FLUSH_OUTPUT
        first = stack.enter_context(library.init(self._model.rknn, flags))
        self.versions = first.require_versions(self._io.toolkit)
        variants = []
        for i, variant in enumerate(self._io.variants):
            context = first if i == 0 else stack.enter_context(first.duplicate())
            variants.append(open_variant(stack, context, self._io, variant, cores))
        layouts = same_layouts(variants)
        names = [n for layer in range(self._config.num_layers) for n in main_names(layer)]
        for _ in range(num_lanes):
            buffers = {
                name: stack.enter_context(first.allocate(layout.size))
                for name, layout in layouts.items()
            }
            variants[0].lanes.append(buffers)
            for other in variants[1:]:
                shared = {
                    name: stack.enter_context(other.context.share(buffer))
                    for name, buffer in buffers.items()
                }
                other.lanes.append(shared)
            views = {
                name: (layouts[name], layouts[name].view(b.bytes)) for name, b in buffers.items()
            }
            memory = LaneMemory(
                self._config, self._geometry, views["tail"], [views[n] for n in names]
            )
            self._lanes.append(_Lane(memory, buffers["tail"], [buffers[n] for n in names]))
        return variants

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        """See LaneBackend.forward; `rows` is one lane's. Raises NpuError after a second failure."""
        (r,) = rows
        assert 0 < r.num_rows <= self.facts.max_rows
        assert r.past + r.num_rows <= self.facts.capacity, "lane is full"
        variant = next(v for v in self._variants if v.rows >= r.num_rows)
        lane = self._lanes[r.lane]
        memory = lane.memory
        memory.table.release_from(r.past)
        memory.make_room(r.num_rows)
        self._fill(variant, r, memory)
        self._flush(lane, variant)
        if variant.lane != r.lane:
            variant.use_lane(r.lane)
            self.counters.lane_binds += 1
        start = time.perf_counter()
        try:
            self._run(variant)
        finally:
            self.seconds_in_passes += time.perf_counter() - start
        logits = self._logits(variant, r.wanted)
        new = variant.outputs["new"]
        self._from_device(new.buffer)
        # Something that is no number would stay in the lane: no mask hides it from a sum.
        _require_numbers(new.native[:, :, 0, : r.num_rows])
        memory.append(r.past, new.native, new.layout, r.num_rows)
        return logits

    def _fill(self, variant: Variant, r: LaneRows, memory: LaneMemory) -> None:
        """Writes a pass's inputs but the keys and values. Rows beyond its own see the first entry
        of the tail, so that no row sees nothing.
        """
        num = r.num_rows
        self._put(variant, "embeds", self._embeddings[r.token_ids].astype(np.float32))
        for suffix, table in zip(("", "_local"), self._ropes, strict=False):
            for name, half in zip(("cos", "sin"), table.rows(r.positions), strict=True):
                self._put(variant, f"{name}{suffix}", np.concatenate([half, half], axis=1))
        in_main, slots = memory.visible(r.past)
        g = self._geometry
        sees = np.zeros((variant.rows, g.keys(variant.rows)), np.bool_)
        sees[:num, : g.main] = in_main
        sees[:num, g.main : g.main + g.tail] = slots >= 0
        sees[:num, g.main + g.tail :][:, :num] = np.tri(num, dtype=np.bool_)
        sees[num:, g.main] = True
        if r.hidden is not None:
            self._hide(sees[:num], r, r.hidden, slots)
        self._mask(variant, "mask", sees)
        if self._config.has_local_layers:
            self._mask(variant, "mask_local", self._near(sees, r, slots))

    def _hide(
        self,
        sees: npt.NDArray[np.bool_],
        r: LaneRows,
        hidden: npt.NDArray[np.bool_],
        slots: npt.NDArray[np.int64],
    ) -> None:
        """`hidden` [n, m + n] is about the last m slots and the pass's own rows."""
        g, first = self._geometry, r.past - (hidden.shape[1] - r.num_rows)
        own = g.main + g.tail
        sees[:, own : own + r.num_rows] &= ~hidden[:, hidden.shape[1] - r.num_rows :]
        for column, slot in enumerate(range(first, r.past)):
            if slot < g.main:
                sees[:, slot] &= ~hidden[:, column]
            sees[:, g.main : g.main + g.tail][:, slots == slot] &= ~hidden[:, column, None]

    def _near(
        self, sees: npt.NDArray[np.bool_], r: LaneRows, slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """What a local layer sees of it, by logical position."""
        g, window = self._geometry, self._config.local_window
        assert window is not None
        of_slot = np.arange(r.past) if r.slot_positions is None else r.slot_positions
        positions = np.full(sees.shape[1], np.iinfo(np.int32).max, np.int64)
        filled = min(g.main, r.past)
        positions[:filled] = of_slot[:filled]
        held = np.flatnonzero(slots >= 0)
        positions[g.main + held] = of_slot[slots[held]]
        positions[g.main + g.tail :][: r.num_rows] = r.positions
        near = sees.copy()
        near[: r.num_rows] &= r.positions[:, None] - positions[None] < window
        return near

    def _put(self, variant: Variant, name: str, rows: F32) -> None:
        """Rows [n, c] of an input [1, c, 1, w]."""
        tensor = variant.inputs[name]
        encoded = tensor.layout.encode(tensor.layout.split(rows))
        tensor.native[0, :, 0, : len(rows)] = encoded
        self.counters.bytes_written += encoded.nbytes

    def _mask(self, variant: Variant, name: str, sees: npt.NDArray[np.bool_]) -> None:
        tensor = variant.inputs[name]
        off = tensor.layout.encode(np.array([0.0, self._io.mask], np.float32))
        tensor.native[0, 0, :, :, 0] = np.where(sees, off[0], off[1])
        self.counters.bytes_written += sees.size * tensor.layout.dtype.itemsize

    def _flush(self, lane: _Lane, variant: Variant) -> None:
        for tensor in variant.inputs.values():
            self._to_device(tensor.buffer)
        self._to_device(lane.tail)
        if lane.memory.is_main_changed:
            for buffer in lane.mains:
                self._to_device(buffer)
            lane.memory.is_main_changed = False
            self.counters.main_flushes += 1
        self.counters.bytes_written += lane.memory.take_bytes_written()

    def _run(self, variant: Variant) -> None:
        """Once more after a failure: all inputs are still in place."""
        self.counters.runs += 1
        try:
            variant.context.run(self._timeout_ms)
        except (NpuTimeoutError, NpuDeviceError):
            variant.context.run(self._timeout_ms)
            self.counters.retries += 1

    def _logits(self, variant: Variant, wanted: Sequence[int]) -> F32:
        """[len(wanted), num_logits]"""
        if not wanted:
            return np.empty((0, self._config.num_logits), np.float32)
        tensor = variant.outputs["logits"]
        self._from_device(tensor.buffer)
        columns = tensor.native[0, :, 0][:, list(wanted)]  # [c1, n, c2]
        logits = tensor.layout.joined(columns, self._config.num_logits)
        _require_numbers(logits)
        return tensor.layout.decode(logits)

    def _to_device(self, buffer: Buffer) -> None:
        buffer.to_device()
        self.counters.bytes_flushed += buffer.size

    def _from_device(self, buffer: Buffer) -> None:
        buffer.from_device()
        self.counters.bytes_flushed += buffer.size

    def close(self) -> None:
        """Gives contexts and buffers back; may be called again, `forward` may not."""
        self._lanes.clear()
        self._variants.clear()
        self._stack.close()


def open_backend(files: NpuFiles, *, library: Path | None, lanes: int, cores: str) -> RknnBackend:
    """What the runtime opens a compiled draft by. Raises NpuError."""
    return RknnBackend(
        files, Library(None if library is None else str(library)), lanes=lanes, cores=CORES[cores]
    )


def mapped(files: NpuFiles) -> npt.NDArray[np.float16]:
    """The embeddings: a row's page is read when its token comes. Raises NpuModelError."""
    shape = (files.config.vocab_size, files.config.hidden_size)
    try:
        return np.memmap(files.embeddings, np.float16, "r", shape=shape)
    except (OSError, ValueError) as error:
        raise NpuModelError(f"{files.embeddings}: {error}; export the model again") from error


def _require_numbers(x: Native) -> None:
    if not np.isfinite(x).all():
        raise NpuDeviceError("the NPU's results are not numbers: an overflow, or a fault")


@dataclass(eq=False)
class _Lane:
    memory: LaneMemory
    tail: Buffer
    mains: list[Buffer]


class _Arena:
    """The lanes' memory, as `runtime.backend.KvMemory`."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = lanes

    def read(self, lane: int, start: int, num_rows: int) -> F32:
        return self._lanes[lane].memory.read(start, num_rows)

    def write(self, lane: int, start: int, rows: npt.NDArray[np.generic]) -> None:
        self._lanes[lane].memory.write(start, rows.astype(np.float32))

    def gather(self, lane: int, sources: Sequence[int], start: int) -> None:
        self._lanes[lane].memory.gather(sources, start)

    def move(self, lane: int, source: range, destination: range) -> None:
        self._lanes[lane].memory.move(source, destination)


def kv_bytes(io: NpuIo) -> int:
    """Of one lane's keys and values, native layouts included."""
    tensors = io.variants[0].inputs
    return sum(t.size for t in tensors if t.name == "tail" or t.name.startswith("main."))
