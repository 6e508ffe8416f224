"""What the double of librknnrt computes with: onnxruntime and the ONNX beside the compiled model.

The double runs this file in the Python that loaded it, from the folder of the library. Of
`npu.rknn` only the name counts: `npu.io.json` states the tensors, `npu.onnx` is what is run.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

FAIL, MODEL_INVALID, INPUT_INVALID = -1, -6, -8
TYPES = {"float16": 1, "int8": 2}
DTYPES: dict[int, type[np.generic]] = {0: np.float32, 1: np.float16, 2: np.int8}
NCHW, NHWC, UNDEFINED = 0, 1, 3
POISON = {1: np.float16(np.nan), 2: np.int8(85)}
"""By type: what lies between the elements of an output."""


class Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("dims", ctypes.c_uint32 * 4),
        ("native", ctypes.c_uint32 * 5),
        ("w_stride", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("zero", ctypes.c_int32),
    )


class View(ctypes.Structure):
    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("n_variants", ctypes.c_uint32),
        ("n_inputs", ctypes.c_uint32),
        ("n_outputs", ctypes.c_uint32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("weight_bytes", ctypes.c_uint64),
    )


class Refused(Exception):
    """With a code of the runtime."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Layout:
    """A tensor's place in memory."""

    name: str
    dims: tuple[int, ...]
    native: tuple[int, ...]
    w_stride: int
    size: int
    type: int
    scale: float
    zero: int

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Layout:
        dims, native = tuple(data["dims"]), tuple(data["native"])
        numbers = data["w_stride"], data["size"], TYPES[data["type"]], data["scale"], data["zero"]
        layout = cls(data["name"], dims, native, *numbers)
        layout.check()
        return layout

    @classmethod
    def of_tensor(cls, t: Tensor) -> Layout:
        numbers = t.w_stride, t.size, t.type, t.scale, t.zero
        return cls(t.name.decode(), tuple(t.dims), tuple(t.native), *numbers)

    def tensor(self) -> Tensor:
        return Tensor(
            self.name.encode(),
            self.dims,
            self.native,
            self.w_stride,
            self.size,
            self.type,
            self.scale,
            self.zero,
        )

    @property
    def plane(self) -> int:
        """Positions from one c1 to the next."""
        return self.native[2] * self.w_stride

    def check(self) -> None:
        n, c, h, w = self.dims
        n1, c1, h1, w1, c2 = self.native
        item = np.dtype(DTYPES[self.type]).itemsize
        fits = (n, h, w) == (n1, h1, w1) and c1 * c2 >= c and self.w_stride >= w
        if not fits or h * w > self.plane or n * c1 * self.plane * c2 * item > self.size:
            raise Refused(
                MODEL_INVALID, f"{self.name}: the layout does not hold the tensor: {self}"
            )

    def array(self, address: int) -> NDArray[Any]:
        """All positions: [n, c1, plane, c2]."""
        n, c1, _, _, c2 = self.native
        dtype = np.dtype(DTYPES[self.type])
        raw: Any = (ctypes.c_char * self.size).from_address(address)
        flat: NDArray[Any] = np.frombuffer(raw, dtype, n * c1 * self.plane * c2)
        return flat.reshape(n, c1, self.plane, c2)

    def elements(self, address: int) -> NDArray[Any]:
        """Without padding positions: [n, c1, h, w, c2]; a view."""
        n, c1, h, w, c2 = self.native
        rows = self.array(address).reshape(n, c1, h, self.w_stride, c2)
        return rows[:, :, :, :w]

    def read(self, address: int) -> NDArray[Any]:
        n, c1, h, w, c2 = self.native
        wide = self.elements(address).transpose(0, 1, 4, 2, 3).reshape(n, c1 * c2, h, w)
        return wide[:, : self.dims[1]]

    def write(self, address: int, values: NDArray[Any]) -> None:
        n, c1, h, w, c2 = self.native
        self.array(address)[:] = POISON[self.type]
        wide = np.full((n, c1 * c2, h, w), POISON[self.type], DTYPES[self.type])
        wide[:, : self.dims[1]] = values
        self.elements(address)[:] = wide.reshape(n, c1, c2, h, w).transpose(0, 1, 3, 4, 2)

    def to_float(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        if self.type == TYPES["int8"]:
            codes = (codes.astype(np.float32) - np.float32(self.zero)) * np.float32(self.scale)
        return codes.astype(np.float32)

    def from_float(self, values: NDArray[Any]) -> NDArray[Any]:
        if self.type == TYPES["int8"]:
            codes: NDArray[Any] = np.clip(np.rint(values / self.scale) + self.zero, -128, 127)
            return codes.astype(np.int8)
        with np.errstate(over="ignore"):  # what is too large for float16 is infinite on the NPU too
            return values.astype(np.float16)


@dataclass(frozen=True)
class Variant:
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class Model:
    """An `.io.json` and a session."""

    def __init__(self, rknn: Path) -> None:
        data = json.loads(rknn.with_suffix(".io.json").read_bytes())
        self.variants = [
            Variant(
                tuple(Layout.of_json(t) for t in v["inputs"]),
                tuple(Layout.of_json(t) for t in v["outputs"]),
            )
            for v in data["variants"]
        ]
        layouts = [t for v in self.variants for t in (*v.inputs, *v.outputs)]
        self.tensors = (Tensor * len(layouts))(*(t.tensor() for t in layouts))
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        onnx = str(rknn.with_suffix(".onnx"))
        self.session = ort.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        self.input_types = {i.name: i.type for i in self.session.get_inputs()}
        self._check_names()

    def _check_names(self) -> None:
        outputs = {o.name for o in self.session.get_outputs()}
        for variant in self.variants:
            if {t.name for t in variant.inputs} != set(self.input_types):
                raise Refused(MODEL_INVALID, "the inputs are not those of the ONNX")
            if not {t.name for t in variant.outputs} <= outputs:
                raise Refused(MODEL_INVALID, "outputs are missing in the ONNX")

    def run(self, variant: Variant, inputs: list[int], outputs: list[int], *, nan: bool) -> None:
        feeds = {t.name: self._feed(t, at) for t, at in zip(variant.inputs, inputs, strict=True)}
        results = self.session.run([t.name for t in variant.outputs], feeds)
        for i, (t, at, values) in enumerate(zip(variant.outputs, outputs, results, strict=True)):
            if values.shape != t.dims:
                raise Refused(FAIL, f"{t.name} is {values.shape}, the file says {t.dims}")
            t.write(at, np.full(t.dims, POISON[t.type]) if nan and i == 0 else t.from_float(values))

    def _feed(self, t: Layout, address: int) -> NDArray[Any]:
        values = t.to_float(t.read(address))
        if not np.isfinite(values).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise Refused(INPUT_INVALID, f"{t.name} is not a number at {at} on the device")
        half = self.input_types[t.name] == "tensor(float16)"
        return values.astype(np.float16) if half else values


class Models:
    """By handle; contexts of one file share a model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[str, Model]] = {}
        self._last = 0

    def load(self, path: bytes, view: Any) -> None:
        rknn = Path(path.decode())
        files = [rknn, rknn.with_suffix(".io.json"), rknn.with_suffix(".onnx")]
        try:
            key = repr([(str(f), f.stat().st_mtime_ns, f.stat().st_ino) for f in files])
        except OSError as error:
            raise Refused(MODEL_INVALID, str(error)) from error
        with self._lock:
            model = next((m for k, m in self._held.values() if k == key), None) or Model(rknn)
            self._last += 1
            self._held[self._last] = key, model
        first = model.variants[0]
        view[0] = View(
            self._last,
            len(model.variants),
            len(first.inputs),
            len(first.outputs),
            model.tensors,
            rknn.stat().st_size,
        )

    def unload(self, handle: int) -> None:
        with self._lock:
            del self._held[handle]

    def compute(self, handle: int, variant: int, inputs: Any, outputs: Any, nan: int) -> None:
        model = self._held[handle][1]
        v = model.variants[variant]
        model.run(v, inputs[: len(v.inputs)], outputs[: len(v.outputs)], nan=bool(nan))


def pack(tensor: Any, plain: int, kind: int, fmt: int, native: int) -> None:
    """What the runtime does with an input of rknn_inputs_set."""
    layout = Layout.of_tensor(tensor[0])
    if kind not in DTYPES or fmt not in (NCHW, NHWC, UNDEFINED):
        raise Refused(INPUT_INVALID, f"{layout.name}: type {kind}, fmt {fmt}")
    n, c, h, w = layout.dims
    dims = (n, c, h, w) if fmt == NCHW else (n, h, w, c)  # undefined: as the attribute has it
    values = np.frombuffer(_bytes(plain, dims, DTYPES[kind]), DTYPES[kind]).reshape(dims)
    values = values if fmt == NCHW else values.transpose(0, 3, 1, 2)
    codes = values if kind == layout.type else layout.from_float(values.astype(np.float32))
    layout.write(native, codes)


def unpack(tensor: Any, native: int, kind: int, plain: int) -> None:
    """What the runtime does with an output of rknn_outputs_get."""
    layout = Layout.of_tensor(tensor[0])
    codes = layout.read(native)
    values = layout.to_float(codes) if kind == 0 else codes
    target = np.frombuffer(_bytes(plain, layout.dims, DTYPES[kind]), DTYPES[kind])
    target[:] = values.ravel()


def _bytes(address: int, dims: tuple[int, ...], dtype: type[np.generic]) -> Any:
    size = int(np.prod(dims)) * np.dtype(dtype).itemsize
    return (ctypes.c_char * size).from_address(address)


# -- For C ----------------------------------------------------------------------------------------

_i, _u, _p = ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p
_pp, _t = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(Tensor)
LOAD = ctypes.CFUNCTYPE(_i, ctypes.c_char_p, ctypes.POINTER(View), _p, _u)
UNLOAD = ctypes.CFUNCTYPE(_i, ctypes.c_uint64)
COMPUTE = ctypes.CFUNCTYPE(_i, ctypes.c_uint64, _u, _pp, _pp, _i, _p, _u)
PACK = ctypes.CFUNCTYPE(_i, _t, _p, _i, _i, _p, _p, _u)
UNPACK = ctypes.CFUNCTYPE(_i, _t, _p, _i, _p, _p, _u)


class Functions(ctypes.Structure):
    _fields_ = (
        ("load", LOAD),
        ("unload", UNLOAD),
        ("compute", COMPUTE),
        ("pack", PACK),
        ("unpack", UNPACK),
    )


def _coded(function: Callable[..., None]) -> Callable[..., int]:
    """With a code instead of an exception, and its text in the last two arguments."""

    def call(*arguments: Any) -> int:
        *own, message, size = arguments
        try:
            function(*own)
            return 0
        except Exception as error:  # noqa: BLE001  C cannot take an exception
            text = (str(error) or repr(error)).encode()[: size - 1] + b"\0"
            ctypes.memmove(message, text, len(text))
            return error.code if isinstance(error, Refused) else FAIL

    return call


def attach(address: int) -> None:
    """Gives the functions to `double_attach`, for as long as the process lives."""
    models = Models()

    def unload(handle: int) -> int:
        models.unload(handle)
        return 0

    functions = Functions(
        LOAD(_coded(models.load)),
        UNLOAD(unload),
        COMPUTE(_coded(models.compute)),
        PACK(_coded(pack)),
        UNPACK(_coded(unpack)),
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(functions))
    ctypes.CFUNCTYPE(None, ctypes.POINTER(Functions))(address)(ctypes.byref(functions))
