"""RoPE as a configuration describes it, resolved to frequencies by `headrace.models.rope`.

Two spellings are read: `rope_theta` with `rope_scaling`, and the later `rope_parameters`, which
holds both and may be nested by layer type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import SourceError, UnsupportedModelError
from headrace.models import rope
from headrace.models.config import Rope
from headrace.models.fields import Fields, shown

MAX_POSITION = 1 << 26
_THETA = (1.0 + 1e-6, 1e15)
_FACTOR = (1e-3, 1e6)


def global_rope(fields: Fields, head_dim: int) -> Rope:
    """RoPE of the full-attention layers."""
    parameters = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    if parameters is not None and parameters.has("full_attention"):
        parameters = parameters.mapping("full_attention")
    return _resolve(fields, parameters, head_dim, _theta(fields, parameters, "rope_theta"))


def local_rope(fields: Fields, head_dim: int) -> Rope:
    """RoPE of the sliding layers in a family where it differs; it is scaled only if nested."""
    nested = fields.mapping("rope_parameters")
    parameters = nested.mapping("sliding_attention") if nested is not None else None
    theta = _theta(fields, parameters, "rope_local_base_freq")
    return _resolve(fields, parameters, head_dim, theta)


def _theta(fields: Fields, parameters: Fields | None, key: str) -> float:
    if parameters is not None and parameters.has("rope_theta"):
        return parameters.number("rope_theta", *_THETA)
    return fields.number(key, *_THETA)


def _resolve(fields: Fields, parameters: Fields | None, head_dim: int, theta: float) -> Rope:
    if parameters is None:
        return rope.plain(head_dim, theta)
    unknown = sorted(key for key in parameters.values if key not in _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        raise UnsupportedModelError(
            f"{parameters.where}: unknown key {shown(unknown[0])}; known: {known}"
        )
    if parameters.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        raise UnsupportedModelError(
            f"{parameters.where}: partial_rotary_factor is "
            f"{parameters.values['partial_rotary_factor']}; only whole heads are rotated (1.0)"
        )
    key = "rope_type" if parameters.has("rope_type") else "type"
    if not parameters.has(key) and parameters.has("factor"):
        raise SourceError(f"{parameters.where}: rope_type is missing")
    resolver: _Resolver = parameters.choice(key, _KINDS, default="default")
    return resolver(fields, parameters, head_dim, theta)


_Resolver = Callable[[Fields, Fields, int, float], Rope]


def _default(fields: Fields, parameters: Fields, head_dim: int, theta: float) -> Rope:
    return rope.plain(head_dim, theta)


def _linear(fields: Fields, parameters: Fields, head_dim: int, theta: float) -> Rope:
    return rope.linear(head_dim, theta, parameters.number("factor", *_FACTOR))


def _llama3(fields: Fields, parameters: Fields, head_dim: int, theta: float) -> Rope:
    low = parameters.number("low_freq_factor", *_FACTOR)
    high = parameters.number("high_freq_factor", *_FACTOR)
    if high <= low:
        raise parameters.error("high_freq_factor", f"more than low_freq_factor ({low:g})")
    factor = parameters.number("factor", *_FACTOR)
    original = parameters.integer("original_max_position_embeddings", MAX_POSITION)
    return rope.llama3(head_dim, theta, factor, low, high, original)


def _yarn(fields: Fields, parameters: Fields, head_dim: int, theta: float) -> Rope:
    # a factor of zero means the default in transformers, hence the `or`
    values: dict[str, Any] = {
        key: parameters.number(key, 0.0, 1e6) if parameters.has(key) else None
        for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    }
    if parameters.has("original_max_position_embeddings"):
        original = parameters.integer("original_max_position_embeddings", MAX_POSITION)
    else:
        original = fields.integer("max_position_embeddings", MAX_POSITION)
    return rope.yarn(
        head_dim,
        theta,
        factor=parameters.number("factor", *_FACTOR),
        original_max_position=original,
        beta_fast=values["beta_fast"] or 32.0,
        beta_slow=values["beta_slow"] or 1.0,
        attention_factor=values["attention_factor"],
        mscale=values["mscale"],
        mscale_all_dim=values["mscale_all_dim"],
        truncate=parameters.flag("truncate", default=True),
    )


_KINDS: dict[str, _Resolver] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "none": _default,
    "yarn": _yarn,
}

_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
    | {"original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"}
    | {"beta_fast", "beta_slow", "truncate", "partial_rotary_factor", "finetuned"}
)
