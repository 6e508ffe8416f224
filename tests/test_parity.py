"""Our forward pass says what transformers and optimum say, for every family.

Logits were stored by tests/oracle/make_fixtures.py; `make oracle` computes them anew.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_checkpoints import NAMES, TINY, reference_logits, stored

TOLERANCE = 1e-3
"""Largest logit difference, in nats; two float32 libraries differ by about 1e-5."""


def test_every_family_has_checkpoints() -> None:
    families = {name.split("_")[0] for name in NAMES}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "gemma3"}


@pytest.mark.parametrize("name", NAMES)
def test_reference_equals_transformers(name: str) -> None:
    expected = stored(name)
    got = reference_logits(TINY / name, expected.input_ids)
    assert got.dtype == np.float32
    assert np.abs(got - expected.logits).max() < TOLERANCE


def test_reference_equals_optimums_export() -> None:
    expected = stored("llama")
    assert expected.optimum_logits is not None
    got = reference_logits(TINY / "llama", expected.input_ids)
    assert np.abs(got - expected.optimum_logits).max() < TOLERANCE
