"""`headrace export`: a checkpoint, or two of them, become a bundle, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import headrace
from headrace.errors import UsageError
from headrace.export.checkpoint import Checkpoint, open_checkpoint
from headrace.export.draft import Draft, find_draft
from headrace.export.model import ModelJob, WrittenModel, needs_calibration, write_model
from headrace.export.npu_build import NpuJob, export_npu
from headrace.export.options import (
    NPU_QUANTS,
    PLATFORMS,
    QUANTS,
    DraftOptions,
    ExportOptions,
    NpuOptions,
)
from headrace.export.report import Reporter, Silent
from headrace.export.rknn_env import find_env
from headrace.export.text import I64, Text, read_text
from headrace.export.whole import whole_or_absent
from headrace.intact import sha256
from headrace.models.iospec import KV_DTYPES
from headrace.models.manifest import (
    DRAFT,
    MANIFEST,
    TARGET,
    TOKENIZER,
    VOCAB_MAP,
    FileRecord,
    Manifest,
    TokenizerRecord,
)
from headrace.models.plantlog import calibration_text, sample_log
from headrace.models.records import DraftRecord

__all__ = ["QUANTS", "DraftOptions", "ExportOptions", "Reporter", "Silent", "export"]

_MAX_TOKENS, _MIN_TOKENS = 1024, 16
"""Of a calibration text."""
_PARITY_TOKENS = 512


def export(
    source: str,
    out: Path,
    options: ExportOptions | None = None,
    report: Reporter | None = None,
) -> Manifest:
    """Writes the bundle `out` from a .gguf file, a Hugging Face folder or a hub id.

    Raises:
        SourceError: a checkpoint cannot be read, or is of an unknown kind.
        TokenizerMismatchError: the draft's tokenizer does not suit the target.
        ExportError: a graph is too far from the float reference.
        StorageError: `out` cannot be written. Nothing is left behind in any of these cases.
        RknnToolkitError: the compiler of an NPU draft is missing, or failed.
        UsageError: an option is unknown or out of range, or `out` exists.
    """
    options, report = options or ExportOptions(), report or Silent()
    if options.kv not in KV_DTYPES:
        raise UsageError(f"kv: got {options.kv!r}, allowed are {', '.join(KV_DTYPES)}")
    _check_quant("quant", options.quant)
    if options.draft is not None:
        _check_quant("draft_quant", options.draft.quant)
        _check_npu(options.draft.npu)
    if out.exists():
        raise UsageError(f"{out}: exists already; choose another name or remove it")
    with whole_or_absent(out) as folder:
        inputs = _inputs(source, options, report)
        return _Export(inputs, options, folder, report).run()


def _check_quant(name: str, quant: str | None) -> None:
    if quant not in (None, *QUANTS):
        raise UsageError(f"{name}: got {quant!r}, allowed are {', '.join(QUANTS)}")


def _check_npu(npu: NpuOptions | None) -> None:
    """Before anything is computed. Raises UsageError, RknnToolkitError."""
    if npu is None:
        return
    for name, value, known in (
        ("platform", npu.platform, PLATFORMS),
        ("npu_quant", npu.quant, NPU_QUANTS),
    ):
        if value not in known:
            raise UsageError(f"{name}: got {value!r}, allowed are {', '.join(known)}")
    find_env()


@dataclass(frozen=True, eq=False)
class _Inputs:
    """All that an export reads, found to be of use before anything is computed."""

    target: Checkpoint
    text: Text
    quant: str
    calibration: str | None
    """The user's own text."""
    draft: Draft | None
    draft_quant: str


def _inputs(source: str, options: ExportOptions, report: Reporter) -> _Inputs:
    report.stage(f"reading {source}")
    target = open_checkpoint(source)
    text, draft, draft_quant = Text.of(target), None, ""
    if options.draft is not None:
        report.stage(f"draft: reading {options.draft.source}")
        draft = find_draft(options.draft, target, text)
        draft_quant = _quant(options.draft.quant, draft.checkpoint)
    quant = _quant(options.quant, target)
    used = needs_calibration(quant, options.kv) or draft_quant == "int4"
    if options.calibrate is not None and not used:
        raise UsageError(
            f"calibrate: nothing here goes by a text; {options.calibrate} would serve --quant int4 "
            "and --kv int8 only"
        )
    calibration = None if options.calibrate is None else read_text(options.calibrate, "calibrate")
    return _Inputs(target, text, quant, calibration, draft, draft_quant)


