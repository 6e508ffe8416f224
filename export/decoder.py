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
        # Rows of all lanes are one axis, except around attention.
        ids = g.node("Reshape", "input_ids", g.ints(-1))
        x = layers.embedding(g, "model.embed_tokens", ids, table)  # [B * T, D]
        if config.embed_scale != 1.0:
            x = g.node(
                "Mul", x, g.constant("embed_scale", np.array(config.embed_scale, np.float32))
            )
        update = ""
        for layer in range(config.num_layers):
            scales = kv_scales[layer] if kv_scales else None
            x, update = _Layer(g, config, matrix, vector, layer, kv, scales).emit(x, update)
            on_layer(layer)
        g.scope("")
        _head(g, x, update, config, table if config.tied_head else matrix("lm_head.weight"), vector)
        g.finish(target_inputs(config, kv), target_outputs(config, kv))


def _head(
    g: GraphBuilder, x: str, update: str, config: ModelConfig, weight: Matrix, vector: ReadVector
) -> None:
    # The vocabulary projection over every prefill row would be most of a prefill's work.
    x, update = g.node("Gather", x, "logit_rows"), g.node("Gather", update, "logit_rows")  # [R, D]
    name = "model.norm.weight"
    _, normed = layers.add_and_norm(g, name, x, update, vector(name), config)
    g.node_n("Identity", ["logits"], layers.linear(g, "lm_head", normed, weight))


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

    def emit(self, x: str, update: str) -> tuple[str, str]:
        """The residual stream x [B * T, D] and what the layer before still adds to it, both
        before and after this layer; the sum is left to the norm that follows.
        """
        sandwich = self.config.sandwich_norms
        x, h = self.add_and_norm("input_layernorm", x, update)
        h = self.attention(h)
        if sandwich:
            h = self.norm("post_attention_layernorm", h)
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        x, h = self.add_and_norm(before_mlp, x, h)
        h = self.mlp(h)
        if sandwich:
            h = self.norm("post_feedforward_layernorm", h)
        return x, h

    def norm(self, name: str, x: str) -> str:
        full = f"{self.prefix}{name}.weight"
        return layers.rms_norm(self.g, full, x, self._vector(full), self.config)

    def add_and_norm(self, name: str, x: str, update: str) -> tuple[str, str]:
        if not update:
            return x, self.norm(name, x)
        full = f"{self.prefix}{name}.weight"
        return layers.add_and_norm(self.g, full, x, update, self._vector(full), self.config)

    def attention(self, x: str) -> str:
        c, g = self.config, self.g
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = self.project(x, "self_attn", names, c.qkv_bias, by_lane=True)
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
        flat = g.node("Reshape", mixed, g.ints(-1, c.num_heads * c.head_dim))
        return self.project(flat, "self_attn", ("o_proj",), c.o_bias)[0]

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

    def project(
        self, x: str, part: str, names: Sequence[str], bias: bool, by_lane: bool = False
    ) -> list[str]:
        """Linear maps of the same x [B * T, K], as one node where their weights allow it.

        Returns [B * T, N] each, or [B, T, N] if `by_lane`.
        """
        prefix = f"{self.prefix}{part}."
        weights = [self._matrix(f"{prefix}{n}.weight") for n in names]
        biases = [self._vector(f"{prefix}{n}.bias") if bias else None for n in names]
        sizes = [w.shape[0] for w in weights]
        if not _stackable(weights):
            each = zip(names, weights, biases, strict=True)
            ys = [layers.linear(self.g, f"{prefix}{n}", x, w, b) for n, w, b in each]
            return [self.lanes(y, n) for y, n in zip(ys, sizes, strict=True)] if by_lane else ys
        given = [b for b in biases if b is not None]
        stacked = np.concatenate(given) if given else None
        y = layers.linear(self.g, prefix + "+".join(names), x, _stack(weights), stacked)
        y = self.lanes(y, sum(sizes)) if by_lane else y
        return layers.split(self.g, y, sizes) if len(sizes) > 1 else [y]

    def lanes(self, x: str, width: int) -> str:
        """x [B * T, width] as [B, T, width]."""
        return self.g.node("Reshape", x, layers.lane_shape(self.g, width))


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
