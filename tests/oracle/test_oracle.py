"""The stored logits are what transformers and optimum say today, and so is our forward pass."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
import smollm2
import tiny_checkpoints
import tiny_models
import torch
from gguf import GGMLQuantizationType as Type
from independent_export import optimum_logits
from tiny_checkpoints import DATA, TINY, reference_logits, stored
from tiny_gguf import write_gguf

# torch, transformers and optimum warn about their own insides, anew in each version.
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

STORED_TOLERANCE = 1e-4
REFERENCE_TOLERANCE = 1e-3

# From GGUF, transformers takes neither RoPE scaling, windows, biases nor qwen3's head size.
READ_BY_TRANSFORMERS = ("llama", "mistral_full", "qwen2")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_checkpoint_is_stored() -> None:
    assert sorted(tiny_models.TINY) == tiny_checkpoints.NAMES


@pytest.mark.parametrize("name", tiny_models.TINY)
def test_stored_logits_can_be_made_again(name: str, tmp_path: Path) -> None:
    tiny_models.write(name, tmp_path)
    expected = stored(name)
    ids = tiny_models.input_ids(name)
    np.testing.assert_array_equal(ids, expected.input_ids)
    made = tiny_models.transformers_logits(tmp_path, ids)
    assert np.abs(made - expected.logits).max() < STORED_TOLERANCE
    read = tiny_models.transformers_logits(TINY / name, ids)
    assert np.abs(read - expected.logits).max() < STORED_TOLERANCE


@pytest.mark.parametrize("name", tiny_models.TINY)
def test_reference_on_fresh_weights(name: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    tiny_models.write(name, tmp_path, seed=seed)
    ids = tiny_models.input_ids(name, seed=seed)
    expected = tiny_models.transformers_logits(tmp_path, ids)
    difference = np.abs(reference_logits(tmp_path, ids) - expected).max()
    assert difference < REFERENCE_TOLERANCE, f"seed {seed}"


def test_optimums_export_can_be_made_again() -> None:
    expected = stored("llama")
    assert expected.optimum_logits is not None
    made = optimum_logits(TINY / "llama", expected.input_ids)
    assert np.abs(made - expected.optimum_logits).max() < STORED_TOLERANCE


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_our_gguf(name: str, tmp_path: Path) -> None:
    """The files that tests/test_gguf_parity.py imports are GGUF as others understand it."""
    write_gguf(TINY / name, tmp_path / "model.gguf", Type.F32)
    expected = stored(name)
    read = tiny_models.transformers_logits(tmp_path, expected.input_ids, gguf_file="model.gguf")
    assert np.abs(read - expected.logits).max() < REFERENCE_TOLERANCE


def test_smollm2(smollm2_gguf: Path) -> None:
    """Stored and reference logits; one test, since loading the model takes a minute."""
    model, ids = smollm2.load(smollm2_gguf)
    live = smollm2.logits(model, ids)
    made = smollm2.fixture(live, ids)
    with np.load(DATA / "smollm2_logits.npz") as arrays:
        assert sorted(arrays) == sorted(made)
        for exact in ("input_ids", "sample_ids"):
            np.testing.assert_array_equal(made[exact], arrays[exact])
        for close in ("sample_logits", "top_logits", "logsumexp"):
            assert np.abs(made[close] - arrays[close]).max() < REFERENCE_TOLERANCE, close
    assert np.abs(reference_logits(smollm2_gguf, ids) - live).max() < REFERENCE_TOLERANCE
