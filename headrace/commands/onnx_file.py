"""`headrace inspect MODEL.onnx`: what ONNX Runtime says about a graph, without the onnx package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from headrace.commands.inspect import print_specs
from headrace.commands.terminal import print_facts, size
from headrace.errors import BundleError
from headrace.intact import sha256
from headrace.models.iospec import TensorSpec

_ORT_TYPES = {"float": "float32", "double": "float64"}


def inspect_onnx(path: Path, as_json: bool) -> None:
    """Prints the inputs and outputs of any ONNX file; raises BundleError if it does not load."""
    session = _load(path)
    meta = session.get_modelmeta()
    inputs, outputs = _specs(session.get_inputs()), _specs(session.get_outputs())
    facts = {
        "file": str(path),
        "size": path.stat().st_size,
        "sha256": sha256(path),
        "producer": meta.producer_name,
        "graph": meta.graph_name,
        "kv_bytes_per_token": _kv_bytes_per_token(inputs),
    }
    if as_json:
        tables = {"inputs": [vars(s) for s in inputs], "outputs": [vars(s) for s in outputs]}
        print(json.dumps({**facts, **tables}, indent=1, ensure_ascii=False))
        return
    per_token = facts.pop("kv_bytes_per_token")
    shown = {**facts, "size": size(path.stat().st_size)}
    if per_token:
        shown["cache per token"] = f"{per_token:,} bytes in the arena"
    print_facts("", [(name, str(value)) for name, value in shown.items() if value])
    print_specs("Inputs", inputs)
    print_specs("Outputs", outputs)


def _load(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what fails is said once, below
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BundleError(f"{path}: ONNX Runtime cannot load it: {reason}") from error


def _specs(arguments: Sequence[Any]) -> list[TensorSpec]:
    return [
        TensorSpec(
            argument.name,
            _dtype(argument.type),
            tuple("?" if dim is None else dim for dim in argument.shape),
        )
        for argument in arguments
    ]


def _dtype(ort_type: str) -> str:
    """numpy's name where there is one: `tensor(float)` is float32."""
    name = ort_type.removeprefix("tensor(").removesuffix(")")
    return _ORT_TYPES.get(name, name)


def _kv_bytes_per_token(inputs: Sequence[TensorSpec]) -> int | None:
    """Of a graph whose past is named as in Hugging Face exports; None if there is none."""
    total = 0
    for spec in inputs:
        if spec.name.startswith("past_key_values.") and len(spec.shape) == 4:
            _, heads, _, head_dim = spec.shape
            if not isinstance(heads, int) or not isinstance(head_dim, int):
                return None
            total += heads * head_dim * np.dtype(spec.dtype).itemsize
    return total or None
