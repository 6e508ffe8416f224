"""The target on ONNX Runtime's CPU execution provider."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.models.config import ModelConfig
from headrace.models.iospec import kv_names, present_names
from headrace.models.rope import cos_sin
from headrace.runtime.arena import Arena
from headrace.runtime.backend import BackendFacts
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.exactness import Machine, declared_rows, is_exact

MAX_ROWS = 256
"""Rows of a prefill chunk: more no longer raise the throughput, and stall others for longer."""

MAX_WANTED = 32

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
        self, session: ort.InferenceSession, config: ModelConfig, arena: Arena, shape: _Shape
    ) -> None:
        half = config.head_dim // 2
        lanes, rows = shape.lanes, shape.rows
        self.io = session.io_binding()
        self._alive: dict[str, ort.OrtValue] = {}
        self.input_ids = self._input("input_ids", np.zeros((lanes, rows), np.int64))
        self.ropes = [
            tuple(
                self._input(f"{name}{suffix}", np.zeros((lanes, rows, half), np.float32))
                for name in ("cos", "sin")
            )
            for suffix in (("", "_local") if config.rope_local else ("",))
        ]
        self.seqlens_k = self._input("seqlens_k", np.zeros(lanes, np.int32))
        self.query_seqlens = self._input("query_seqlens", np.zeros(lanes, np.int32))
        self.total = self._input("total_sequence_length", np.zeros((), np.int32))
        self.logit_rows = self._input("logit_rows", np.zeros(shape.wanted, np.int64))
        self.logits = np.zeros((shape.wanted, config.vocab_size), np.float32)
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
        """Binds a bias, whose width changes with every pass."""
        self._input(name, array)


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
    ) -> None:
        """Allocates the arena; `session` must hold a graph that `iospec` describes."""
        self.arena = Arena.allocate(config, kv, lanes, capacity)
        self.seconds_in_passes = 0.0
        self._session, self._config = session, config
        self._machine = machine or Machine.here()
        self._bindings: dict[_Shape, _Binding] = {}
        self._biases = _Biases(config.sliding_window)
        self._facts = BackendFacts(
            vocab_size=config.vocab_size,
            lanes=lanes,
            capacity=capacity,
            max_rows=MAX_ROWS,
            max_wanted=MAX_WANTED,
            exact=is_exact(config, kv, self._machine),
        )

    @property
    def facts(self) -> BackendFacts:
        return self._facts

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        """See Backend.forward."""
        self._check(rows)
        num_wanted = sum(len(r.wanted) for r in rows)
        shape, declared = self._shape(rows, num_wanted)
        binding = self._bindings.get(shape)
        if binding is None:
            binding = _Binding(self._session, self._config, self.arena, shape)
            self._bindings[shape] = binding
        self._fill(binding, shape, rows, declared)
        start = time.perf_counter()
        self._session.run_with_iobinding(binding.io)
        self.seconds_in_passes += time.perf_counter() - start
        return binding.logits[:num_wanted]

    def _shape(self, rows: Sequence[LaneRows], num_wanted: int) -> tuple[_Shape, list[int]]:
        declared = [declared_rows(r.past, r.num_rows, self._machine) for r in rows]
        first, last = rows[0].lane, rows[-1].lane
        # Two rows through the head, too: one row takes another kernel on some machines.
        wanted = max(2, 1 << (num_wanted - 1).bit_length()) if num_wanted else 2
        return _Shape(first, last - first + 1, _padded(max(declared)), wanted), declared

    def _fill(
        self, binding: _Binding, shape: _Shape, rows: Sequence[LaneRows], declared: Sequence[int]
    ) -> None:
        binding.input_ids[:] = 0
        positions = np.zeros((shape.lanes, shape.rows), np.int64)
        wanted: list[int] = []
        for i, r in enumerate(rows):
            binding.input_ids[i, : r.num_rows] = r.token_ids
            positions[i, : r.num_rows] = r.positions
            wanted += [i * shape.rows + row for row in r.wanted]
        binding.query_seqlens[:] = declared
        binding.seqlens_k[:] = [r.past + d - 1 for r, d in zip(rows, declared, strict=True)]
        # The operator refuses a total below the width of the pass.
        total = max(int(binding.seqlens_k.max()) + 1, shape.rows)
        binding.total[...] = total
        binding.logit_rows[:] = wanted + [0] * (shape.wanted - len(wanted))
        ropes = (self._config.rope, self._config.rope_local)
        for (cos, sin), rope in zip(binding.ropes, ropes, strict=False):
            assert rope is not None
            cos[...], sin[...] = cos_sin(rope, positions)
        binding.bind_bias("attention_bias", self._biases.full(shape.rows, rows, total))
        if self._config.has_local_layers:
            local = self._biases.local(shape.rows, rows, total)
            binding.bind_bias("attention_bias_local", local)

    def _check(self, rows: Sequence[LaneRows]) -> None:
        facts = self._facts
        assert rows, "a pass needs at least one lane"
        assert rows[0].lane >= 0 and rows[-1].lane < facts.lanes, "no such lane"
        assert all(b.lane == a.lane + 1 for a, b in pairwise(rows)), "lanes must be consecutive"
        assert all(r.past + r.num_rows <= facts.capacity for r in rows), "lane is full"
        assert all(r.num_rows <= facts.max_rows for r in rows), "too many rows in one pass"
        assert sum(len(r.wanted) for r in rows) <= facts.max_wanted, "too many logits wanted"

    def close(self) -> None:
        """Drops bindings and session; the arena's memory goes with the last view of it."""
        self._bindings.clear()
        del self._session


class _Biases:
    """Attention biases [lanes, 1, rows, total]; causality itself is the operator's."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        # Never written: its pages stay the kernel's one zero page.
        self._zeros = np.zeros(0, np.float32)

    def full(self, width: int, rows: Sequence[LaneRows], total: int) -> F32:
        shape = (len(rows), 1, width, total)
        if all(r.hidden is None for r in rows):
            size = int(np.prod(shape))
            if size > len(self._zeros):
                self._zeros = np.zeros(size, np.float32)
            return self._zeros[:size].reshape(shape)
        bias = np.zeros(shape, np.float32)
        self._hide_branches(bias, rows)
        return bias

    def local(self, width: int, rows: Sequence[LaneRows], total: int) -> F32:
        """Masks what lies `window` or more positions back. By logical position: the operator's
        own window counts slots, and slots are not in order once a ring has wrapped.
        """
        assert self._window is not None
        bias = np.zeros((len(rows), 1, width, total), np.float32)
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
                bias[i, 0, : r.num_rows, r.past : r.past + r.num_rows][r.hidden] = _MASKED


def _padded(num_rows: int) -> int:
    """Width of a pass: few widths, so that few bindings are ever made."""
    if num_rows <= 16:
        return num_rows
    step = 16 if num_rows <= 64 else 64
    return -(-num_rows // step) * step
