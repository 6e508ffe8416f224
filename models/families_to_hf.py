"""From a ModelConfig back to a config.json: the inverse of `families.config_from_hf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from headrace.errors import UnsupportedModelError
from headrace.models import rope
from headrace.models.config import ModelConfig, Rope
from headrace.models.families import ACTIVATIONS, FAMILIES, Family, config_from_hf

_LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
_ULPS = 64
"""How far the quotients and powers below may be off what they were computed from."""


def hf_config(config: ModelConfig, where: str = "config.json") -> dict[str, Any]:
    """The config.json that `config_from_hf` reads as `config`, whose head must be whole.

    `norm_offset` alone is not stored: it is the family's, as in every Hugging Face folder.

    Raises UnsupportedModelError where the RoPE is neither plain nor linear, or there is no such
    config.json for another reason; `where` is named.
    """
    assert config.head_size is None
    family = FAMILIES[config.family]
    spellings = {value: key for key, value in reversed(ACTIVATIONS.items())}
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_position,
        family.activation_key: spellings[config.activation],
        **_biases(family, config),
        **_ropes(config, where),
    }
    if family.windows != "none":
        values["sliding_window"] = config.sliding_window
    if family.local_rope:
        values["query_pre_attn_scalar"] = _query_scalar(config.attention_scale, where)
    values = with_layers(values, config)
    if config_from_hf(values, where) != replace(config, norm_offset=family.norm_offset):
        raise _inexpressible(where, f"a {family.name} model with these settings")
    return values


def with_layers(values: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """A config.json's values for a model like its own with the layers of `config`.

    Those of the text model alone, where there is more in it.
    """
    family = FAMILIES[config.family]
    if family.local_rope and isinstance(values.get("text_config"), Mapping):
        values = values["text_config"]
    is_listed = family.windows in ("upper", "pattern") or "layer_types" in values
    model_type = f"{family.name}_text" if family.local_rope else family.name
    changed: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": model_type,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tied_head,
    }
    if is_listed:
        changed["layer_types"] = [_LAYER_TYPES[kind] for kind in config.layer_types]
    if family.windows == "upper":
        changed["use_sliding_window"] = config.has_local_layers
        # what goes by it alone knows no list of types
        types = [*config.layer_types, "sliding"]
        changed["max_window_layers"] = types.index("sliding")
    return {**values, **changed}


def _biases(family: Family, config: ModelConfig) -> dict[str, bool]:
    values = {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    return {key: value for key, value in values.items() if key in family.optional_biases}


def _ropes(config: ModelConfig, where: str) -> dict[str, Any]:
    theta, factor = _theta_and_factor(config.rope, config.head_dim, where)
    scaling = None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if config.rope_local is not None:
        theta, factor = _theta_and_factor(config.rope_local, config.head_dim, where)
        if factor != 1.0:
            raise _inexpressible(where, "a local RoPE that is scaled")
        values["rope_local_base_freq"] = theta
    return values


def _theta_and_factor(found: Rope, head_dim: int, where: str) -> tuple[float, float]:
    """Of a plain or linear RoPE, whose frequencies they give bit for bit."""
    first, last = found.inv_freq[0], found.inv_freq[-1]
    # The last frequency says most about theta; from the others, errors grow by a larger power.
    # A single one is the same for any.
    theta = (first / last) ** (head_dim / (head_dim - 2)) if head_dim > 2 else 1e4
    factors = [factor for factor in _close(1.0 / first) if 1.0 / factor == first]
    for factor, close in product(factors, _close(theta)):
        if close > 1.0 and rope.linear(head_dim, close, factor) == found:
            return close, factor
    raise _inexpressible(where, "a RoPE that is neither plain nor linear")


def _query_scalar(attention_scale: float, where: str) -> float:
    for scalar in _close(attention_scale**-2):
        if scalar**-0.5 == attention_scale:
            return scalar
    raise _inexpressible(where, f"the attention scale {attention_scale!r}")


def _close(guess: float) -> Iterator[float]:
    """Numbers close to `guess`, likely ones first."""
    for digits in range(1, 12):
        yield float(f"{guess:.{digits}g}")
    yield float(np.float32(guess))  # as GGUF stores numbers
    yield guess
    up = down = guess
    for _ in range(_ULPS):
        up, down = float(np.nextafter(up, np.inf)), float(np.nextafter(down, 0.0))
        yield from (up, down)


def _inexpressible(where: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: {what} cannot be written as a config.json; distil from the Hugging Face folder"
    )
