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
    """y = x @ weight.T + bias for x [..., K]."""
    if isinstance(weight, QuantMatrix):
        y = _quantised(g, name, x, weight)
    else:
        y = g.node("MatMul", x, g.constant(f"{name}.weight", weight.T))
    return y if bias is None else g.node("Add", y, g.constant(f"{name}.bias", bias))


def _quantised(g: GraphBuilder, name: str, x: str, w: QuantMatrix) -> str:
    codes, scales = f"{name}.codes", f"{name}.scales"
    inputs = [x, g.constant(codes, pack(w)), g.constant(scales, w.scales)]
    rows, columns = w.shape
    if w.zero_points is not None:
        inputs.append(g.constant(f"{name}.zero_points", pack_zero_points(w)))
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
    blocks = w.codes.shape[1]
    if columns % BLOCK:
        x = g.node("Pad", x, g.ints(0, 0, 0, 0, 0, blocks * BLOCK - columns))
    grouped = g.node("Reshape", x, g.ints(0, 0, blocks, BLOCK))
    sums = g.node("ReduceSum", grouped, g.ints(3), keepdims=0)
    return g.node("Add", y, g.node("MatMul", sums, g.constant(f"{name}.offsets", w.offsets.T)))


def embedding(g: GraphBuilder, name: str, ids: str, table: Matrix) -> str:
    """Rows of `table` [V, D] for ids [B, T]: [B, T, D]."""
    if not isinstance(table, QuantMatrix):
        return g.node("Gather", g.constant(f"{name}.table", table), ids)
    rows, columns = table.shape
    codes = pack(table).reshape(rows, -1)
    inputs = [
        g.constant(f"{name}.table_codes", codes),
        ids,
        g.constant(f"{name}.table_scales", table.scales),
    ]
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
        blocks = g.node("Reshape", x, g.ints(0, 0, table.codes.shape[1], BLOCK))
        shifted = g.node("Add", blocks, g.node("Unsqueeze", offsets, g.ints(-1)))
        x = g.node("Reshape", shifted, g.ints(0, 0, -1))
    if columns % BLOCK:
        x = g.node("Slice", x, g.ints(0), g.ints(columns), g.ints(-1))
    return x


def rms_norm(g: GraphBuilder, name: str, x: str, weight: F32, config: ModelConfig) -> str:
    """RMSNorm over the last axis (Zhang and Sennrich, 2019)."""
    scale = g.constant(name, weight + np.float32(config.norm_offset))
    return g.node("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=config.rms_eps)


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
