"""What the toolkit's build log says about a compiled graph: operators, memory, tensors.

The toolkit gives no such answers by its interface; it prints tables, one set per variant. A log
whose tables are not as expected, say another version's, is an error, never an empty answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from headrace.errors import ExportError, RknnToolkitError
from headrace.models.npu_io import ITEM_BYTES, NativeTensor, NpuIo, NpuVariant

Dims = tuple[int, ...]

BOUNDARY = ("InputOperator", "OutputOperator")
"""What stands for inputs and outputs in the table; the CPU does these by definition."""

_TABLE = "Network Layer Information Table"
_TENSORS = "Feature Tensor Information Table"
_OPERATOR = re.compile(
    r"\]\s(\d+)\s+(\S+)\s+(\S+)\s+(CPU|NPU|GPU)\s+(\S+)\s+(\S+)\s+"
    r"(\d+)/(\d+)/(\d+)\s+([\d.]+)[ \t]*(\S*)"
)
_TENSOR = re.compile(
    r"\]\s(\d+)\s+(\S+)\s+(\S+)\s+(\S+)\s+(\S+)\s+(\([\d,]+\))\s+(\([\d,]+\))\s*\|"
    r"\s*(0x[0-9a-f]+)\s+(0x[0-9a-f]+)\s+(0x[0-9a-f]+)"
)
_MEMORY = re.compile(r"Total (Internal|Weight) Memory Size:\s*([\d.]+)\s*(B|KB|MB|GB)\b")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_BANNER = re.compile(r"^rknn-toolkit2 version|Traceback \(most recent")
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Operator:
    """A row of a variant's operator table."""

    type: str
    target: str
    """CPU, NPU or GPU."""
    input_dims: str
    """As printed; a long list is cut off."""
    output_dims: str
    cycles: int
    traffic_kb: float
    """Read and written."""
    name: str
    """The node's, or empty."""

    @property
    def label(self) -> str:
        return self.name or f"{self.type}{self.output_dims}"


@dataclass(frozen=True)
class LogTensor:
    """A row of a variant's tensor table: a tensor as one of its users has it."""

    user: str
    """Type of the operator that reads it."""
    name: str
    type: str
    """As in NativeTensor.type: float16, int8."""
    layout: str
    dims: Dims
    printed: Dims
    """The native shape as printed, N, C1, H, W, C2. C1 is not to be relied on: for float16 it is
    printed four times as large as it is.
    """
    size: int
    """Bytes, padding included."""


@dataclass(frozen=True)
class VariantLog:
    """What the log tells of one variant."""

    operators: tuple[Operator, ...]
    tensors: tuple[LogTensor, ...]
    internal_bytes: int
    """Of all tensors that are no weights; inputs and outputs are among them."""
    weight_bytes: int

    @property
    def inputs(self) -> dict[str, Dims]:
        return {
            op.label.removeprefix("InputOperator:"): _dims(op.output_dims)
            for op in self.operators
            if op.type == "InputOperator"
        }

    @property
    def outputs(self) -> dict[str, Dims]:
        return {
            op.label.removeprefix("OutputOperator:"): _dims(op.input_dims)
            for op in self.operators
            if op.type == "OutputOperator"
        }

    @property
    def computing(self) -> list[Operator]:
        """All but the inputs and outputs."""
        return [op for op in self.operators if op.type not in BOUNDARY]

    @property
    def cycles(self) -> int:
        """A lower bound: only convolutions and matrix products are counted."""
        return sum(op.cycles for op in self.operators)

    @property
    def traffic_bytes(self) -> int:
        """Read and written by all operators."""
        return round(sum(op.traffic_kb for op in self.operators) * 1024)

    @property
    def types(self) -> dict[str, int]:
        """Number of operators by type, the most frequent first."""
        return dict(Counter(op.type for op in self.computing).most_common())


def parse(log: str) -> list[VariantLog]:
    """The variants' tables in the order of the log, which is not that of the variants.

    Raises RknnToolkitError for a log that is not understood.
    """
    parts = plain(log).split(_TABLE)[1:]
    if not parts:
        raise RknnToolkitError(f"the toolkit's log has no {_TABLE!r}; is it another version?")
    return [_variant(part) for part in parts]


def plain(log: str) -> str:
    """Without colours and progress bars."""
    lines = _ESCAPES.sub("", log).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines)


def complaints(log: str) -> list[str]:
    """The errors that the toolkit printed, without their prefixes."""
    found = re.findall(r"^E (?:RKNN: )?(?:\[[\d:.]+\] )?(.*)", plain(log), re.MULTILINE)
    return [line for text in found if (line := text.strip(" =-*")) and not _BANNER.search(line)]


def by_inputs(
    logs: Sequence[VariantLog], wanted: Mapping[int, Mapping[str, Dims]]
) -> dict[int, VariantLog]:
    """Each variant's table, found by the dims of its inputs.

    Raises RknnToolkitError when a variant has no table, or there are more tables.
    """
    found: dict[int, VariantLog] = {}
    for rows, inputs in wanted.items():
        same = [log for log in logs if log.inputs == dict(inputs)]
        if len(same) != 1:
            raise RknnToolkitError(
                f"the toolkit's log has {len(same)} tables for the variant of {rows} rows, "
                "expected 1; is it another version?"
            )
        found[rows] = same[0]
    if len(logs) != len(wanted):
        raise RknnToolkitError(
            f"the toolkit's log has tables of {len(logs)} variants, expected {len(wanted)}"
        )
    return found


def cpu_operators(variant: VariantLog) -> list[Operator]:
    """Operators that the NPU does not do, beside inputs and outputs."""
    return [op for op in variant.computing if op.target != "NPU"]


