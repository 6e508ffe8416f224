"""Sinks that move: keys rotated once more are the keys of later positions, in every cache type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from exported import backend, smollm2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streaming import engine_of
from tiny_checkpoints import NAMES, TINY

from headrace.export.checkpoint import open_checkpoint
from headrace.models.config import ModelConfig, Rope
from headrace.models.plantlog import sample_log
from headrace.models.rope import cos_sin, rotate
from headrace.runtime.batch import F32, I64
from headrace.runtime.kv import SinkRotation
from headrace.runtime.load import load_tokenizer
from headrace.runtime.ring import RingLayout

F64 = npt.NDArray[np.float64]

TOLERANCE = 2e-6
"""Of a RoPE pair's norm, float32."""

shifts = st.integers(0, 10**9)
seeds = st.integers(0, 2**32 - 1)


def ropes(config: ModelConfig) -> list[Rope]:
    """Each layer's."""
    local = config.rope_local or config.rope
    return [config.rope if kind == "full" else local for kind in config.layer_types]


def turned(keys: npt.NDArray[np.generic], rope: Rope, positions: I64) -> F64:
    """Keys [..., rows, head_dim] rotated in float64 as complex numbers, without YaRN's factor."""
    angles = positions[:, None] * np.asarray(rope.inv_freq, np.float64)
    a, b = np.split(keys.astype(np.float64), 2, axis=-1)
    pairs = (a + 1j * b) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def pair_norms(keys: npt.NDArray[np.generic]) -> F64:
    """Of each channel's pair, [..., head_dim]."""
    a, b = np.split(keys.astype(np.float64), 2, axis=-1)
    return np.concatenate([np.hypot(a, b)] * 2, axis=-1)


def random_keys(config: ModelConfig, seed: int) -> F32:
    shape = (config.num_layers, config.num_kv_heads, 16, config.head_dim)
    return np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(shift=shifts, seed=seeds)
@example(shift=0, seed=0)
def test_a_rotated_key_is_the_key_of_a_later_position(name: str, shift: int, seed: int) -> None:
    """Every kind of RoPE, and each layer its own; positions that no stream reaches in years."""
    config = open_checkpoint(str(TINY / name)).config
    plain, positions = random_keys(config, seed), np.arange(16)
    stored = np.stack(
        [
            rotate(keys, *cos_sin(rope, positions))
            for keys, rope in zip(plain, ropes(config), strict=True)
        ]
    )
    moved = SinkRotation(config, "f32").shifted(stored, shift)
    for keys, rope, unmoved in zip(moved, ropes(config), plain, strict=True):
        expected = turned(unmoved, rope, positions + shift) * rope.attention_scaling
        error = np.abs(keys - expected) / pair_norms(expected)
        assert error.max() < TOLERANCE


@settings(max_examples=30, deadline=None)
@given(shift=shifts, seed=seeds)
def test_an_f16_cache_gets_keys_that_its_pool_can_hold(shift: int, seed: int) -> None:
    config = open_checkpoint(str(TINY / "gemma3")).config
    stored = random_keys(config, seed).astype(np.float16).astype(np.float32)
    moved = np.asarray(SinkRotation(config, "f16").shifted(stored, shift), np.float32)
    unrounded = SinkRotation(config, "f32").shifted(stored, shift)
    assert (moved == unrounded.astype(np.float16).astype(np.float32)).all()


@settings(max_examples=60, deadline=None)
@given(shift=shifts, seed=seeds)
def test_int8_codes_are_rounded_once_and_never_wrap(shift: int, seed: int) -> None:
    """Calibrated steps are sized to a pair's norm, so codes of one within it stay within it."""
    config = open_checkpoint(str(TINY / "gemma3")).config
    shape = (config.num_layers, config.num_kv_heads, 16, config.head_dim)
    codes = np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8)
    moved = SinkRotation(config, "int8").shifted(codes, shift)
    assert moved.dtype == np.int8
    within = pair_norms(codes) <= 127.5
    assert 0.5 < within.mean() < 1, "some beyond what a calibration allows, too"
    for layer, rope in enumerate(ropes(config)):
        exact = turned(codes[layer], rope, np.full(16, shift))
        error = np.abs(moved[layer] - exact)
        assert error[within[layer]].max() <= 0.5 + 1e-3
        assert np.abs(moved[layer] - exact.clip(-127, 127)).max() <= 0.5 + 1e-3


def test_int8_sinks_of_a_real_model_are_hardly_clipped() -> None:
    """After many evictions a lane's sinks are one rotation from their blocks, and no more."""
    bundle, layout = smollm2("int8", "int8"), RingLayout(64, 128, 64)
    engine = engine_of(backend(bundle, capacity=256), bundle, 16)
    stream = engine.stream(layout)
    ids = load_tokenizer(bundle).encode(sample_log(40))[: layout.capacity + 4 * layout.unit]
    stream.append(ids)
    stream.compute()
    shift = stream.state.sink_shift
    assert shift == 5 * layout.unit
    rope, excess = bundle.manifest.config.rope, []
    for entry, block_id in enumerate(stream.table.block_ids[: layout.sinks // 16]):
        codes, values = engine.arrays.blocks[block_id]
        lane_codes, lane_values = engine.arena.rows(0, entry * 16, 16)
        exact = turned(codes, rope, np.full(16, shift))
        assert np.abs(lane_codes - exact.clip(-127, 127)).max() <= 0.5 + 1e-3
        assert (lane_values == values).all()
        excess.append(np.maximum(np.abs(exact) - 127.5, 0))
    beyond = np.concatenate(excess)
    # Of keys that are larger than any of the calibration text; a graph clips those as well.
    assert (beyond > 0).mean() < 5e-4, f"{(beyond > 0).mean():.1e} of the codes were clipped"
