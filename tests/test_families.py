"""Laws of the importer's configuration: defaults, RoPE kinds, layer types, the table of weights."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.errors import SourceError, UnsupportedModelError
from headrace.models import rope
from headrace.models.config import ModelConfig
from headrace.models.families import config_from_hf, weights
from headrace.models.families_gguf import GgufTensors, config_from_gguf

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(architecture: str, **values: Any) -> ModelConfig:
    return config_from_hf({"architectures": [architecture], **SIZES, **values})


def llama(**values: Any) -> ModelConfig:
    return hf("LlamaForCausalLM", **values)


def test_llama_defaults_are_those_of_its_config_class() -> None:
    config = llama()
    assert config.rope == rope.plain(16, 10000.0)
    assert (config.rms_eps, config.max_position, config.tied_head) == (1e-6, 2048, False)
    assert config.attention_scale == 16**-0.5
    assert not config.has_local_layers
    assert llama(num_key_value_heads=None).num_kv_heads == 4
    assert llama(head_dim=None).head_dim == 16
    assert llama(head_dim=8).head_dim == 8


def test_qwen_families_differ_from_llama_in_biases_and_norms() -> None:
    qwen2 = hf("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = hf("Qwen3ForCausalLM")
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    biased = hf("Qwen3ForCausalLM", attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_mistral_slides_everywhere_or_nowhere() -> None:
    assert hf("MistralForCausalLM").layer_types == ("sliding",) * 6
    assert hf("MistralForCausalLM").sliding_window == 4096
    none = hf("MistralForCausalLM", sliding_window=None)
    assert (none.layer_types, none.sliding_window) == (("full",) * 6, None)


def test_qwen_slides_above_max_window_layers_if_told_to() -> None:
    assert not hf("Qwen2ForCausalLM", sliding_window=32, max_window_layers=2).has_local_layers
    values = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}
    config = hf("Qwen2ForCausalLM", **values)
    assert config.layer_types == ("full",) * 4 + ("sliding",) * 2
    assert (config.sliding_window, config.rope_local) == (32, None)
    listed = ["sliding_attention", "full_attention"] * 3
    assert hf("Qwen3ForCausalLM", layer_types=listed, **values).layer_types[0] == "sliding"


def test_gemma3_text() -> None:
    config = hf("Gemma3ForCausalLM", sliding_window=64, query_pre_attn_scalar=20)
    assert config.layer_types == ("sliding",) * 5 + ("full",)
    assert config.rope == rope.plain(256, 1e6)
    assert config.rope_local == rope.plain(256, 1e4)
    assert (config.tied_head, config.norm_offset, config.embed_scale) == (True, 1.0, 8.0)
    assert config.attention_scale == pytest.approx(20**-0.5)
    assert (config.activation, config.sandwich_norms) == ("gelu_tanh", True)
    halves = hf("Gemma3ForCausalLM", sliding_window_pattern=2).layer_types
    assert halves == ("sliding", "full") * 3


def test_text_config_of_a_multimodal_gemma_leaves_out_defaults() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**text, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "vision_config": {},
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262208
    assert config.rope == rope.linear(256, 1e6, 8.0)
    assert config.rope_local == rope.plain(256, 1e4)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, rope.plain(16, 5e5)),
        ({"rope_type": "default"}, rope.plain(16, 5e5)),
        ({"type": "linear", "factor": 4.0}, rope.linear(16, 5e5, 4.0)),
        (LLAMA3, rope.llama3(16, 5e5, 8.0, 1.0, 4.0, 8192)),
        ({"rope_type": "yarn", "factor": 4.0}, rope.yarn(16, 5e5, 4.0, 2048)),
        (
            {"rope_type": "yarn", "factor": 4, "beta_fast": 16, "attention_factor": 0.9},
            rope.yarn(16, 5e5, 4.0, 2048, beta_fast=16, attention_factor=0.9),
        ),
    ],
)
def test_rope_kinds_in_both_spellings(scaling: dict[str, Any] | None, expected: object) -> None:
    assert llama(rope_theta=5e5, rope_scaling=scaling).rope == expected
    assert llama(rope_parameters={**(scaling or {}), "rope_theta": 5e5}).rope == expected


def test_rope_formulas() -> None:
    assert llama().rope.inv_freq[3] == pytest.approx(10000 ** (-6 / 16), rel=1e-12)
    yarn = llama(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope
    assert yarn.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    # wavelengths beyond the original context are divided by the factor, short ones are kept
    long = llama(rope_theta=5e5, rope_scaling=LLAMA3).rope.inv_freq
    assert long[-1] == pytest.approx(5e5 ** (-14 / 16) / 8)
    assert long[0] == 1.0


def test_rope_parameters_nested_by_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    config = hf("Gemma3ForCausalLM", rope_parameters=nested)
    assert config.rope == rope.linear(256, 2e6, 8.0)
    assert config.rope_local == rope.plain(256, 3e4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["PhiForCausalLM"]}, ("PhiForCausalLM", "LlamaForCausalLM", "Qwen3")),
        ({"architectures": []}, ("architecture None", "MistralForCausalLM")),
        ({"hidden_act": "relu"}, ("hidden_act", "relu", "silu")),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, ("longrope", "yarn", "llama3")),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, ("mrope_section",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
        ({"final_logit_softcapping": 30.0}, ("final_logit_softcapping", "30.0")),
        ({"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping",)),
        ({"num_local_experts": 8}, ("num_local_experts", "8")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        llama(**values)
    assert_line(caught.value, *words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"vocab_size": 0}, ("vocab_size", "0")),
        ({"vocab_size": "many"}, ("vocab_size", "many")),
        ({"num_hidden_layers": 1e9}, ("num_hidden_layers", "1000000000")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"num_attention_heads": -4}, ("num_attention_heads", "-4")),
        ({"num_attention_heads": 5}, ("hidden_size", "64", "5")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({"head_dim": 7}, ("head_dim", "7")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rope_theta": -1.0}, ("rope_theta", "-1.0")),
        ({"rope_scaling": 4}, ("rope_scaling", "4")),
        ({"rope_scaling": {"factor": 2.0}}, ("rope_scaling", "rope_type", "missing")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("rope_scaling", "factor", "missing")),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ("high_freq_factor", "1.0")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "yes")),
    ],
)
def test_absurd_numbers_are_named(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SourceError) as caught:
        llama(**values)
    assert_line(caught.value, "config.json", *words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_types": ["full_attention"]}, ("layer_types", "6")),
        ({"layer_types": ["chunked_attention"] * 6}, ("layer_types", "chunked_attention")),
        ({"layer_types": ["sliding_attention"] * 6}, ("sliding_attention", "no sliding window")),
    ],
)
def test_bad_layer_types_are_named(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SourceError) as caught:
        hf("Qwen3ForCausalLM", **values)
    assert_line(caught.value, *words)


def test_mistral_with_mixed_layer_types_is_refused() -> None:
    mixed = ["sliding_attention", "full_attention"] * 3
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        hf("MistralForCausalLM", layer_types=mixed)


def test_weights_have_the_names_and_shapes_of_the_config() -> None:
    table = weights(hf("Gemma3ForCausalLM", head_dim=32, tie_word_embeddings=False))
    assert table["model.embed_tokens.weight"] == table["lm_head.weight"] == (100, 64)
    assert table["model.layers.5.self_attn.q_proj.weight"] == (128, 64)
    assert table["model.layers.5.self_attn.k_proj.weight"] == (64, 64)
    assert table["model.layers.5.self_attn.o_proj.weight"] == (64, 128)
    assert table["model.layers.0.self_attn.q_norm.weight"] == (32,)
    assert table["model.layers.0.mlp.down_proj.weight"] == (64, 96)
    # 7 matrices, 4 norms, 2 head norms a layer; embedding, final norm, head
    assert len(table) == 6 * 13 + 3
    biased = weights(llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    assert sum(name.endswith(".bias") for name in biased) == 6 * 7
    assert "lm_head.weight" not in biased
    qwen2 = weights(hf("Qwen2ForCausalLM"))
    assert sum(name.endswith(".bias") for name in qwen2) == 6 * 3


def metadata(arch: str, **values: Any) -> dict[str, Any]:
    own = {
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 6,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 2048,
        **values,
    }
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in own.items()}}


UNTIED = GgufTensors(frozenset({"output.weight", "token_embd.weight"}), 100)


def test_gguf_metadata_gives_the_same_config_as_config_json() -> None:
    assert config_from_gguf(metadata("llama"), UNTIED) == llama()
    window = {"attention.sliding_window": 4096, "context_length": 131072}
    assert config_from_gguf(metadata("llama", **window), UNTIED) == hf("MistralForCausalLM")
    qwen3 = metadata("qwen3", **{"attention.key_length": 128, "context_length": 32768})
    assert config_from_gguf(qwen3, UNTIED) == hf("Qwen3ForCausalLM")
    qwen2 = metadata("qwen2", context_length=32768)
    assert config_from_gguf(qwen2, UNTIED) == hf("Qwen2ForCausalLM")


def test_gguf_gemma3_stores_norms_with_their_offset() -> None:
    values = {
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.sliding_window": 512,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    config = config_from_gguf(
        metadata("gemma3", **values), GgufTensors(frozenset({"token_embd.weight"}), 100)
    )
    assert config.norm_offset == 0.0
    assert config.tied_head
    assert config.rope == rope.linear(256, 1e6, 8.0)
    assert config.rope_local == rope.plain(256, 1e4)
    assert config.layer_types == ("sliding",) * 5 + ("full",)
    assert (config.attention_scale, config.embed_scale) == (256**-0.5, 8.0)


def test_gguf_rope_scaling() -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 512,
    }
    assert config_from_gguf(metadata("llama", **yarn), UNTIED).rope == rope.yarn(16, 1e4, 4.0, 512)
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert config_from_gguf(metadata("llama", **none), UNTIED).rope == rope.plain(16, 1e4)
    factors = (1.0, 1.0, 2.0, 3.0, 8.0, 8.0, 8.0, 8.0)
    tensors = GgufTensors(frozenset(), 100, factors)
    config = config_from_gguf(metadata("llama"), tensors)
    assert config.rope == rope.with_factors(16, 1e4, factors)


def test_gguf_biases_are_those_that_the_file_has() -> None:
    names = frozenset({"blk.0.attn_q.bias", "blk.0.ffn_up.bias"})
    config = config_from_gguf(metadata("llama"), GgufTensors(names, 100))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, True)


@pytest.mark.parametrize(
    ("arch", "values", "words"),
    [
        ("phi3", {}, ("phi3", "llama", "qwen3")),
        ("llama", {"expert_count": 8}, ("llama.expert_count", "8")),
        ("llama", {"final_logit_softcapping": 30.0}, ("llama.final_logit_softcapping",)),
        ("qwen2", {"attention.sliding_window": 32}, ("qwen2.attention.sliding_window",)),
        ("llama", {"rope.dimension_count": 8}, ("llama.rope.dimension_count", "8", "16")),
        ("llama", {"attention.value_length": 8}, ("llama.attention.value_length", "8")),
        ("llama", {"attention.head_count": [4, 8]}, ("llama.attention.head_count", "differs")),
        ("llama", {"attention.causal": False}, ("llama.attention.causal",)),
        ("llama", {"rope.scaling.type": "longrope"}, ("longrope", "yarn")),
    ],
)
def test_gguf_what_is_not_supported_is_named(
    arch: str, values: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_gguf(metadata(arch, **values), UNTIED)
    assert_line(caught.value, *words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"block_count": 0}, ("llama.block_count", "0")),
        ({"embedding_length": None}, ("llama.embedding_length", "missing")),
        ({"attention.layer_norm_rms_epsilon": None}, ("layer_norm_rms_epsilon", "missing")),
        ({"rope.freq_base": float("inf")}, ("llama.rope.freq_base", "inf")),
    ],
)
def test_gguf_absurd_numbers_are_named_as_gguf_spells_them(
    values: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(SourceError) as caught:
        config_from_gguf(metadata("llama", **values), UNTIED)
    assert_line(caught.value, *words)


def test_gguf_rope_factors_must_fit() -> None:
    with pytest.raises(SourceError, match=r"rope_freqs\.weight has 2 values"):
        config_from_gguf(metadata("llama"), GgufTensors(frozenset(), 100, (1.0, 2.0)))


def assert_line(error: Exception, *words: str) -> None:
    """The message is one line that has every word."""
    text = str(error)
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text
