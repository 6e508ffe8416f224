"""A draft's passes, whatever carries them to the NPU: inputs written, results taken, lanes kept.

Rows go into the narrowest variant that holds them; new keys and values come back and are put into
the tail (staging.py). How inputs reach the NPU and how it is run is the transport's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import NpuDeviceError, NpuModelError
from headrace.models.npu_io import NpuFiles
from headrace.models.rope import RopeTable
from headrace.npu.staging import F32, LaneMemory, Layout, Native
from headrace.runtime.backend import BackendFacts
from headrace.runtime.batch import LaneRows


@dataclass
class NpuCounters:
    """Since the backend was opened."""

    runs: int = 0
    retries: int = 0
    """Runs that failed once and then succeeded."""
    bytes_written: int = 0
    """Into memory that the NPU reads, or that is copied there."""
    bytes_flushed: int = 0
    """Of whole buffers, either way; or copied."""
    main_flushes: int = 0
    binds: int = 0
    """Passes before which buffers were bound: another lane's, or of another width."""


class Placed(Protocol):
    """A tensor in memory."""

    @property
    def layout(self) -> Layout: ...

    @property
    def native(self) -> Native: ...


class NpuPasses(ABC):
    """Implements `runtime.backend.LaneBackend` over a transport, for one lane a pass."""

    seconds_in_passes = 0.0

    def __init__(
        self, files: NpuFiles, lanes: Sequence[LaneMemory], widths: tuple[int, ...] | None = None
    ) -> None:
        """`lanes` are the transport's; it may drop them when it is closed. `widths` are the variants
        that it can run, all if None. Raises NpuModelError.
        """
        config, g = files.config, files.io.geometry
        self._widths = widths or g.rows
        self._files, self._config, self._geometry = files, config, g
        self._memories = lanes
        self._embeddings = _mapped(files)
        self._ropes = [RopeTable(config.rope)]
        if config.rope_local is not None:
            self._ropes.append(RopeTable(config.rope_local))
        self.counters = NpuCounters()
        self.arena = _Arena(lanes)
        self.facts = BackendFacts(
            vocab_size=config.vocab_size,
            num_logits=config.num_logits,
            lanes=len(lanes),
            capacity=g.main + g.tail,
            max_rows=max(g.rows),
            max_wanted=max(g.rows),
            least_rows=1,
            row_multiple=1,
        )

    @abstractmethod
    def _inputs(self, rows: int) -> Mapping[str, Placed]:
        """Where the inputs of a variant go, keys and values apart."""

    @abstractmethod
    def _compute(self, rows: int, lane: int, *, with_logits: bool) -> Mapping[str, Placed]:
        """Outputs of the variant on what was written; logits only if they are wanted.

        Raises NpuError.
        """

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        """See LaneBackend.forward; `rows` is one lane's. Raises NpuError."""
        (r,) = rows
        assert 0 < r.num_rows <= self.facts.max_rows
        assert r.past + r.num_rows <= self.facts.capacity, "lane is full"
        width = next(w for w in self._widths if w >= r.num_rows)
        memory = self._memories[r.lane]
        memory.table.release_from(r.past)
        memory.make_room(r.num_rows)
        self._fill(self._inputs(width), r, memory)
        self.counters.bytes_written += memory.take_bytes_written()
        start = time.perf_counter()
        try:
            outputs = self._compute(width, r.lane, with_logits=bool(r.wanted))
        finally:
            self.seconds_in_passes += time.perf_counter() - start
        logits = self._logits(outputs, r.wanted)
        new = outputs["new"]
        # Something that is no number would stay in the lane: no mask hides it from a sum.
        _require_numbers(new.native[:, :, 0, : r.num_rows])
        memory.append(r.past, new.native, new.layout, r.num_rows)
        return logits

    def prove(self) -> None:
        """Runs the export's probe, in chunks and whole, and leaves lane 0 as if nothing had been.

        Strides that are not as they were understood, and an overflow on silicon, show here and
        nowhere else before a proposal is refused. Raises NpuError.
        """
        probe = self._files.io.probe
        if probe is None:
            return
        ids, expected = np.array(probe.token_ids, np.int64), np.array(probe.logits, np.float32)
        whole = max(self._widths)
        for widths in (self._widths[:2][::-1], (whole,)):
            past, logits = 0, np.empty((0, 0), np.float32)
            while past < len(ids):
                # Wide ones first, then single rows: each width takes part.
                num = next((w for w in widths if w < len(ids) - past), min(widths))
                num = min(num, len(ids) - past)
                positions = np.arange(past, past + num)
                logits = self.forward(
                    [LaneRows(0, ids[past : past + num], positions, past, (num - 1,), exact=False)]
                )
                past += num
                # Main takes part too, which is written once in many passes otherwise.
                self._memories[0].is_main_changed |= past <= widths[0]
            error = np.abs(logits[0, list(probe.columns)] - expected).max() / np.ptp(expected)
            if not error <= probe.tolerance:
                raise NpuModelError(
                    f"the NPU does not compute what was exported: on the probe its logits are "
                    f"{error:.1%} of their range off, {probe.tolerance:.0%} are allowed; compare "
                    "driver and library with `headrace doctor`, or use the draft on the CPU"
                )
        self._memories[0].table.release_from(0)

    def _fill(self, inputs: Mapping[str, Placed], r: LaneRows, memory: LaneMemory) -> None:
        """Writes a pass's inputs but the keys and values. Rows beyond its own see the first entry
        of the tail, so that no row sees nothing.
        """
        num = r.num_rows
        width = next(w for w in self._widths if w >= r.num_rows)
        # In all rows: a norm of zeros would be no number, which a mask does not hide.
        ids = np.resize(r.token_ids, width)
        self._put(inputs, "embeds", self._embeddings[ids].astype(np.float32))
        for suffix, table in zip(("", "_local"), self._ropes, strict=False):
            for name, half in zip(("cos", "sin"), table.rows(r.positions), strict=True):
                self._put(inputs, f"{name}{suffix}", np.concatenate([half, half], axis=1))
        in_main, slots = memory.visible(r.past)
        g = self._geometry
        sees = np.zeros((width, g.keys(width)), np.bool_)
        sees[:num, : g.main] = in_main
        sees[:num, g.main : g.main + g.tail] = slots >= 0
        sees[:num, g.main + g.tail :][:, :num] = np.tri(num, dtype=np.bool_)
        sees[num:, g.main] = True
        if r.hidden is not None:
            self._hide(sees[:num], r, r.hidden, slots)
        self._mask(inputs, "mask", sees)
        if self._config.has_local_layers:
            self._mask(inputs, "mask_local", self._near(sees, r, slots))

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

    def _put(self, inputs: Mapping[str, Placed], name: str, rows: F32) -> None:
        """Rows [n, c] of an input [1, c, 1, w]."""
        tensor = inputs[name]
        encoded = tensor.layout.encode(tensor.layout.split(rows))
        tensor.native[0, :, 0, : len(rows)] = encoded
        self.counters.bytes_written += encoded.nbytes

    def _mask(self, inputs: Mapping[str, Placed], name: str, sees: npt.NDArray[np.bool_]) -> None:
        tensor = inputs[name]
        off = tensor.layout.encode(np.array([0.0, self._files.io.mask], np.float32))
        tensor.native[0, 0, :, :, 0] = np.where(sees, off[0], off[1])
        self.counters.bytes_written += sees.size * tensor.layout.dtype.itemsize

    def _logits(self, outputs: Mapping[str, Placed], wanted: Sequence[int]) -> F32:
        """[len(wanted), num_logits]"""
        if not wanted:
            return np.empty((0, self._config.num_logits), np.float32)
        tensor = outputs["logits"]
        columns = tensor.native[0, :, 0][:, list(wanted)]  # [c1, n, c2]
        logits = tensor.layout.joined(columns, self._config.num_logits)
        _require_numbers(logits)
        return tensor.layout.decode(logits)


