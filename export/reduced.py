"""A checkpoint with fewer layers and a smaller head, read through the whole one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from headrace.errors import UsageError
from headrace.export.checkpoint import Checkpoint, TokenizerSource
from headrace.export.quantize import QuantMatrix
from headrace.export.text import I64
from headrace.export.weights import EMBEDDING, HEAD, Weight
from headrace.models.config import ModelConfig
from headrace.models.families import weights

_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")


class ReducedCheckpoint:
    """A checkpoint (see `headrace.export.checkpoint.Checkpoint`) that is part of another."""

    def __init__(self, whole: Checkpoint, layers: tuple[int, ...], head_ids: I64 | None) -> None:
        """Keeps `layers` in the given order, and the head's rows of `head_ids`; None is all."""
        self.whole, self.layers, self._head_ids = whole, layers, head_ids
        self.name, self.kind, self.sampling = whole.name, whole.kind, whole.sampling
        self.config = reduced_config(whole.config, layers, head_ids)

    def names(self) -> set[str]:
        return set(weights(self.config))

    def read(self, name: str) -> Weight:
        if name == HEAD and self._head_ids is not None:
            head = self.whole.read(EMBEDDING if self.whole.config.tied_head else HEAD)
            return (
                head.rows(self._head_ids) if isinstance(head, QuantMatrix) else head[self._head_ids]
            )
        return self.whole.read(_LAYER.sub(lambda found: str(self.layers[int(found[0])]), name))

    def tokenizer(self) -> TokenizerSource:
        return self.whole.tokenizer()

    def files(self) -> dict[Path, int]:
        return self.whole.files()


def reduced_config(
    whole: ModelConfig, layers: tuple[int, ...], head_ids: I64 | None = None
) -> ModelConfig:
    """Of a model with these layers of another, and these rows of its head; None is all."""
    types = tuple(whole.layer_types[layer] for layer in layers)
    local = "sliding" in types
    return replace(
        whole,
        num_layers=len(layers),
        layer_types=types,
        # a graph has no inputs that none of its layers reads
        rope_local=whole.rope_local if local else None,
        sliding_window=whole.sliding_window if local else None,
        tied_head=whole.tied_head and head_ids is None,
        head_size=None if head_ids is None else len(head_ids),
    )


def kept_layers(wanted: tuple[int, ...] | None, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The layers to keep of a checkpoint, all if none are named; raises UsageError."""
    num_layers = checkpoint.config.num_layers
    if wanted is None:
        return tuple(range(num_layers))
    if not wanted:
        raise UsageError("draft_layers: got none, at least one is needed")
    for layer in wanted:
        if not 0 <= layer < num_layers:
            raise UsageError(
                f"draft_layers: got {layer}, allowed are 0 to {num_layers - 1} for "
                f"{checkpoint.name}"
            )
        if wanted.count(layer) > 1:
            raise UsageError(f"draft_layers: layer {layer} is named {wanted.count(layer)} times")
    return wanted
