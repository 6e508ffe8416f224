"""Bit-exactness of every family and form of weights, on the tiny checkpoints: local windows, norms
of heads, biases and each kind of quantised matrix have kernels of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from exported import backend, logits_of
from gguf import GGMLQuantizationType as Type
from tiny_checkpoints import NAMES, TINY, stored
from tiny_gguf import write_gguf

from headrace.export.build import ExportOptions, export
from headrace.models.manifest import Bundle

WIDTHS = ([1], [2], [7], [16], [17], [3, 1, 9, 2])


def assert_exact(bundle: Bundle, name: str) -> None:
    ids = stored(name).input_ids
    runner = backend(bundle, lanes=2, capacity=len(ids) + 8)
    expected = logits_of(runner, ids, [32])
    for widths in WIDTHS:
        assert (logits_of(runner, ids, widths, lane=1) == expected).all(), widths
    alone = backend(bundle, capacity=len(ids) + 8, threads=1)
    assert (logits_of(alone, ids, [5]) == expected).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("quant", "kv"), [("int8", "f16"), ("int4", "int8")])
def test_every_family(name: str, quant: str, kv: str, tmp_path: Path) -> None:
    # --force: random weights quantise badly, and exactness is another matter
    export(str(TINY / name), tmp_path / "b", ExportOptions(quant=quant, kv=kv, force=True))
    assert_exact(Bundle.open(tmp_path / "b"), name)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_weights_kept_as_a_gguf_file_has_them(kind: Type, tmp_path: Path) -> None:
    """`llama_wide` has rows that every type fits. Only activations are rounded, so it stays near."""
    write_gguf(TINY / "llama_wide", tmp_path / "m.gguf", kind)
    manifest = export(str(tmp_path / "m.gguf"), tmp_path / "b")
    assert manifest.quant == "keep"
    assert manifest.target.parity is not None
    assert manifest.target.parity.mean_kl < 0.02
    assert_exact(Bundle.open(tmp_path / "b"), "llama_wide")
