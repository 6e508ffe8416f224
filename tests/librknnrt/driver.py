"""Calls the double as a program would that knows Rockchip's documents and an `.io.json`.

Structs and numbers are written here anew, apart from those of the double and of `headrace.npu`, so
that an error in one of them shows.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from ctypes import POINTER, byref, c_float, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.npu_io import NativeTensor, NpuIo, NpuVariant

OK, FAIL, TIMEOUT, LOST, PARAM, MODEL, CTX, INPUT, OUTPUT = 0, -1, -2, -3, -5, -6, -7, -8, -9
NO_FLUSH_INPUT, NO_FLUSH_OUTPUT = 0x4000, 0x8000
TO_DEVICE, FROM_DEVICE = 1, 2
FLOAT32, FLOAT16 = 0, 1
NCHW, NHWC, NC1HWC2 = 0, 1, 2


class V(IntEnum):
    """Violations, by the numbers of double.h."""

    CONTEXT = 1
    MEM = 2
    LEAK = 3
    ARGUMENT = 4
    INDEX = 5
    SIZE = 6
    FORMAT = 7
    DIMS = 8
    ALIGN = 9
    UNBOUND = 10
    SHAPES = 11
    EDGE = 12
    FREED = 13
    NUMBER = 14
    RACE = 15
    FD = 16


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


def places(t: NativeTensor) -> NDArray[np.int64]:
    """Index of each element in the buffer: [n, c, h, w]."""
    n, c, h, w = np.indices(t.dims)
    _, c1, h_, _, c2 = t.native
    plane = h_ * t.w_stride
    index: NDArray[np.int64] = ((n * c1 + c // c2) * plane + h * t.w_stride + w) * c2 + c % c2
    return index


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
        """Of violations since the last call, in order; forgets all faults too."""
        lines = self.lib.double_violations().decode().splitlines()
        self.lib.double_reset()
        return [int(line.split()[0]) for line in lines]

    def trace(self) -> dict[str, Any]:
        trace: dict[str, Any] = json.loads(self.lib.double_trace())
        return trace

    def init(self, model: Path, flags: int = 0) -> tuple[int, Context]:
        handle = CONTEXT_T()
        code = self.lib.rknn_init(byref(handle), str(model).encode(), 0, flags, None)
        io = NpuIo.load(model.with_suffix(".io.json")) if code == OK else None
        return code, Context(self, handle, io.variants if io else ())


class Context:
    """A context and what is bound to it."""

    def __init__(self, double: Double, handle: c_uint64, variants: tuple[NpuVariant, ...]) -> None:
        self.lib, self.handle = double.lib, handle
        self.variants = {v.rows: v for v in variants}
        self.mems: dict[str, Any] = {}
        self.rows = max(self.variants, default=0)

    @property
    def variant(self) -> NpuVariant:
        return self.variants[self.rows]

    @property
    def tensors(self) -> list[NativeTensor]:
        """Inputs, then outputs."""
        return [*self.variant.inputs, *self.variant.outputs]

    def query(self, command: int, info: ctypes.Structure) -> int:
        code: int = self.lib.rknn_query(self.handle, command, byref(info), ctypes.sizeof(info))
        return code

    def attr(self, command: int, index: int) -> Attr:
        attr = Attr(index=index)
        assert self.query(command, attr) == OK
        return attr

    def versions(self) -> tuple[str, str]:
        """Of the library and of the driver."""
        texts = ctypes.create_string_buffer(512)
        assert self.lib.rknn_query(self.handle, 5, texts, 512) == OK
        library, driver = (texts.raw[at : at + 256].split(b"\0")[0] for at in (0, 256))
        return library.decode(), driver.decode()

    def shape(self, rows: int) -> int:
        inputs = self.variants[rows].inputs
        attrs = (Attr * len(inputs))()
        for i, t in enumerate(inputs):
            n, c, h, w = t.dims
            attrs[i] = Attr(index=i, n_dims=4, dims=(n, h, w, c), fmt=NHWC)
        code: int = self.lib.rknn_set_input_shapes(self.handle, len(inputs), attrs)
        self.rows = rows if code == OK else self.rows
        return code

    def native_attr(self, name: str) -> Attr:
        index, inputs = [t.name for t in self.tensors].index(name), len(self.variant.inputs)
        attr = self.attr(16, index) if index < inputs else self.attr(17, index - inputs)
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
        for t in self.tensors:
            mem = self.mems.get(t.name) or self.create(t.size)
            assert self.bind(t.name, mem) == OK

    def host(self, name: str) -> NDArray[Any]:
        """The processor's view of a tensor's memory, in elements."""
        mem, t = self.mems[name][0], next(t for t in self.tensors if t.name == name)
        raw: Any = (ctypes.c_char * mem.size).from_address(mem.virt_addr)
        return np.frombuffer(raw, t.type)

    def write_one(self, name: str, values: NDArray[Any]) -> None:
        t = next(t for t in self.tensors if t.name == name)
        codes = values / t.scale + t.zero  # of float16, the values themselves
        self.host(name)[places(t)] = np.rint(codes) if t.type == "int8" else codes

    def write(self, fed: Mapping[str, NDArray[Any]]) -> None:
        for t in self.variant.inputs:
            self.write_one(t.name, fed[t.name])

    def read(self) -> dict[str, NDArray[np.float32]]:
        values = {t: self.host(t.name)[places(t)].astype(np.float32) for t in self.variant.outputs}
        return {t.name: (v - t.zero) * np.float32(t.scale) for t, v in values.items()}

    def sync(self, name: str, mode: int) -> int:
        code: int = self.lib.rknn_mem_sync(self.handle, self.mems[name], mode)
        return code

    def sync_all(self, mode: int) -> None:
        for t in self.variant.inputs if mode == TO_DEVICE else self.variant.outputs:
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
