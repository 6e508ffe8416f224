"""What the target says at each token of a text: the student learns from this and nothing else.

Of each distribution the most likely tokens are kept; the rest is one number, their remainder.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import torch
from safetensors.numpy import save
from torch import Tensor

from headrace.errors import SourceError
from headrace.export.distill.decoder import Decoder

NUM_TOP = 32

_MAX_HALF = float(torch.finfo(torch.float16).max)

_ROWS_AT_ONCE = 1024
"""Of logits [rows, V], which are 200 MB then for a vocabulary of 49,152."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Texts of one length with the target's word on each token of theirs."""

    ids: npt.NDArray[np.int32]
    """[N, T]"""
    top_ids: npt.NDArray[np.int32]
    """[N, T, NUM_TOP], the most likely next tokens, best first."""
    top_log_probs: npt.NDArray[np.float16]
    """[N, T, NUM_TOP]"""
    hidden: npt.NDArray[np.float16]
    """[N, T, D], what the target's head reads."""

    @classmethod
    def join(cls, parts: list[Labelled]) -> Labelled:
        fields = [each.name for each in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))

    def save(self, path: Path) -> None:
        """Whole or absent: what is interrupted leaves no file of this name."""
        partial = path.with_suffix(".partial")
        # of any other array the library stores what lies in memory
        data = save({k: np.ascontiguousarray(v) for k, v in vars(self).items()})
        partial.write_bytes(data)  # save_file reports a full disk as an error of its own
        partial.replace(path)


class Shelf:
    """Labelled texts in files, of which one row at a time is read.

    No file stays open: what was read of a mapped one would count as this process's memory.
    """

    def __init__(self, paths: list[Path]) -> None:
        """Raises SourceError for a damaged file."""
        sizes = [_opened(path).get_slice("ids").get_shape()[0] for path in paths]
        self._places = [
            (path, row) for path, size in zip(paths, sizes, strict=True) for row in range(size)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def take(self, numbers: list[int]) -> Labelled:
        return Labelled.join([self._row(*self._places[number]) for number in numbers])

    def _row(self, path: Path, row: int) -> Labelled:
        file = _opened(path)
        names = [each.name for each in dataclasses.fields(Labelled)]
        return Labelled(*(file.get_slice(name)[row : row + 1] for name in names))


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise SourceError(f"{path}: damaged ({error}); remove it, and it is made anew") from error


@torch.no_grad()
def best(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens and their log-probabilities, each [rows, NUM_TOP], by hidden [rows, D]."""
    parts = []
    for rows in hidden.split(_ROWS_AT_ONCE):
        log_probs = torch.log_softmax(rows @ head.T, dim=-1)  # [rows, V]
        parts.append(log_probs.topk(min(NUM_TOP, len(head)), dim=-1))
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


@torch.no_grad()
def label(model: Decoder, head: Tensor, ids: npt.NDArray[np.int64]) -> Labelled:
    """Texts [N, T] as the target reads them. `head` is [V, D]."""
    hidden = model(torch.from_numpy(ids))
    tokens, log_probs = (part.unflatten(0, ids.shape) for part in best(hidden.flatten(0, 1), head))
    return labelled(torch.from_numpy(ids), tokens, log_probs, hidden)


def labelled(ids: Tensor, tokens: Tensor, log_probs: Tensor, hidden: Tensor) -> Labelled:
    """As they are kept."""
    whole = (part.numpy().astype(np.int32) for part in (ids, tokens))
    halves = (part.clamp(-_MAX_HALF, _MAX_HALF).half().numpy() for part in (log_probs, hidden))
    return Labelled(*whole, *halves)
