"""The draft's graph for the NPU: what the RKNN compiler maps whole, at the layouts of `npu_io`.

Plain operators of opset 17, in the spellings that the compiler knows as one NPU operator each: an
RMS norm, an attention with its heads expanded, a linear map. One graph serves all variants, so
every shape but the number of rows is a constant, and that one is nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.export.graph import GraphBuilder
from headrace.export.quantize import F32
from headrace.models.config import ModelConfig
from headrace.models.iospec import TensorSpec
from headrace.models.npu_io import NpuGeometry, main_names, npu_inputs, npu_outputs

OPSET, IR_VERSION = 17, 8
"""The compiler takes no opset above 19."""

ReadWeight = Callable[[str], F32]
"""A weight by its Hugging Face name, float32."""

_FLOAT = 1
"""onnx.TensorProto.FLOAT"""


def build_npu(
    path: Path,
    config: ModelConfig,
    geometry: NpuGeometry,
    weight: ReadWeight,
    *,
    residual_scale: float = 1.0,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> None:
    """Writes `path` and its `.data` file, weights rounded to float16. It takes embeddings: the
    table is the host's, where a row costs nothing.

    The residual stream, embeddings included, is `residual_scale` times the model's: a norm does not
    see it, and its squares stay within float16.
    """
    with GraphBuilder(path, opset=OPSET, ir_version=IR_VERSION) as g:
        graph = _Graph(g, config, weight, residual_scale)
        x = graph.rows("embeds", config.hidden_size)  # [1, T, D]
        new: list[str] = []
        planes = 2 * config.num_layers
        tails = g.node_n("Split", planes, "tail", g.ints(*[config.num_kv_heads] * planes), axis=0)
        for layer in range(config.num_layers):
            x = graph.layer(layer, x, tails[2 * layer : 2 * layer + 2], new)
            on_layer(layer)
        g.scope("")
        x = graph.norm("model.norm.weight", x, of_residual=True)
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        logits = graph.linear("lm_head", x, head, None)  # [1, T, V]
        columns = g.node("Transpose", logits, perm=[0, 2, 1])
        g.node_n("Reshape", ["logits"], columns, g.ints(1, config.num_logits, 1, -1))
        g.node_n("Concat", ["new"], *new, axis=0)
        g.finish(*_boundary(config, geometry))


def _boundary(
    config: ModelConfig, geometry: NpuGeometry
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs; the dims in which two variants differ are symbols."""
    sides = []
    for few, many in (
        (npu_inputs(config, geometry, 1), npu_inputs(config, geometry, 2)),
        (npu_outputs(config, 1), npu_outputs(config, 2)),
    ):
        sides.append(
            [
                TensorSpec(
                    a.name,
                    "float32",
                    tuple(
                        x if x == y else ("rows" if x == 1 else "keys")
                        for x, y in zip(a.dims, b.dims, strict=True)
                    ),
                )
                for a, b in zip(few, many, strict=True)
            ]
        )
    return sides[0], sides[1]


