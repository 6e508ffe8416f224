"""Tiny checkpoints made from others (fewer layers, other ids, another tokenizer), and bundles of two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import F32, I64, TINY

from headrace.errors import HeadraceError
from headrace.export.build import DraftOptions, ExportOptions, export
from headrace.export.check import run_graph
from headrace.models.manifest import DRAFT, Bundle

VOCAB_SIZE = 283
NUM_TOKENS = 280
"""Of the tiny tokenizers; their models have three rows more."""

TOLERANCE = 1e-4
"""Of logits: the graph's float32 against numpy's."""


def copy_of(name: str, folder: Path) -> Path:
    """A checkpoint that a test may change."""
    return shutil.copytree(TINY / name, folder)


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def with_layers(name: str, folder: Path, layers: tuple[int, ...]) -> Path:
    """The checkpoint with these layers only, as if it had been trained so."""
    copy_of(name, folder)
    config = json.loads((folder / "config.json").read_text())
    types = config.get("layer_types")
    edit_json(
        folder / "config.json",
        num_hidden_layers=len(layers),
        **({"layer_types": [types[layer] for layer in layers]} if types else {}),
    )
    tensors = _unsharded(folder)
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.")}
    for new, old in enumerate(layers):
        before = f"model.layers.{old}."
        part = {n: t for n, t in tensors.items() if n.startswith(before)}
        kept |= {f"model.layers.{new}.{n.removeprefix(before)}": t for n, t in part.items()}
    save_file(kept, folder / "model.safetensors")
    return folder


def _unsharded(folder: Path) -> dict[str, F32]:
    """All tensors; the folder may be written to as one file."""
    tensors: dict[str, F32] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return tensors


def permuted(name: str, folder: Path, new_ids: I64) -> Path:
    """The checkpoint with token i as token `new_ids[i]` [vocab_size]: other ids, same model."""
    copy_of(name, folder)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    document["model"]["vocab"] = {text: int(new_ids[i]) for text, i in vocab.items()}
    for token in document["added_tokens"]:
        token["id"] = int(new_ids[token["id"]])
    path.write_text(json.dumps(document))
    tensors = load_file(folder / "model.safetensors")
    for weight in ("model.embed_tokens.weight", "lm_head.weight"):
        if weight in tensors:
            moved = np.empty_like(tensors[weight])
            moved[new_ids] = tensors[weight]
            tensors[weight] = moved
    save_file(tensors, folder / "model.safetensors")
    ends = [int(new_ids[1]), int(new_ids[2])]
    for file in ("config.json", "generation_config.json"):
        edit_json(folder / file, bos_token_id=int(new_ids[0]), eos_token_id=ends)
    return folder


def with_tokenizer(name: str, folder: Path, **parts: Any) -> Path:
    """The checkpoint with other parts in its tokenizer; of `model`, only what is given."""
    copy_of(name, folder)
    path = folder / "tokenizer.json"
    model = {**json.loads(path.read_text())["model"], **parts.pop("model", {})}
    edit_json(path, model=model, **parts)
    return folder


def tokenizer_model(name: str) -> Any:
    """Vocabulary and merges."""
    return json.loads((TINY / name / "tokenizer.json").read_text())["model"]


def with_added_token(name: str, folder: Path, text: str) -> Path:
    """The checkpoint with one more token, which is plain text and always matched."""
    copy_of(name, folder)
    path = folder / "tokenizer.json"
    added = json.loads(path.read_text())["added_tokens"]
    plain = {**added[0], "id": NUM_TOKENS, "content": text, "special": False}
    edit_json(path, added_tokens=[*added, plain])
    return folder


def pair(
    out: Path,
    source: Path,
    layers: tuple[int, ...] | None = None,
    *,
    target: Path = TINY / "llama",
    kv: str = "f32",
    keep: int | None = None,
    corpus: Sequence[Path] = (),
) -> Bundle:
    """A bundle of float32 graphs."""
    draft = DraftOptions(str(source), layers, "f32", keep, tuple(corpus))
    export(str(target), out, ExportOptions(quant="f32", kv=kv, draft=draft))
    return Bundle.open(out)


def draft_logits(bundle: Bundle, ids: I64) -> F32:
    assert bundle.draft is not None
    return run_graph(bundle.file(DRAFT), bundle.draft.config, bundle.draft.kv, ids)


def refused(
    kind: type[HeadraceError], out: Path, source: Path, *words: str, **more: object
) -> None:
    with pytest.raises(kind) as caught:
        pair(out, source, **more)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text
    assert not out.exists()
