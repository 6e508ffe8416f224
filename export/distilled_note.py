"""`draft.json`: what a distilled draft was made from, so that it is not given to another target."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import SourceError, TokenizerMismatchError, UsageError
from headrace.export.checkpoint import Checkpoint
from headrace.export.huggingface_text import read_json
from headrace.export.quantize import QuantMatrix
from headrace.export.text import Text
from headrace.export.weights import EMBEDDING, HEAD, Weight
from headrace.models.config import ModelConfig
from headrace.models.fields import Fields, shown

VERSION = 1

_PARTS = {
    "embeddings": "embedding_sha256",
    "head weights": "head_sha256",
    "tokenizer entries": "tokenizer_sha256",
}
"""What is compared, in this order: words for it, and its key."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_LAYER, _MAX_TOKEN = 1023, (1 << 24) - 1
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class DraftNote:
    """Content of `draft.json`."""

    target: Mapping[str, str]
    """See `identity`."""
    layers: tuple[int, ...]
    """Which of the target's layers it started from, in its own order."""
    head_ids: tuple[int, ...] | None
    """The tokens that its head keeps, ascending; None is all."""
    training: Mapping[str, Any]
    """Figures, of JSON's types."""

    def write(self, path: Path) -> None:
        """One line for each value: a list of tokens is long."""
        values = {
            "version": VERSION,
            "target": dict(self.target),
            "layers": self.layers,
            "head_ids": self.head_ids,
            "training": dict(self.training),
        }
        lines = [
            f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
            for key, value in values.items()
        ]
        # names of files may hold what is no text
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8", errors="replace")

    @classmethod
    def read(cls, path: Path) -> DraftNote:
        """Raises SourceError where it is damaged, or of another version."""
        fields = Fields(read_json(path), str(path))
        version = fields.integer("version", 1 << 30)
        if version != VERSION:
            raise SourceError(
                f"{path}: version {version}, this headrace reads {VERSION}; update headrace"
            )
        layers, training = _numbers(fields, "layers", _MAX_LAYER), fields.mapping("training")
        if layers is None:
            raise fields.error("layers", "a list of layers")
        head_ids = _numbers(fields, "head_ids", _MAX_TOKEN)
        return cls(_target(fields), layers, head_ids, {} if training is None else training.values)

    def check_target(self, target: Checkpoint, text: Text) -> None:
        """Raises UsageError or TokenizerMismatchError unless `target` is the one it is for."""
        found, name = identity(target, text), shown(self.target["name"])
        advice = f"{target.name} has others; export with that target or distil again"
        for part, key in _PARTS.items():
            sha256 = self.target.get(key)
            if sha256 == found.get(key):
                continue
            whose = f"sha256 {sha256[:8]}…" if sha256 else "those of its embeddings"
            words = f"the {part} of {name} ({whose}), {advice}"
            if part == "tokenizer entries":
                raise TokenizerMismatchError(f"draft: it was distilled with {words}")
            raise UsageError(f"draft: it was distilled from {words}")

    def check_sizes(self, config: ModelConfig, where: Path) -> None:
        """Raises SourceError unless it is about a model of this `config`, without its head cut."""
        if len(self.layers) != config.num_layers:
            raise SourceError(
                f"{where}: layers has {len(self.layers)} numbers, config.json "
                f"{config.num_layers} layers"
            )
        ids = self.head_ids
        if ids is None:
            return
        if not ids or list(ids) != sorted(set(ids)):
            raise SourceError(f"{where}: head_ids must be ascending token ids, at least one")
        if ids[-1] >= config.vocab_size:
            raise SourceError(
                f"{where}: head_ids has {ids[-1]}, of a vocabulary of {config.vocab_size}"
            )


def identity(target: Checkpoint, text: Text) -> dict[str, str]:
    """What a draft must find again in the target that it is exported with, and its name.

    `text` is the target's. There is no `head_sha256` where the head is the embeddings.
    """
    found = {
        "name": target.name,
        "embedding_sha256": weight_sha256(target.read(EMBEDDING)),
        "tokenizer_sha256": _tokens_sha256(text),
    }
    if not target.config.tied_head:
        found["head_sha256"] = weight_sha256(target.read(HEAD))
    return found


def _tokens_sha256(text: Text) -> str:
    """Of what every id stands for. Not of tokenizer.json, which each version of the tokenizers
    library writes in its own way from the same GGUF file.
    """
    digest = hashlib.sha256()
    for token in text.tokens:
        known = None if token is None else (token.control, token.data.hex(), token.entry)
        digest.update(json.dumps(known).encode() + b"\n")
    return digest.hexdigest()


def weight_sha256(weight: Weight) -> str:
    """Of the float32 values of a matrix, little-endian, row by row."""
    digest = hashlib.sha256()
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        if isinstance(weight, QuantMatrix):
            order = np.arange(start, min(start + _ROWS_AT_ONCE, weight.shape[0]))
            rows = weight.rows(order).dequantize()
        else:
            rows = weight[start : start + _ROWS_AT_ONCE]
        digest.update(rows.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _target(fields: Fields) -> dict[str, str]:
    target = fields.mapping("target")
    if target is None:
        raise fields.error("target", "an object")
    if not isinstance(target.values.get("name"), str):
        raise target.error("name", "a text")
    found = {"name": target.values["name"]}
    for key in _PARTS.values():
        if key != "head_sha256" or target.has(key):
            found[key] = _sha256(target, key)
    return found


def _sha256(fields: Fields, key: str) -> str:
    value = fields.values.get(key)
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise fields.error(key, "a SHA-256 in hexadecimal digits")
    return value


def _numbers(fields: Fields, key: str, high: int) -> tuple[int, ...] | None:
    value = fields.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= high for v in value
    ):
        raise fields.error(key, f"a list of integers from 0 to {high}")
    return tuple(value)
