"""`headrace inspect`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from headrace.commands.summary import (
    draft_facts,
    kv_bytes_per_token,
    manifest_facts,
    npu_facts,
    parity_facts,
    span,
)
from headrace.commands.terminal import print_facts, print_table, say, size
from headrace.errors import BundleError
from headrace.intact import CheckMemory
from headrace.models.iospec import TensorSpec, target_inputs, target_outputs
from headrace.models.manifest import MANIFEST, PC_ONLY, TOKENIZER, Bundle, FileRecord
from headrace.models.records import ModelRecord
from headrace.paths import cache_dir

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@click.command(name="inspect")
@click.argument("path", metavar="BUNDLE|MODEL.onnx", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, as_json: bool) -> None:
    """Show what is in a bundle or an ONNX file.

    Of a bundle: geometry, quantisation, bytes per token of keys and values, parity figures,
    tokenizer, the draft, files and whether they still are what they were (exit code 1 if not),
    inputs and outputs of the target's graph. Of an ONNX file: its inputs and outputs.
    """
    if path.is_file() and path.name != MANIFEST:
        from headrace.commands.onnx_file import inspect_onnx

        inspect_onnx(path, as_json)
        return
    bundle = Bundle.open(path.parent if path.is_file() else path)
    files = [_FileState.of(bundle, *item) for item in bundle.manifest.files.items()]
    if as_json:
        print(json.dumps(_bundle_json(bundle, files), indent=1, ensure_ascii=False))
    else:
        _print_bundle(bundle, files)
    damaged = [file.name for file in files if file.state not in ("ok", "left out")]
    if damaged:
        raise BundleError(
            f"{path}: {', '.join(damaged)} not as exported; export or copy the bundle again"
        )


_State = Literal["ok", "left out", "missing", "other size", "other content", "unreadable"]
"""`left out` is what a copy for a board may do without."""


@dataclass(frozen=True)
class _FileState:
    """A file of the manifest, and what became of it."""

    name: str
    size: int
    sha256: str
    """Both as the manifest has them."""
    state: _State

    @classmethod
    def of(cls, bundle: Bundle, name: str, record: FileRecord) -> _FileState:
        path = bundle.file(name)
        memory = CheckMemory(cache_dir() / "checked.json")
        state: _State
        try:
            if name in PC_ONLY and not path.exists():
                state = "left out"
            elif not path.is_file():
                state = "missing"
            elif path.stat().st_size != record.size:
                state = "other size"
            else:
                intact = memory.is_intact(path, record.sha256, lambda: say(f"checking {name}"))
                state = "ok" if intact else "other content"
        except OSError:
            state = "unreadable"
        return cls(name, record.size, record.sha256, state)


def _bundle_json(bundle: Bundle, files: Sequence[_FileState]) -> dict[str, Any]:
    manifest = bundle.manifest
    tokenizer = manifest.tokenizer
    return {
        "name": manifest.name,
        "created_by": manifest.created_by,
        "source": manifest.source,
        **_model_json(manifest.target),
        "tokenizer": {
            "bos_id": tokenizer.bos_id,
            "eos_ids": tokenizer.eos_ids,
            "add_bos": tokenizer.add_bos,
            "chat_template": tokenizer.chat_template is not None,
        },
        "sampling": manifest.sampling,
        "files": [dataclasses.asdict(file) for file in files],
        "draft": None if manifest.draft is None else _model_json(manifest.draft),
    }


def _model_json(model: ModelRecord) -> dict[str, Any]:
    """All of a record, and what follows from it."""
    return {
        **model.to_json(),
        "kv_bytes_per_token": kv_bytes_per_token(model.config, model.kv),
        "inputs": [vars(spec) for spec in target_inputs(model.config, model.kv)],
        "outputs": [vars(spec) for spec in target_outputs(model.config, model.kv)],
    }


def _print_bundle(bundle: Bundle, files: Sequence[_FileState]) -> None:
    manifest = bundle.manifest
    facts = [
        *manifest_facts(manifest),
        *parity_facts(manifest.target.parity),
        *_tokenizer_facts(bundle, files),
        *((f"model's {name}", f"{value:g}") for name, value in manifest.sampling.items()),
    ]
    print_facts(str(bundle.path), facts)
    if manifest.draft is not None:
        print_facts("Draft", draft_facts(manifest.draft))
        if manifest.draft.npu is not None:
            print_facts("Draft on the NPU", npu_facts(manifest.draft.npu))
    rows = [(file.name, size(file.size), file.state, file.sha256) for file in files]
    print_table("Files", ("file", "size", "state", "sha256"), rows, numbers=frozenset((1,)))
    print_specs("Inputs", target_inputs(manifest.config, manifest.kv))
    print_specs("Outputs", target_outputs(manifest.config, manifest.kv))


def _tokenizer_facts(bundle: Bundle, files: Sequence[_FileState]) -> list[tuple[str, str]]:
    record = bundle.manifest.tokenizer
    names: dict[int, str] = {}
    if any(file.name == TOKENIZER and file.state == "ok" for file in files):
        from headrace.runtime.load import load_tokenizer

        tokenizer = load_tokenizer(bundle)
        ids = {*record.eos_ids, *(() if record.bos_id is None else (record.bos_id,))}
        names = {i: f" {tokenizer.decode([i], skip_control=False)}" for i in ids}

    def named(token_id: int) -> str:
        return f"{token_id}{names.get(token_id, '')}"

    before = "before each text" if record.add_bos else "not before a text"
    bos = "none" if record.bos_id is None else f"{named(record.bos_id)}, {before}"
    return [
        ("start token", bos),
        ("end tokens", ", ".join(map(named, record.eos_ids)) or "none"),
        ("chat template", "yes" if record.chat_template is not None else "no"),
    ]


def print_specs(title: str, specs: Sequence[TensorSpec]) -> None:
    """A graph's inputs or outputs; those that differ in the layer alone share a row."""
    layers: dict[tuple[str, str, tuple[int | str, ...]], list[int]] = {}
    for spec in specs:
        found = _LAYER.search(spec.name)
        key = (_LAYER.sub("{}", spec.name, count=1), spec.dtype, spec.shape)
        layers.setdefault(key, []).extend([int(found[0])] if found else [])
    rows = [
        (name.replace("{}", span(numbers)), dtype, " x ".join(map(str, shape)) or "scalar")
        for (name, dtype, shape), numbers in layers.items()
    ]
    print_table(title, ("name", "type", "shape"), rows)
