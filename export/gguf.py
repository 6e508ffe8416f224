"""GGUF files: metadata, tensors, and Q4_0, Q4_1 and Q8_0 taken over without loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from headrace.errors import SourceError, UnsupportedModelError
from headrace.export.checkpoint import TokenizerSource
from headrace.export.gguf_file import GgufTensor, read_gguf
from headrace.export.quantize import BLOCK, QuantMatrix
from headrace.export.weights import F32, Weight, check_finite, check_table
from headrace.models.config import ModelConfig
from headrace.models.families import FAMILIES, weights
from headrace.models.families_gguf import GgufTensors, config_from_gguf
from headrace.models.fields import Fields, shown

# Hugging Face's name -> GGUF's
_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# the norm before the MLP is named after what it follows, unless another one follows as well
_PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
_SANDWICH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ROPE_FREQS = "rope_freqs.weight"

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
}


@dataclass(frozen=True)
class GgufCheckpoint:
    """A checkpoint (see `headrace.export.checkpoint.Checkpoint`) in one GGUF file."""

    name: str
    config: ModelConfig
    sampling: dict[str, float]
    path: Path
    metadata: Mapping[str, Any]
    _tensors: Mapping[str, GgufTensor]
    """By Hugging Face name; memory mapped."""
    kind: str = "gguf"

    @classmethod
    def open(cls, path: Path) -> GgufCheckpoint:
        """Reads metadata and the table of tensors; raises as `open_checkpoint`."""
        where = str(path)
        file = read_gguf(path)
        metadata, tensors = file.metadata, file.tensors
        parts = metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise UnsupportedModelError(
                f"{where}: one of {shown(parts)} parts; "
                "join them first with llama-gguf-split --merge"
            )
        config = config_from_gguf(metadata, _facts(tensors, path), where)
        names = {gguf_name(name, config): name for name in weights(config)}
        expected = {own: weights(config)[name] for own, name in names.items()}
        found = {own: tensor.shape for own, tensor in tensors.items() if own != _ROPE_FREQS}
        check_table(expected, found, where)
        for tensor in {t.type: t for t in tensors.values()}.values():
            _dequantize(tensor, path, rows=1)
        settings = Fields(metadata, where)
        sampling = {
            name: settings.number(key, 0.0, 1e9)
            for key, name in _SAMPLING.items()
            if key in metadata
        }
        return cls(
            shown(metadata.get("general.name") or path.stem),
            config,
            sampling,
            path,
            metadata,
            {name: tensors[own] for own, name in names.items()},
        )

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str) -> Weight:
        tensor = self._tensors[name]
        exact = _EXACT.get(tensor.type) if len(tensor.shape) == 2 else None
        weight: Weight
        if exact is not None:
            # ggml's arithmetic on a damaged scale may overflow; check_finite reports it
            with np.errstate(over="ignore", invalid="ignore"):
                weight = exact(tensor.data, tensor.shape[1])
        else:
            weight = _dequantize(tensor, self.path)
        check_finite(weight, tensor.name, str(self.path))
        heads = self._permuted_heads(name)
        if heads is None:
            return weight
        order = rope_order(heads, self.config.head_dim)
        return weight.rows(order) if isinstance(weight, QuantMatrix) else weight[order]

    def tokenizer(self) -> TokenizerSource:
        from headrace.export.gguf_text import read_tokenizer

        return read_tokenizer(self.metadata, str(self.path))

    def files(self) -> dict[Path, int]:
        return {self.path: self.path.stat().st_size}

    def _permuted_heads(self, name: str) -> int | None:
        """Heads of a weight whose rows GGUF stores for interleaved RoPE, None for the others."""
        if not FAMILIES[self.config.family].gguf_interleaved:
            return None
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


def gguf_name(name: str, config: ModelConfig) -> str:
    """GGUF's name of a weight, given Hugging Face's."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    norms = _SANDWICH_NORMS if config.sandwich_norms else _PLAIN_NORMS
    return f"blk.{layer}.{ {**_LAYER_NAMES, **norms}[part] }.{suffix}"


def rope_order(num_heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """The rows of a permuted q or k in the order that pairs (i, i + head_dim / 2) need."""
    rows = np.arange(num_heads * head_dim, dtype=np.int64)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _facts(tensors: Mapping[str, GgufTensor], path: Path) -> GgufTensors:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise SourceError(f"{path}: weight token_embd.weight is missing")
    factors = tensors.get(_ROPE_FREQS)
    return GgufTensors(
        names=frozenset(tensors),
        vocab_rows=embedding.shape[0],
        rope_factors=None
        if factors is None
        else tuple(float(f) for f in _dequantize(factors, path).reshape(-1)),
    )


def _dequantize(tensor: GgufTensor, path: Path, rows: int | None = None) -> F32:
    try:
        return tensor.dequantize(rows)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name} is of type {tensor.type.name}, "
            "which the gguf package cannot dequantise"
        ) from error


def _q4_0(data: npt.NDArray[np.uint8], columns: int) -> QuantMatrix:
    blocks = data.reshape(len(data), -1, 18)
    return QuantMatrix(4, _nibbles(blocks[..., 2:]), _f16(blocks[..., :2]), None, columns)


def _q4_1(data: npt.NDArray[np.uint8], columns: int) -> QuantMatrix:
    blocks = data.reshape(len(data), -1, 20)
    scales, minima = _f16(blocks[..., :2]), _f16(blocks[..., 2:4])
    # ours is d (q - 8) + offset, GGUF's is d q + m
    offsets = minima + np.float32(8) * scales
    return QuantMatrix(4, _nibbles(blocks[..., 4:]), scales, offsets, columns)


def _q8_0(data: npt.NDArray[np.uint8], columns: int) -> QuantMatrix:
    blocks = data.reshape(len(data), -1, 34)
    # int8 plus 128 is the same byte with its top bit turned
    return QuantMatrix(8, blocks[..., 2:] ^ np.uint8(0x80), _f16(blocks[..., :2]), None, columns)


_EXACT = {
    gguf.GGMLQuantizationType.Q4_0: _q4_0,
    gguf.GGMLQuantizationType.Q4_1: _q4_1,
    gguf.GGMLQuantizationType.Q8_0: _q8_0,
}


def _f16(data: npt.NDArray[np.uint8]) -> F32:
    """Byte pairs [..., 2] as float32 [...]."""
    return np.ascontiguousarray(data).view("<f2")[..., 0].astype(np.float32)


def _nibbles(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes [..., 16] as codes [..., 32]: the low nibbles are the first half of a block."""
    assert data.shape[-1] * 2 == BLOCK
    return np.concatenate([data & 0x0F, data >> 4], axis=-1)
