"""Tiny random checkpoints of every family, and what transformers says about them.

A `Tiny` is data; `write` turns it into a Hugging Face folder and `transformers_logits` runs the
folder. Sizes are odd on purpose: what only works for powers of two fails here.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Read when transformers is imported: nothing here may ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoConfig, AutoModelForCausalLM

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

VOCAB_SIZE = 283
"""More than the tokenizer has: real checkpoints pad their vocabulary too."""

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

CORPUS = (
    "pump 3 pressure 4.2 bar, temperature 61.5 C",
    "pump 3 pressure 4.3 bar, temperature 61.9 C",
    "valve 12 open, flow 118 l/min",
    "warning: pump 3 vibration above limit",
)


@dataclass(frozen=True)
class Tiny:
    """One checkpoint: `model_type` and `config` are transformers' own words."""

    model_type: str
    config: dict[str, Any]
    num_tokens: int = 40
    dtype: str = "float32"
    max_shard_size: str = "1GB"
    eos_token_ids: tuple[int, ...] = field(default=(1,))


def _shape(
    hidden: int, ff: int, layers: int, heads: int, kv: int, head_dim: int | None
) -> dict[str, Any]:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    return shape if head_dim is None else {**shape, "head_dim": head_dim}


def _yarn(**more: Any) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    return {**scaling, **more}


TINY: dict[str, Tiny] = {
    "llama": Tiny(
        "llama",
        {**_shape(40, 56, 2, 5, 5, 8), "tie_word_embeddings": False},
        eos_token_ids=(1, 2),
    ),
    "llama_linear": Tiny(
        "llama",
        {
            **_shape(24, 40, 2, 7, 1, 8),
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 2.5},
        },
        num_tokens=72,
    ),
    "llama_llama3": Tiny(
        "llama",
        {
            **_shape(40, 56, 2, 4, 1, 24),
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 48,
            },
        },
        num_tokens=72,
    ),
    "llama_yarn": Tiny(
        "llama",
        {
            **_shape(32, 64, 2, 4, 2, 16),
            "tie_word_embeddings": True,
            "rope_scaling": _yarn(beta_fast=4.0, beta_slow=0.5),
        },
        num_tokens=72,
    ),
    "llama_yarn_factor": Tiny(
        "llama",
        {
            **_shape(24, 40, 2, 2, 2, 24),
            "tie_word_embeddings": False,
            "rope_scaling": _yarn(attention_factor=0.875),
        },
        num_tokens=72,
    ),
    "llama_bias": Tiny(
        "llama",
        {
            **_shape(40, 56, 2, 4, 2, 8),
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    # Rows of 256 and of 32 values, as K-quants and their fallbacks need; bfloat16 as most hubs.
    "llama_wide": Tiny(
        "llama",
        {**_shape(256, 64, 1, 4, 2, 8), "tie_word_embeddings": True},
        dtype="bfloat16",
    ),
    "mistral": Tiny(
        "mistral",
        {**_shape(24, 40, 3, 4, 2, 8), "tie_word_embeddings": False, "sliding_window": 11},
        max_shard_size="24KB",
    ),
    "mistral_full": Tiny(
        "mistral",
        {
            **_shape(40, 56, 2, 4, 1, 16),
            "tie_word_embeddings": True,
            "sliding_window": None,
            "rope_theta": 1000000.0,
        },
    ),
    # The one family whose published configurations have no head_dim.
    "qwen2": Tiny(
        "qwen2",
        {**_shape(56, 40, 2, 7, 1, None), "tie_word_embeddings": True, "rope_theta": 1000000.0},
    ),
    "qwen3": Tiny(
        "qwen3",
        {
            **_shape(32, 64, 2, 4, 2, 24),
            "tie_word_embeddings": False,
            "rope_theta": 1000000.0,
            "rope_scaling": _yarn(),
        },
        num_tokens=72,
    ),
    # The default pattern of six, a global layer scaled as in the 4B model, one layer after it.
    "gemma3": Tiny(
        "gemma3_text",
        {
            **_shape(24, 40, 7, 4, 1, 16),
            "tie_word_embeddings": True,
            "sliding_window": 13,
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 8000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        num_tokens=72,
    ),
    "gemma3_scalar": Tiny(
        "gemma3_text",
        {
            **_shape(24, 40, 4, 4, 2, 8),
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "query_pre_attn_scalar": 21,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


def write(name: str, folder: Path, *, seed: int = 0) -> None:
    """Writes checkpoint, generation config and tokenizer of TINY[name] as a Hugging Face folder."""
    tiny = TINY[name]
    base = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "max_position_embeddings": 128,
    }
    config = AutoConfig.for_model(tiny.model_type, **{**base, **tiny.config})
    model = AutoModelForCausalLM.from_config(config)
    _randomise(model, np.random.default_rng([zlib.crc32(name.encode()), seed]))
    if len(tiny.eos_token_ids) > 1:
        model.generation_config.eos_token_id = list(tiny.eos_token_ids)
    model.to(getattr(torch, tiny.dtype)).save_pretrained(
        folder, safe_serialization=True, max_shard_size=tiny.max_shard_size
    )
    write_tokenizer(folder)


def _randomise(model: Any, rng: np.random.Generator) -> None:
    """Weights large enough that attention is peaked and every term shows in the logits."""
    norm_mean = 0.0 if model.config.model_type == "gemma3_text" else 1.0
    for name, parameter in sorted(model.named_parameters()):
        noise = rng.standard_normal(parameter.shape, dtype=np.float32)
        if "norm" in name:
            values = norm_mean + 0.25 * noise
        elif name.endswith("bias") or "embed_tokens" in name:
            values = 0.5 * noise
        else:
            values = 2.0 / parameter.shape[-1] ** 0.5 * noise
        parameter.data = torch.from_numpy(values.astype(np.float32))
    model.tie_weights()


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with GPT-2's pre-tokenizer, a few merges, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 3,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def input_ids(name: str, *, seed: int = 0) -> I64:
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, 1])
    return rng.integers(0, VOCAB_SIZE, TINY[name].num_tokens)


def transformers_logits(folder: Path, ids: I64, *, gguf_file: str | None = None) -> F32:
    """Logits [T, V] of a folder's checkpoint, or of a GGUF file in it, all in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        gguf_file=gguf_file,
    )
    with torch.inference_mode():
        logits = model.eval()(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return np.asarray(logits.numpy(), dtype=np.float32)
