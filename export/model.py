"""One graph of a bundle: calibrated, written, and compared with the float32 reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.export import check
from headrace.export.calibrate import FloatWeights, Observation, observe
from headrace.export.checkpoint import Checkpoint
from headrace.export.decoder import ReadMatrix, build_target
from headrace.export.layers import Matrix
from headrace.export.quantize import F32, QuantMatrix, quantize_int4, quantize_int8
from headrace.export.report import Reporter
from headrace.export.text import I64
from headrace.export.weights import EMBEDDING, HEAD
from headrace.models.records import ModelRecord


@dataclass(frozen=True, eq=False)
class ModelJob:
    """What a graph is made of."""

    checkpoint: Checkpoint
    quant: str
    """One of QUANTS."""
    kv: str
    calibration_ids: I64
    """[T]; for the int4 search and an int8 cache."""
    parity_ids: I64
    """[T]"""
    parity_columns: I64
    """[T], the same text's tokens as columns of the logits; -1 for those without one."""
    force: bool
    role: check.Role

    @property
    def label(self) -> str:
        """What goes before reports."""
        return "" if self.role == "target" else "draft: "


@dataclass(frozen=True, eq=False)
class WrittenModel:
    """A graph that passed its parity check."""

    record: ModelRecord
    logits: F32
    """[T, num_logits] of the graph on the parity text."""
    head_bytes: int | None
    """Of an untied head on disk."""


def write_model(job: ModelJob, graph: Path, report: Reporter) -> WrittenModel:
    """Writes `graph` and its data beside it; raises ExportError where parity fails."""
    checkpoint, kv = job.checkpoint, job.kv
    config = checkpoint.config
    graph.parent.mkdir(parents=True)
    seen: Observation | None = None
    if needs_calibration(job.quant, kv):
        report.stage(f"{job.label}calibrating")
        seen = observe(checkpoint, job.calibration_ids)
    scales = seen.kv_scales() if seen and kv == "int8" else None
    report.stage(f"{job.label}writing the {job.quant} graph", config.num_layers)
    matrices = _Matrices(checkpoint, job.quant, seen)
    build_target(
        graph,
        config,
        matrices.read,
        FloatWeights(checkpoint).__getitem__,
        kv=kv,
        kv_scales=scales,
        on_layer=lambda layer: report.advance(),
    )
    # on a text other than the calibration's
    report.stage(f"{job.label}checking against the float reference")
    expected = observe(checkpoint, job.parity_ids)
    logits = check.run_graph(graph, config, kv, job.parity_ids)
    limit = check.limit(job.quant, kv)
    parity = check.compare(logits, expected.logits, job.parity_columns, limit)
    check.gate(parity, job.force, job.role)
    clipping = expected.clipping(scales) if scales else None
    record = ModelRecord(config, job.quant, kv, clipping, parity)
    return WrittenModel(record, logits, matrices.head_bytes)


def needs_calibration(quant: str, kv: str) -> bool:
    return kv == "int8" or quant == "int4"


class _Matrices:
    """How weight matrices are stored, by the chosen quantisation."""

    def __init__(self, checkpoint: Checkpoint, quant: str, seen: Observation | None) -> None:
        self.head_bytes: int | None = None
        self._checkpoint, self._float = checkpoint, FloatWeights(checkpoint)
        self._energy = seen.energy if seen else {}
        forms: dict[str, ReadMatrix] = {
            "keep": self._keep,
            "int8": lambda name: quantize_int8(self._float[name]),
            "int4": self._int4,
            "f32": self._float.__getitem__,
        }
        self._form = forms[quant]

    def read(self, name: str) -> Matrix:
        matrix = self._form(name)
        if name == HEAD:
            stored = matrix.stored_bytes if isinstance(matrix, QuantMatrix) else matrix.nbytes
            self.head_bytes = stored
        return matrix

    def _keep(self, name: str) -> Matrix:
        weight = self._checkpoint.read(name)
        return weight if isinstance(weight, QuantMatrix) else quantize_int8(weight)

    def _int4(self, name: str) -> Matrix:
        if name in (EMBEDDING, HEAD):
            return quantize_int8(self._float[name])
        return quantize_int4(self._float[name], self._energy.get(name.removesuffix(".weight")))
