"""GraphBuilder: nodes and initialisers of one ONNX graph, large data streamed to a file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace.closing import Closing
from headrace.models.iospec import TensorSpec

OPSET = 23  # RotaryEmbedding with per-row cos and sin
IR_VERSION = 11
_INLINE_BYTES = 1024
_ALIGNMENT = 4096  # whole pages, so that a mapped tensor shares none with another


class GraphBuilder(Closing):
    """Appends nodes in order and returns value names; use as a context manager.

    Initialisers over 1 KiB go to `<stem>.data` beside the graph as they come, so a model never
    stands in memory twice.
    """

    def __init__(self, path: Path, *, opset: int = OPSET, ir_version: int = IR_VERSION) -> None:
        self.path, self._opset, self._ir_version = path, opset, ir_version
        self._data_name = path.with_suffix(".data").name
        self._file = (path.parent / self._data_name).open("wb")
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self.made: set[str] = set()
        """Names that several nodes use and that exist already."""
        self._prefix = ""

    def close(self) -> None:
        self._file.close()

    def scope(self, prefix: str) -> None:
        """Names of the nodes that follow start with `prefix`."""
        self._prefix = prefix

    def node(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.node_n(op, 1, *inputs, domain=domain, **attributes)[0]

    def node_n(
        self,
        op: str,
        outputs: int | Sequence[str],
        *inputs: str,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Adds a node with several outputs, counted or named."""
        name = f"{self._prefix}{op}_{len(self._nodes)}"
        if isinstance(outputs, int):
            outputs = [f"{name}.{i}" if outputs > 1 else name for i in range(outputs)]
        self._nodes.append(
            helper.make_node(
                op, list(inputs), list(outputs), name=name, domain=domain, **attributes
            )
        )
        return list(outputs)

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        """Adds an initialiser under the given name (without the scope) and returns it."""
        array = np.ascontiguousarray(array)
        if array.nbytes <= _INLINE_BYTES:
            self._initializers.append(numpy_helper.from_array(array, name))
            return name
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", self._data_name),
            ("offset", self._file.tell()),
            ("length", array.nbytes),
        ):
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(array.data.cast("B"))
        self._initializers.append(tensor)
        return name

    def shared(self, name: str, array: npt.NDArray[Any]) -> str:
        """An initialiser that several nodes use: added once under its name."""
        if name not in self.made:
            self.made.add(self.constant(name, array))
        return name

    def ints(self, *values: int) -> str:
        """A small int64 constant, shared by all that want the same values."""
        name = "ints_" + "_".join(map(str, values)).replace("-", "m")
        return self.shared(name, np.array(values, np.int64))

    def finish(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Writes the graph; its inputs and outputs are exactly the given ones."""
        graph = helper.make_graph(
            self._nodes,
            self.path.stem,
            [_value_info(s) for s in inputs],
            [_value_info(s) for s in outputs],
            self._initializers,
        )
        opsets = [helper.make_opsetid("", self._opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="headrace")
        model.ir_version = self._ir_version
        self._file.flush()
        self.path.write_bytes(model.SerializeToString())


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    return helper.make_tensor_value_info(spec.name, kind, list(spec.shape))
