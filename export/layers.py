"""Layers as ONNX nodes: linear maps by weight form, norms, attention on the arena, the MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.export.graph import GraphBuilder
from headrace.export.quantize import BLOCK, F32, QuantMatrix, pack, pack_zero_points
from headrace.models.config import Activation, ModelConfig

MS = "com.microsoft"

Matrix = F32 | QuantMatrix
"""A weight [N, K]: float32 as it is, or in blocks."""


@dataclass(frozen=True)
class KvScales:
    """int8 cache: quantisation step of every channel, [kv_heads * head_dim] float32."""

    key: F32
    value: F32


def linear(g: GraphBuilder, name: str, x: str, weight: Matrix, bias: F32 | None = None) -> str:
    """y = x @ weight.T + bias for x [N, K]."""
    if isinstance(weight, QuantMatrix):
        return _quantised(g, name, x, weight, bias)
    inputs = [x, g.constant(f"{name}.weight", weight.T)]
    if bias is None:
        return g.node("MatMul", *inputs)
    return g.node("Gemm", *inputs, g.constant(f"{name}.bias", bias))


def _quantised(g: GraphBuilder, name: str, x: str, w: QuantMatrix, bias: F32 | None) -> str:
    rows, columns = w.shape
    inputs = [x, g.constant(f"{name}.codes", pack(w)), g.constant(f"{name}.scales", w.scales)]
    if w.zero_points is not None:
        inputs.append(g.constant(f"{name}.zero_points", pack_zero_points(w)))
    if bias is not None:
        inputs += [""] * (5 - len(inputs)) + [g.constant(f"{name}.bias", bias)]
    # accuracy_level 4 (int8 activations) at block 32 is the fast path whose rows do not depend on
    # how many of them run together.
    y = g.node(
        "MatMulNBits",
        *inputs,
        domain=MS,
        K=columns,
        N=rows,
        bits=w.bits,
        block_size=BLOCK,
        accuracy_level=4,
    )
    if w.offsets is None:
        return y
    # A float offset per block times the block's sum of x. As a zero point it would have to be
    # rounded to a whole code, and that costs far more than this small product does.
    sums = g.node("MatMul", x, _block_sums(g, columns))  # [N, blocks]
    return g.node("Gemm", sums, g.constant(f"{name}.offsets", w.offsets.T), y)


def _block_sums(g: GraphBuilder, columns: int) -> str:
    """The matrix of ones [K, blocks] that sums x block by block, shared by all maps of one K."""
    blocks = np.arange(columns)[:, None] // BLOCK == np.arange(-(-columns // BLOCK))
    return g.shared(f"block_sums_{columns}", blocks.astype(np.float32))


def embedding(g: GraphBuilder, name: str, ids: str, table: Matrix) -> str:
    """Rows of `table` [V, D] for ids [N]: [N, D]."""
    if not isinstance(table, QuantMatrix):
        return g.node("Gather", g.constant(f"{name}.table", table), ids)
    rows, columns = table.shape
    codes = pack(table).reshape(rows, -1)
    inputs = [
        g.constant(f"{name}.table_codes", codes),
        ids,
        g.constant(f"{name}.table_scales", table.scales),
    ]
    if table.zero_points is not None:
        inputs.append(g.constant(f"{name}.table_zero_points", pack_zero_points(table)))
    x = g.node(
        "GatherBlockQuantized",
        *inputs,
        domain=MS,
        bits=table.bits,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )
    if table.offsets is not None:
        offsets = g.node("Gather", g.constant(f"{name}.table_offsets", table.offsets), ids)
        blocks = g.node("Reshape", x, g.ints(0, table.codes.shape[1], BLOCK))
        shifted = g.node("Add", blocks, g.node("Unsqueeze", offsets, g.ints(-1)))
        x = g.node("Reshape", shifted, g.ints(0, -1))
    if columns % BLOCK:
        x = g.node("Slice", x, g.ints(0), g.ints(columns), g.ints(-1))
    return x


def rms_norm(g: GraphBuilder, name: str, x: str, weight: F32, config: ModelConfig) -> str:
    """RMSNorm over the last axis (Zhang and Sennrich, 2019)."""
    scale = g.constant(name, weight + np.float32(config.norm_offset))
    return g.node("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=config.rms_eps)


def add_and_norm(
    g: GraphBuilder, name: str, x: str, update: str, weight: F32, config: ModelConfig
) -> tuple[str, str]:
    """The residual sum x + update, and its RMSNorm: (sum, normed). One node for both."""
    scale = g.constant(name, weight + np.float32(config.norm_offset))
    inputs = (x, update, scale)
    normed, _, _, total = g.node_n(
        "SkipSimplifiedLayerNormalization",
        [f"{name}.normed", "", "", f"{name}.sum"],
        *inputs,
        domain=MS,
        epsilon=config.rms_eps,
    )
    return total, normed


def head_norm(
    g: GraphBuilder, name: str, x: str, weight: F32, num_heads: int, config: ModelConfig
) -> str:
    """RMSNorm of each head of x [B, T, num_heads * head_dim] (Qwen3, Gemma3)."""
    heads = g.node("Reshape", x, g.ints(0, 0, num_heads, config.head_dim))
    return g.node("Reshape", rms_norm(g, name, heads, weight, config), g.ints(0, 0, -1))


def activation(g: GraphBuilder, x: str, kind: Activation) -> str:
    if kind == "silu":
        return g.node("Mul", x, g.node("Sigmoid", x))
    return g.node("Gelu", x, approximate="tanh")


def split(g: GraphBuilder, x: str, sizes: Sequence[int]) -> list[str]:
    """Cuts the last axis into parts of the given sizes."""
    return g.node_n("Split", len(sizes), x, g.ints(*sizes), axis=-1)


def lane_shape(g: GraphBuilder, width: int) -> str:
    """The shape [B, T, width] as a tensor, made once a graph."""
    name = f"lane_shape_{width}"
    if name not in g.made:
        g.made.add(name)
        shape = g.node("Shape", "input_ids")
        g.node_n("Concat", [name], shape, g.ints(width), axis=0)
    return name


def rotary(g: GraphBuilder, x: str, cos: str, sin: str, num_heads: int) -> str:
    return g.node("RotaryEmbedding", x, cos, sin, num_heads=num_heads)


def round_f16(g: GraphBuilder, x: str) -> str:
    """Values that a float16 block can hold: what a parked lane gives back is what it had."""
    half = g.node("Cast", x, to=10)
    return g.node("Cast", half, to=1)


def attention(
    g: GraphBuilder,
    qkv: tuple[str, str, str],
    past: tuple[str, str],
    present: tuple[str, str],
    bias: str,
    config: ModelConfig,
    scales: tuple[str, str] | None,
) -> str:
    """GroupQueryAttention on an arena that past and present share; keys come in rotated.

    `scales` names the key and value steps of an int8 cache.
    """
    extra: dict[str, object] = {}
    if scales is not None:
        kind = "PER_CHANNEL"
        extra = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}
    k_scale, v_scale = scales or ("", "")
    inputs = [*qkv, *past, "seqlens_k", "total_sequence_length", "", "", "", bias]
    inputs += ["", k_scale, v_scale, "", "", "query_seqlens"]
    outputs = [f"{present[0]}.attention", *present]
    return g.node_n(
        "GroupQueryAttention",
        outputs,
        *inputs,
        domain=MS,
        num_heads=config.num_heads,
        kv_num_heads=config.num_kv_heads,
        scale=config.attention_scale,
        do_rotary=0,
        **extra,
    )[0]
