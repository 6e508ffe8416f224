"""A checkpoint imports from GGUF as it does from its folder, but for what rounding changed.

The expected logits are the numpy oracle's with the folder's configuration and the weights that the
file holds, so the file's metadata, names, row order and tensor types are all on trial.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tiny_checkpoints import NAMES, TINY, read_weights, reference_logits, stored
from tiny_gguf import write_gguf

from headrace.errors import UnsupportedModelError
from headrace.models.reference import forward

# Its file has a key that llama.cpp's converter and its loader understand differently.
REFUSED = "llama_yarn_factor"
IMPORTED = [name for name in NAMES if name != REFUSED]

TOLERANCE = 1e-4
"""Weights are equal, so only RoPE's frequencies and shifted norms round differently."""

WIDE_TYPES = (
    *(Type.F32, Type.F16, Type.BF16),
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_NL, Type.IQ4_XS),
)


def assert_imports(name: str, path: Path, qtype: Type) -> None:
    """The law of this module, and that no matrix changes but by its type."""
    held = write_gguf(TINY / name, path, qtype)
    folder_config, folder_weights = read_weights(TINY / name)
    ids = stored(name).input_ids
    _, weights = read_weights(path)
    assert weights.keys() == folder_weights.keys()
    for weight, values in held.items():
        if values.ndim == 2:
            np.testing.assert_array_equal(weights[weight], values, err_msg=weight)
    expected = forward(folder_config, held, ids)
    assert np.abs(reference_logits(path, ids) - expected).max() < TOLERANCE


@pytest.mark.parametrize("qtype", [Type.F32, Type.F16, Type.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("name", IMPORTED)
def test_every_family(name: str, qtype: Type, tmp_path: Path) -> None:
    assert_imports(name, tmp_path / "model.gguf", qtype)


@pytest.mark.parametrize("qtype", WIDE_TYPES, ids=lambda t: t.name)
def test_every_tensor_type(qtype: Type, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert_imports("llama_wide", path, qtype)
    assert qtype in {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", IMPORTED)
def test_float32_file_equals_transformers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(TINY / name, path, Type.F32)
    expected = stored(name)
    got = reference_logits(path, expected.input_ids)
    assert np.abs(got - expected.logits).max() < 1e-3


def test_yarn_attention_factor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(TINY / REFUSED, path, Type.F32)
    with pytest.raises(UnsupportedModelError, match=r"yarn_attn_factor = 0\.875"):
        read_weights(path)
