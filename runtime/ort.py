"""The target on ONNX Runtime's CPU execution provider."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.errors import ModelOutputError
from headrace.models.config import ModelConfig
from headrace.models.iospec import kv_names, present_names
from headrace.models.rope import RopeTable
from headrace.runtime.arena import Arena, ArenaShape
from headrace.runtime.backend import BackendFacts
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.cores import Cpus, pinned
from headrace.runtime.exactness import (
    MIN_DECLARED_ROWS,
    Machine,
    declared_rows,
)
from headrace.runtime.pages import untouched

MAX_ROWS = 256
"""Rows of a prefill chunk: more no longer raise the throughput, and stall others for longer."""

MAX_WANTED = 32

_TOTAL_STEP = 64
"""The declared total grows in steps, so that most passes keep the bias of the one before."""

MAX_BINDINGS = 64
_MAX_ZEROS = 64

_T = TypeVar("_T", bound=np.generic)

_MASKED = np.float32(-1e9)


@dataclass(frozen=True)
class _Shape:
    """What a prepared binding is good for."""

    first_lane: int
    lanes: int
    rows: int
    wanted: int


class _Binding:
    """An IOBinding with the arrays it points at: OrtValues share the memory of numpy arrays, so
    both must live as long as the binding does.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        config: ModelConfig,
        arena: Arena,
        logits: F32,
        shape: _Shape,
    ) -> None:
        half = config.head_dim // 2
        lanes, rows = shape.lanes, shape.rows
        self.io = session.io_binding()
        self._alive: dict[str, ort.OrtValue] = {}
        self._bound: dict[str, F32] = {}
        self.input_ids = self._input("input_ids", np.zeros((lanes, rows), np.int64))
        self.ropes = [
            (
                self._input(f"cos{suffix}", np.zeros((lanes, rows, half), np.float32)),
                self._input(f"sin{suffix}", np.zeros((lanes, rows, half), np.float32)),
            )
            for suffix in (("", "_local") if config.rope_local else ("",))
        ]
        self.seqlens_k = self._input("seqlens_k", np.zeros(lanes, np.int32))
        self.query_seqlens = self._input("query_seqlens", np.zeros(lanes, np.int32))
        self.total = self._input("total_sequence_length", np.zeros((), np.int32))
        self.logit_rows = self._input("logit_rows", np.zeros(shape.wanted, np.int64))
        self.logits = logits[: shape.wanted]
        self.io.bind_ortvalue_output("logits", self._keep("logits", self.logits))
        held = slice(shape.first_lane, shape.first_lane + lanes)
        for layer in range(config.num_layers):
            arrays = (arena.keys[layer][held], arena.values[layer][held])
            names = zip(kv_names(layer), present_names(layer), arrays, strict=True)
            for past, present, array in names:
                value = self._keep(past, array)
                self.io.bind_ortvalue_input(past, value)
                self.io.bind_ortvalue_output(present, value)

    def _keep(self, name: str, array: npt.NDArray[np.generic]) -> ort.OrtValue:
        self._alive[name] = ort.OrtValue.ortvalue_from_numpy(array)
        return self._alive[name]

    def _input(self, name: str, array: npt.NDArray[_T]) -> npt.NDArray[_T]:
        self.io.bind_ortvalue_input(name, self._keep(name, array))
        return array

    def bind_bias(self, name: str, array: F32) -> None:
        """Binds a bias; its width grows with the lanes, so not every pass brings another."""
        if self._bound.get(name) is not array:
            self._bound[name] = self._input(name, array)


