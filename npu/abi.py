"""The C interface of librknnrt: enums and structs as Rockchip's "RKNN Runtime API" 2.3.2 has them.

Sizes and offsets are compared with the documented ones on import.
"""

from __future__ import annotations

import ctypes as c
import enum

MAX_DIMS, MAX_NAME = 16, 256


class Status(enum.IntEnum):
    """What every function returns."""

    OK = 0
    FAIL = -1
    TIMEOUT = -2
    DEVICE_UNAVAILABLE = -3
    MALLOC_FAIL = -4
    PARAM_INVALID = -5
    MODEL_INVALID = -6
    CTX_INVALID = -7
    INPUT_INVALID = -8
    OUTPUT_INVALID = -9
    DEVICE_UNMATCH = -10
    TARGET_PLATFORM_UNMATCH = -13


class Query(enum.IntEnum):
    IN_OUT_NUM = 0
    INPUT_ATTR = 1
    SDK_VERSION = 5
    INPUT_DYNAMIC_RANGE = 13
    CURRENT_NATIVE_INPUT_ATTR = 16
    CURRENT_NATIVE_OUTPUT_ATTR = 17


class Flag(enum.IntFlag):
    """Of `rknn_init`."""

    PRIOR_MEDIUM = 1
    DISABLE_FLUSH_INPUT = 0x4000
    DISABLE_FLUSH_OUTPUT = 0x8000


class CoreMask(enum.IntEnum):
    AUTO = 0
    CORE_0 = 1
    CORE_1 = 2
    CORE_2 = 4
    CORE_0_1 = 3
    CORE_0_1_2 = 7


CORES = {
    "auto": CoreMask.AUTO,
    "0": CoreMask.CORE_0,
    "1": CoreMask.CORE_1,
    "2": CoreMask.CORE_2,
    "0_1": CoreMask.CORE_0_1,
    "0_1_2": CoreMask.CORE_0_1_2,
}

FORMATS = ("NCHW", "NHWC", "NC1HWC2", "UNDEFINED")


def format_name(fmt: int) -> str:
    """Also of one that the documents do not know."""
    return FORMATS[fmt] if 0 <= fmt < len(FORMATS) else str(fmt)


TYPES = {0: "float32", 1: "float16", 2: "int8", 3: "uint8", 6: "int32", 8: "int64"}

TO_DEVICE, FROM_DEVICE = 1, 2


class TensorAttr(c.Structure):
    """rknn_tensor_attr"""

    _fields_ = [
        ("index", c.c_uint32),
        ("n_dims", c.c_uint32),
        ("dims", c.c_uint32 * MAX_DIMS),
        ("name", c.c_char * MAX_NAME),
        ("n_elems", c.c_uint32),
        ("size", c.c_uint32),
        ("fmt", c.c_int),
        ("type", c.c_int),
        ("qnt_type", c.c_int),
        ("fl", c.c_int8),
        ("zp", c.c_int32),
        ("scale", c.c_float),
        ("w_stride", c.c_uint32),
        ("size_with_stride", c.c_uint32),
        ("pass_through", c.c_uint8),
        ("h_stride", c.c_uint32),
    ]


class TensorMem(c.Structure):
    """rknn_tensor_mem"""

    _fields_ = [
        ("virt_addr", c.c_void_p),
        ("phys_addr", c.c_uint64),
        ("fd", c.c_int32),
        ("offset", c.c_int32),
        ("size", c.c_uint32),
        ("flags", c.c_uint32),
        ("priv_data", c.c_void_p),
    ]


class InputOutputNum(c.Structure):
    """rknn_input_output_num"""

    _fields_ = [("n_input", c.c_uint32), ("n_output", c.c_uint32)]


class SdkVersion(c.Structure):
    """rknn_sdk_version"""

    _fields_ = [("api_version", c.c_char * 256), ("drv_version", c.c_char * 256)]


class RunExtend(c.Structure):
    """rknn_run_extend"""

    _fields_ = [
        ("frame_id", c.c_uint64),
        ("non_block", c.c_int32),
        ("timeout_ms", c.c_int32),
        ("fence_fd", c.c_int32),
    ]


class InputRange(c.Structure):
    """rknn_input_range"""

    _fields_ = [
        ("index", c.c_uint32),
        ("shape_number", c.c_uint32),
        ("fmt", c.c_int),
        ("name", c.c_char * MAX_NAME),
        ("dyn_range", (c.c_uint32 * MAX_DIMS) * 512),
        ("n_dims", c.c_uint32),
    ]


_SIZES = {TensorAttr: 376, TensorMem: 40, InputOutputNum: 8, SdkVersion: 512, RunExtend: 24}
_SIZES[InputRange] = 33040
_OFFSETS = {
    TensorAttr: {"dims": 8, "name": 72, "n_elems": 328, "fmt": 336, "zp": 352, "scale": 356},
    TensorMem: {"phys_addr": 8, "fd": 16, "size": 24, "priv_data": 32},
    InputRange: {"name": 12, "dyn_range": 268, "n_dims": 33036},
    RunExtend: {"non_block": 8, "timeout_ms": 12, "fence_fd": 16},
}
_OFFSETS[TensorAttr] |= {"w_stride": 360, "size_with_stride": 364, "h_stride": 372}
for _struct, _size in _SIZES.items():
    assert c.sizeof(_struct) == _size, f"{_struct.__name__} is {c.sizeof(_struct)} bytes"
for _struct, _fields in _OFFSETS.items():
    for _name, _offset in _fields.items():
        assert getattr(_struct, _name).offset == _offset, f"{_struct.__name__}.{_name}"