class _Graph:
    """Emits the parts; rows of a pass are [1, T, width] between them."""

    def __init__(
        self, g: GraphBuilder, config: ModelConfig, weight: ReadWeight, scale: float
    ) -> None:
        self.g, self.config, self._weight, self._scale = g, config, weight, scale
        self._ropes: dict[str, tuple[str, str]] = {}

    def rows(self, boundary: str, width: int) -> str:
        """[1, width, 1, T] as [1, T, width]."""
        g = self.g
        return g.node(
            "Reshape", g.node("Transpose", boundary, perm=[0, 2, 3, 1]), g.ints(1, -1, width)
        )

    def layer(self, layer: int, x: str, tails: list[str], new: list[str]) -> str:
        c, g = self.config, self.g
        g.scope(f"layers.{layer}.")
        prefix = f"model.layers.{layer}."
        normed = self.norm(f"{prefix}input_layernorm.weight", x, of_residual=True)
        h = self.attention(layer, normed, prefix, tails, new)
        if c.sandwich_norms:
            h = self.norm(f"{prefix}post_attention_layernorm.weight", h, scale=self._scale)
        x = g.node("Add", x, h)
        before = "pre_feedforward" if c.sandwich_norms else "post_attention"
        normed = self.norm(f"{prefix}{before}_layernorm.weight", x, of_residual=True)
        h = self.mlp(normed, prefix)
        if c.sandwich_norms:
            h = self.norm(f"{prefix}post_feedforward_layernorm.weight", h, scale=self._scale)
        return g.node("Add", x, h)

    @property
    def _last_scale(self) -> float:
        """Of a linear map whose result is added to the residual, unless a norm comes between."""
        return 1.0 if self.config.sandwich_norms else self._scale

    def norm(self, name: str, x: str, *, of_residual: bool = False, scale: float = 1.0) -> str:
        """RMSNorm over the last axis (Zhang and Sennrich, 2019), times `scale`; one NPU operator."""
        g = self.g
        squares = g.node("Pow", x, g.shared("two", np.array(2, np.float32)))
        mean = g.node("ReduceMean", squares, axes=[-1], keepdims=1)
        eps = self.config.rms_eps * (self._scale**2 if of_residual else 1.0)
        kind = "residual_eps" if of_residual else "eps"
        root = g.node("Sqrt", g.node("Add", mean, g.shared(kind, np.array(eps, np.float32))))
        weight = (self._weight(name) + np.float32(self.config.norm_offset)) * np.float32(scale)
        return g.node("Mul", g.node("Div", x, root), g.constant(name, weight))

    def linear(
        self,
        name: str,
        x: str,
        weight: str,
        bias: str | None,
        scale: float = 1.0,
    ) -> str:
        """(x @ weight.T + bias) * scale for x [1, T, K]."""
        g = self.g
        scaled = self._weight(weight).T * np.float32(scale)
        matrix = g.constant(f"{name}.weight", scaled.astype(np.float16))
        y = g.node("MatMul", x, g.node("Cast", matrix, to=_FLOAT))
        if bias is None:
            return y
        return g.node("Add", y, g.constant(f"{name}.bias", self._weight(bias) * np.float32(scale)))

    def attention(self, layer: int, x: str, prefix: str, tails: list[str], new: list[str]) -> str:
        c, g = self.config, self.g
        suffix = "_local" if c.layer_types[layer] == "sliding" else ""
        cos, sin = self.rope(suffix if c.rope_local is not None else "")
        q, k, v = (
            self.heads(x, f"{prefix}self_attn.{name}_proj", count)
            for name, count in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
        )  # [1, heads, T, hd]
        if c.qk_norm:
            q = self.norm(f"{prefix}self_attn.q_norm.weight", q)
            k = self.norm(f"{prefix}self_attn.k_norm.weight", k)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        keys, values = (
            self.expand(self.append(part, main, tail, new))
            for part, main, tail in zip((k, v), main_names(layer), tails, strict=True)
        )  # [1, heads, S, hd]
        scores = g.node("MatMul", q, g.node("Transpose", keys, perm=[0, 1, 3, 2]))
        scale = g.shared("attention_scale", np.array(c.attention_scale, np.float32))
        masked = g.node("Add", g.node("Mul", scores, scale), f"mask{suffix}")
        mixed = g.node("MatMul", g.node("Softmax", masked, axis=-1), values)
        flat = g.node(
            "Reshape",
            g.node("Transpose", mixed, perm=[0, 2, 1, 3]),
            g.ints(1, -1, c.num_heads * c.head_dim),
        )
        name = f"{prefix}self_attn.o_proj"
        bias = f"{name}.bias" if c.o_bias else None
        return self.linear(name, flat, f"{name}.weight", bias, self._last_scale)

    def heads(self, x: str, name: str, count: int) -> str:
        """A projection of x, [1, count, T, hd]."""
        g, c = self.g, self.config
        y = self.linear(name, x, f"{name}.weight", f"{name}.bias" if c.qkv_bias else None)
        apart = g.node("Reshape", y, g.ints(1, -1, count, c.head_dim))
        return g.node("Transpose", apart, perm=[0, 2, 1, 3])

    def rope(self, suffix: str) -> tuple[str, str]:
        """cos and sin [1, 1, T, hd], made once."""
        if suffix not in self._ropes:
            g = self.g
            cos, sin = (
                g.node("Transpose", f"{name}{suffix}", perm=[0, 2, 3, 1]) for name in ("cos", "sin")
            )
            self._ropes[suffix] = cos, sin
        return self._ropes[suffix]

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """RoPE (Su et al., 2021) of halves, x [1, heads, T, hd]."""
        g, half = self.g, self.config.head_dim // 2
        first, second = (
            g.node("Slice", x, g.ints(start), g.ints(start + half), g.ints(3))
            for start in (0, half)
        )
        turned = g.node("Concat", g.node("Neg", second), first, axis=3)
        return g.node("Add", g.node("Mul", x, cos), g.node("Mul", turned, sin))

    def append(self, x: str, main: str, tail: str, new: list[str]) -> str:
        """Main, tail and x, [1, kv_heads, S, hd]; x also becomes a plane of the output."""
        g = self.g
        native = g.node("Transpose", x, perm=[1, 3, 0, 2])  # [kv_heads, hd, 1, T]
        new.append(native)
        return g.node("Transpose", g.node("Concat", main, tail, native, axis=3), perm=[2, 0, 3, 1])

    def expand(self, x: str) -> str:
        """Every kv head as often as query heads share it: the compiler fuses no other form, and of the
        ways to say so only this one leaves nothing to the CPU with a single kv head.
        """
        c = self.config
        times = c.num_heads // c.num_kv_heads
        if times == 1:
            return x
        heads = (head // times for head in range(c.num_heads))
        return self.g.node("Gather", x, self.g.ints(*heads), axis=1)

    def mlp(self, x: str, prefix: str) -> str:
        c, g = self.config, self.g

        def linear(name: str, of: str, scale: float = 1.0) -> str:
            full = f"{prefix}mlp.{name}"
            bias = f"{full}.bias" if c.mlp_bias else None
            return self.linear(full, of, f"{full}.weight", bias, scale)

        gate, up = linear("gate_proj", x), linear("up_proj", x)
        product = g.node("Mul", self.activation(gate), up)
        return linear("down_proj", product, self._last_scale)

    def activation(self, x: str) -> str:
        g = self.g
        if self.config.activation == "silu":
            return g.node("Mul", x, g.node("Sigmoid", x))
        # GELU by tanh (Hendrycks and Gimpel, 2016), which opset 17 has no operator for.
        cube = g.node("Mul", g.node("Mul", x, x), x)
        inner = g.node("Add", x, g.node("Mul", cube, self._number("gelu_cubic", 0.044715)))
        bent = g.node("Tanh", g.node("Mul", inner, self._number("gelu_scale", (2 / np.pi) ** 0.5)))
        half = g.node("Mul", x, self._number("half", 0.5))
        return g.node("Mul", half, g.node("Add", bent, self._number("one", 1.0)))

    def _number(self, name: str, value: float) -> str:
        return self.g.shared(name, np.array(value, np.float32))
