"""The bundle: one folder with `bundle.json`, which names every file with its size and SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import BundleError, TokenizerMismatchError
from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES
from headrace.models.records import DraftRecord, ModelRecord

MANIFEST = "bundle.json"
TOKENIZER = "tokenizer.json"
TARGET = "target/model.onnx"
TARGET_DATA = "target/model.data"
DRAFT = "draft/model.onnx"
DRAFT_DATA = "draft/model.data"
VOCAB_MAP = "draft/vocab_map.npz"
NPU = "draft/npu.rknn"
NPU_IO = "draft/npu.io.json"
NPU_EMBEDDINGS = "draft/npu.embeddings"
NPU_GRAPH = "draft/npu.onnx"
NPU_GRAPH_DATA = "draft/npu.data"

PC_ONLY = {NPU_GRAPH, NPU_GRAPH_DATA}
"""What the compiler's simulator needs and a board does not: a copy of a bundle may do without."""

VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """A file of the bundle as it was when it was written."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """What `tokenizer.json` does not say about text."""

    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool


@dataclass(frozen=True)
class Manifest:
    """Content of `bundle.json`."""

    name: str
    created_by: str
    source: str
    """Kind of the target's checkpoint, `gguf` or `huggingface`."""
    target: ModelRecord
    tokenizer: TokenizerRecord
    sampling: dict[str, float]
    """The model's own sampling settings, by SamplingParams' names."""
    files: dict[str, FileRecord]
    draft: DraftRecord | None = None

    @property
    def config(self) -> ModelConfig:
        """The target's."""
        return self.target.config

    @property
    def quant(self) -> str:
        """The target's."""
        return self.target.quant

    @property
    def kv(self) -> str:
        """The target's cache type."""
        return self.target.kv

    def to_json(self) -> dict[str, Any]:
        data = {
            "format": "headrace-bundle",
            "version": VERSION,
            "name": self.name,
            "created_by": self.created_by,
            "source": self.source,
            "target": self.target.to_json(),
            # Programs that know no drafts ignore it, and give the same text.
            **({} if self.draft is None else {"draft": self.draft.to_json()}),
            "tokenizer": vars(self.tokenizer),
            "sampling": self.sampling,
            "files": {name: vars(record) for name, record in self.files.items()},
        }
        return {**data, "sha256": _digest(data)}

    @classmethod
    def from_json(cls, data: Any, where: Path) -> Manifest:
        """Inverse of `to_json`; raises BundleError for another format, version or content."""
        _check_format(data, where)
        try:
            tokenizer, draft = data["tokenizer"], data.get("draft")
            manifest = cls(
                name=data["name"],
                created_by=data["created_by"],
                source=data["source"],
                target=ModelRecord.from_json(data["target"]),
                tokenizer=TokenizerRecord(**{**tokenizer, "eos_ids": tuple(tokenizer["eos_ids"])}),
                sampling=dict(data["sampling"]),
                files={name: FileRecord(**record) for name, record in data["files"].items()},
                draft=None if draft is None else DraftRecord.from_json(draft),
            )
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise BundleError(
                f"{where}: damaged or edited ({type(error).__name__}: {error}); "
                "export the model again"
            ) from error
        manifest.check(where)
        return manifest

    def check(self, where: Path) -> None:
        """Raises BundleError if parts of it cannot belong together."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        for model in models:
            if model.kv not in KV_DTYPES:
                known = ", ".join(KV_DTYPES)
                raise BundleError(f"{where}: cache type {model.kv!r}, known are {known}")
        names = [TARGET, TARGET_DATA, TOKENIZER]
        if self.draft is not None:
            names += [DRAFT, DRAFT_DATA, VOCAB_MAP]
            names += [] if self.draft.npu is None else [NPU, NPU_IO, NPU_EMBEDDINGS]
        for name in names:
            if name not in self.files:
                raise BundleError(f"{where}: damaged or edited, it lists no {name}")
        if self.draft is None:
            return
        fit, size = self.draft.vocabulary, self.config.vocab_size
        if (fit.tokenizer_sha256, fit.target_size) != (self.files[TOKENIZER].sha256, size):
            raise TokenizerMismatchError(
                f"{where}: the draft {self.draft.name} was made for a target with another "
                "tokenizer; export the two together (--draft)"
            )


def _check_format(data: Any, where: Path) -> None:
    """Raises BundleError unless it is a whole manifest of a version that can be read."""
    if not isinstance(data, dict) or data.get("format") != "headrace-bundle":
        raise BundleError(f"{where}: not a headrace bundle's {MANIFEST}")
    version = data.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = "update headrace" if newer else "export the model again"
        raise BundleError(
            f"{where}: bundle version {version!r}, this headrace reads {VERSION}; {advice}"
        )
    if data.get("sha256") != _digest(data):
        raise BundleError(
            f"{where}: its SHA-256 is not the one it was written with, so it was damaged or "
            "edited; export or copy the bundle again"
        )


def _digest(data: dict[str, Any]) -> str:
    """Of everything in a manifest but the digest itself."""
    content = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Its files are named in the manifest; `verify` says if they are whole."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Reads `bundle.json` alone; raises BundleError."""
        where = path / MANIFEST
        if not path.exists():
            raise BundleError(f"{path}: no such bundle; make one with `headrace export`")
        if not where.is_file():
            raise BundleError(f"{path}: not a bundle, it has no {MANIFEST}")
        try:
            data = json.loads(where.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{where}: cannot be read: {error}") from error
        return cls(path, Manifest.from_json(data, where))

    @property
    def draft(self) -> DraftRecord | None:
        return self.manifest.draft

    def file(self, name: str) -> Path:
        return self.path / name

    def target_identity(self) -> str:
        """Content hash of the target's graph and weights."""
        return self._identity(TARGET, TARGET_DATA)

    def draft_identity(self) -> str:
        """The same of the draft's; there must be one."""
        return self._identity(DRAFT, DRAFT_DATA)

    def _identity(self, *names: str) -> str:
        parts = [self.manifest.files[name].sha256 for name in names]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def verify(self, is_intact: Callable[[Path, FileRecord], bool]) -> None:
        """Raises BundleError naming the first file that is missing, truncated or edited."""
        for name, record in self.manifest.files.items():
            path = self.file(name)
            if name in PC_ONLY and not path.exists():
                continue
            if not path.is_file():
                raise BundleError(f"{path}: missing from the bundle; export or copy it again")
            size = path.stat().st_size
            if size != record.size:
                raise BundleError(
                    f"{path}: {size} bytes, the manifest says {record.size}; "
                    "export or copy the bundle again"
                )
            if not is_intact(path, record):
                raise BundleError(
                    f"{path}: its SHA-256 is not the manifest's, so it was damaged or edited; "
                    "export or copy the bundle again"
                )
