"""The bundle: one folder with `bundle.json`, which names every file with its size and SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import BundleError
from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES

MANIFEST = "bundle.json"
TOKENIZER = "tokenizer.json"
TARGET = "target/model.onnx"
TARGET_DATA = "target/model.data"
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
class Parity:
    """The exported graph against the float32 reference of the same checkpoint, on one text."""

    tokens: int
    mean_kl: float
    """Mean Kullback-Leibler divergence of the graph's distribution from the reference's, nats."""
    max_kl: float
    top1_agreement: float
    """Share of tokens at which both put the same token first."""
    perplexity: float
    reference_perplexity: float
    limit: float
    """The export fails above this mean_kl."""


@dataclass(frozen=True)
class Manifest:
    """Content of `bundle.json`."""

    name: str
    created_by: str
    source: str
    config: ModelConfig
    quant: str
    kv: str
    """Cache type, a key of `iospec.KV_DTYPES`."""
    tokenizer: TokenizerRecord
    sampling: dict[str, float]
    """The model's own sampling settings, by SamplingParams' names."""
    parity: Parity | None
    kv_clipping: dict[str, float] | None = None
    """int8 cache: share of the parity text's keys and values that the calibrated steps clip."""
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = {
            "format": "headrace-bundle",
            "version": VERSION,
            "name": self.name,
            "created_by": self.created_by,
            "source": self.source,
            "target": {
                "config": self.config.to_json(),
                "quant": self.quant,
                "kv": self.kv,
                "kv_clipping": self.kv_clipping,
                "parity": vars(self.parity) if self.parity else None,
            },
            "tokenizer": vars(self.tokenizer),
            "sampling": self.sampling,
            "files": {name: vars(record) for name, record in self.files.items()},
        }
        return {**data, "sha256": _digest(data)}

    @classmethod
    def from_json(cls, data: Any, where: Path) -> Manifest:
        """Inverse of `to_json`; raises BundleError for another format, version or content."""
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
        try:
            target, tokenizer = data["target"], data["tokenizer"]
            manifest = cls(
                name=data["name"],
                created_by=data["created_by"],
                source=data["source"],
                config=ModelConfig.from_json(target["config"]),
                quant=target["quant"],
                kv=target["kv"],
                kv_clipping=target["kv_clipping"],
                parity=Parity(**target["parity"]) if target["parity"] else None,
                tokenizer=TokenizerRecord(**{**tokenizer, "eos_ids": tuple(tokenizer["eos_ids"])}),
                sampling=dict(data["sampling"]),
                files={name: FileRecord(**record) for name, record in data["files"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise BundleError(
                f"{where}: damaged or edited ({type(error).__name__}: {error}); "
                "export the model again"
            ) from error
        if manifest.kv not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise BundleError(f"{where}: cache type {manifest.kv!r}, known are {known}")
        return manifest


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
        bundle = cls(path, Manifest.from_json(data, where))
        for name in (TARGET, TARGET_DATA, TOKENIZER):
            if name not in bundle.manifest.files:
                raise BundleError(f"{where}: damaged or edited, it lists no {name}")
        return bundle

    def file(self, name: str) -> Path:
        return self.path / name

    def target_identity(self) -> str:
        """Content hash of the target's graph and weights."""
        parts = [self.manifest.files[name].sha256 for name in (TARGET, TARGET_DATA)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def verify(self, is_intact: Callable[[Path, FileRecord], bool]) -> None:
        """Raises BundleError naming the first file that is missing, truncated or edited."""
        for name, record in self.manifest.files.items():
            path = self.file(name)
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
