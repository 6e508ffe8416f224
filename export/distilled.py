"""A distilled draft on disk: a Hugging Face folder without embeddings, which stay the target's.

    config.json         of a model like the target, with the draft's layers
    model.safetensors   every weight by its Hugging Face name, but for embeddings and head
    draft.json          whose draft it is, and the tokens of its head (`distilled_note.py`)

Weights are F16. A matrix may be I8 instead, codes [N, K] from -127 to 127, with F16 steps
[N, ceil(K / 32)] beside it as `<name>.scales`: a QuantMatrix's 8-bit symmetric form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from headrace.errors import SourceError, StorageError, UnsupportedModelError, UsageError
from headrace.export.checkpoint import NOTE, Checkpoint, TokenizerSource
from headrace.export.distilled_note import DraftNote, identity
from headrace.export.huggingface import HuggingFaceCheckpoint, open_shard
from headrace.export.huggingface_text import read_json
from headrace.export.quantize import BLOCK, QuantMatrix, quantize_q8_0
from headrace.export.reduced import reduced_config
from headrace.export.text import I64, Text
from headrace.export.weights import EMBEDDING, F32, HEAD, Shape, Weight, check_finite, check_table
from headrace.models.config import ModelConfig
from headrace.models.families import config_from_hf, weights
from headrace.models.families_to_hf import hf_config, with_layers

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SCALES = ".scales"
_ZERO = 128
"""The code of a QuantMatrix that stands for 0."""

Tensors = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class DraftWeights:
    """A trained draft, and what it was trained from."""

    target: Checkpoint
    text: Text
    """The target's."""
    layers: tuple[int, ...]
    """The target's layers that it started from; `reduced_config` has the model."""
    weights: Mapping[str, F32]
    """By Hugging Face name, in the target's convention for norms; `own_weights` says which."""
    head_ids: I64 | None
    """[K], the tokens that the head keeps, ascending; None is all."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Figures for `draft.json`, of JSON's types and finite."""


