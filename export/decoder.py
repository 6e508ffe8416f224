"""The target graph: one decoder over an external KV arena, for prefill, chains and trees alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headrace.export import layers
from headrace.export.graph import GraphBuilder
from headrace.export.layers import KvScales, Matrix
from headrace.export.quantize import F32, QuantMatrix
from headrace.models.config import ModelConfig
from headrace.models.iospec import kv_names, present_names, target_inputs, target_outputs

ReadMatrix = Callable[[str], Matrix]
"""A weight matrix by its Hugging Face name, in the form it is to be stored in."""
ReadVector = Callable[[str], F32]


def build_target(
    path: Path,
    config: ModelConfig,
    matrix: ReadMatrix,
    vector: ReadVector,
    *,
    kv: str,
    kv_scales: Sequence[KvScales] | None = None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> None:
    """Writes `path` and its `.data` file.

    Args:
        kv: cache type, a key of `iospec.KV_DTYPES`.
        kv_scales: one per layer; given exactly when `kv` is int8.
        on_layer: called after each layer, for progress.
    """
    assert (kv == "int8") == (kv_scales is not None)
    with GraphBuilder(path) as g:
        table = matrix("model.embed_tokens.weight")
        x = layers.embedding(g, "model.embed_tokens", "input_ids", table)
        if config.embed_scale != 1.0:
            x = g.node(
                "Mul", x, g.constant("embed_scale", np.array(config.embed_scale, np.float32))
            )
        for layer in range(config.num_layers):
            scales = kv_scales[layer] if kv_scales else None
            x = _Layer(g, config, matrix, vector, layer, kv, scales).emit(x)
            on_layer(layer)
        g.scope("")
        _head(g, x, config, table if config.tied_head else matrix("lm_head.weight"), vector)
        g.finish(target_inputs(config, kv), target_outputs(config, kv))


def _head(g: GraphBuilder, x: str, config: ModelConfig, weight: Matrix, vector: ReadVector) -> None:
    # The vocabulary projection over every prefill row would be most of a prefill's work.
    flat = g.node("Reshape", x, g.ints(-1, config.hidden_size))
    wanted = g.node("Gather", flat, "logit_rows")  # [R, D]
    normed = layers.rms_norm(g, "model.norm.weight", wanted, vector("model.norm.weight"), config)
    # three axes, as everywhere else, so that one form of every layer is enough
    rows = g.node("Unsqueeze", normed, g.ints(0))
    logits = layers.linear(g, "lm_head", rows, weight)
    g.node_n("Squeeze", ["logits"], logits, g.ints(0))


class _Layer:
    """Emits one decoder layer."""

    def __init__(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        matrix: ReadMatrix,
        vector: ReadVector,
        layer: int,
        kv: str,
        kv_scales: KvScales | None,
    ) -> None:
        self.g, self.config, self.layer, self.kv, self.kv_scales = g, config, layer, kv, kv_scales
        self.local = config.layer_types[layer] == "sliding"
        self.prefix = f"model.layers.{layer}."
        self._matrix, self._vector = matrix, vector
        g.scope(f"layers.{layer}.")

    def emit(self, x: str) -> str:
        sandwich = self.config.sandwich_norms
        h = self.attention(self.norm("input_layernorm", x))
        if sandwich:
            h = self.norm("post_attention_layernorm", h)
        x = self.g.node("Add", x, h)
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        h = self.mlp(self.norm(before_mlp, x))
        if sandwich:
            h = self.norm("post_feedforward_layernorm", h)
        return self.g.node("Add", x, h)

    def norm(self, name: str, x: str) -> str:
        full = f"{self.prefix}{name}.weight"
        return layers.rms_norm(self.g, full, x, self._vector(full), self.config)

    def attention(self, x: str) -> str:
        c, g = self.config, self.g
        q, k, v = self.project(x, "self_attn", ("q_proj", "k_proj", "v_proj"), c.qkv_bias)
        if c.qk_norm:
            q = self.head_norm("q_norm", q, c.num_heads)
            k = self.head_norm("k_norm", k, c.num_kv_heads)
        suffix = "_local" if self.local and c.rope_local is not None else ""
        q = layers.rotary(g, q, f"cos{suffix}", f"sin{suffix}", c.num_heads)
        k = layers.rotary(g, k, f"cos{suffix}", f"sin{suffix}", c.num_kv_heads)
        if self.kv == "f16":
            k, v = layers.round_f16(g, k), layers.round_f16(g, v)
        mixed = layers.attention(
            g,
            (q, k, v),
            kv_names(self.layer),
            present_names(self.layer),
            "attention_bias_local" if self.local else "attention_bias",
            c,
            self.scale_names(),
        )
        return self.project(mixed, "self_attn", ("o_proj",), c.o_bias)[0]

    def head_norm(self, name: str, x: str, num_heads: int) -> str:
        full = f"{self.prefix}self_attn.{name}.weight"
        return layers.head_norm(self.g, full, x, self._vector(full), num_heads, self.config)

    def scale_names(self) -> tuple[str, str] | None:
        if self.kv_scales is None:
            return None
        return (
            self.g.constant(f"{self.prefix}self_attn.k_scale", self.kv_scales.key),
            self.g.constant(f"{self.prefix}self_attn.v_scale", self.kv_scales.value),
        )

    def mlp(self, x: str) -> str:
        bias = self.config.mlp_bias
        gate, up = self.project(x, "mlp", ("gate_proj", "up_proj"), bias)
        h = self.g.node("Mul", layers.activation(self.g, gate, self.config.activation), up)
        return self.project(h, "mlp", ("down_proj",), bias)[0]

    def project(self, x: str, part: str, names: Sequence[str], bias: bool) -> list[str]:
        """Linear maps of the same x, as one node where their weights allow it."""
        prefix = f"{self.prefix}{part}."
        weights = [self._matrix(f"{prefix}{n}.weight") for n in names]
        biases = [self._vector(f"{prefix}{n}.bias") if bias else None for n in names]
        if len(names) == 1 or not _stackable(weights):
            return [
                layers.linear(self.g, f"{prefix}{n}", x, w, b)
                for n, w, b in zip(names, weights, biases, strict=True)
            ]
        given = [b for b in biases if b is not None]
        stacked = np.concatenate(given) if given else None
        y = layers.linear(self.g, prefix + "+".join(names), x, _stack(weights), stacked)
        return layers.split(self.g, y, [w.shape[0] for w in weights])


def _stackable(weights: Sequence[Matrix]) -> bool:
    forms = {
        (w.bits, w.offsets is None, w.zero_points is None) if isinstance(w, QuantMatrix) else None
        for w in weights
    }
    return len(forms) == 1


def _stack(weights: Sequence[Matrix]) -> Matrix:
    quantised = [w for w in weights if isinstance(w, QuantMatrix)]
    if quantised:
        return QuantMatrix.stack(quantised)
    return np.concatenate([w for w in weights if not isinstance(w, QuantMatrix)])