def _quant(wanted: str | None, checkpoint: Checkpoint) -> str:
    return wanted or ("keep" if checkpoint.kind in ("gguf", "distilled") else "int4")


class _Export:
    """One run of `export`, into a temporary folder."""

    def __init__(
        self, inputs: _Inputs, options: ExportOptions, folder: Path, report: Reporter
    ) -> None:
        self.inputs, self.options = inputs, options
        self.folder, self.report = folder, report
        text = sample_log(num_lines=12, seed=1) + calibration_text()
        self.parity_ids = inputs.text.encode(text, _PARITY_TOKENS)

    def run(self) -> Manifest:
        tokenizer = self.folder / TOKENIZER
        tokenizer.write_text(self.inputs.text.source.tokenizer_json, encoding="utf-8")
        target = self.target()
        draft = self.draft(self.inputs.draft, target) if self.inputs.draft else None
        manifest = self.manifest(target, draft)
        data = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
        (self.folder / MANIFEST).write_text(data + "\n", encoding="utf-8")
        return manifest

    def target(self) -> WrittenModel:
        job = ModelJob(
            self.inputs.target,
            self.inputs.quant,
            self.options.kv,
            self.calibration_ids(self.inputs.text),
            parity_ids=self.parity_ids,
            parity_columns=self.parity_ids,
            force=self.options.force,
            role="target",
        )
        return write_model(job, self.folder / TARGET, self.report)

    def draft(self, draft: Draft, target: WrittenModel) -> DraftRecord:
        ids = draft.reads(self.parity_ids)
        job = ModelJob(
            draft.checkpoint,
            self.inputs.draft_quant,
            self.options.kv,
            self.calibration_ids(draft.text),
            parity_ids=ids,
            parity_columns=draft.columns(ids),
            force=self.options.force,
            role="draft",
        )
        written = write_model(job, self.folder / DRAFT, self.report)
        draft.vocab_map.save(self.folder / VOCAB_MAP)
        record = draft.record(written, target.logits, sha256(self.folder / TOKENIZER))
        assert self.options.draft is not None
        if self.options.draft.npu is None:
            return record
        npu = NpuJob(
            draft.checkpoint,
            self.options.draft.npu,
            ids,
            job.parity_columns,
            target.logits,
            draft.vocab_map.to_target,
            self.options.force,
        )
        return replace(record, npu=export_npu(npu, self.folder, self.report))

    def calibration_ids(self, text: Text) -> I64:
        """The float pass that int8 caches and the int4 search need."""
        own = self.inputs.calibration
        ids = text.encode(calibration_text() if own is None else own, _MAX_TOKENS)
        if own is not None and len(ids) < _MIN_TOKENS:
            raise UsageError(
                f"calibrate: {self.options.calibrate} has {len(ids)} tokens, at least "
                f"{_MIN_TOKENS} are needed; give a text like those in service"
            )
        return ids

    def manifest(self, target: WrittenModel, draft: DraftRecord | None) -> Manifest:
        files = sorted(p for p in self.folder.rglob("*") if p.is_file())
        self.report.stage("hashing", len(files))
        records = {}
        for path in files:
            name = path.relative_to(self.folder).as_posix()
            records[name] = FileRecord(path.stat().st_size, sha256(path))
            self.report.advance()
        checkpoint, text = self.inputs.target, self.inputs.text.source
        return Manifest(
            name=self.options.name or checkpoint.name,
            created_by=f"headrace {headrace.__version__}",
            source=checkpoint.kind,
            target=target.record,
            tokenizer=TokenizerRecord(text.chat_template, text.bos_id, text.eos_ids, text.add_bos),
            sampling=checkpoint.sampling,
            files=records,
            draft=draft,
        )
