"""The GGUF container: bounds-checked reading of its metadata and table of tensors.

The gguf package's own reader makes several arrays of every string, which takes seconds for a
vocabulary, and does not check bounds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from headrace.errors import SourceError, UnsupportedModelError
from headrace.export.weights import F32

U8 = npt.NDArray[np.uint8]

VERSIONS = (2, 3)
MAX_DIMS = 4

# value types of the metadata, by their number in the file
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor as it lies in the file."""

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """In elements, rows first (the file has them the other way round)."""
    data: U8
    """[*shape[:-1], bytes of a row], memory mapped."""

    def dequantize(self, rows: int | None = None) -> F32:
        """Float32 values of all rows or, of a matrix, the first; the caller owns the array.

        Raises NotImplementedError for a type that the gguf package cannot dequantise.
        """
        data = self.data[:rows] if self.data.ndim > 1 else self.data
        # a damaged scale may overflow here; the checkpoint reports values that are not finite
        with np.errstate(over="ignore", invalid="ignore"):
            return np.array(gguf.quants.dequantize(data, self.type), np.float32)


@dataclass(frozen=True, eq=False)
class GgufFile:
    metadata: dict[str, Any]
    """Plain Python values: numbers, booleans, text, and lists of these."""
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the tables; every tensor lies within the file.

    Raises:
        SourceError: not GGUF, empty, truncated, damaged, big-endian or of an unknown version.
        UnsupportedModelError: a tensor of a type that this version does not know.
    """
    size = path.stat().st_size
    if not size:
        raise SourceError(f"{path}: empty")
    cursor = _Cursor(np.asarray(np.memmap(path, np.uint8, mode="r")), path)
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise SourceError(f"{path}: not a GGUF file: it begins with {magic!r}")
    version = cursor.number("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "big-endian" if swapped in VERSIONS else f"GGUF version {version}"
        raise SourceError(f"{path}: {what}; known are little-endian versions 2 and 3")
    num_tensors, num_pairs = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.name()
        metadata[key] = cursor.value(cursor.number("<I"))
    infos = [_TensorInfo.read(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise SourceError(f"{path}: general.alignment is {alignment}, expected a power of two")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise SourceError(f"{path}: tensor {info.name} is listed twice")
        tensors[info.name] = info.tensor(cursor, start)
    return GgufFile(metadata, tensors)


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int
    """In bytes, from the start of the data."""

    @classmethod
    def read(cls, cursor: _Cursor) -> _TensorInfo:
        name = cursor.name()
        num_dims = cursor.number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.damaged(f"tensor {name} has {num_dims} dimensions")
        dims = [cursor.number("<Q") for _ in range(num_dims)]
        return cls(name, tuple(reversed(dims)), cursor.number("<I"), cursor.number("<Q"))

    def tensor(self, cursor: _Cursor, start: int) -> GgufTensor:
        try:
            kind = gguf.GGMLQuantizationType(self.type_number)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{cursor.path}: tensor {self.name} is of type {self.type_number}, "
                "which the gguf package does not know"
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if self.shape[-1] % block:
            raise cursor.damaged(
                f"tensor {self.name} has rows of {self.shape[-1]}, not whole blocks of {block}"
            )
        row_bytes = self.shape[-1] // block * block_bytes
        first = start + self.offset
        last = first + math.prod(self.shape[:-1]) * row_bytes
        if last > len(cursor.data):
            raise cursor.damaged(f"tensor {self.name} ends at byte {last} of {len(cursor.data)}")
        data = cursor.data[first:last].reshape(*self.shape[:-1], row_bytes)
        return GgufTensor(self.name, kind, self.shape, data)


class _Cursor:
    """A position in the file; reading past the end raises SourceError."""

    def __init__(self, data: U8, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self.data):
            raise self.damaged(f"needs {num_bytes} bytes at byte {self.offset}")
        part = self.data[self.offset : end].tobytes()
        self.offset = end
        return part

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(value)

    def text(self) -> str:
        start = self.offset
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"text at byte {start} is not UTF-8") from error

    def name(self) -> str:
        """Text that may stand in a message."""
        text = self.text()
        if not text.isprintable():
            raise self.damaged(f"the name {text[:60]!r} is not printable")
        return text

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return np.frombuffer(self.take(_SCALARS[kind].itemsize), _SCALARS[kind])[0].item()
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.damaged(f"unknown value type {kind} at byte {self.offset}")
        item, count = self.number("<I"), self.number("<Q")
        if item == _STRING:
            return [self.text() for _ in range(count)]
        if item not in _SCALARS:
            raise self.damaged(f"unknown value type {item} in an array at byte {self.offset}")
        return np.frombuffer(self.take(count * _SCALARS[item].itemsize), _SCALARS[item]).tolist()

    def damaged(self, what: str) -> SourceError:
        return SourceError(f"{self.path}: truncated or damaged ({len(self.data)} bytes): {what}")
