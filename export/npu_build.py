"""A draft compiled for the NPU, and all that a PC can prove of it before there is a board."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import ExportError, UsageError
from headrace.export import check, rknn_log, simulator
from headrace.export.calibrate import observe
from headrace.export.checkpoint import Checkpoint
from headrace.export.npu_cost import variant_cost
from headrace.export.npu_draft import embeddings, write_npu_files
from headrace.export.npu_text import TextPasses
from headrace.export.options import NpuOptions
from headrace.export.quantize import F32
from headrace.export.report import Reporter
from headrace.export.rknn import Toolkit
from headrace.export.text import I64
from headrace.models.manifest import NPU, NPU_GRAPH, NPU_IO
from headrace.models.npu_io import (
    DEFAULT_ROWS,
    INT8_ROWS,
    NpuGeometry,
    NpuIo,
    geometry_for,
    npu_inputs,
)
from headrace.models.records import NpuRecord, NpuVariantRecord

_COMPARED, _RANGED, _CALIBRATED = 3, 4, 8
"""Passes of the text: compared by variant, looked at tensor by tensor, and calibrated with."""

_PROBE_TOKENS = 12

_LARGEST = 32_768.0
"""Half of what float16 holds: other texts have larger activations."""

_PARITY_QUANT = "int8"
"""Whose parity limit holds for weights in float16: they are finer."""


@dataclass(frozen=True, eq=False)
class NpuJob:
    """What is compiled, and the text that it is judged by."""

    checkpoint: Checkpoint
    options: NpuOptions
    ids: I64
    """[T], the parity text as the draft reads it."""
    columns: I64
    """[T], its tokens as columns of the logits; -1 for those without one."""
    target_logits: F32
    """[T, V] of the target on the same text."""
    to_target: npt.NDArray[np.int32]
    """[num_logits] target ids; -1 for none."""
    force: bool

    def geometry(self) -> NpuGeometry:
        """Raises UsageError where the NPU cannot have such a draft."""
        config = self.checkpoint.config
        if config.head_dim % 16:
            raise UsageError(
                f"{self.checkpoint.name}: a head of {config.head_dim} channels does not fill the "
                "NPU's groups of 16; leave --platform out, or choose another draft"
            )
        rows = INT8_ROWS if self.options.quant == "w8a8" else DEFAULT_ROWS
        return geometry_for(config, self.options.ctx, rows)

    def passes(self, folder: Path, io: NpuIo) -> TextPasses:
        """The text through the graph in a bundle's folder."""
        table = embeddings(folder, self.checkpoint.config)
        return TextPasses(self.checkpoint.config, io, table, folder / NPU_GRAPH, self.ids)


def export_npu(job: NpuJob, folder: Path, report: Reporter) -> NpuRecord:
    """Writes the draft for the NPU into a bundle's folder.

    Raises RknnToolkitError; ExportError for an operator that the NPU does not do, a graph that is
    too far from its reference, or activations beyond float16; UsageError.
    """
    geometry, config = job.geometry(), job.checkpoint.config
    io, ranges = _within_range(job, geometry, folder, report)
    text = job.passes(folder, io)
    report.stage("draft for the NPU: checking against the float reference")
    _check_parity(job, text)
    report.stage(f"draft for the NPU: compiling {len(geometry.rows)} variants")
    with Toolkit(report, folder.parent) as toolkit:
        is_quantised = job.options.quant == "w8a8"
        built = toolkit.build(
            folder / NPU_GRAPH,
            folder / NPU,
            {rows: npu_inputs(config, geometry, rows) for rows in geometry.rows},
            platform=job.options.platform,
            quant=job.options.quant,
            calibration=text.feeds(text.most_rows, _CALIBRATED) if is_quantised else (),
        )
        rknn_log.check_on_npu(built.variants)
        first = built.variants[min(geometry.rows)]
        io = io.compiled(built.toolkit, rknn_log.boundary_types(first))
        rknn_log.check_layouts(built.variants, io)
        io.save(folder / NPU_IO)
        report.stage("draft for the NPU: simulating each variant")
        compared = simulator.compare(
            toolkit,
            folder / NPU_GRAPH,
            {rows: text.feeds(rows, _COMPARED) for rows in geometry.rows},
        )
        report.stage("draft for the NPU: simulating the text")
        logits = text.logits(toolkit.run)
        target_logits = job.target_logits[: len(logits)]
        agreement = check.agreement(target_logits, logits, job.to_target)
    return NpuRecord(
        platform=built.platform,
        toolkit=built.toolkit,
        quant=built.quant,
        weight_bytes=first.weight_bytes,
        build_s=built.seconds,
        build_peak_bytes=built.peak_rss_bytes,
        step_s=variant_cost(first).by_bytes_ms / 1e3,
        largest=ranges.largest,
        largest_at=ranges.name,
        variants=tuple(
            NpuVariantRecord(
                rows=rows,
                operators=len(log.computing),
                internal_bytes=log.internal_bytes,
                cycles=log.cycles,
                cosine=compared[rows].cosine[simulator.LOGITS],
                max_error=compared[rows].max_error[simulator.LOGITS],
                top1_clear=compared[rows].decided,
                top1_same=compared[rows].decided_same,
            )
            for rows, log in built.variants.items()
        ),
        agreement=agreement,
    )


def _check_parity(job: NpuJob, text: TextPasses) -> None:
    logits = text.logits(text.run)
    expected = observe(job.checkpoint, text.ids).logits
    limit = check.limit(_PARITY_QUANT, "f16")
    parity = check.compare(logits, expected, job.columns[: len(logits)], limit)
    check.gate(parity, job.force, "draft")


def _within_range(
    job: NpuJob, geometry: NpuGeometry, folder: Path, report: Reporter
) -> tuple[NpuIo, simulator.Activations]:
    """Writes the graph, its residual stream scaled down if its squares are too large for float16.

    Small models have single activations of tens of thousands ("massive activations", Sun et al.,
    2024). The simulator computes a norm without overflow, and nobody says that the NPU does.
    """
    scale = 1.0
    for _ in range(2):
        report.stage("draft for the NPU: writing the graph", job.checkpoint.config.num_layers)
        io = write_npu_files(
            job.checkpoint,
            folder,
            geometry,
            platform=job.options.platform,
            toolkit="",
            quant=job.options.quant,
            residual_scale=scale,
            probe_ids=job.ids[:_PROBE_TOKENS],
            on_layer=lambda layer: report.advance(),
        )
        report.stage("draft for the NPU: ranges of activations")
        text = job.passes(folder, io)
        ranges = simulator.activations(text.graph, text.feeds(text.most_rows, _RANGED))
        if not ranges.largest > _LARGEST or scale != 1.0:
            break
        scale = 2.0 ** -np.ceil(np.log2(np.sqrt(ranges.largest / _LARGEST)))
    if ranges.beyond and not job.force:
        names = ", ".join(list(ranges.beyond)[:3])
        raise ExportError(
            f"draft: {len(ranges.beyond)} tensors go beyond float16's {simulator.FP16_LIMIT:,.0f} "
            f"on the parity text ({names}), so the NPU would compute nonsense; choose another draft, "
            "or insist with --force"
        )
    return io, ranges
