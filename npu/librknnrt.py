"""librknnrt, Rockchip's NPU runtime, by ctypes: contexts, and buffers that the NPU reads in place.

Functions, structs and rules are those of Rockchip's "RKNN Runtime API" 2.3.2. The library is opened
when it is asked for, never on import. A context or a buffer that is closed calls nothing any more.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.closing import Closing
from headrace.errors import (
    NpuCallError,
    NpuDeviceError,
    NpuError,
    NpuMemoryError,
    NpuMissingError,
    NpuModelError,
    NpuTimeoutError,
    NpuVersionError,
)
from headrace.npu.abi import (
    FROM_DEVICE,
    TO_DEVICE,
    CoreMask,
    Flag,
    InputOutputNum,
    InputRange,
    Query,
    RunExtend,
    SdkVersion,
    Status,
    TensorAttr,
    TensorMem,
)

DEFAULT_PATH = "librknnrt.so"

MIN_DRIVER = "0.9.6"
"""Older kernel drivers fail to submit, or run out of file descriptors."""

ERRORS: dict[Status, tuple[type[NpuError], str]] = {
    Status.FAIL: (NpuDeviceError, "the call failed"),
    Status.TIMEOUT: (NpuTimeoutError, "it took too long"),
    Status.DEVICE_UNAVAILABLE: (NpuDeviceError, "the NPU is not available"),
    Status.MALLOC_FAIL: (NpuMemoryError, "no memory that the NPU can reach"),
    Status.PARAM_INVALID: (NpuCallError, "a parameter is invalid"),
    Status.MODEL_INVALID: (NpuModelError, "the model is invalid"),
    Status.CTX_INVALID: (NpuCallError, "the context is invalid"),
    Status.INPUT_INVALID: (NpuCallError, "an input is invalid"),
    Status.OUTPUT_INVALID: (NpuCallError, "an output is invalid"),
    Status.DEVICE_UNMATCH: (NpuVersionError, "library and driver do not go together"),
    Status.TARGET_PLATFORM_UNMATCH: (NpuModelError, "the model is for another chip"),
}


_INIT_EXTEND_BYTES = 256
"""rknn_init_extend is 136 to 144 bytes by version; zeros beyond them do no harm."""

_P = c.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rknn_init": (c.c_int, [c.POINTER(c.c_uint64), _P, c.c_uint32, c.c_uint32, _P]),
    "rknn_dup_context": (c.c_int, [c.POINTER(c.c_uint64), c.POINTER(c.c_uint64)]),
    "rknn_destroy": (c.c_int, [c.c_uint64]),
    "rknn_query": (c.c_int, [c.c_uint64, c.c_int, _P, c.c_uint32]),
    "rknn_set_core_mask": (c.c_int, [c.c_uint64, c.c_int]),
    "rknn_set_input_shapes": (c.c_int, [c.c_uint64, c.c_uint32, c.POINTER(TensorAttr)]),
    "rknn_create_mem": (c.POINTER(TensorMem), [c.c_uint64, c.c_uint32]),
    "rknn_create_mem_from_fd": (
        c.POINTER(TensorMem),
        [c.c_uint64, c.c_int32, _P, c.c_uint32, c.c_int32],
    ),
    "rknn_destroy_mem": (c.c_int, [c.c_uint64, c.POINTER(TensorMem)]),
    "rknn_set_io_mem": (c.c_int, [c.c_uint64, c.POINTER(TensorMem), c.POINTER(TensorAttr)]),
    "rknn_mem_sync": (c.c_int, [c.c_uint64, c.POINTER(TensorMem), c.c_int]),
    "rknn_run": (c.c_int, [c.c_uint64, c.POINTER(RunExtend)]),
}


@dataclass(frozen=True)
class Versions:
    library: str
    driver: str


def version_tuple(text: str) -> tuple[int, ...]:
    """The first dotted number of a text, e.g. (2, 3, 2); empty where there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


class Library:
    """The functions of one librknnrt."""

    def __init__(self, path: str | None = None) -> None:
        """Loads `path`, by default what the system's loader finds.

        Raises NpuMissingError, or NpuVersionError for a library without a function.
        """
        self.path = path or DEFAULT_PATH
        try:
            # One that is named may be this folder's, where the loader does not look.
            is_file = path is not None and Path(path).exists()
            where = str(Path(self.path).resolve()) if is_file else self.path
            self._library = c.CDLL(where)
        except OSError as error:
            raise NpuMissingError(
                f"{self.path}: the NPU's runtime library cannot be loaded ({error}); "
                "`headrace doctor` says where it comes from, or name it with --npu-library"
            ) from error
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise NpuVersionError(
                    f"{self.path}: has no {name}, so it is no librknnrt of version 1.5 or later; "
                    "install the one of the board's vendor anew"
                ) from error
            function.restype, function.argtypes = result, arguments

    def call(self, name: str, *arguments: Any) -> None:
        """Raises the NpuError of what it returns, unless that is 0."""
        check(name, getattr(self._library, name)(*arguments))

    def memory(self, name: str, *arguments: Any) -> c._Pointer[TensorMem]:
        """Raises NpuMemoryError."""
        found: c._Pointer[TensorMem] = getattr(self._library, name)(*arguments)
        if not found or not found.contents.virt_addr:
            raise NpuMemoryError(f"{name}: no memory that the NPU can reach")
        return found

    def init(self, model: Path, flags: Flag) -> Context:
        """A context of a compiled model. Raises NpuError."""
        handle = c.c_uint64()
        extend = (c.c_uint8 * _INIT_EXTEND_BYTES)()
        path = c.create_string_buffer(str(model).encode())
        # A size of 0 says that the model is a path: the library maps the file itself.
        self.call("rknn_init", c.byref(handle), c.cast(path, _P), 0, int(flags), c.byref(extend))
        return Context(self, handle.value)


