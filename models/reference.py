"""A plain float32 forward pass in numpy: the oracle that graphs and runtime are tested against.

Written for reading: no cache, no quantisation, one sequence. Positions and mask can be given, so
that rings and token trees are checked against the same few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from headrace.models.config import ModelConfig
from headrace.models.rope import F32, cos_sin, rotate

MASKED = np.float32(-1e9)

Observe = Callable[[str, F32], None]
"""Told every linear map's name and input [T, K], and `...self_attn.keys` (rotated) and `.values`
[kv_heads, T, head_dim] of every layer."""


def forward(
    config: ModelConfig,
    weights: Mapping[str, F32],
    input_ids: npt.NDArray[np.int64],
    *,
    positions: npt.NDArray[np.int64] | None = None,
    visible: npt.NDArray[np.bool_] | None = None,
    observe: Observe | None = None,
) -> F32:
    """Logits of every token.

    Args:
        weights: float32 arrays by Hugging Face name, as `families.weights` lists them.
        input_ids: [T].
        positions: [T] logical positions; 0 .. T-1 if not given.
        visible: [T, T], row i may look at column j; causal by order if not given. Sliding layers
            also require that j is less than `sliding_window` positions back.
        observe: a listener for calibration.

    Returns:
        [T, num_logits] float32.
    """
    num_tokens = len(input_ids)
    if positions is None:
        positions = np.arange(num_tokens)
    if visible is None:
        visible = np.tri(num_tokens, dtype=np.bool_)
    x = weights["model.embed_tokens.weight"][input_ids] * np.float32(config.embed_scale)  # [T, D]
    for layer in range(config.num_layers):
        part = _Layer(config, weights, layer, observe)
        x = x + part.after("post_attention", part.attention(part.norm_in(x), positions, visible))
        x = x + part.after("post_feedforward", part.mlp(part.norm_mlp(x)))
    x = _rms_norm(x, weights["model.norm.weight"], config)
    head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
    return x @ weights[head].T  # [T, V]


class _Layer:
    """One decoder layer's weights, by their names below `model.layers.{i}.`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, F32],
        layer: int,
        observe: Observe | None,
    ) -> None:
        self.config, self.weights, self.observe = config, weights, observe
        self.layer, self.prefix = layer, f"model.layers.{layer}."

    def weight(self, name: str) -> F32:
        return self.weights[f"{self.prefix}{name}"]

    def tell(self, name: str, x: F32) -> None:
        if self.observe is not None:
            self.observe(f"{self.prefix}{name}", x)

    def linear(self, name: str, x: F32, bias: bool) -> F32:
        self.tell(name, x)
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if bias else y

    def norm(self, name: str, x: F32) -> F32:
        return _rms_norm(x, self.weight(f"{name}.weight"), self.config)

    def norm_in(self, x: F32) -> F32:
        return self.norm("input_layernorm", x)

    def norm_mlp(self, x: F32) -> F32:
        sandwich = self.config.sandwich_norms
        return self.norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm", x)

    def after(self, which: str, x: F32) -> F32:
        """The norm after a block, of families that have one."""
        return self.norm(f"{which}_layernorm", x) if self.config.sandwich_norms else x

    def attention(
        self, x: F32, positions: npt.NDArray[np.int64], visible: npt.NDArray[np.bool_]
    ) -> F32:
        c = self.config
        local = c.layer_types[self.layer] == "sliding"
        q = self.heads("self_attn.q_proj", x, c.num_heads)  # [H, T, hd]
        k = self.heads("self_attn.k_proj", x, c.num_kv_heads)  # [KVH, T, hd]
        v = self.heads("self_attn.v_proj", x, c.num_kv_heads)
        if c.qk_norm:
            q = self.norm("self_attn.q_norm", q)
            k = self.norm("self_attn.k_norm", k)
        rope = c.rope_local if local and c.rope_local is not None else c.rope
        cos, sin = cos_sin(rope, positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if local:
            assert c.sliding_window is not None
            distance = positions[:, None] - positions[None, :]
            visible = visible & (distance < c.sliding_window)
        self.tell("self_attn.keys", k)
        self.tell("self_attn.values", v)
        group = c.num_heads // c.num_kv_heads
        k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
        scores = q @ k.transpose(0, 2, 1) * np.float32(c.attention_scale)  # [H, T, T]
        scores = np.where(visible, scores, MASKED)
        mixed = _softmax(scores) @ v  # [H, T, hd]
        flat = mixed.transpose(1, 0, 2).reshape(len(x), -1)
        return self.linear("self_attn.o_proj", flat, c.o_bias)

    def heads(self, name: str, x: F32, num_heads: int) -> F32:
        y = self.linear(name, x, self.config.qkv_bias)
        return y.reshape(len(x), num_heads, -1).transpose(1, 0, 2)

    def mlp(self, x: F32) -> F32:
        bias = self.config.mlp_bias
        gate = self.linear("mlp.gate_proj", x, bias)
        up = self.linear("mlp.up_proj", x, bias)
        return self.linear("mlp.down_proj", _activation(gate, self.config) * up, bias)


def _rms_norm(x: F32, weight: F32, config: ModelConfig) -> F32:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(config.rms_eps))
    return np.asarray(x * scale * (weight + np.float32(config.norm_offset)))


def _activation(x: F32, config: ModelConfig) -> F32:
    if config.activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True), dtype=np.float32)
