"""Copying: a few heads look where what the target says next stands in the text already.

Language models grow heads that find what followed the last time (induction heads; Olsson et al.,
2022), but from far more text than a distillation has: as long as a head looks elsewhere, nothing is
gained by copying what it sees, and as long as it is not copied, nothing by looking there. So both
halves are taught on their own before the training, each in a form in which it is easy: the looking by
its attention, on texts through layers below that stay as they are, and the copying in closed form.
Beside the training the attention stays a part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.export.distill.decoder import Decoder, Places
from headrace.export.distill.student import Batch, Head, divergence
from headrace.models.config import ModelConfig

MAX_STEPS = 2000
"""Of teaching where to look."""
MAX_TEXTS = 192
"""That it is taught with, beside MAX_RANDOM."""
MAX_RANDOM = 64
"""Texts of random tokens that repeat: what is looked for may be any token."""

_AT_ONCE = 2
_LEARNING_RATE = 6e-3
_BETAS = (0.9, 0.98)
_WARMUP = 20
_SHORTEST = 16
"""Of what repeats in a random text."""
_RIDGE = 0.01
"""Of the mean square of what is fitted from."""
_STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_JUDGED_TEXTS = 4


@dataclass(frozen=True)
class CopyHeads:
    """The query heads of one key and value head in a layer."""

    layer: int
    group: int = 0
    """Which key and value head."""

    @classmethod
    def of(cls, config: ModelConfig) -> CopyHeads | None:
        """None for a model of fewer than three layers.

        A key has to tell which token was before its own, and that takes a layer below that mixes
        tokens; what is found then goes through the last layer like everything else.
        """
        return cls(max(2, config.num_layers - 2)) if config.num_layers > 2 else None

    def queries(self, config: ModelConfig) -> slice:
        size = config.num_heads // config.num_kv_heads
        return slice(self.group * size, (self.group + 1) * size)

    def aside(self, student: Decoder, read: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        """How far the heads look past the places that hold the wanted token, in nats: mean of minus
        the logarithm of their attention to these, over tokens that have such a place.

        Args:
            student: whose layer it is.
            read: [B, T, D], what the layer reads.
            ids: [B, T], the texts.
            wanted: [B, T], the target's first choice after each token; -1 for none.
        """
        c, length = student.config, ids.shape[1]
        layer: Any = student.layers[self.layer]
        places = Places.of(c, torch.arange(length), None, layer.is_local)
        q, k = layer.self_attn.queries_and_keys(layer.input_layernorm(read), places)
        q, k = q[:, self.queries(c)], k[:, self.group : self.group + 1]
        visible = places.visible
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) * c.attention_scale).masked_fill(~visible, -torch.inf)
        there = (ids[:, None, :] == wanted[:, :, None]) & visible  # [B, T, T]
        attention = torch.log_softmax(scores, -1).masked_fill(~there[:, None], -torch.inf)
        found = attention.logsumexp(-1).transpose(1, 2)[there.any(-1)]  # [tokens, heads]
        return -found.sum() / max(1, found.numel())


class _Lessons(NamedTuple):
    read: Tensor
    """[N, T, D]"""
    ids: Tensor
    """[N, T]"""
    wanted: Tensor
    """[N, T]; see `CopyHeads.aside`."""


def teach(
    student: Decoder,
    heads: CopyHeads,
    head: Head,
    whole_head: Tensor,
    texts: Sequence[Batch],
    *,
    steps: int,
    seed: int,
    on_step: Callable[[], None],
) -> None:
    """Changes the heads' own rows of a student's weights, and no others.

    Args:
        student: as it is before its training.
        heads: which of its heads are to copy.
        head: of the student.
        whole_head: [V, D], of the target.
        texts: one text each; MAX_TEXTS are enough.
        steps: of teaching where to look.
        seed: the same gives the same.
        on_step: is told after each step.
    """
    random = np.random.default_rng((seed, 1))
    lessons = _lessons(student, heads, texts, random)
    _teach_looking(student, heads, lessons, steps, random, on_step)
    _teach_copying(student, heads, lessons, whole_head)
    _choose_strength(student, heads, head, texts[:_JUDGED_TEXTS])


@torch.no_grad()
def _lessons(
    student: Decoder, heads: CopyHeads, texts: Sequence[Batch], random: np.random.Generator
) -> _Lessons:
    ids = [batch.ids for batch in texts]
    wanted = [batch.first for batch in texts]
    length, seen = ids[0].shape[1], torch.cat(ids).flatten().numpy()
    for _ in range(min(MAX_RANDOM, len(texts))):
        period = int(random.integers(min(_SHORTEST, length), max(_SHORTEST, length // 2) + 1))
        row = torch.from_numpy(np.resize(random.choice(seen, period), length))[None]
        following = row.roll(-1, 1)
        following[:, : period - 1] = following[:, -1:] = -1
        ids.append(row)
        wanted.append(following)
    read = [next(islice(student.states(row), heads.layer, None)) for row in ids]
    return _Lessons(torch.cat(read), torch.cat(ids), torch.cat(wanted))


def _teach_looking(
    student: Decoder,
    heads: CopyHeads,
    lessons: _Lessons,
    steps: int,
    random: np.random.Generator,
    on_step: Callable[[], None],
) -> None:
    attention: Any = student.layers[heads.layer].self_attn
    # rows of other heads get no gradient, and so stay
    trained = [*attention.q_proj.parameters(), *attention.k_proj.parameters()]
    optimizer = torch.optim.Adam(trained, lr=_LEARNING_RATE, betas=_BETAS)
    order: list[int] = []
    for step in range(steps):
        while len(order) < _AT_ONCE:
            order += random.permutation(len(lessons.ids)).tolist()
        rows, order = order[:_AT_ONCE], order[_AT_ONCE:]
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min((step + 1) / _WARMUP, 1 - step / steps)
        read, ids, wanted = (part[rows] for part in lessons)
        heads.aside(student, read, ids, wanted).backward()
        optimizer.step()
        student.zero_grad()  # of all: the layer's norm got a gradient as well
        on_step()


@torch.no_grad()
def _teach_copying(
    student: Decoder, heads: CopyHeads, lessons: _Lessons, whole_head: Tensor
) -> None:
    """Values and outputs: from what a layer reads of a token, the direction that makes the head say
    this token. Least squares, with the rank that a value has (Eckart and Young, 1936).
    """
    c = student.config
    layer: Any = student.layers[heads.layer]
    attention = layer.self_attn
    mean, size = whole_head.mean(0), lessons.read.shape[-1]
    square, mixed, count = torch.zeros(size, size), torch.zeros(size, size), lessons.ids.numel()
    for read, ids in zip(lessons.read, lessons.ids, strict=True):
        normed = layer.input_layernorm(read)
        square += normed.T @ normed / count
        mixed += normed.T @ (whole_head[ids] - mean) / count
    eye = torch.eye(size) * _RIDGE * square.diagonal().mean()
    fitted = torch.linalg.solve(square + eye, mixed).T  # [D, D]
    # the best of a rank on what is read, not on any input: in coordinates where that is round
    scales, axes = torch.linalg.eigh(square)
    scales = scales.clamp(min=float(scales[-1]) * 1e-6).sqrt()
    left, strengths, right = torch.linalg.svd(fitted @ (axes * scales))
    kept = strengths[: c.head_dim].sqrt()
    values = slice(heads.group * c.head_dim, (heads.group + 1) * c.head_dim)
    attention.v_proj.weight[values] = kept[:, None] * right[: c.head_dim] @ (axes / scales).T
    if attention.v_proj.bias is not None:
        attention.v_proj.bias[values] = 0
    _outputs(attention, heads, c)[:] = (left[:, : c.head_dim] * kept)[:, None]


def _outputs(attention: Any, heads: CopyHeads, config: ModelConfig) -> Tensor:
    """[D, query heads of the group, head_dim], a view of what makes outputs of their values."""
    weight: Tensor = attention.o_proj.weight.unflatten(1, (-1, config.head_dim))
    return weight[:, heads.queries(config)]


@torch.no_grad()
def _choose_strength(
    student: Decoder, heads: CopyHeads, head: Head, texts: Sequence[Batch]
) -> None:
    """How much of it: what brings the student nearest to the target as it is."""
    outputs = _outputs(student.layers[heads.layer].self_attn, heads, student.config)
    whole = outputs / outputs.shape[1]
    losses = []
    for strength in _STRENGTHS:
        outputs[:] = whole * strength
        apart = [divergence(student(b.ids).flatten(0, 1), head, b) for b in texts]
        losses.append(float(sum(apart)))
    outputs[:] = whole * _STRENGTHS[int(np.argmin(losses))]