def _mapped(files: NpuFiles) -> npt.NDArray[np.float16]:
    """The embeddings: a row's page is read when its token comes. Raises NpuModelError."""
    shape = (files.config.vocab_size, files.config.hidden_size)
    try:
        return np.memmap(files.embeddings, np.float16, "r", shape=shape)
    except (OSError, ValueError) as error:
        raise NpuModelError(f"{files.embeddings}: {error}; export the model again") from error


def _require_numbers(x: Native) -> None:
    if not np.isfinite(x).all():
        raise NpuDeviceError("the NPU's results are not numbers: an overflow, or a fault")


class _Arena:
    """The lanes' memory, as `runtime.backend.KvMemory`."""

    def __init__(self, lanes: Sequence[LaneMemory]) -> None:
        self._lanes = lanes

    def read(self, lane: int, start: int, num_rows: int) -> F32:
        return self._lanes[lane].read(start, num_rows)

    def write(self, lane: int, start: int, rows: npt.NDArray[np.generic]) -> None:
        self._lanes[lane].write(start, rows.astype(np.float32))

    def gather(self, lane: int, sources: Sequence[int], start: int) -> None:
        self._lanes[lane].gather(sources, start)

    def move(self, lane: int, source: range, destination: range) -> None:
        self._lanes[lane].move(source, destination)
