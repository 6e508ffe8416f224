"""What a model takes beside its weights, pool and arena: measured where it is prepared.

A process of its own loads the prepared graph and runs the largest passes on empty memory. ONNX
Runtime's memory arena grows to the largest pass it has seen and keeps that; attention needs next to
nothing for the context's length.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.models.config import ModelConfig
from headrace.models.iospec import LANES, LOGIT_ROWS, ROWS, SLOTS, TOTAL
from headrace.runtime.cores import Placement
from headrace.runtime.memory import mapped_ranges, usage
from headrace.runtime.ort import MAX_ROWS
from headrace.runtime.pages import resident, untouched
from headrace.runtime.prepare import DATA, MODEL, OVERHEAD, PROVIDERS, session_options
from headrace.sizes import MIB, Bytes

_SLOTS = 1024
"""Of the one lane that is measured."""

_NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
_NUMPY["tensor(int8)"] = np.int8

_PAST, _PRESENT = "past_key_values.", "present."


@dataclass(frozen=True)
class Overhead:
    """Sizes in bytes; anonymous memory, but for the last two."""

    python: Bytes
    """The interpreter and what `headrace.runtime` imports."""
    session: Bytes
    """ONNX Runtime's session, its weights mapped from the prepared file."""
    passes: Bytes
    """Activations of a pass of MAX_ROWS rows."""
    per_slot: float
    """What those passes take more for each slot that they attend to."""
    weights: Bytes
    """File pages that the session maps."""
    libraries: Bytes
    """File pages of the interpreter's and the libraries' code."""
    is_measured: bool = True

    def activations(self, num_rows: int, num_slots: int) -> Bytes:
        """Of passes with up to so many rows, of all lanes together, in lanes of so many slots."""
        whole = self.passes + self.per_slot * num_slots
        return round(whole * num_rows / MAX_ROWS)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(folder: Path) -> Overhead | None:
    """What was measured for a prepared copy; None when nothing was."""
    try:
        value = json.loads((folder / OVERHEAD).read_bytes())
        return Overhead(**value) if value is not None else None
    except (OSError, ValueError, TypeError):
        return None


def estimate(config: ModelConfig, weights_on_disk: Bytes) -> Overhead:
    """For a machine on which the bundle was not prepared.

    The rule, from measurements on x86-64: Python 30 MiB; a session 6 MiB and a quarter of a MiB a
    layer; for each row of a pass the inputs and outputs of a layer's maps, in float32; weights
    a quarter larger than in the bundle.
    """
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row_values = 3 * config.intermediate_size + 4 * config.hidden_size + attention
    return Overhead(
        python=30 * MIB,
        session=6 * MIB + config.num_layers * MIB // 4,
        passes=MAX_ROWS * row_values * 4,
        per_slot=0.0,
        weights=weights_on_disk * 5 // 4,
        libraries=34 * MIB,
        is_measured=False,
    )


def measure(folder: Path, threads: int | None) -> Overhead:
    """Loads the prepared copy in `folder` and runs it. Call it in a process that did nothing yet.

    Raises what ONNX Runtime raises.
    """
    import headrace.runtime.llm  # noqa: F401  what a process that runs a model has imported

    start = usage()
    options = session_options(Placement(threads=threads), prepared=True)
    session = ort.InferenceSession(str(folder / MODEL), options, providers=PROVIDERS)
    loaded = usage()
    weights = sum(part.length for part in mapped_ranges(folder / DATA))
    probe = _Probe(session)
    empty = usage()
    probe.run(num_rows=16, total=64)
    probe.run(num_rows=MAX_ROWS, total=MAX_ROWS)
    probe.run(num_rows=2, total=MAX_ROWS)
    short = usage()
    probe.run(num_rows=MAX_ROWS, total=_SLOTS)
    long = usage()
    return Overhead(
        python=start.rss_anon,
        session=max(0, loaded.rss_anon - start.rss_anon),
        passes=max(0, short.rss_anon - empty.rss_anon),
        per_slot=max(0, long.rss_anon - short.rss_anon) / (_SLOTS - MAX_ROWS),
        weights=weights,
        libraries=start.rss_file,
    )


class _Probe:
    """Passes over one lane of zeros, as the graph's own inputs and outputs ask for them."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        lane = {LANES: 1, SLOTS: _SLOTS}
        self._kv = {
            spec.name: _allocate(spec, lane, is_resident=True)
            for spec in session.get_inputs()
            if spec.name.startswith(_PAST)
        }

    def run(self, *, num_rows: int, total: int) -> None:
        sizes = {LANES: 1, ROWS: num_rows, SLOTS: _SLOTS, LOGIT_ROWS: 2, TOTAL: total}
        values: Mapping[str, int] = {
            "seqlens_k": total - 1,
            "query_seqlens": num_rows,
            "total_sequence_length": total,
        }
        io = self._session.io_binding()
        alive: list[ort.OrtValue] = []  # they share the arrays' memory
        for spec in self._session.get_inputs():
            array = self._kv.get(spec.name)
            if array is None:
                array = _allocate(spec, sizes)
                if spec.name in values:
                    array[...] = values[spec.name]
            alive.append(ort.OrtValue.ortvalue_from_numpy(array))
            io.bind_ortvalue_input(spec.name, alive[-1])
        for spec in self._session.get_outputs():
            array = self._kv.get(spec.name.replace(_PRESENT, _PAST))
            if array is None:
                array = _allocate(spec, sizes)
            alive.append(ort.OrtValue.ortvalue_from_numpy(array))
            io.bind_ortvalue_output(spec.name, alive[-1])
        self._session.run_with_iobinding(io)


def _allocate(
    spec: ort.NodeArg, sizes: Mapping[str, int], *, is_resident: bool = False
) -> npt.NDArray[np.generic]:
    """Zeros of a graph input's or output's shape; a size that is not named is 1."""
    shape = [dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in spec.shape]
    dtype = np.dtype(_NUMPY[spec.type])
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = resident(num_bytes) if is_resident else untouched(num_bytes)
    return memory.view(dtype).reshape(shape)


def _child(arguments: list[str]) -> str | None:
    """What `prepare` starts; what it returns is printed to stderr, exit code 1."""
    folder, threads = Path(arguments[1]), int(arguments[2]) or None
    try:
        found = measure(folder, threads)
    except Exception as error:  # noqa: BLE001  ONNX Runtime's have no other common base
        return str(error) or repr(error)
    (folder / OVERHEAD).write_text(json.dumps(found.to_json()), encoding="utf-8")
    return None
