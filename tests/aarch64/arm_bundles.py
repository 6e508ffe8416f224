"""Bundles to run on the emulated board, exported on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from debian_tree import ROOT
from tiny_checkpoints import TINY

from headrace.export.build import DraftOptions, ExportOptions, export


def of_tiny(name: str, quant: str, kv: str, out: Path) -> Path:
    # --force: random weights quantise badly, and exactness is another matter
    export(str(TINY / name), out, ExportOptions(quant=quant, kv=kv, force=True))
    return out


def of_heads(head_dim: int, quant: str, kv: str, out: Path) -> Path:
    """Random weights with heads as large as real models' ones; all rows are of whole blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        synthetic = importlib.import_module("synthetic")
    source = out.with_name(f"{out.name}-source")
    source.mkdir()
    geometry = {
        **synthetic.GEOMETRIES["tiny"],
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": head_dim,
    }
    synthetic.write_checkpoint(source, geometry, seed=0)
    export(str(source), out, ExportOptions(quant=quant, kv=kv, force=True))
    return out


def twins(name: str, quant: str, out: Path) -> Path:
    """A tiny checkpoint as its own draft."""
    source = str(TINY / name)
    export(
        source, out, ExportOptions(quant=quant, draft=DraftOptions(source, quant=quant), force=True)
    )
    return out
