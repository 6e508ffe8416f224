"""The student: which of the target's layers it starts from, its head, and what it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.errors import UsageError
from headrace.export.calibrate import FloatWeights
from headrace.export.checkpoint import Checkpoint
from headrace.export.distill.decoder import Cache, Decoder
from headrace.export.distill.labels import Labelled
from headrace.export.quantize import F32
from headrace.export.reduced import ReducedCheckpoint
from headrace.export.text import I64
from headrace.export.weights import EMBEDDING, HEAD

_LEAST = 1e-6
"""Of a remainder's probability: where a few tokens hold all of it, its logarithm is noise."""


@dataclass(frozen=True, eq=False)
class Target:
    """The model that is learned from, in memory."""

    checkpoint: Checkpoint
    model: Decoder
    embedding: Tensor
    """[V, D]"""
    head: Tensor
    """[V, D]; the embedding itself where they are tied."""

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Target:
        weights = FloatWeights(checkpoint)
        embedding = torch.from_numpy(np.ascontiguousarray(weights[EMBEDDING]))
        head = embedding
        if not checkpoint.config.tied_head:
            head = torch.from_numpy(np.ascontiguousarray(weights[HEAD]))
        model = Decoder(checkpoint.config, weights, embedding)
        model.requires_grad_(False)
        return cls(checkpoint, model, embedding, head)

    @torch.no_grad()
    def go_on(self, length: int, count: int, hidden: Tensor, cache: Cache) -> Tensor:
        """[B, count] tokens that it goes on with greedily, behind the first `length` of each text.

        `hidden` [B, T, D] and `cache` are what a pass over the whole texts has left. Slots of the
        cache behind `length` are written over, so ask for longer beginnings first.
        """
        cache.length, row, chosen = length, hidden[:, length - 1 : length], list[Tensor]()
        for number in range(count):
            chosen.append((row @ self.head.T).argmax(-1))  # [B, 1]
            if number + 1 < count:
                row = self.model.extend(chosen[-1], cache)
        return torch.cat(chosen, 1)

    def student(self, layers: tuple[int, ...]) -> Decoder:
        """A smaller decoder that begins as these layers of the target's."""
        return self.beside(ReducedCheckpoint(self.checkpoint, layers, None))

    def beside(self, checkpoint: Checkpoint) -> Decoder:
        """A model with the target's embedding."""
        return Decoder(checkpoint.config, FloatWeights(checkpoint), self.embedding)


@dataclass(frozen=True, eq=False)
class Head:
    """The rows of the target's head that a student can propose."""

    rows: Tensor
    """[K, D]"""
    ids: Tensor
    """[K], their tokens."""
    columns: Tensor
    """[V], the row of each token; -1 for those left out."""

    @classmethod
    def of(cls, whole: Tensor, kept: I64 | None) -> Head:
        ids = torch.arange(len(whole)) if kept is None else torch.from_numpy(kept)
        columns = torch.full((len(whole),), -1)
        columns[ids] = torch.arange(len(ids))
        return cls(whole if kept is None else whole[ids].contiguous(), ids, columns)


@dataclass(frozen=True)
class Batch:
    """Labelled texts as tensors."""

    ids: Tensor
    """[B, T]"""
    top_ids: Tensor
    """[B * T, k]"""
    log_probs: Tensor
    """[B * T, k]"""
    hidden: Tensor
    """[B * T, D], the target's."""

    @classmethod
    def of(cls, texts: Labelled) -> Batch:
        ids, top_ids = (torch.from_numpy(part).long() for part in (texts.ids, texts.top_ids))
        halves = (texts.top_log_probs, texts.hidden)
        log_probs, hidden = (torch.from_numpy(part).float().flatten(0, 1) for part in halves)
        return cls(ids, top_ids.flatten(0, 1), log_probs, hidden)

    @property
    def first(self) -> Tensor:
        """[B, T], the target's most likely next tokens."""
        return self.top_ids[:, 0].view_as(self.ids)


def divergence(hidden: Tensor, head: Head, batch: Batch) -> Tensor:
    """Mean KL divergence of rows [B * T, D] from the target's distributions, in nats a token.

    The target's most likely tokens count one by one, all others together as one. Those that the
    head has left out count as if the target did not have them either, and a token of the text as
    much as the rest of its distribution: what cannot be proposed is not learned.
    """
    _, ours, known = _on_the_best(hidden, head, batch)
    p = batch.log_probs.exp()
    there = (1 - (p * ~known).sum(-1)).clamp(min=_LEAST)  # [B * T], what can be proposed
    p = p * known
    apart = (p * (batch.log_probs - there.log()[:, None] - ours)).sum(-1)
    rest_p = (there - p.sum(-1)).clamp(min=_LEAST)
    rest_q = (1 - (ours.exp() * known).sum(-1)).clamp(min=_LEAST)
    return (apart + rest_p * (rest_p.log() - there.log() - rest_q.log())).mean()


def _on_the_best(hidden: Tensor, head: Head, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of rows [B * T, D]: of the head's tokens [B * T, K], of those that are the
    target's best [B * T, k], and which of the latter the head has; where it has not, any.
    """
    log_q = torch.log_softmax(hidden @ head.rows.T, dim=-1)
    columns = head.columns[batch.top_ids]
    return log_q, log_q.gather(-1, columns.clamp(min=0)), columns >= 0


def angle(hidden: Tensor, batch: Batch) -> Tensor:
    """Mean of 1 - cosine between rows [B * T, D] and the target's: both are read by one head, which
    a direction that is right before any softmax serves as well.
    """
    return (1 - F.cosine_similarity(hidden, batch.hidden, dim=-1)).mean()


@dataclass(frozen=True)
class Likeness:
    """How alike two models' distributions are, as means over tokens."""

    overlap: float
    """Sum of the smaller probabilities: what a drawn proposal is accepted with (Leviathan et al.,
    2023)."""
    top1: float
    """Share of tokens where both have the same most likely one: what a greedy proposal is accepted
    with."""

    @classmethod
    @torch.no_grad()
    def of(cls, student: Decoder, head: Head, batches: list[Batch]) -> Likeness:
        overlap = same = 0.0
        for batch in batches:
            log_q, ours, known = _on_the_best(student(batch.ids).flatten(0, 1), head, batch)
            overlap += float(
                torch.minimum(batch.log_probs.exp(), ours.exp() * known).sum(-1).mean()
            )
            same += float((head.ids[log_q.argmax(-1)] == batch.top_ids[:, 0]).float().mean())
        return cls(overlap / len(batches), same / len(batches))


def begun_with(num_layers: int, wanted: int) -> tuple[int, ...]:
    """The target's layers that a student of `wanted` begins as; raises UsageError.

    The first ones, which make words of tokens, and the rest evenly up to the last. Other choices
    were measured (docs/distill.md): the divergence before any training does not tell which is best.
    """
    if not 1 <= wanted <= num_layers:
        raise UsageError(f"layers: got {wanted}, allowed are 1 to {num_layers} for this target")
    first = (wanted + 1) // 2
    rest = np.linspace(first - 1, num_layers - 1, wanted - first + 1)[1:]
    return (*range(first), *map(int, rest.round()))


def trained_weights(student: Decoder) -> Mapping[str, F32]:
    return {name: p.detach().numpy() for name, p in student.by_name().items()}
