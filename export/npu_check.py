"""`headrace check --npu-sim`: how well a bundle's NPU draft would do, before there is a board."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BundleError, UsageError
from headrace.export import check
from headrace.export.npu_draft import embeddings
from headrace.export.npu_text import TextPasses
from headrace.export.report import Reporter
from headrace.export.rknn import Toolkit
from headrace.export.rknn_env import find_env
from headrace.export.text import I64
from headrace.models.manifest import NPU_GRAPH, NPU_GRAPH_DATA, NPU_IO, TARGET, Bundle
from headrace.models.npu_io import NpuIo, npu_inputs
from headrace.models.records import Agreement
from headrace.models.vocab_map import load_vocab_map

_MIN_TOKENS, _CALIBRATED = 64, 8


@dataclass(frozen=True)
class Simulation:
    """A text through the simulated draft beside the target."""

    simulated: Agreement
    by_ort: Agreement
    """The same graph by ONNX Runtime, in float32: what float16 or int8 costs is the difference."""
    build_s: float


def simulate(bundle: Bundle, token_ids: I64, report: Reporter) -> Simulation:
    """On as much of a text of the target's tokens as the draft's main inputs hold.

    Raises BundleError, UsageError, RknnToolkitError.
    """
    draft = bundle.draft
    if draft is None or draft.npu is None:
        raise BundleError(f"{bundle.path}: has no draft for an NPU; export it with --platform")
    for name in (NPU_GRAPH, NPU_GRAPH_DATA):
        if not bundle.file(name).is_file():
            raise BundleError(
                f"{bundle.file(name)}: was left out of this copy, and the simulator needs it; use "
                "the bundle as it was exported"
            )
    if len(token_ids) < _MIN_TOKENS:
        raise UsageError(
            f"the text has {len(token_ids)} tokens, at least {_MIN_TOKENS} are needed; give more"
        )
    find_env()  # before what takes long
    io, vocab_map = NpuIo.load(bundle.file(NPU_IO)), load_vocab_map(bundle)
    token_ids = token_ids[: io.geometry.main]
    report.stage("the target")
    target = check.run_graph(
        bundle.file(TARGET), bundle.manifest.config, bundle.manifest.kv, token_ids
    )
    table = embeddings(bundle.path, draft.config)
    draft_ids = vocab_map.read(token_ids)
    text = TextPasses(draft.config, io, table, bundle.file(NPU_GRAPH), draft_ids)
    report.stage("the draft by ONNX Runtime")
    by_ort = check.agreement(target, text.logits(text.run), vocab_map.to_target)
    report.stage("compiling the draft")
    with tempfile.TemporaryDirectory() as folder, Toolkit(report) as toolkit:
        rows = text.most_rows
        built = toolkit.build(
            text.graph,
            Path(folder) / "npu.rknn",
            {rows: npu_inputs(draft.config, io.geometry, rows)},
            platform=io.platform,
            quant=io.quant,
            calibration=text.feeds(rows, _CALIBRATED) if io.quant == "w8a8" else (),
        )
        report.stage("the draft in the simulator")
        logits = text.logits(toolkit.run)
    simulated = check.agreement(target, logits, vocab_map.to_target)
    return Simulation(simulated, by_ort, built.seconds)
