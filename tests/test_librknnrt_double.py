"""The double of librknnrt: computes through a model, notices misuse, plays faults.

Structs and numbers are written here from Rockchip's documents, apart from those of the double and
of `headrace.npu`, so that an error in one of them shows.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Iterator
from ctypes import POINTER, byref, c_float, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from librknnrt import build as double_build
from numpy.typing import NDArray
from onnx import TensorProto, helper

from headrace.models.npu_io import (
    NativeTensor,
    NpuGeometry,
    NpuIo,
    NpuTensor,
    NpuVariant,
)

MISSING = double_build.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

OK, FAIL, TIMEOUT, LOST, PARAM, MODEL, CTX, INPUT, OUTPUT = 0, -1, -2, -3, -5, -6, -7, -8, -9
NO_FLUSH_INPUT, NO_FLUSH_OUTPUT = 0x4000, 0x8000
TO_DEVICE, FROM_DEVICE = 1, 2
FLOAT32, FLOAT16 = 0, 1
NCHW, NHWC, NC1HWC2 = 0, 1, 2

# Violations, by the numbers of double.h
CONTEXT, MEM, LEAK, ARGUMENT, INDEX, SIZE, FORMAT, DIMS, ALIGN, UNBOUND = range(1, 11)
SHAPES, EDGE, FREED, NUMBER, RACE, FD = range(11, 17)

ROWS, PAST = (1, 3), 5


class Attr(ctypes.Structure):
    _fields_ = (
        ("index", c_uint32),
        ("n_dims", c_uint32),
        ("dims", c_uint32 * 16),
        ("name", ctypes.c_char * 256),
        ("n_elems", c_uint32),
        ("size", c_uint32),
        ("fmt", c_int32),
        ("type", c_int32),
        ("qnt_type", c_int32),
        ("fl", ctypes.c_int8),
        ("zp", c_int32),
        ("scale", c_float),
        ("w_stride", c_uint32),
        ("size_with_stride", c_uint32),
        ("pass_through", c_uint8),
        ("h_stride", c_uint32),
    )


class Mem(ctypes.Structure):
    _fields_ = (
        ("virt_addr", c_void_p),
        ("phys_addr", c_uint64),
        ("fd", c_int32),
        ("offset", c_int32),
        ("size", c_uint32),
        ("flags", c_uint32),
        ("priv", c_void_p),
    )


class Input(ctypes.Structure):
    _fields_ = (
        ("index", c_uint32),
        ("buf", c_void_p),
        ("size", c_uint32),
        ("pass_through", c_uint8),
        ("type", c_int32),
        ("fmt", c_int32),
    )


class Output(ctypes.Structure):
    _fields_ = (
        ("want_float", c_uint8),
        ("is_prealloc", c_uint8),
        ("index", c_uint32),
        ("buf", c_void_p),
        ("size", c_uint32),
    )


class RunExtend(ctypes.Structure):
    _fields_ = (
        ("frame_id", c_uint64),
        ("non_block", c_int32),
        ("timeout_ms", c_int32),
        ("fence_fd", c_int32),
    )


class Range(ctypes.Structure):
    _fields_ = (
        ("index", c_uint32),
        ("shape_number", c_uint32),
        ("fmt", c_int32),
        ("name", ctypes.c_char * 256),
        ("dyn_range", c_uint32 * 16 * 512),
        ("n_dims", c_uint32),
    )


# -- A model --------------------------------------------------------------------------------------


def graph() -> onnx.ModelProto:
    """logits = 2 x + the sum of each mask row; new = x's first channels + the sum of past."""
    f32, node = TensorProto.FLOAT, helper.make_node
    numbers = {"last": 3, "first": 0, "eight": 8, "one": 1}
    nodes = [
        node("Mul", ["x", "two"], ["twice"]),
        node("ReduceSum", ["mask", "last"], ["sums"]),
        node("Transpose", ["sums"], ["row"], perm=[0, 1, 3, 2]),
        node("Add", ["twice", "row"], ["logits"]),
        node("Slice", ["x", "first", "eight", "one"], ["head"]),
        node("ReduceSum", ["past", "last"], ["total"]),
        node("Add", ["head", "total"], ["new"]),
    ]
    ports: list[tuple[str, list[int | str]]] = [
        ("x", [1, 20, 1, "T"]),
        ("mask", [1, 1, "T", "S"]),
        ("past", [2, 8, 1, PAST]),
        ("logits", [1, 20, 1, "T"]),
        ("new", [2, 8, 1, "T"]),
    ]
    values = [helper.make_tensor_value_info(name, f32, dims) for name, dims in ports]
    constants = [helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in numbers.items()]
    constants.append(helper.make_tensor("two", f32, [1], [2.0]))
    made = helper.make_graph(nodes, "tiny", values[:3], values[3:], constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def padded(tensor: NativeTensor, extra: int) -> NativeTensor:
    """With `extra` positions in each row (H > 1) or plane (H = 1)."""
    n, c1, h, w, c2 = tensor.native
    stride = tensor.w_stride + extra
    return dataclasses.replace(
        tensor, w_stride=stride if h > 1 else w, size=n * c1 * h * stride * c2 * 2
    )


def variant(rows: int) -> NpuVariant:
    keys = PAST + rows
    ins = [NpuTensor("x", (1, 20, 1, rows)), NpuTensor("mask", (1, 1, rows, keys))]
    x, mask = (NativeTensor.expected(t, is_output=False) for t in ins)
    past = NativeTensor.expected(NpuTensor("past", (2, 8, 1, PAST)), is_output=False)
    outs = [NpuTensor("logits", (1, 20, 1, rows)), NpuTensor("new", (2, 8, 1, rows))]
    logits, new = (NativeTensor.expected(t, is_output=True) for t in outs)
    return NpuVariant(rows, (padded(x, 3), padded(mask, 2), past), (padded(logits, 1), new))


VARIANTS = {rows: variant(rows) for rows in ROWS}


def save_model(folder: Path, rows: tuple[int, ...] = ROWS) -> Path:
    rknn = folder / "npu.rknn"
    rknn.write_bytes(b"compiled")
    onnx.save(graph(), folder / "npu.onnx")
    geometry = NpuGeometry(sinks=1, window=4, unit=1, nodes=1, rows=rows)
    variants = tuple(VARIANTS[r] for r in rows)
    NpuIo("rk3588", "2.5.0", "fp16", -1e4, geometry, variants).save(folder / "npu.io.json")
    return rknn


def places(t: NativeTensor) -> NDArray[np.int64]:
    """Index of each element in the buffer: [n, c, h, w]."""
    n, c, h, w = np.indices(t.dims)
    n_, c1, h_, _, c2 = t.native
    plane = t.size // (n_ * c1 * c2 * 2) if h_ == 1 else h_ * t.w_stride
    index: NDArray[np.int64] = ((n * c1 + c // c2) * plane + h * t.w_stride + w) * c2 + c % c2
    return index


def feeds(rows: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Small whole numbers: exact in float16."""
    rng = np.random.default_rng(seed)
    return {t.name: rng.integers(-9, 9, t.dims).astype(np.float32) for t in VARIANTS[rows].inputs}


def expected(fed: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    sums = fed["mask"].sum(axis=3, keepdims=True).transpose(0, 1, 3, 2)
    total = fed["past"].sum(axis=3, keepdims=True)
    return {"logits": 2 * fed["x"] + sums, "new": fed["x"][:, :8] + total}


# -- Driving it -----------------------------------------------------------------------------------

MEM_P, CONTEXT_T = POINTER(Mem), c_uint64


class Double:
    """The library with the types of what is called."""

    def __init__(self, path: Path) -> None:
        self.lib = lib = ctypes.CDLL(str(path))
        for name in ("rknn_create_mem", "rknn_create_mem2", "rknn_create_mem_from_fd"):
            getattr(lib, name).restype = MEM_P
        for name in ("double_violations", "double_trace", "double_report"):
            getattr(lib, name).restype = ctypes.c_char_p

    def script(self, text: str) -> None:
        assert self.lib.double_script(text.encode()) == 0

    def counts(self) -> list[int]:
        """Contexts, pieces of memory, bytes, fds, outputs."""
        numbers = (c_uint64 * 5)()
        self.lib.double_counts(numbers)
        return list(numbers)

    def kinds(self) -> list[int]:
        """Of violations since the last call."""
        lines = self.lib.double_violations().decode().splitlines()
        self.lib.double_reset()
        return [int(line.split()[0]) for line in lines]

    def trace(self) -> dict[str, Any]:
        trace: dict[str, Any] = json.loads(self.lib.double_trace())
        return trace

    def init(self, model: Path, flags: int = 0) -> tuple[int, Context]:
        handle = CONTEXT_T()
        code = self.lib.rknn_init(byref(handle), str(model).encode(), 0, flags, None)
        return code, Context(self, handle)


class Context:
    """A context and what is bound to it."""

    def __init__(self, double: Double, handle: c_uint64) -> None:
        self.double, self.lib, self.handle = double, double.lib, handle
        self.mems: dict[str, Any] = {}
        self.rows = max(ROWS)

    def query(self, command: int, info: ctypes.Structure) -> int:
        code: int = self.lib.rknn_query(self.handle, command, byref(info), ctypes.sizeof(info))
        return code

    def attr(self, command: int, index: int) -> Attr:
        attr = Attr(index=index)
        assert self.query(command, attr) == OK
        return attr

    def shape(self, rows: int) -> int:
        attrs = (Attr * 3)()
        for i, t in enumerate(VARIANTS[rows].inputs):
            n, c, h, w = t.dims
            attrs[i] = Attr(index=i, n_dims=4, dims=(n, h, w, c), fmt=NHWC)
        code: int = self.lib.rknn_set_input_shapes(self.handle, 3, attrs)
        self.rows = rows if code == OK else self.rows
        return code

    def tensors(self) -> list[NativeTensor]:
        return [*VARIANTS[self.rows].inputs, *VARIANTS[self.rows].outputs]

    def native_attr(self, name: str) -> Attr:
        index = [t.name for t in self.tensors()].index(name)
        attr = self.attr(16, index) if index < 3 else self.attr(17, index - 3)
        attr.pass_through = 1
        return attr

    def create(self, size: int) -> Any:
        return self.lib.rknn_create_mem(self.handle, size)

    def bind(self, name: str, mem: Any, attr: Attr | None = None) -> int:
        attr = attr or self.native_attr(name)
        code: int = self.lib.rknn_set_io_mem(self.handle, mem, byref(attr))
        if code == OK:
            self.mems[name] = mem
        return code

    def bind_all(self) -> None:
        for t in self.tensors():
            mem = self.mems.get(t.name) or self.create(t.size)
            assert self.bind(t.name, mem) == OK

    def host(self, name: str) -> NDArray[np.float16]:
        mem = self.mems[name][0]
        raw: Any = (ctypes.c_char * mem.size).from_address(mem.virt_addr)
        return np.frombuffer(raw, np.float16)

    def write(self, fed: dict[str, NDArray[np.float32]]) -> None:
        for t in VARIANTS[self.rows].inputs:
            self.host(t.name)[places(t)] = fed[t.name]

    def read(self) -> dict[str, NDArray[np.float32]]:
        outputs = VARIANTS[self.rows].outputs
        return {t.name: self.host(t.name)[places(t)].astype(np.float32) for t in outputs}

    def sync(self, name: str, mode: int) -> int:
        code: int = self.lib.rknn_mem_sync(self.handle, self.mems[name], mode)
        return code

    def sync_all(self, mode: int) -> None:
        v = VARIANTS[self.rows]
        for t in v.inputs if mode == TO_DEVICE else v.outputs:
            assert self.sync(t.name, mode) == OK

    def run(self, **extend: int) -> int:
        code: int = self.lib.rknn_run(self.handle, byref(RunExtend(**extend)) if extend else None)
        return code

    def wait(self, timeout_ms: int = 0) -> int:
        extend = RunExtend(timeout_ms=timeout_ms)
        code: int = self.lib.rknn_wait(self.handle, byref(extend))
        return code

    def destroy(self) -> None:
        for mem in self.mems.values():
            assert self.lib.rknn_destroy_mem(self.handle, mem) == OK
        self.mems.clear()
        assert self.lib.rknn_destroy(self.handle) == OK


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return double_build.build(tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def double(library: Path) -> Iterator[Double]:
    """A test that leaves something behind, or a violation that it did not expect, fails."""
    double = Double(library)
    double.lib.double_reset()
    yield double
    assert double.lib.double_violations() == b""
    assert double.counts() == [0, 0, 0, 0, 0]


def ready(double: Double, model: Path, flags: int = 0, rows: int = 3) -> Context:
    code, context = double.init(model, flags)
    assert code == OK
    assert context.shape(rows) == OK
    context.bind_all()
    return context


def check_run(context: Context, seed: int = 0) -> None:
    fed = feeds(context.rows, seed)
    context.write(fed)
    assert context.run() == OK
    for name, values in context.read().items():
        np.testing.assert_array_equal(values, expected(fed)[name])


# -- Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_computes_what_the_onnx_does(double: Double, model: Path, rows: int) -> None:
    context = ready(double, model, rows=rows)
    check_run(context)
    check_run(context, seed=1)
    context.destroy()
