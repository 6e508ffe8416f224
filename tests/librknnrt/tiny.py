"""A graph of three inputs and two outputs, with paddings that nobody would guess."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from headrace.models.npu_io import (
    ITEM_BYTES,
    NativeTensor,
    NpuGeometry,
    NpuIo,
    NpuTensor,
    NpuVariant,
)

ROWS, PAST = (1, 3), 5
F32 = NDArray[np.float32]
Dims = tuple[int, int, int, int]


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
    n, c1, h, _, c2 = tensor.native
    stride = tensor.w_stride + extra
    size = n * c1 * h * stride * c2 * ITEM_BYTES[tensor.type]
    return dataclasses.replace(tensor, w_stride=stride, size=size)


def variant(rows: int, kind: str = "float16") -> NpuVariant:
    """In int8, halves in and wholes out."""
    ins = [(1, 20, 1, rows), (1, 1, rows, PAST + rows), (2, 8, 1, PAST)]
    outs = [(1, 20, 1, rows), (2, 8, 1, rows)]

    def natives(names: str, dims: list[Dims], *, is_output: bool) -> list[NativeTensor]:
        tensors = [NpuTensor(*both) for both in zip(names.split(), dims, strict=True)]
        made = [NativeTensor.expected(t, kind, is_output=is_output) for t in tensors]
        codes = ((1.0, -5) if is_output else (0.5, 3)) if kind == "int8" else (1.0, 0)
        return [dataclasses.replace(t, scale=codes[0], zero=codes[1]) for t in made]

    x, mask, past = natives("x mask past", ins, is_output=False)
    logits, new = natives("logits new", outs, is_output=True)
    return NpuVariant(rows, (padded(x, 3), padded(mask, 2), past), (padded(logits, 1), new))


VARIANTS = {rows: variant(rows) for rows in ROWS}


def save_model(folder: Path, rows: tuple[int, ...] = ROWS, kind: str = "float16") -> Path:
    """The compiled model's path; what lies beside it is what counts."""
    rknn = folder / "npu.rknn"
    rknn.write_bytes(b"compiled")
    onnx.save(graph(), folder / "npu.onnx")
    geometry = NpuGeometry(sinks=1, window=4, unit=1, nodes=1, rows=rows)
    variants = tuple(variant(r, kind) for r in rows)
    NpuIo("rk3588", "2.5.0", "fp16", -1e4, geometry, variants).save(folder / "npu.io.json")
    return rknn


def feeds(rows: int, seed: int = 0) -> dict[str, F32]:
    """Small whole numbers: exact in both types."""
    rng = np.random.default_rng(seed)
    return {t.name: rng.integers(-9, 9, t.dims).astype(np.float32) for t in VARIANTS[rows].inputs}


def expected(fed: dict[str, F32]) -> dict[str, F32]:
    sums = fed["mask"].sum(axis=3, keepdims=True).transpose(0, 1, 3, 2)
    total = fed["past"].sum(axis=3, keepdims=True)
    return {"logits": 2 * fed["x"] + sums, "new": fed["x"][:, :8] + total}
