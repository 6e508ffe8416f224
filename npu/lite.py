"""The second transport: Rockchip's RKNNLite, for boards whose library refuses the first.

It copies every input at every pass, keys and values among them, and gives floats back: at the
83 MB/s that one report works out at, a cache of 512 tokens of a 135M draft takes longer than the
pass itself (docs/npu.md). It knows no time-out; the drafter gives up a pass that does not end. It asks
for its outputs' sizes once, of the widest variant, and so runs no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import NpuDeviceError, NpuError, NpuMissingError, NpuModelError
from headrace.models.npu_io import NpuFiles, NpuTensor, is_kv, main_names, npu_inputs, npu_outputs
from headrace.npu.abi import CORES
from headrace.npu.passes import NpuPasses, Placed
from headrace.npu.staging import LaneMemory, Layout, Native


@dataclass(frozen=True, eq=False)
class _Array:
    """A tensor of the host's."""

    layout: Layout
    native: Native

    @classmethod
    def input(cls, tensor: NpuTensor, dtype: type[np.generic]) -> _Array:
        """Zeros, with channels last as RKNNLite wants them."""
        n, c, h, w = tensor.dims
        native = np.zeros((n, 1, h, w, c), dtype)
        return cls(_layout(tensor, native), native)

    @property
    def nhwc(self) -> Native:
        return self.native[:, 0]


def _layout(tensor: NpuTensor, native: Native) -> Layout:
    n, c1, h, w, c2 = native.shape
    a, b, c, d, e = native.strides
    strides = (a, b, c, d, e)
    return Layout(tensor.name, native.dtype, (n, c1, h, w, c2), strides, native.nbytes, 1.0, 0)


def open_backend(files: NpuFiles, *, library: Path | None, lanes: int, cores: str) -> LiteBackend:
    """What the runtime opens a compiled draft by. Raises NpuError."""
    if library is not None:
        raise NpuMissingError(
            f"{library}: RKNNLite loads /usr/lib/librknnrt.so itself; leave --npu-library out"
        )
    return LiteBackend(files, lanes=lanes, cores=cores)


class LiteBackend(NpuPasses):
    """Passes through RKNNLite."""

    def __init__(self, files: NpuFiles, *, lanes: int, cores: str) -> None:
        """Raises NpuError."""
        self._lite: Any = _opened(files.rknn, cores)
        try:
            self.version = str(self._lite.get_sdk_version())
            most = max(files.io.geometry.rows)
            self._tensors = npu_inputs(files.config, files.io.geometry, most)
            self._own = {
                t.name: _Array.input(t, np.float16) for t in self._tensors if not is_kv(t.name)
            }
            self._kv = [
                {t.name: _Array.input(t, np.float16) for t in self._tensors if is_kv(t.name)}
                for _ in range(lanes)
            ]
            names = [n for layer in range(files.config.num_layers) for n in main_names(layer)]
            memories = [
                LaneMemory(
                    files.config,
                    files.io.geometry,
                    (kv["tail"].layout, kv["tail"].native),
                    [(kv[name].layout, kv[name].native) for name in names],
                )
                for kv in self._kv
            ]
            super().__init__(files, memories, (most,))
            self.prove()
        except BaseException:
            self.close()
            raise

    def _inputs(self, rows: int) -> Mapping[str, Placed]:
        return self._own

    def _compute(self, rows: int, lane: int, *, with_logits: bool) -> Mapping[str, Placed]:
        arrays = {**self._own, **self._kv[lane]}
        inputs = [arrays[tensor.name].nhwc for tensor in self._tensors]
        self.counters.runs += 1
        with _its_errors("in a pass"):
            found = self._lite.inference(inputs=inputs, data_format=["nhwc"] * len(inputs))
        if found is None:
            raise NpuDeviceError("RKNNLite failed in a pass and does not say why")
        self._memories[lane].is_main_changed = False
        self.counters.bytes_flushed += sum(array.nbytes for array in (*inputs, *found))
        return {
            tensor.name: _output(tensor, array)
            for tensor, array in zip(npu_outputs(self._config, rows), found, strict=True)
        }

    def close(self) -> None:
        """May be called again."""
        lite, self._lite = self._lite, None
        if lite is not None:
            lite.release()


def _output(tensor: NpuTensor, array: Any) -> _Array:
    """Raises NpuModelError for a result of another size."""
    if array.size != np.prod(tensor.dims):
        raise NpuModelError(
            f"RKNNLite gives {tensor.name} as {list(array.shape)}, the description says "
            f"{list(tensor.dims)}; export the model again"
        )
    channels_last = np.asarray(array, np.float32).reshape(tensor.dims).transpose(0, 2, 3, 1)
    native = channels_last[:, None]
    return _Array(_layout(tensor, native), native)


def _opened(model: Path, cores: str) -> Any:
    """Raises NpuError."""
    try:
        from rknnlite.api import RKNNLite
    except ImportError as error:
        raise NpuMissingError(
            f"RKNNLite is not installed ({error}): pip install 'headrace[board]' on the board"
        ) from error
    with _its_errors("to start"):
        lite = RKNNLite()
    try:
        with _its_errors("to open the NPU"):
            if lite.load_rknn(str(model)) != 0:
                raise NpuModelError(f"{model}: RKNNLite does not load it")
            # Where all cores may be used, RKNNLite's own number for that differs by version.
            mask = {} if cores == "auto" else {"core_mask": int(CORES[cores])}
            if lite.init_runtime(**mask) != 0:
                raise NpuDeviceError("RKNNLite cannot open the NPU; `headrace doctor` says more")
    except BaseException:
        lite.release()
        raise
    return lite


@contextmanager
def _its_errors(doing: str) -> Iterator[None]:
    """RKNNLite raises whatever its own calls do, or ends the program. Raises NpuError for both."""
    try:
        yield
    except NpuError:
        raise
    except (Exception, SystemExit) as error:
        raise NpuDeviceError(f"RKNNLite failed {doing}: {error}") from error