def check(name: str, code: int) -> None:
    """Raises for what a function returned, unless it is 0."""
    if code == Status.OK:
        return
    try:
        status = Status(code)
    except ValueError:
        raise NpuDeviceError(f"{name} returned {code}, which the documents do not know") from None
    kind, meaning = ERRORS[status]
    raise kind(f"{name}: {meaning} ({status.name}, {code})")


class Context(Closing):
    """A loaded model with one variant's shapes, and what is bound to them."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library, self.handle = library, handle
        self._is_open = True

    def duplicate(self) -> Context:
        """A second context on the same weights. Raises NpuError."""
        source, handle = c.c_uint64(self.handle), c.c_uint64()
        self.library.call("rknn_dup_context", c.byref(source), c.byref(handle))
        return Context(self.library, handle.value)

    def versions(self) -> Versions:
        version = SdkVersion()
        self._query(Query.SDK_VERSION, version)
        return Versions(
            *(v.decode(errors="replace") for v in (version.api_version, version.drv_version))
        )

    def require_versions(self, model: str) -> Versions:
        """Raises NpuVersionError where the library is older than what compiled the model, or the
        driver too old for either."""
        found = self.versions()
        for what, has, needs in (
            ("the library", found.library, model),
            ("the kernel's NPU driver", found.driver, MIN_DRIVER),
        ):
            if version_tuple(has) < version_tuple(needs):
                raise NpuVersionError(
                    f"{what} is version {has or 'unknown'}, this model needs at least {needs}; "
                    "`headrace doctor` says how to get it"
                )
        return found

    def counts(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        counts = InputOutputNum()
        self._query(Query.IN_OUT_NUM, counts)
        return counts.n_input, counts.n_output

    def attribute(self, query: Query, index: int) -> TensorAttr:
        attr = TensorAttr(index=index)
        self._query(query, attr)
        return attr

    def shapes(self, index: int) -> InputRange:
        """What an input may have as its dims, variant by variant."""
        found = InputRange(index=index)
        self._query(Query.INPUT_DYNAMIC_RANGE, found)
        return found

    def _query(self, query: Query, into: c.Structure) -> None:
        self.library.call("rknn_query", self.handle, int(query), c.byref(into), c.sizeof(into))

    def set_cores(self, mask: CoreMask) -> None:
        self.library.call("rknn_set_core_mask", self.handle, int(mask))

    def set_input_shapes(self, attributes: Sequence[TensorAttr]) -> None:
        """Chooses the variant with these inputs."""
        array = (TensorAttr * len(attributes))(*attributes)
        self.library.call("rknn_set_input_shapes", self.handle, len(attributes), array)

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory that CPU and NPU reach, zeroed for both. Raises NpuError."""
        buffer = Buffer(self, self.library.memory("rknn_create_mem", self.handle, num_bytes))
        try:
            buffer.bytes[:] = 0
            buffer.to_device()
        except BaseException:
            buffer.close()
            raise
        return buffer

    def share(self, buffer: Buffer) -> Buffer:
        """Another context's memory, for binding it here; to be closed before it."""
        mem = buffer.mem.contents
        made = self.library.memory(
            "rknn_create_mem_from_fd", self.handle, mem.fd, mem.virt_addr, mem.size, mem.offset
        )
        return Buffer(self, made)

    def bind(self, buffer: Buffer, attr: TensorAttr) -> None:
        """The tensor is read from or written to there from now on, in its native layout."""
        attr.pass_through = 1
        self.library.call("rknn_set_io_mem", self.handle, buffer.mem, c.byref(attr))

    def run(self, timeout_ms: int) -> None:
        """Computes. Raises NpuTimeoutError, NpuError."""
        extend = RunExtend(timeout_ms=timeout_ms)
        self.library.call("rknn_run", self.handle, c.byref(extend))

    def close(self) -> None:
        """May be called again. A context that the library does not know any more is gone too."""
        if self._is_open:
            self._is_open = False
            self.library._library.rknn_destroy(self.handle)


class Buffer(Closing):
    """Memory that CPU and NPU share. Neither sees the other's writes before a flush."""

    def __init__(self, context: Context, mem: c._Pointer[TensorMem]) -> None:
        self.context, self.mem = context, mem
        self.size = int(mem.contents.size)
        address = mem.contents.virt_addr
        assert address is not None
        raw = memoryview((c.c_uint8 * self.size).from_address(address)).cast("B")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(raw, np.uint8)
        self._is_open = True

    def to_device(self) -> None:
        """What the CPU wrote reaches the NPU: the whole buffer, there is no range."""
        self._sync(TO_DEVICE)

    def from_device(self) -> None:
        """What the NPU wrote reaches the CPU."""
        self._sync(FROM_DEVICE)

    def _sync(self, mode: int) -> None:
        self.context.library.call("rknn_mem_sync", self.context.handle, self.mem, mode)

    def close(self) -> None:
        """May be called again; `bytes` may not be used any more."""
        if self._is_open:
            self._is_open = False
            self.bytes = np.empty(0, np.uint8)
            self.context.library._library.rknn_destroy_mem(self.context.handle, self.mem)
