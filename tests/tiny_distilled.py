"""Distilled drafts of the tiny checkpoints, without any distilling: layers with a little noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoints import F32, I64
from tiny_pairs import copy_of

from headrace.export.calibrate import FloatWeights
from headrace.export.checkpoint import Checkpoint, open_checkpoint
from headrace.export.distilled import DistilledDraft, DraftWeights, own_weights, write_draft
from headrace.export.reduced import ReducedCheckpoint
from headrace.export.report import Silent
from headrace.export.text import Text


class Enough(Exception):
    """What StopsAtTraining raises."""


class StopsAtTraining(Silent):
    """Ends a distillation once its texts are there."""

    def stage(self, title: str, steps: int | None = None) -> None:
        if title == "training":
            raise Enough


def trained(source: Path, head_ids: I64 | None = None, noise: float = 0.01) -> DraftWeights:
    """First and last layer of a checkpoint, as if they had been trained."""
    target = open_checkpoint(str(source))
    last = target.config.num_layers - 1
    layers = (0, last) if last else (0,)
    part = ReducedCheckpoint(target, layers, None)
    rng = np.random.default_rng(3)
    weights = {
        name: FloatWeights(part)[name] + rng.normal(0, noise, shape).astype(np.float32)
        for name, shape in own_weights(part.config).items()
    }
    return DraftWeights(target, Text.of(target), layers, weights, head_ids, {"steps": 3})


def distilled(
    folder: Path, source: Path, storage: str = "f16", head_ids: I64 | None = None
) -> Path:
    folder.mkdir()
    write_draft(folder, trained(source, head_ids), storage)
    return folder


def opened(folder: Path, target: Checkpoint) -> DistilledDraft:
    return DistilledDraft.open(folder, target, Text.of(target))


def as_whole_folder(name: str, folder: Path, draft: DistilledDraft) -> Path:
    """The draft as an ordinary Hugging Face folder of float32 weights, with the target's own in it;
    `name` is its target's."""
    copy_of(name, folder)
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    floats: Mapping[str, F32] = FloatWeights(draft)
    tensors = {name: np.ascontiguousarray(floats[name]) for name in draft.names()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((draft.folder / "config.json").read_text())
    return folder
