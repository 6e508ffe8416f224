"""From GGUF metadata to a ModelConfig, by the same families as `headrace.models.families`.

The metadata is translated to Hugging Face's key names and read by the same code; messages name
GGUF's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import SourceError, UnsupportedModelError
from headrace.models import rope
from headrace.models.config import ModelConfig, Rope
from headrace.models.families import FAMILIES, MISTRAL, Family, build, head_dim_of
from headrace.models.fields import Fields, shown
from headrace.models.rope_kinds import global_rope


@dataclass(frozen=True)
class GgufTensors:
    """What a ModelConfig needs to know of a GGUF file's tensors."""

    names: frozenset[str]
    vocab_rows: int
    """Rows of token_embd.weight."""
    rope_factors: tuple[float, ...] | None = None
    """Values of rope_freqs.weight: what each frequency is divided by (Llama 3's scaling)."""


# Hugging Face's name -> GGUF's, behind the architecture
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
_WINDOW_KEYS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_SCALING_KEYS = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# read below, or without effect on the computation
_OTHER_KEYS = frozenset(
    {"attention.value_length", "attention.scale", "rope.dimension_count", "rope.scale_linear"}
    | {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.causal"}
)
# what llama.cpp assumes where the file is silent
_DEFAULTS = {"rope_theta": 1e4, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}

_GEMMA3_27B_LAYERS = 62


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: GgufTensors, where: str = "GGUF metadata"
) -> ModelConfig:
    """The ModelConfig that a GGUF file's metadata (plain Python values) and tensors describe.

    Raises:
        UnsupportedModelError: unknown architecture, RoPE kind, or key of the architecture.
        SourceError: a number is missing or absurd; `where`, key and value are named.
    """
    arch = metadata.get("general.architecture")
    found = [f for f in FAMILIES.values() if f.gguf == arch]
    if not found:
        known = ", ".join(sorted({f.gguf for f in FAMILIES.values()}))
        raise UnsupportedModelError(
            f"{where}: general.architecture {shown(arch)} is not known; known: {known}"
        )
    family = found[0]
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    if family.gguf == MISTRAL.gguf and own.get("attention.sliding_window"):
        family = MISTRAL
    _refuse_unknown(family, own, f"{where}: {arch}.")
    fields = _fields(family, own, tensors, where, str(arch))
    head_dim = head_dim_of(fields)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{where}: {arch}.{key} is {shown(own[key])}; "
                f"only the head dimension {head_dim} is known"
            )
    config = build(
        family,
        fields,
        rope=_rope(fields, head_dim, tensors),
        activation=family.activation,
        norm_offset=0.0,
    )
    attention_bias = "attention_bias" in family.optional_biases
    scale = fields.number("attention_scale", 0.0, 1e3, default=0.0)
    if family.local_rope and config.num_layers == _GEMMA3_27B_LAYERS:
        # the file does not say it: Gemma 3 27B alone scales by hidden size over heads
        scale = scale or (config.hidden_size / config.num_heads) ** -0.5
    return replace(
        config,
        qkv_bias=family.qkv_bias or (attention_bias and "blk.0.attn_q.bias" in tensors.names),
        o_bias=attention_bias and "blk.0.attn_output.bias" in tensors.names,
        mlp_bias="mlp_bias" in family.optional_biases and "blk.0.ffn_up.bias" in tensors.names,
        attention_scale=scale or config.attention_scale,
    )


def _refuse_unknown(family: Family, own: Mapping[str, Any], prefix: str) -> None:
    """Raises UnsupportedModelError on a key that would change the computation."""
    known = {*_KEYS.values(), *_SCALING_KEYS.values(), *_OTHER_KEYS}
    if family.windows in ("all", "pattern"):
        known |= set(_WINDOW_KEYS.values())
    # zero and false switch a feature off
    unknown = sorted(key for key, value in own.items() if key not in known and value)
    if unknown:
        raise UnsupportedModelError(
            f"{prefix}{unknown[0]} = {shown(own[unknown[0]])} is not supported; "
            f"known: {', '.join(sorted(known))}"
        )
    if own.get("attention.causal", True) is not True:
        raise UnsupportedModelError(f"{prefix}attention.causal is false; only decoders are known")


def _fields(
    family: Family, own: Mapping[str, Any], tensors: GgufTensors, where: str, arch: str
) -> Fields:
    keys = {**_KEYS, **_WINDOW_KEYS, "attention_scale": "attention.scale"}
    values: dict[str, Any] = dict(_DEFAULTS)
    for name, key in keys.items():
        if key in own:
            values[name] = _same_in_all_layers(own[key], f"{where}: {arch}.{key}")
    if not values.get("sliding_window"):
        values["sliding_window"] = None
    values["vocab_size"] = tensors.vocab_rows
    values["tie_word_embeddings"] = "output.weight" not in tensors.names
    scaling = {name: own[key] for name, key in _SCALING_KEYS.items() if key in own}
    # zero means unscaled; `scale_linear` is the older spelling
    scaling["factor"] = scaling.get("factor") or own.get("rope.scale_linear") or 1.0
    scaling.setdefault("rope_type", "linear")
    values["rope_scaling"] = scaling
    return Fields(values, where, {name: f"{arch}.{key}" for name, key in keys.items()})


def _same_in_all_layers(value: Any, where: str) -> Any:
    """The one value of a list with an entry a layer; other values as they are."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"{where} differs between layers; one value is known")
    return value[0]


def _rope(fields: Fields, head_dim: int, tensors: GgufTensors) -> Rope:
    factors = tensors.rope_factors
    if factors is None:
        return global_rope(fields, head_dim)
    if len(factors) != head_dim // 2 or not all(1e-3 <= f <= 1e6 for f in factors):
        raise SourceError(
            f"{fields.where}: rope_freqs.weight has {len(factors)} values up to "
            f"{max(factors, default=0):g}; expected {head_dim // 2} positive factors"
        )
    plain = rope.plain(head_dim, theta := fields.number("rope_theta", 1.0, 1e15))
    if global_rope(fields, head_dim) != plain:
        raise UnsupportedModelError(
            f"{fields.where}: rope_freqs.weight together with rope.scaling is not supported"
        )
    return rope.with_factors(head_dim, theta, factors)
