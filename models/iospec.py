"""The inputs and outputs of the target graph, and of a draft's for the CPU: named here alone.

The exporter declares the graph by this table, the manifest stores nothing of it, the runtime takes
KV names and types from it, and `headrace inspect` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.config import ModelConfig

# B lanes, T rows a lane (padded), C slots a lane, R rows of logits, S total_sequence_length
LANES, ROWS, SLOTS, LOGIT_ROWS, TOTAL = "lanes", "rows", "slots", "logit_rows", "total"

KV_DTYPES = {"f16": "float32", "f32": "float32", "int8": "int8"}
"""Arena element by cache type: an f16 cache is a float32 arena of values rounded in the graph."""

KV_POOL_BYTES = {"f16": 2, "f32": 4, "int8": 1}

SPARE_SLOTS = 4
"""Slots behind every lane's end where padding rows land (docs/exactness.md)."""


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: name, numpy dtype name, dims (int fixed, str symbolic)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def kv_names(layer: int) -> tuple[str, str]:
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    return f"present.{layer}.key", f"present.{layer}.value"


def _kv_shape(config: ModelConfig) -> tuple[int | str, ...]:
    return LANES, config.num_kv_heads, SLOTS, config.head_dim


def target_inputs(config: ModelConfig, kv: str) -> list[TensorSpec]:
    """Inputs of the graph in graph order. `kv` is a key of KV_DTYPES."""
    half = config.head_dim // 2
    specs = [
        TensorSpec("input_ids", "int64", (LANES, ROWS)),
        TensorSpec("cos", "float32", (LANES, ROWS, half)),
        TensorSpec("sin", "float32", (LANES, ROWS, half)),
    ]
    if config.rope_local is not None:
        specs += [
            TensorSpec("cos_local", "float32", (LANES, ROWS, half)),
            TensorSpec("sin_local", "float32", (LANES, ROWS, half)),
        ]
    for layer in range(config.num_layers):
        specs += [TensorSpec(n, KV_DTYPES[kv], _kv_shape(config)) for n in kv_names(layer)]
    specs += [
        # slots in use after this pass, minus one; counts the declared rows, padding included
        TensorSpec("seqlens_k", "int32", (LANES,)),
        # rows that each lane declares (never fewer than two)
        TensorSpec("query_seqlens", "int32", (LANES,)),
        TensorSpec("total_sequence_length", "int32", ()),
        # indices into the flattened [lanes * rows] whose logits are wanted
        TensorSpec("logit_rows", "int64", (LOGIT_ROWS,)),
        TensorSpec("attention_bias", "float32", (LANES, 1, ROWS, TOTAL)),
    ]
    if config.has_local_layers:
        specs.append(TensorSpec("attention_bias_local", "float32", (LANES, 1, ROWS, TOTAL)))
    return specs


def target_outputs(config: ModelConfig, kv: str) -> list[TensorSpec]:
    """Outputs of the graph in graph order; present.* share the past's memory."""
    specs = [TensorSpec("logits", "float32", (LOGIT_ROWS, config.num_logits))]
    for layer in range(config.num_layers):
        specs += [TensorSpec(n, KV_DTYPES[kv], _kv_shape(config)) for n in present_names(layer)]
    return specs
