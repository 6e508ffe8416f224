"""The decoder of `headrace.models.reference` in torch: batches, gradients, and a cache to write with.

One module serves target and student of every family, since both are a ModelConfig and a table of
weights by Hugging Face name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.models.config import ModelConfig
from headrace.models.rope import cos_sin


@dataclass
class Cache:
    """Keys and values of texts that are written side by side, one token of each at a time."""

    keys: list[Tensor]
    """Per layer [B, kv_heads, C, head_dim]."""
    values: list[Tensor]
    length: int = 0
    """Tokens of every text that are in it."""

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int) -> Cache:
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        keys, values = ([torch.empty(shape) for _ in range(config.num_layers)] for _ in range(2))
        return cls(keys, values)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new keys and values behind those of a layer; returns all of them."""
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class Decoder(nn.Module):
    """A decoder-only transformer up to its head. Weights are float32."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], embedding: Tensor) -> None:
        """`weights` gives numpy arrays by name; `embedding` [V, D] is shared and never trained."""
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.layers = nn.ModuleList(
            _Layer(config, weights, layer) for layer in range(config.num_layers)
        )
        self.norm = _Norm(config, weights, "model.norm")

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] token ids to what the head reads, [B, T, D]: causal, positions from 0."""
        return self._last(self.states(ids))

    def states(self, ids: Tensor) -> Iterator[Tensor]:
        """As `forward`, step by step: what each layer reads, and at last the head, [B, T, D]."""
        return self._states(ids, torch.arange(ids.shape[1]), None)

    def extend(self, ids: Tensor, cache: Cache) -> Tensor:
        """Appends tokens [B, T] to the texts of a cache: many to an empty one, then one at a time."""
        assert ids.shape[1] == 1 or not cache.length
        positions = torch.arange(cache.length, cache.length + ids.shape[1])
        hidden = self._last(self._states(ids, positions, cache))
        cache.length += ids.shape[1]
        return hidden

    @staticmethod
    def _last(states: Iterator[Tensor]) -> Tensor:
        for state in states:
            last = state
        return last

    def _states(self, ids: Tensor, positions: Tensor, cache: Cache | None) -> Iterator[Tensor]:
        x = F.embedding(ids, self.embedding) * self.config.embed_scale  # [B, T, D]
        full, local = (
            Places.of(self.config, positions, cache, is_local) for is_local in (False, True)
        )
        for number, layer in enumerate(self.layers):
            yield x
            x = layer(x, local if layer.is_local else full, number)
        yield self.norm(x)

    def by_name(self) -> dict[str, nn.Parameter]:
        """Everything that is trained, by Hugging Face name."""
        names: dict[str, nn.Parameter] = {}
        for number, layer in enumerate(self.layers):
            names |= {f"model.layers.{number}.{k}": p for k, p in layer.named_parameters()}
        return names | {"model.norm.weight": self.norm.weight}


@dataclass
class Places:
    """Where the tokens of a pass stand, for the layers of one kind."""

    cos: Tensor
    """[T, head_dim / 2]"""
    sin: Tensor
    visible: Tensor | None
    """Bool [T, slots]; None for a pass that is causal among its own tokens, or sees all slots."""
    cache: Cache | None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        positions: Tensor,
        cache: Cache | None,
        is_local: bool,
        visible: Tensor | None = None,
    ) -> Places:
        rope = config.rope_local if is_local and config.rope_local is not None else config.rope
        cos, sin = map(torch.from_numpy, cos_sin(rope, positions.numpy()))
        if is_local and config.sliding_window is not None:
            distance = positions[:, None] - torch.arange(int(positions[-1]) + 1)
            visible = (distance >= 0) & (distance < config.sliding_window)
        return cls(cos, sin, visible, cache)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1)


class _Norm(nn.Module):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], name: str) -> None:
        super().__init__()
        self.weight = _parameter(weights[f"{name}.weight"])
        self._offset, self._eps = config.norm_offset, config.rms_eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self._offset if self._offset else self.weight
        return F.rms_norm(x, weight.shape, weight, self._eps)


class _Linear(nn.Module):
    def __init__(self, weights: Mapping[str, Any], name: str, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(weights[f"{name}.weight"])
        self.bias = _parameter(weights[f"{name}.bias"]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], name: str) -> None:
        super().__init__()
        self.config = config
        for part in ("q_proj", "k_proj", "v_proj"):
            setattr(self, part, _Linear(weights, f"{name}.{part}", config.qkv_bias))
        self.o_proj = _Linear(weights, f"{name}.o_proj", config.o_bias)
        if config.qk_norm:
            self.q_norm = _Norm(config, weights, f"{name}.q_norm")
            self.k_norm = _Norm(config, weights, f"{name}.k_norm")

    def forward(self, x: Tensor, places: Places, layer: int) -> Tensor:
        q, k = self.queries_and_keys(x, places)
        v = self._heads(self.v_proj(x))
        if places.cache is not None:
            k, v = places.cache.extend(layer, k, v)
        mixed = _attend(q, k, v, places.visible, self.config.attention_scale)
        out: Tensor = self.o_proj(mixed)
        return out

    def queries_and_keys(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """[B, heads, T, head_dim] and [B, kv_heads, T, head_dim], turned to their positions."""
        q, k = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return places.rotate(q), places.rotate(k)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """[B, T, heads * head_dim]. Heads of one group share keys and values."""
    batch, heads, num_rows, head_dim = q.shape
    kv_heads = k.shape[1]
    if num_rows == 1:
        # the group's queries as rows, so that a long cache is not copied for each of them
        q = q.view(batch, kv_heads, -1, head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return mixed.reshape(batch, 1, -1)
    k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale
    )
    return mixed.transpose(1, 2).flatten(2)


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], name: str) -> None:
        super().__init__()
        self._activation = config.activation
        self.gate_proj, self.up_proj, self.down_proj = (
            _Linear(weights, f"{name}.{part}", config.mlp_bias)
            for part in ("gate_proj", "up_proj", "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self._activation == "silu" else F.gelu(gate, approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class _Layer(nn.Module):
    """Submodules have the names of the checkpoint's weights."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer: int) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        self.is_local = config.layer_types[layer] == "sliding"
        self.self_attn = _Attention(config, weights, f"{name}.self_attn")
        self.mlp = _Mlp(config, weights, f"{name}.mlp")
        self.input_layernorm = _Norm(config, weights, f"{name}.input_layernorm")
        self.post_attention_layernorm = _Norm(config, weights, f"{name}.post_attention_layernorm")
        self.has_sandwich = config.sandwich_norms
        if self.has_sandwich:
            for part in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                setattr(self, part, _Norm(config, weights, f"{name}.{part}"))

    def forward(self, x: Tensor, places: Places, layer: int) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), places, layer)
        if not self.has_sandwich:
            x = x + mixed
            out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
            return out
        x = x + self.post_attention_layernorm(mixed)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        out = x + self.post_feedforward_layernorm(fed)
        return out


def _parameter(array: Any) -> nn.Parameter:
    """A copy: an optimiser writes into it."""
    return nn.Parameter(torch.tensor(array, dtype=torch.float32))
