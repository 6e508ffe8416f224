"""The torch decoder computes what the numpy reference does, in every family and way of running."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_checkpoints
import torch
from tiny_checkpoints import TINY, stored

from headrace.export.calibrate import FloatWeights
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.decoder import Cache
from headrace.export.distill.student import Target
from headrace.models.reference import forward

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOLERANCE = 1e-3


def target(name: str) -> Target:
    return Target.load(open_checkpoint(str(TINY / name)))


def texts(name: str) -> torch.Tensor:
    """[3, T]: the stored text, and it turned around and doubled."""
    ids = stored(name).input_ids.astype(np.int64)
    return torch.from_numpy(np.stack([ids, ids[::-1], np.roll(ids, 5)]))


@pytest.mark.parametrize("name", tiny_checkpoints.NAMES)
def test_batches_equal_the_reference(name: str) -> None:
    t, ids = target(name), texts(name)
    logits = t.model(ids) @ t.head.T
    weights = FloatWeights(t.checkpoint)
    for ours, row in zip(logits.numpy(), ids.numpy(), strict=True):
        expected = forward(t.checkpoint.config, weights, row)
        assert np.abs(ours - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", tiny_checkpoints.NAMES)
def test_token_by_token_equals_whole(name: str) -> None:
    t, ids = target(name), texts(name)
    whole = t.model(ids)
    for begun in (1, 7):
        cache = Cache.empty(t.checkpoint.config, *ids.shape)
        parts = [t.model.extend(ids[:, :begun], cache)]
        parts += [t.model.extend(ids[:, i : i + 1], cache) for i in range(begun, ids.shape[1])]
        assert (torch.cat(parts, 1) - whole).abs().max() < TOLERANCE


def test_trained_are_all_weights_but_embedding_and_head() -> None:
    for name in ("llama_bias", "gemma3", "qwen3"):
        t = target(name)
        expected = t.checkpoint.names() - {"model.embed_tokens.weight", "lm_head.weight"}
        student = t.student(tuple(range(t.checkpoint.config.num_layers)))
        assert set(student.by_name()) == expected
        assert all(p.requires_grad for p in student.parameters())
        assert not any(p.requires_grad for p in t.model.parameters())
