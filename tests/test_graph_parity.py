"""The exported graph, run by the backend, says what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exported import backend, logits_of, smollm2
from tiny_checkpoints import DATA, NAMES, TINY, read_weights, stored

from headrace.export.build import ExportOptions, export
from headrace.export.check import compare, run_graph
from headrace.export.decoder import build_target
from headrace.export.quantize import F32, QuantMatrix, quantize_int4, quantize_int8
from headrace.models.manifest import Bundle
from headrace.models.reference import forward
from headrace.runtime.batch import LaneRows

TOLERANCE = 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_every_family_as_float32(name: str, tmp_path: Path) -> None:
    ids, expected = stored(name).input_ids, stored(name).logits
    export(str(TINY / name), tmp_path / "b", ExportOptions(quant="f32", kv="f32"))
    runner = backend(Bundle.open(tmp_path / "b"), lanes=2, capacity=100)
    for lane, widths in ((0, [32]), (1, [1]), (1, [5, 1, 2])):
        logits = logits_of(runner, ids, widths, lane)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_a_tree_after_slots_in_any_order(name: str, tmp_path: Path) -> None:
    """Branches, positions that slots do not follow, and local windows by position, against the
    oracle with the same positions and an explicit mask.
    """
    config, weights = read_weights(TINY / name)
    export(str(TINY / name), tmp_path / "b", ExportOptions(quant="f32", kv="f32"))
    runner = backend(Bundle.open(tmp_path / "b"), capacity=64)
    ids = stored(name).input_ids[:26]
    # sinks, then a ring that has wrapped, then a trunk of three with a branch of two at its root
    slots = np.concatenate([np.arange(4), np.arange(30, 38), np.arange(20, 29)])
    tree = np.array([40, 41, 42, 41, 42])
    positions = np.concatenate([slots, tree])
    past = len(slots)
    hidden = np.zeros((5, 5), np.bool_)
    hidden[3:, 1:3] = True
    for at in range(0, past, 7):
        part = slice(at, min(at + 7, past))
        runner.forward([LaneRows(0, ids[part], slots[part], at, slot_positions=slots[:at])])
    rows = LaneRows(0, ids[past:], tree, past, tuple(range(5)), slot_positions=slots, hidden=hidden)
    logits = runner.forward([rows])
    visible = np.tri(len(ids), dtype=np.bool_)
    visible[past:, past:] &= ~hidden
    expected = forward(config, weights, ids, positions=positions, visible=visible)[past:]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    without = forward(config, weights, ids, positions=positions)[past:]
    assert np.abs(without[3:] - expected[3:]).max() > 10 * TOLERANCE


FORMS: dict[str, Callable[[F32], QuantMatrix]] = {"int8": quantize_int8, "int4": quantize_int4}


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama_bias", "llama_wide", "gemma3"])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_graphs_say_what_their_matrices_say(name: str, form: str, tmp_path: Path) -> None:
    """Against the oracle over the very same quantised matrices, only the rounding of activations
    to 8 bits is left.
    """
    config, weights = read_weights(TINY / name)
    matrices = {n: FORMS[form](w) for n, w in weights.items() if w.ndim == 2}
    build_target(
        tmp_path / "model.onnx", config, matrices.__getitem__, weights.__getitem__, kv="f16"
    )
    restored = {n: matrices[n].dequantize() if n in matrices else weights[n] for n in weights}
    ids = stored(name).input_ids
    expected = forward(config, restored, ids)
    parity = compare(run_graph(tmp_path / "model.onnx", config, "f16", ids), expected, ids, 0.0)
    assert parity.mean_kl < 0.1
    assert parity.top1_agreement > 0.7


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_an_int8_cache_stays_near(name: str, tmp_path: Path) -> None:
    options = ExportOptions(quant="f32", kv="int8", force=True)
    manifest = export(str(TINY / name), tmp_path / "b", options)
    assert manifest.target.parity is not None
    assert manifest.target.parity.mean_kl < 0.1
    assert manifest.target.kv_clipping is not None
    assert max(manifest.target.kv_clipping.values()) < 0.05


def test_smollm2_as_float32_equals_transformers() -> None:
    fixture = np.load(DATA / "smollm2_logits.npz")
    runner = backend(smollm2("f32", "f32"), capacity=256)
    logits = logits_of(runner, fixture["input_ids"].astype(np.int64), [32])
    sampled = np.take_along_axis(logits, fixture["sample_ids"].astype(np.int64), axis=1)
    top = np.take_along_axis(logits, fixture["top_ids"].astype(np.int64), axis=1)
    assert np.abs(sampled - fixture["sample_logits"]).max() < TOLERANCE
    assert np.abs(top - fixture["top_logits"]).max() < TOLERANCE
    assert (logits.argmax(axis=1) == fixture["top_ids"][:, 0]).all()


@pytest.mark.parametrize(("quant", "kv", "limit"), [("int8", "f16", 0.02), ("keep", "f16", 0.02)])
def test_smollm2_quantised_stays_near_float32(quant: str, kv: str, limit: float) -> None:
    parity = smollm2(quant, kv).manifest.target.parity
    assert parity is not None
    assert parity.mean_kl < limit
    assert parity.top1_agreement > 0.9
