"""The compiled draft in the toolkit's simulator beside ONNX Runtime on the same inputs, and what the
simulator cannot show: activations beyond what float16 holds.

The simulator rounds to float16 between operators, but computes inside a fused norm or attention
without overflow; silicon may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from headrace.export.npu_text import Feeds, ort_run
from headrace.export.quantize import F32
from headrace.export.rknn import Toolkit
from headrace.export.session import cpu_session

FP16_LIMIT = 65504.0
LOGITS = "logits"

_BATCH = 64
"""Tensors that are looked at in one pass: they stand in memory together."""


@dataclass(frozen=True)
class Agreement:
    """Simulated outputs of one variant beside ONNX Runtime's, over all its feeds."""

    cosine: dict[str, float]
    """By output, the least of all feeds."""
    max_error: dict[str, float]
    """By output, absolute."""
    positions: int
    """Rows of logits that were compared."""
    same_top1: int
    """Of them, those with the same best token."""
    decided: int
    """Those whose two best logits are further apart than the largest error of any logit."""
    decided_same: int
    """Of the decided, those with the same best token: it should be all of them."""


@dataclass(frozen=True)
class Activations:
    """The largest absolute value in a graph, over all feeds."""

    largest: float
    name: str
    """The tensor that has it."""
    beyond: dict[str, float]
    """Tensors beyond what float16 holds, and their largest value; one that is not a number is."""


def compare(
    toolkit: Toolkit, graph: Path, feeds: Mapping[int, Sequence[Feeds]]
) -> dict[int, Agreement]:
    """By rows: `toolkit`, which built `graph` last, against ONNX Runtime.

    Raises RknnToolkitError.
    """
    run = ort_run(graph)
    return {
        rows: agreement((run(rows, feed), toolkit.run(rows, feed)) for feed in of_rows)
        for rows, of_rows in feeds.items()
    }


def agreement(pairs: Iterable[tuple[Mapping[str, F32], Mapping[str, F32]]]) -> Agreement:
    """Of (reference, simulated) outputs; logits are [1, V, 1, T]."""
    cosines: dict[str, float] = {}
    errors: dict[str, float] = {}
    wanted, got = [], []
    for reference, simulated in pairs:
        for name, expected in reference.items():
            cosine = _cosine(expected, simulated[name])
            error = float(np.abs(expected - simulated[name]).max())
            # not min() and max(): those may drop what is not a number
            cosines[name] = float(np.minimum(cosine, cosines.get(name, 1.0)))
            errors[name] = float(np.maximum(error, errors.get(name, 0.0)))
        wanted.append(reference[LOGITS][0, :, 0].T)
        got.append(simulated[LOGITS][0, :, 0].T)
    logits, theirs = np.concatenate(wanted), np.concatenate(got)  # [positions, V]
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    decided = best[:, 1] - best[:, 0] > errors[LOGITS]
    same = logits.argmax(-1) == theirs.argmax(-1)
    return Agreement(
        cosine=cosines,
        max_error=errors,
        positions=len(logits),
        same_top1=int(same.sum()),
        decided=int(decided.sum()),
        decided_same=int((decided & same).sum()),
    )


def activations(graph: Path, feeds: Sequence[Feeds]) -> Activations:
    """Runs a graph by ONNX Runtime with every float tensor as an output."""
    model = onnx.load(graph, load_external_data=False)
    computed = list(_computed(model.graph))
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in computed if name not in outputs
    )
    session = cpu_session(model.SerializeToString(), graph.parent)
    floats = [o.name for o in session.get_outputs() if o.type == "tensor(float)"]
    largest: dict[str, float] = {}
    for feed in feeds:
        for name, array in feed.items():
            _raise(largest, name, array)
        for start in range(0, len(floats), _BATCH):
            names = floats[start : start + _BATCH]
            for name, array in zip(names, session.run(names, dict(feed)), strict=True):
                _raise(largest, name, array)
    top = max(largest, key=lambda name: _rank(largest[name]))
    beyond = {name: value for name, value in largest.items() if not value <= FP16_LIMIT}
    return Activations(largest[top], top, beyond)


def _computed(graph: onnx.GraphProto) -> Iterator[str]:
    """Tensors that depend on an input; the others are weights in another form."""
    living = {i.name for i in graph.input} - {i.name for i in graph.initializer}
    for node in graph.node:
        if living.intersection(node.input):
            living.update(node.output)
            yield from (name for name in node.output if name)


def _raise(largest: dict[str, float], name: str, array: npt.NDArray[np.float32]) -> None:
    value = float(np.abs(array).max(initial=0))  # not a number, if any is not
    largest[name] = max(value, largest.get(name, 0.0), key=_rank)


def _rank(value: float) -> float:
    return np.inf if np.isnan(value) else value


def _cosine(a: F32, b: F32) -> float:
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / norms) if norms else float(not np.any(x) and not np.any(y))
