"""Model families as data, and the way from a config.json to a ModelConfig.

A family is a base plus what differs. `weights` is the exact table of what a checkpoint must hold.
GGUF metadata is read by `headrace.models.families_gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import SourceError, UnsupportedModelError
from headrace.models.config import Activation, LayerType, ModelConfig, Rope
from headrace.models.fields import Fields, shown
from headrace.models.rope_kinds import MAX_POSITION, global_rope, local_rope

Windows = Literal["none", "all", "upper", "pattern"]


@dataclass(frozen=True)
class Family:
    """What one family of models does that the plain Llama decoder does not."""

    name: str
    architectures: tuple[str, ...]
    """`architectures` of config.json."""
    gguf: str
    """`general.architecture` of a GGUF file."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the family's config class in transformers assumes where config.json is silent."""
    qkv_bias: bool = False
    """q, k and v always have a bias."""
    optional_biases: frozenset[str] = frozenset()
    """Which of `attention_bias` (q, k, v and o) and `mlp_bias` the family honours."""
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    """Of a Hugging Face checkpoint; GGUF files store the sum."""
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    windows: Windows = "none"
    """Which layers slide: none, all with a window, those above `max_window_layers`, a pattern."""
    local_rope: bool = False
    gguf_interleaved: bool = False
    """GGUF stores q and k with each head's rows permuted for interleaved RoPE."""


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_QWEN = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

LLAMA = Family(
    "llama",
    ("LlamaForCausalLM",),
    gguf="llama",
    defaults={**_COMMON, "max_position_embeddings": 2048},
    optional_biases=frozenset({"attention_bias", "mlp_bias"}),
    gguf_interleaved=True,
)
MISTRAL = Family(
    "mistral",
    ("MistralForCausalLM",),
    gguf="llama",
    defaults={
        **_COMMON,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
    windows="all",
    gguf_interleaved=True,
)
QWEN2 = Family(
    "qwen2",
    ("Qwen2ForCausalLM",),
    gguf="qwen2",
    defaults=_QWEN,
    qkv_bias=True,
    windows="upper",
)
QWEN3 = Family(
    "qwen3",
    ("Qwen3ForCausalLM",),
    gguf="qwen3",
    defaults={**_QWEN, "head_dim": 128},
    optional_biases=frozenset({"attention_bias"}),
    qk_norm=True,
    windows="upper",
)
GEMMA3 = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf="gemma3",
    # the text_config of a multimodal checkpoint leaves out even sizes that equal these
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    optional_biases=frozenset({"attention_bias"}),
    qk_norm=True,
    sandwich_norms=True,
    norm_offset=1.0,
    activation="gelu_tanh",
    activation_key="hidden_activation",
    scaled_embeddings=True,
    windows="pattern",
    local_rope=True,
)

FAMILIES = {f.name: f for f in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3)}

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_LAYER_TYPES: dict[str, LayerType] = {"full_attention": "full", "sliding_attention": "sliding"}

# keys of config.json that change the computation in ways the graph does not know, unless falsy
_REFUSED = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "use_bidirectional_attention",
    "use_mrope",
    "attention_chunk_size",
    "is_encoder_decoder",
    "add_cross_attention",
)


