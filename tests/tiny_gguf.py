"""Writes a tiny Hugging Face folder as GGUF, the way llama.cpp's converter does.

Metadata keys, the order of q and k rows, shifted norms and the types that tensors fall back to
follow convert_hf_to_gguf.py and llama-quantize; the law that tests hold is that nothing but the
tensors' rounding changes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf

# numpy has no bfloat16 before this import registers it
import ml_dtypes  # noqa: F401
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from tiny_checkpoints import F32

ARCH = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}

FALLBACK = {
    Type.Q2_K: Type.IQ4_NL,
    Type.Q3_K: Type.IQ4_NL,
    Type.IQ4_XS: Type.IQ4_NL,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}
"""For rows that are no multiple of 256; rows that are none of 32 become F16."""

# (offset of d, offset of dmin, dmin / d that centres the values), in bytes of a block
RANDOM_BLOCKS: dict[Any, tuple[int, int | None, float]] = {
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0.0),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0.0),
    Type.IQ4_NL: (0, None, 0.0),
    Type.IQ4_XS: (0, None, 0.0),
}

BLOCK_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_TENSORS = {"embed_tokens": "token_embd", "norm": "output_norm"}


def write_gguf(folder: Path, path: Path, qtype: Any) -> dict[str, F32]:
    """Writes `folder` to `path` with matrices of type `qtype`, or what that falls back to.

    Returns:
        the folder's weights by Hugging Face name, each replaced by what the file holds of it.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _add_metadata(writer, config, arch)
    _add_tokenizer(writer, folder, config["vocab_size"])
    rng = np.random.default_rng(0)
    held: dict[str, F32] = {}
    for name, values in _folder_weights(folder).items():
        rows = _row_order(name, len(values), config, arch)
        shift = 1.0 if arch == "gemma3" and name.endswith("norm.weight") else 0.0
        raw, kind = _encode(values[rows] + np.float32(shift), qtype, rng)
        writer.add_tensor(_gguf_name(name, arch), raw, raw_dtype=kind)
        held[name] = np.empty_like(values)
        held[name][rows] = gguf.quants.dequantize(raw, kind) - np.float32(shift)
    if (scaling := config.get("rope_scaling")) and scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config, scaling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _folder_weights(folder: Path) -> dict[str, F32]:
    """Every tensor of the folder in float32, by Hugging Face name."""
    weights: dict[str, F32] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                weights[name] = tensors.get_tensor(name).astype(np.float32)
    return weights


def _gguf_name(name: str, arch: str) -> str:
    parts = name.removeprefix("model.").split(".")
    kind = parts[-1]
    if parts[0] == "lm_head":
        return f"output.{kind}"
    if parts[0] != "layers":
        return f"{TOP_TENSORS[parts[0]]}.{kind}"
    names = BLOCK_TENSORS | (GEMMA_TENSORS if arch == "gemma3" else {})
    return f"blk.{parts[1]}.{names['.'.join(parts[2:-1])]}.{kind}"


def _row_order(name: str, num_rows: int, config: dict[str, Any], arch: str) -> Any:
    """Rows in file order: arch llama rotates neighbours, Hugging Face the halves of a head."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    rows = np.arange(num_rows)
    if arch != "llama" or heads is None:
        return rows
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _encode(values: F32, qtype: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """The tensor's bytes as type `qtype`, and the type it really got."""
    if values.ndim == 1:
        return values, Type.F32
    block = gguf.GGML_QUANT_SIZES[qtype][0]
    if values.shape[-1] % block:
        smaller = FALLBACK.get(qtype, Type.F16)
        return _encode(values, smaller, rng)
    if qtype in RANDOM_BLOCKS:
        return _random_blocks(values, qtype, rng), qtype
    return gguf.quants.quantize(values, qtype), qtype


def _random_blocks(like: F32, qtype: Any, rng: np.random.Generator) -> Any:
    """Random blocks with the spread of `like`: the gguf package reads these types but cannot
    quantise to them."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    at, at_min, ratio = RANDOM_BLOCKS[qtype]
    raw = rng.integers(0, 256, (like.size // block, size), dtype=np.uint8)

    def set_scale(scale: float) -> None:
        raw[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        if at_min is not None:
            raw[:, at_min : at_min + 2] = np.array([scale * ratio], np.float16).view(np.uint8)

    set_scale(1.0)
    set_scale(float(like.std() / gguf.quants.dequantize(raw, qtype).std()))
    return raw.reshape(like.shape[0], -1)


def _llama3_divisors(config: dict[str, Any], scaling: dict[str, Any]) -> F32:
    """What each frequency is divided by, as the converter stores Llama 3's scaling."""
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (scaling[key] for key in keys)
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / config["head_dim"])
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def _add_metadata(writer: Any, config: dict[str, Any], arch: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma3":
        _add_gemma3(writer, config)
    if scaling := config.get("rope_scaling"):
        _add_rope_scaling(writer, scaling)


def _add_gemma3(writer: Any, config: dict[str, Any]) -> None:
    writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    pattern = config["layer_types"].index("full_attention") + 1
    if pattern != 6:  # the default; no published file has the key
        writer.add_sliding_window_pattern(pattern)
    if config["query_pre_attn_scalar"] != config["head_dim"]:
        # beyond the converter, which loses it
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)


def _add_rope_scaling(writer: Any, scaling: dict[str, Any]) -> None:
    kind = scaling["rope_type"]
    if kind == "llama3":  # a tensor, not metadata
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        optional = {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }
        for key, add in optional.items():
            if key in scaling:
                add(scaling[key])


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids: dict[str, int] = data["model"]["vocab"]
    special = {token["content"]: token["id"] for token in data["added_tokens"]}
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, index in (ids | special).items():
        tokens[index] = token
        types[index] = gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    writer.add_bos_token_id(special[settings["bos_token"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_pad_token_id(special[settings["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])
