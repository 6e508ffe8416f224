"""`headrace export`: a checkpoint becomes a bundle, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

import headrace
from headrace.errors import (
    ExportError,
    StorageError,
    TokenizerMismatchError,
    UnsupportedModelError,
    UsageError,
)
from headrace.export import check
from headrace.export.calibrate import FloatWeights, Observation, observe
from headrace.export.checkpoint import Checkpoint, TokenizerSource, open_checkpoint
from headrace.export.decoder import ReadMatrix, build_target
from headrace.export.layers import KvScales, Matrix
from headrace.export.options import QUANTS, ExportOptions
from headrace.export.quantize import F32, QuantMatrix, quantize_int4, quantize_int8
from headrace.export.tokenizer import drop_tokens_without_row
from headrace.intact import sha256
from headrace.models.iospec import KV_DTYPES
from headrace.models.manifest import (
    MANIFEST,
    TARGET,
    TOKENIZER,
    FileRecord,
    Manifest,
    Parity,
    TokenizerRecord,
)
from headrace.models.plantlog import calibration_text, sample_log

__all__ = ["QUANTS", "ExportOptions", "Reporter", "Silent", "export"]

_MAX_TOKENS, _MIN_TOKENS = 1024, 16
"""Of a calibration text."""
_PARITY_TOKENS = 512


class Reporter(Protocol):
    """Hears of long work as it goes on."""

    def stage(self, title: str, steps: int | None = None) -> None:
        """Something that takes `steps` calls of `advance`, or an unknown time, begins."""
        ...

    def advance(self) -> None: ...


class Silent:
    """A Reporter that says nothing."""

    def stage(self, title: str, steps: int | None = None) -> None:
        """See Reporter."""

    def advance(self) -> None:
        """See Reporter."""


def export(
    source: str,
    out: Path,
    options: ExportOptions | None = None,
    report: Reporter | None = None,
) -> Manifest:
    """Writes the bundle `out` from a .gguf file, a Hugging Face folder or a hub id.

    Raises:
        SourceError: the checkpoint cannot be read, or is of an unknown kind.
        ExportError: the graph is too far from the float reference.
        StorageError: `out` cannot be written. Nothing is left behind in any of these cases.
        UsageError: an option is unknown, or `out` exists.
    """
    options, report = options or ExportOptions(), report or Silent()
    if options.kv not in KV_DTYPES:
        raise UsageError(f"kv: got {options.kv!r}, allowed are {', '.join(KV_DTYPES)}")
    if options.quant not in (None, *QUANTS):
        raise UsageError(f"quant: got {options.quant!r}, allowed are {', '.join(QUANTS)}")
    if out.exists():
        raise UsageError(f"{out}: exists already; choose another name or remove it")
    report.stage(f"reading {source}")
    checkpoint = open_checkpoint(source)
    quant = options.quant or ("keep" if checkpoint.kind == "gguf" else "int4")
    with _whole_or_absent(out) as folder:
        return _Export(checkpoint, quant, options, folder, report).run()


class _Export:
    """One run of `export`, into a temporary folder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant: str,
        options: ExportOptions,
        folder: Path,
        report: Reporter,
    ) -> None:
        self.checkpoint, self.quant, self.options = checkpoint, quant, options
        self.folder, self.report = folder, report
        text = checkpoint.tokenizer()
        # Gemma3's text models come with a token for images that has no row.
        fitted, _ = drop_tokens_without_row(text.tokenizer_json, checkpoint.config.vocab_size)
        self.text = replace(text, tokenizer_json=fitted)
        self.tokenizer = _load_tokenizer(self.text, checkpoint)

    def run(self) -> Manifest:
        config, kv = self.checkpoint.config, self.options.kv
        graph = self.folder / TARGET
        graph.parent.mkdir(parents=True)
        seen = self.calibration()
        scales = seen.kv_scales() if seen and kv == "int8" else None
        self.report.stage(f"writing the {self.quant} graph", config.num_layers)
        build_target(
            graph,
            config,
            self.matrices(seen),
            self.vector,
            kv=kv,
            kv_scales=scales,
            on_layer=lambda layer: self.report.advance(),
        )
        parity, clipping = self.check(graph, scales)
        (self.folder / TOKENIZER).write_text(self.text.tokenizer_json, encoding="utf-8")
        manifest = self.manifest(parity, clipping)
        data = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
        (self.folder / MANIFEST).write_text(data + "\n", encoding="utf-8")
        return manifest

    def calibration(self) -> Observation | None:
        """The float pass that int8 caches and the int4 search need."""
        path = self.options.calibrate
        if self.options.kv != "int8" and self.quant != "int4":
            if path is not None:
                raise UsageError(
                    f"calibrate: nothing here goes by a text; {path} would serve --quant int4 and "
                    "--kv int8 only"
                )
            return None
        ids = self.encode(calibration_text() if path is None else _read_text(path), _MAX_TOKENS)
        if path is not None and len(ids) < _MIN_TOKENS:
            raise UsageError(
                f"calibrate: {path} has {len(ids)} tokens, at least {_MIN_TOKENS} are needed; "
                "give a text like those in service"
            )
        self.report.stage("calibrating")
        return observe(self.checkpoint, ids)

    def matrices(self, seen: Observation | None) -> ReadMatrix:
        """How weight matrices are stored, by the chosen quantisation."""
        read = FloatWeights(self.checkpoint)
        energy = seen.energy if seen else {}

        def keep(name: str) -> Matrix:
            weight = self.checkpoint.read(name)
            return weight if isinstance(weight, QuantMatrix) else quantize_int8(weight)

        def int4(name: str) -> Matrix:
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                return quantize_int8(read[name])
            return quantize_int4(read[name], energy.get(name.removesuffix(".weight")))

        forms: dict[str, ReadMatrix] = {
            "keep": keep,
            "int8": lambda name: quantize_int8(read[name]),
            "int4": int4,
            "f32": lambda name: read[name],
        }
        return forms[self.quant]

    def vector(self, name: str) -> F32:
        return FloatWeights(self.checkpoint)[name]

    def check(
        self, graph: Path, scales: list[KvScales] | None
    ) -> tuple[Parity, dict[str, float] | None]:
        """Parity on a text other than the calibration's; raises ExportError."""
        config, kv = self.checkpoint.config, self.options.kv
        ids = self.encode(sample_log(num_lines=12, seed=1) + calibration_text(), _PARITY_TOKENS)
        self.report.stage("checking against the float reference")
        seen = observe(self.checkpoint, ids)
        logits = check.run_graph(graph, config, kv, ids)
        parity = check.compare(logits, seen.logits, ids, check.limit(self.quant, kv))
        check.gate(parity, self.options.force)
        return parity, seen.clipping(scales) if scales else None

    def encode(self, text: str, max_tokens: int) -> npt.NDArray[np.int64]:
        """Token ids with the start token before them: its keys are unlike all others."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.text.bos_id is not None:
            ids = [self.text.bos_id, *ids]
        return np.array(ids[: min(max_tokens, self.checkpoint.config.max_position)], np.int64)

    def manifest(self, parity: Parity, clipping: dict[str, float] | None) -> Manifest:
        files = sorted(p for p in self.folder.rglob("*") if p.is_file())
        self.report.stage("hashing", len(files))
        records = {}
        for path in files:
            name = path.relative_to(self.folder).as_posix()
            records[name] = FileRecord(path.stat().st_size, sha256(path))
            self.report.advance()
        return Manifest(
            name=self.options.name or self.checkpoint.name,
            created_by=f"headrace {headrace.__version__}",
            source=self.checkpoint.kind,
            config=self.checkpoint.config,
            quant=self.quant,
            kv=self.options.kv,
            tokenizer=TokenizerRecord(
                self.text.chat_template, self.text.bos_id, self.text.eos_ids, self.text.add_bos
            ),
            sampling=self.checkpoint.sampling,
            parity=parity,
            kv_clipping=clipping,
            files=records,
        )


def _load_tokenizer(text: TokenizerSource, checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text.tokenizer_json)
    except Exception as error:
        raise ExportError(f"{checkpoint.name}: its tokenizer does not load: {error}") from error
    kind = type(tokenizer.model).__name__
    if kind != "BPE":
        # The others find control tokens in plain text by themselves.
        raise UnsupportedModelError(
            f"{checkpoint.name}: a tokenizer of kind {kind}, known are BPE ones (byte-level and "
            "SentencePiece-style)"
        )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= checkpoint.config.vocab_size:
        raise TokenizerMismatchError(
            f"{checkpoint.name}: the tokenizer has token id {highest}, the model's vocabulary is "
            f"{checkpoint.config.vocab_size}; they do not belong together"
        )
    return tokenizer


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"calibrate: {path} is not a readable UTF-8 text: {error}") from error


@contextmanager
def _whole_or_absent(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out`, or goes away whatever happens."""
    # Not the process id alone: two containers that share a volume may both be process 1, and the
    # draft that is removed at the end must be this run's own.
    draft = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    new_parents = [folder for folder in draft.parents if not folder.exists()]
    try:
        try:
            draft.mkdir(parents=True)
            yield draft
            _sync_all(draft)
            draft.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            for folder in new_parents:
                with suppress(OSError):  # not empty: it holds the bundle
                    folder.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{out}: the disk is full; make room and export again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise StorageError(f"{out}: cannot be written: {error.strerror}") from error
        raise


def _sync_all(folder: Path) -> None:
    """A rename must not reach the disk before what it names."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
