"""Hugging Face folders: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# registers bfloat16 with numpy, which safetensors asks for by name
import ml_dtypes  # noqa: F401
import numpy as np
import safetensors

from headrace.errors import SourceError, UnsupportedModelError
from headrace.export.checkpoint import TokenizerSource
from headrace.export.huggingface_text import read_json, read_sampling, read_tokenizer
from headrace.export.weights import EMBEDDING, F32, HEAD, Shape, check_finite, check_table
from headrace.models.config import ModelConfig
from headrace.models.families import config_from_hf, weights
from headrace.models.fields import shown

DTYPES = ("F32", "F16", "BF16")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_HARMLESS = "rotary_emb.inv_freq"
_TEXT_PREFIX = "language_model."


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies."""

    file: Path
    name: str
    """In the file."""
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """A checkpoint (see `headrace.export.checkpoint.Checkpoint`) in a local folder."""

    name: str
    config: ModelConfig
    sampling: dict[str, float]
    folder: Path
    _entries: Mapping[str, _Entry]
    _shards: Mapping[Path, Any]
    """Open files, memory mapped."""
    kind: str = "huggingface"

    @classmethod
    def open(cls, folder: Path, name: str | None = None) -> HuggingFaceCheckpoint:
        """Reads the configuration and the tables of all shards; raises as `open_checkpoint`."""
        config_path = folder / "config.json"
        if not config_path.is_file():
            raise SourceError(f"{folder}: no config.json; not a Hugging Face model folder")
        config = config_from_hf(read_json(config_path), str(config_path))
        shards = {path: open_shard(path) for path in _shard_paths(folder)}
        entries = _entries(shards)
        if config.tied_head and HEAD in entries and EMBEDDING in entries:
            head, embedding = (_read(shards, entries[n]) for n in (HEAD, EMBEDDING))
            if np.array_equal(head, embedding):
                del entries[HEAD]
            else:
                # config.json is wrong then: somebody trained the head on its own
                config = replace(config, tied_head=False)
        where = str(folder)
        check_table(weights(config), {name: e.shape for name, e in entries.items()}, where)
        for key, entry in entries.items():
            if entry.dtype not in DTYPES:
                raise UnsupportedModelError(
                    f"{entry.file}: weight {key} is {entry.dtype}; known: {', '.join(DTYPES)}"
                )
        sampling = read_sampling(folder)
        label = name or folder.resolve().name
        return cls(label, config, sampling, folder, entries, shards)

    def names(self) -> set[str]:
        return set(self._entries)

    def read(self, name: str) -> F32:
        entry = self._entries[name]
        weight = _read(self._shards, entry).astype(np.float32)
        check_finite(weight, name, str(entry.file))
        return weight

    def tokenizer(self) -> TokenizerSource:
        return read_tokenizer(self.folder)

    def files(self) -> dict[Path, int]:
        texts = [p for p in sorted(self.folder.glob("*.j*")) if p.suffix in (".json", ".jinja")]
        return {path: path.stat().st_size for path in [*texts, *self._shards] if path.is_file()}


def _shard_paths(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        if any((folder / name).is_file() for name in _PICKLED):
            raise SourceError(
                f"{folder}: has only pickled weights (pytorch_model.bin), which can run code when "
                "read; convert them to safetensors, e.g. save_pretrained(safe_serialization=True)"
            )
        raise SourceError(f"{folder}: neither {_SINGLE} nor {_INDEX}")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{folder / _INDEX}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise SourceError(f"{folder / _INDEX}: {shown(name)} is not a file name")
        if not (folder / name).is_file():
            raise SourceError(f"{folder / shown(name)}: this shard is missing; {_INDEX} lists it")
    return [folder / name for name in names]


def open_shard(path: Path) -> Any:
    """A safetensors file, memory mapped; raises SourceError, PermissionError."""
    # safetensors reports a file that may not be read as one that does not exist
    path.open("rb").close()
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SourceError(
            f"{path}: truncated or damaged ({path.stat().st_size} bytes): {reason}"
        ) from error


def _entries(shards: Mapping[Path, Any]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for path, shard in shards.items():
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            if name.endswith(_HARMLESS):
                continue
            if name in entries:
                raise SourceError(
                    f"{path}: weight {shown(name)} is also in {entries[name].file.name}"
                )
            part = shard.get_slice(name)
            entries[name] = _Entry(path, name, part.get_dtype(), tuple(part.get_shape()))
    if all(name.startswith(_TEXT_PREFIX) for name in entries):
        return {name.removeprefix(_TEXT_PREFIX): entry for name, entry in entries.items()}
    return entries


def _read(shards: Mapping[Path, Any], entry: _Entry) -> np.ndarray[Any, Any]:
    tensor: np.ndarray[Any, Any] = shards[entry.file].get_tensor(entry.name)
    return tensor