class OrtBackend:
    """Implements Backend with `lanes` x `capacity` tokens of KV in one arena."""

    def __init__(
        self,
        session: ort.InferenceSession,
        config: ModelConfig,
        *,
        kv: str,
        lanes: int,
        capacity: int,
        machine: Machine | None = None,
        least_rows: int = MIN_DECLARED_ROWS,
        cpus: Cpus | None = None,
    ) -> None:
        """Allocates the arena; `session` must hold a graph that `iospec` describes. The thread
        that calls `forward` computes on one of `cpus` until it returns. `least_rows` is what
        `exactness.least_rows` says of the graph.
        """
        self.arena = Arena(ArenaShape(config, kv, lanes, capacity))
        self.seconds_in_passes = 0.0
        self._session: ort.InferenceSession | None = session
        self._config = config
        self._machine = machine or Machine.here()
        self._cpus = cpus
        self._logits = np.zeros((MAX_WANTED, config.num_logits), np.float32)
        self._bindings: dict[_Shape, _Binding] = {}
        self._biases = _Biases(
            config.local_window,
            lanes * min(MAX_ROWS, self.arena.slots) * self.arena.slots,
        )
        self._ropes = [RopeTable(config.rope)]
        if config.rope_local is not None:
            self._ropes.append(RopeTable(config.rope_local))
        self._facts = BackendFacts(
            vocab_size=config.vocab_size,
            num_logits=config.num_logits,
            lanes=lanes,
            capacity=capacity,
            max_rows=MAX_ROWS,
            max_wanted=MAX_WANTED,
            least_rows=least_rows,
            row_multiple=self._machine.row_multiple,
        )

    @property
    def facts(self) -> BackendFacts:
        return self._facts

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        """See Backend.forward."""
        assert self._session is not None, "the backend is closed"
        num_wanted = sum(len(r.wanted) for r in rows)
        shape, declared = self._shape(rows, num_wanted)
        binding = self._bindings.pop(shape, None)
        if binding is None:
            if len(self._bindings) >= MAX_BINDINGS:
                self._bindings.pop(next(iter(self._bindings)))
            binding = _Binding(self._session, self._config, self.arena, self._logits, shape)
        self._bindings[shape] = binding  # the most recently used one stands last
        self._fill(binding, shape, rows, declared)
        start = time.perf_counter()
        try:
            with pinned(self._cpus):
                self._session.run_with_iobinding(binding.io)
        except Exception as error:  # ONNX Runtime's have no other common base
            raise ModelOutputError(f"ONNX Runtime failed in a pass: {error}") from error
        self.seconds_in_passes += time.perf_counter() - start
        return binding.logits[:num_wanted]

    def _shape(self, rows: Sequence[LaneRows], num_wanted: int) -> tuple[_Shape, list[int]]:
        facts, first, declared = self._facts, rows[0].lane, []
        for i, r in enumerate(rows):
            assert r.lane == first + i < facts.lanes, "lanes must exist and be consecutive"
            assert r.past + r.num_rows <= facts.capacity, "lane is full"
            assert r.num_rows <= facts.max_rows, "too many rows in one pass"
            if r.exact:
                number = declared_rows(r.past, r.num_rows, self._machine, facts.least_rows)
            else:
                number = r.num_rows
            declared.append(max(1, number))  # the operator refuses a lane of no rows
        assert num_wanted <= facts.max_wanted, "too many logits wanted"
        # Two rows through the head, too: one row takes another kernel on some machines.
        least = facts.least_rows if any(r.exact for r in rows) else 1
        wanted = 1 << (max(least, num_wanted) - 1).bit_length()
        # The operator refuses a width that does not fit behind what a lane holds.
        width = min(_padded(max(declared)), self.arena.slots - max(r.past for r in rows))
        assert width >= max(declared), "a lane has no room for the longest lane's rows"
        return _Shape(first, len(rows), width, wanted), declared

    def _fill(
        self, binding: _Binding, shape: _Shape, rows: Sequence[LaneRows], declared: Sequence[int]
    ) -> None:
        """Writes a pass's inputs. What padding rows hold does not matter and is left as it was.

        After a pass the caches are full of weights, so every Python object touched here costs
        several times what a warm loop would show.
        """
        wanted: list[int] = []
        total = shape.rows  # the operator refuses a total below the width of the pass
        for i, (r, num_declared) in enumerate(zip(rows, declared, strict=True)):
            binding.input_ids[i, : r.num_rows] = r.token_ids
            for (cos, sin), table in zip(binding.ropes, self._ropes, strict=True):
                cos[i, : r.num_rows], sin[i, : r.num_rows] = table.rows(r.positions)
            binding.query_seqlens[i] = num_declared
            binding.seqlens_k[i] = r.past + num_declared - 1
            total = max(total, r.past + num_declared)
            wanted += [i * shape.rows + row for row in r.wanted]
        binding.logit_rows[: len(wanted)] = wanted
        binding.logit_rows[len(wanted) :] = 0
        # The lanes' own lengths decide what is attended to; the total only has to cover them.
        total = min(-(-total // _TOTAL_STEP) * _TOTAL_STEP, self.arena.slots)
        binding.total[...] = total
        binding.bind_bias("attention_bias", self._biases.full(shape.rows, rows, total))
        if self._config.has_local_layers:
            local = self._biases.local(shape.rows, rows, total)
            binding.bind_bias("attention_bias_local", local)

    def close(self) -> None:
        """Drops session, bindings and arena; may be called again, `forward` may not."""
        self._session = None
        self._bindings.clear()
        self.arena.close()


class _Biases:
    """Attention biases [lanes, 1, rows, total]; causality itself is the operator's."""

    def __init__(self, window: int | None, max_values: int) -> None:
        """`max_values` is the size of the largest bias."""
        self._window = window
        self._zeros: dict[tuple[int, ...], F32] = {}
        # One place each for biases of zeros and for those that hold something, so that the bindings
        # of many shapes do not each keep one; pages become resident as they are written.
        self._nothing = untouched(max_values * 4).view(np.float32)
        self._branches = np.empty(max_values, np.float32)
        self._local = np.empty(max_values if window is not None else 0, np.float32)

    def full(self, width: int, rows: Sequence[LaneRows], total: int) -> F32:
        shape = (len(rows), 1, width, total)
        if all(r.hidden is None for r in rows):
            return self._zero(shape)
        bias = _cleared(self._branches, shape)
        self._hide_branches(bias, rows)
        return bias

    def _zero(self, shape: tuple[int, ...]) -> F32:
        """The same array for the same shape, a view of what is never written."""
        zeros = self._zeros.get(shape)
        if zeros is None:
            if len(self._zeros) >= _MAX_ZEROS:
                self._zeros.pop(next(iter(self._zeros)))
            zeros = self._nothing[: int(np.prod(shape))].reshape(shape)
            self._zeros[shape] = zeros
        return zeros

    def local(self, width: int, rows: Sequence[LaneRows], total: int) -> F32:
        """Masks what lies `window` or more positions back. By logical position: the operator's
        own window counts slots, and slots are not in order once a ring has wrapped.
        """
        assert self._window is not None
        bias = _cleared(self._local, (len(rows), 1, width, total))
        for i, r in enumerate(rows):
            slots = np.arange(r.past) if r.slot_positions is None else r.slot_positions
            keys = np.concatenate([slots, r.positions])  # [past + n]
            far = r.positions[:, None] - keys[None, :] >= self._window  # [n, past + n]
            bias[i, 0, : r.num_rows, : len(keys)][far] = _MASKED
        self._hide_branches(bias, rows)
        return bias

    @staticmethod
    def _hide_branches(bias: F32, rows: Sequence[LaneRows]) -> None:
        for i, r in enumerate(rows):
            if r.hidden is not None:
                end = r.past + r.num_rows
                start = end - r.hidden.shape[1]
                bias[i, 0, : r.num_rows, start:end][r.hidden] = _MASKED


def _cleared(place: F32, shape: tuple[int, ...]) -> F32:
    """The beginning of `place` as zeros of this shape."""
    view = place[: int(np.prod(shape))].reshape(shape)
    view[...] = 0
    return view


def _padded(num_rows: int) -> int:
    """Width of a pass: few widths, so that few bindings are ever made."""
    if num_rows <= 16:
        return num_rows
    step = 16 if num_rows <= 64 else 32 if num_rows <= 128 else 64
    return -(-num_rows // step) * step