def own_weights(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight that a draft does not share with its target."""
    table = weights(config)
    return {name: shape for name, shape in table.items() if name not in (EMBEDDING, HEAD)}


def write_draft(folder: Path, draft: DraftWeights, storage: str = "f16") -> None:
    """Writes the three files into a folder that exists; `storage` is one of STORAGES.

    Raises:
        UsageError: it is none of these.
        SourceError: a weight has no number that half precision can hold.
        UnsupportedModelError: the target's settings cannot be written as a config.json.
        OSError: the folder cannot be written.
    """
    if storage not in STORAGES:
        raise UsageError(f"storage: got {storage!r}, allowed are {', '.join(STORAGES)}")
    target = draft.target
    config = reduced_config(target.config, draft.layers)
    values = config_json(target, draft.layers)
    # GGUF files add the family's offset to norms, Hugging Face folders never do
    shift = np.float32(config_from_hf(values).norm_offset - config.norm_offset)
    store = STORAGES[storage]
    tensors: Tensors = {}
    for name, shape in own_weights(config).items():
        # safetensors writes an array's memory, in whatever order it lies there
        weight = np.ascontiguousarray(draft.weights[name])
        assert weight.shape == shape, name
        if name.endswith("norm.weight"):
            weight = weight - shift
        tensors |= store(name, weight) if weight.ndim == 2 else _as_f16(name, weight)
    # not save_file: it reports a full disk as an error of its own
    data = safetensors.numpy.save(tensors, {"format": "pt"})
    (folder / WEIGHTS).write_bytes(data)
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    ids = None if draft.head_ids is None else tuple(draft.head_ids.tolist())
    note = DraftNote(identity(target, draft.text), draft.layers, ids, draft.training)
    note.check_sizes(config, folder / NOTE)
    note.write(folder / NOTE)


def config_json(target: Checkpoint, layers: tuple[int, ...]) -> dict[str, Any]:
    """For a model like the target with these layers; raises UnsupportedModelError."""
    config = reduced_config(target.config, layers)
    if isinstance(target, HuggingFaceCheckpoint):
        values = with_layers(read_json(target.folder / CONFIG), config)
    else:
        values = hf_config(config, target.name)
    values.pop("torch_dtype", None)
    values["dtype"] = "float16"
    read = config_from_hf(values)
    assert replace(read, norm_offset=config.norm_offset) == config
    return values


def _as_f16(name: str, weight: F32) -> Tensors:
    with np.errstate(over="ignore"):  # the check says it
        half = weight.astype(np.float16)
    check_finite(half.astype(np.float32), name, "the draft in half precision")
    return {name: half}


def _as_int8(name: str, weight: F32) -> Tensors:
    check_finite(weight, name, "the draft")
    matrix = quantize_q8_0(weight)
    check_finite(matrix, name, "the draft in half precision")
    codes = matrix.codes.reshape(len(weight), -1)[:, : matrix.columns]
    signed = (codes.astype(np.int16) - _ZERO).astype(np.int8)
    return {name: signed, name + _SCALES: matrix.scales.astype(np.float16)}


STORAGES: dict[str, Callable[[str, F32], Tensors]] = {"f16": _as_f16, "int8": _as_int8}


@dataclass(frozen=True, eq=False)
class DistilledDraft:
    """A checkpoint (see `headrace.export.checkpoint.Checkpoint`): a draft beside its target.

    Its head is whole; `note.head_ids` says which rows were trained to be used.
    """

    name: str
    config: ModelConfig
    folder: Path
    note: DraftNote
    target: Checkpoint
    _file: Any
    """Open, memory mapped."""
    sampling: dict[str, float] = field(default_factory=dict)
    kind: str = "distilled"

    @classmethod
    def open(cls, folder: Path, target: Checkpoint, text: Text) -> DistilledDraft:
        """Reads all but the weights' values; `text` is the target's.

        Raises:
            SourceError: a file is missing, damaged, or of an unknown form.
            UsageError: the draft was distilled from another target.
            TokenizerMismatchError: or with another tokenizer.
            StorageError: no permission.
        """
        try:
            return cls._open(folder, target, text)
        except PermissionError as error:
            raise StorageError(f"{error.filename or folder}: no permission to read it") from error

    @classmethod
    def _open(cls, folder: Path, target: Checkpoint, text: Text) -> DistilledDraft:
        for name in (NOTE, CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise SourceError(f"{folder}: not a whole distilled draft, it has no {name}")
        note = DraftNote.read(folder / NOTE)
        note.check_target(target, text)
        config = config_from_hf(read_json(folder / CONFIG), str(folder / CONFIG))
        for name in ("vocab_size", "hidden_size", "tied_head"):
            found, wanted = getattr(config, name), getattr(target.config, name)
            if found != wanted:
                raise SourceError(
                    f"{folder / CONFIG}: {name} is {found}, the target {target.name} has {wanted}"
                )
        note.check_sizes(config, folder / NOTE)
        file = open_shard(folder / WEIGHTS)
        _check_stored(file, config, folder / WEIGHTS)
        return cls(folder.resolve().name, config, folder, note, target, file)

    @property
    def head_ids(self) -> I64 | None:
        """[K], ascending; None is all."""
        ids = self.note.head_ids
        return None if ids is None else np.array(ids, np.int64)

    def sha256(self) -> str:
        """Of its weights and its note."""
        digest = hashlib.sha256()
        for name in (WEIGHTS, NOTE):
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()

    def names(self) -> set[str]:
        return set(weights(self.config))

    def read(self, name: str) -> Weight:
        if name in (EMBEDDING, HEAD):
            return self.target.read(name)
        weight: Weight
        tensor = self._file.get_tensor(name)
        if tensor.dtype == np.int8:
            weight = _matrix(tensor, self._file.get_tensor(name + _SCALES))
        else:
            weight = tensor.astype(np.float32)
        check_finite(weight, name, str(self.folder / WEIGHTS))
        return weight

    def tokenizer(self) -> TokenizerSource:
        return self.target.tokenizer()

    def files(self) -> dict[Path, int]:
        own = [self.folder / name for name in (NOTE, CONFIG, WEIGHTS)]
        return {**{path: path.stat().st_size for path in own}, **self.target.files()}


def _matrix(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> QuantMatrix:
    rows, columns = codes.shape
    padded = np.pad(codes, ((0, 0), (0, -columns % BLOCK)))
    unsigned = (padded.astype(np.int16) + _ZERO).astype(np.uint8)
    return QuantMatrix(
        8, unsigned.reshape(rows, -1, BLOCK), scales.astype(np.float32), None, columns
    )


def _check_stored(file: Any, config: ModelConfig, where: Path) -> None:
    """Raises SourceError unless the file has exactly the draft's weights, in a known form."""
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    kinds = {name: part.get_dtype() for name, part in parts.items()}
    shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
    expected = own_weights(config)
    matrices = [name for name, shape in expected.items() if len(shape) == 2]
    for name in matrices:
        if kinds.get(name) == "I8":
            rows, columns = expected[name]
            expected[name + _SCALES] = (rows, -(-columns // BLOCK))
    check_table(expected, shapes, str(where))
    for name, kind in kinds.items():
        known = ("F16", "I8") if name in matrices else ("F16",)
        if kind not in known:
            raise UnsupportedModelError(
                f"{where}: weight {name} is {kind}; known: {', '.join(known)}"
            )