def check_on_npu(variants: Mapping[int, VariantLog]) -> None:
    """Raises ExportError, naming the operators that the NPU does not do."""
    for rows, variant in variants.items():
        if others := cpu_operators(variant):
            names = ", ".join(f"{op.type} ({op.label})" for op in others[:5])
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            raise ExportError(
                f"NPU graph: in the variant of {rows} rows, these would run on the CPU: {names}{more}"
            )


def boundary_types(variant: VariantLog) -> dict[str, str]:
    """Types of inputs and outputs by name."""
    names = {*variant.inputs, *variant.outputs}
    return {t.name: t.type for t in variant.tensors if t.name in names}


def check_layouts(variants: Mapping[int, VariantLog], io: NpuIo) -> None:
    """Raises ExportError where compiled inputs or outputs are not as they will be described."""
    found = [d for v in io.variants for d in layout_differences(variants[v.rows], v)]
    if found:
        raise ExportError(
            f"the compiled draft's tensors are not as they should be, {len(found)} times, first "
            f"{found[0]}; is the toolkit of another version?"
        )


def layout_differences(variant: VariantLog, expected: NpuVariant) -> list[str]:
    """Where boundary tensors in the log are not as `expected` has them, a sentence each."""
    found: list[str] = []
    sides = (
        ("input", variant.inputs, expected.inputs),
        ("output", variant.outputs, expected.outputs),
    )
    for side, logged, wanted in sides:
        if list(logged) != [t.name for t in wanted] and set(logged) != {t.name for t in wanted}:
            found.append(f"{side}s: the log has {', '.join(logged)}")
        for tensor in wanted:
            found += _differences(side, tensor, variant.tensors)
    return found


def _differences(side: str, wanted: NativeTensor, tensors: Iterable[LogTensor]) -> Iterator[str]:
    seen = [t for t in tensors if t.name == wanted.name]
    if side == "output":
        seen = [t for t in seen if t.user == "OutputOperator"] or seen
    if not seen:
        yield f"{side} {wanted.name}: not in the log's table of tensors"
        return
    logged = seen[0]
    facts = {
        "dims": (logged.dims, wanted.dims),
        "type": (logged.type, wanted.type),
        "C2": (logged.printed[-1], wanted.native[-1]),
        "bytes": (_planned(logged.size, wanted.size), wanted.size),
    }
    for fact, (got, expected) in facts.items():
        if got != expected:
            yield f"{side} {wanted.name} {wanted.dims}: {fact} {got}, expected {expected}"


def _planned(size: int, expected: int) -> int:
    """What a plan of `size` bytes says of a tensor that should have `expected`.

    In float16 the compiler plans embeddings, and all that a residual sum reads, at a multiple of
    their bytes, whose rest is room to work in: no difference in where their elements lie.
    """
    return expected if expected and size % expected == 0 else size


def _variant(text: str) -> VariantLog:
    head, has_tensors, rest = text.partition(_TENSORS)
    operators = tuple(_operators(head))
    if not operators or not has_tensors:
        raise RknnToolkitError("the toolkit's log has a table without rows; is it another version?")
    memory = {which: float(size) * _UNITS[unit] for which, size, unit in _MEMORY.findall(rest)}
    if set(memory) != {"Internal", "Weight"}:
        raise RknnToolkitError("the toolkit's log tells no memory sizes; is it another version?")
    tensors = tuple(_tensors(rest))
    return VariantLog(operators, tensors, round(memory["Internal"]), round(memory["Weight"]))


def _operators(text: str) -> Iterator[Operator]:
    """Raises RknnToolkitError where a row is missing: it might be what runs on the CPU."""
    number = 0
    for row in _OPERATOR.finditer(text):
        index, kind, _, target, inputs, outputs, _, _, cycles, traffic, name = row.groups()
        if int(index) != number:
            raise RknnToolkitError(
                f"the toolkit's log: row {number} of the operators cannot be read; "
                "is it another version?"
            )
        number += 1
        yield Operator(kind, target, inputs, outputs, int(cycles), float(traffic), name)
    rows = len(re.findall(r"RKNN: \[[\d:.]+\]\s\d+\s+[A-Za-z]", text))
    if rows != number:
        raise RknnToolkitError(
            f"the toolkit's log: {rows - number} rows of the operators cannot be read; "
            "is it another version?"
        )


def _tensors(text: str) -> Iterator[LogTensor]:
    for row in _TENSOR.finditer(text):
        _, user, name, kind, layout, dims, printed, _, _, size = row.groups()
        yield LogTensor(
            user, name, kind.lower(), layout, _dims(dims), _dims(printed), int(size, 16)
        )


def item_bytes(tensor: LogTensor) -> int:
    """Raises RknnToolkitError for a type that a boundary tensor cannot have."""
    if tensor.type not in ITEM_BYTES:
        raise RknnToolkitError(
            f"{tensor.name}: compiled as {tensor.type}, known are {', '.join(ITEM_BYTES)}"
        )
    return ITEM_BYTES[tensor.type]


def padding(tensor: LogTensor) -> float:
    """How many times larger than its elements a tensor is."""
    return tensor.size / (prod(tensor.dims) * item_bytes(tensor))


def _dims(printed: str) -> Dims:
    """Of `(1,192,1,8)`; the first tensor's, where several are printed."""
    first = printed.split("),")[0].strip("().")
    try:
        return tuple(int(d) for d in first.split(",") if d)
    except ValueError as error:
        raise RknnToolkitError(f"the toolkit's log: {printed!r} are no dims") from error
