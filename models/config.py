"""ModelConfig: everything about a model's shape that graph, runtime and oracle need.

Built from a Hugging Face `config.json` or from GGUF metadata by `headrace.models.families`,
stored in `bundle.json`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

LayerType = Literal["full", "sliding"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding with its scaling resolved: angle = position * inv_freq[i].

    Positions may be any integer; there is no table and no limit. `attention_scaling` multiplies
    cos and sin (YaRN's temperature; 1.0 elsewhere).
    """

    inv_freq: tuple[float, ...]
    """head_dim / 2 angular frequencies, radians per position."""
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and switches of a decoder-only transformer. Sizes are in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    """Trained context, in tokens."""
    rope: Rope
    rope_local: Rope | None = None
    """RoPE of the sliding layers where it differs from `rope` (gemma3)."""
    sliding_window: int | None = None
    """Tokens that a sliding layer sees, its own included."""
    layer_types: tuple[LayerType, ...] = ()
    tied_head: bool = True
    head_size: int | None = None
    """Rows of a head that keeps a part of the vocabulary (drafts); None is all of it."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    """Four norms a layer: also after attention and after the MLP (gemma3)."""
    norm_offset: float = 0.0
    """Added to every norm weight: 1.0 where the checkpoint stores weight - 1 (gemma3)."""
    activation: Activation = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0
    """Factor on q.k; 0 is never valid in a finished config (see `__post_init__`)."""

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full",) * self.num_layers)
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        assert len(self.layer_types) == self.num_layers
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.rope.inv_freq) * 2 == self.head_dim
        assert not self.has_local_layers or self.sliding_window
        assert self.head_size is None or not self.tied_head

    @property
    def num_logits(self) -> int:
        """Width of the graph's `logits`."""
        return self.vocab_size if self.head_size is None else self.head_size

    @property
    def has_local_layers(self) -> bool:
        return "sliding" in self.layer_types

    @property
    def local_window(self) -> int | None:
        """Tokens that the sliding layers see; None without such layers."""
        return self.sliding_window if self.has_local_layers else None

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token's keys and values hold, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        if self.head_size is None:
            del data["head_size"]  # 0.1.0 would not know it, and reads all that do without
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`; raises TypeError or KeyError on unknown or missing fields."""
        fields = dict(data)
        for name in ("rope", "rope_local"):
            if fields.get(name) is not None:
                rope = dict(fields[name])
                rope["inv_freq"] = tuple(rope["inv_freq"])
                fields[name] = Rope(**rope)
        fields["layer_types"] = tuple(fields["layer_types"])
        return cls(**fields)