def config_from_hf(config_json: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The ModelConfig that a Hugging Face config.json describes.

    Raises:
        UnsupportedModelError: unknown architecture, RoPE kind, activation or flag.
        SourceError: a number is missing or absurd; `where`, key and value are named.
    """
    architectures = config_json.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    found = [f for f in FAMILIES.values() if name in f.architectures]
    if not found:
        known = ", ".join(a for f in FAMILIES.values() for a in f.architectures)
        raise UnsupportedModelError(
            f"{where}: architecture {shown(name)} is not known; known: {known}"
        )
    family = found[0]
    nested = Fields(config_json, where).mapping("text_config")
    if nested is not None and family.local_rope:
        where, config_json = nested.where, nested.values
    refused = [key for key in _REFUSED if config_json.get(key)]
    factor = config_json.get("partial_rotary_factor")
    if factor is not None and factor != 1:
        refused.append("partial_rotary_factor")
    if refused:
        values = ", ".join(f"{key} = {shown(config_json[key])}" for key in refused)
        raise UnsupportedModelError(
            f"{where}: {values} is not supported; known are float weights, dense layers, "
            "heads rotated as a whole, no soft-capping"
        )
    fields = Fields({**family.defaults, **config_json}, where)
    head_dim = head_dim_of(fields)
    return build(
        family,
        fields,
        rope=global_rope(fields, head_dim),
        activation=fields.choice(family.activation_key, ACTIVATIONS, _spelling(family.activation)),
        norm_offset=family.norm_offset,
    )


def _spelling(activation: Activation) -> str:
    return next(key for key, value in ACTIVATIONS.items() if value == activation)


def build(
    family: Family, fields: Fields, *, rope: Rope, activation: Activation, norm_offset: float
) -> ModelConfig:
    """The ModelConfig of a family from fields by Hugging Face's names; raises as the readers do."""
    num_layers = fields.integer("num_hidden_layers", 1024)
    num_heads = fields.integer("num_attention_heads", 1024)
    num_kv_heads = fields.integer("num_key_value_heads", 1024, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {num_heads} attention heads")
    hidden_size = fields.integer("hidden_size", 1 << 17)
    head_dim = head_dim_of(fields)
    layer_types = _layer_types(family, fields, num_layers)
    sliding = "sliding" in layer_types
    biased = {key for key in family.optional_biases if fields.flag(key)}
    scalar = fields.number("query_pre_attn_scalar", 1e-6, 1e6, default=head_dim)
    return ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size", 1 << 24),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1 << 20),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", 1e-12, 1.0),
        max_position=fields.integer("max_position_embeddings", MAX_POSITION),
        rope=rope,
        rope_local=local_rope(fields, head_dim) if family.local_rope and sliding else None,
        sliding_window=fields.integer("sliding_window", MAX_POSITION) if sliding else None,
        layer_types=layer_types,
        tied_head=fields.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or "attention_bias" in biased,
        o_bias="attention_bias" in biased,
        mlp_bias="mlp_bias" in biased,
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        norm_offset=norm_offset,
        activation=activation,
        embed_scale=hidden_size**0.5 if family.scaled_embeddings else 1.0,
        attention_scale=(scalar if family.local_rope else head_dim) ** -0.5,
    )


def head_dim_of(fields: Fields) -> int:
    hidden_size = fields.integer("hidden_size", 1 << 17)
    num_heads = fields.integer("num_attention_heads", 1024)
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of the {num_heads} attention heads")
    head_dim = fields.integer("head_dim", 1024, low=2, default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number: RoPE turns pairs")
    return head_dim


def _layer_types(family: Family, fields: Fields, num_layers: int) -> tuple[LayerType, ...]:
    windowed = fields.has("sliding_window")
    if family.windows == "upper":
        windowed = windowed and fields.flag("use_sliding_window")
    given = fields.values.get("layer_types")
    if given is not None and family.windows != "none":
        return _given_types(family, fields, given, num_layers, windowed)
    first = 0
    if family.windows == "upper" and windowed:
        first = fields.integer("max_window_layers", 1 << 20, low=0)
    period = 0
    if family.windows == "pattern":
        period = fields.integer("sliding_window_pattern", 1024)
    types: list[LayerType] = ["full"] * num_layers
    for i in range(num_layers):
        if (
            family.windows != "none"
            and windowed
            and i >= first
            and (not period or (i + 1) % period)
        ):
            types[i] = "sliding"
    return tuple(types)


def _given_types(
    family: Family, fields: Fields, given: Any, num_layers: int, windowed: bool
) -> tuple[LayerType, ...]:
    if not isinstance(given, list) or len(given) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} names")
    unknown = [str(name) for name in given if str(name) not in _LAYER_TYPES]
    if unknown:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types has {shown(unknown[0])}; known: {', '.join(_LAYER_TYPES)}"
        )
    types: tuple[LayerType, ...] = tuple(_LAYER_TYPES[name] for name in given)
    if "sliding" in types and not windowed:
        raise SourceError(
            f"{fields.where}: layer_types has sliding_attention, but there is no sliding window"
        )
    # transformers 4 ignores the list in a Mistral config, later versions follow it
    if family.windows == "all" and len({*types, "sliding" if windowed else "full"}) > 1:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types of a {family.name} model must all follow sliding_window"
        )
    return types


def weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight a checkpoint of this config holds, no more and no fewer."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inter, hidden, config.mlp_bias),
        "mlp.up_proj": (inter, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inter, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.sandwich_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}

    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        table["lm_head.weight"] = (config.num_logits, hidden)
    for i in range(config.num_layers):
        for name, (rows, columns, bias) in linears.items():
            table[f"model.layers.{i}.{name}.weight"] = (rows, columns)
            if bias:
                table[f"model.layers.{i}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            table[f"model.layers.{i}.{name}.weight"] = (size,)
    return table
