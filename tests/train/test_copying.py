"""Laws of teaching a student to copy, on a tiny one of three layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import TINY
from torch import Tensor

from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.copying import CopyHeads, teach
from headrace.export.distill.decoder import Decoder, Places
from headrace.export.distill.labels import label
from headrace.export.distill.student import Batch, Head, Target

LENGTH = 48
LAYERS = (0, 1, 0)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return Target.load(open_checkpoint(str(TINY / "llama_bias")))


def repeated(target: Target, count: int, seed: int) -> Tensor:
    """[count, LENGTH], each of tokens that come three times in the same order."""
    random = np.random.default_rng(seed)
    rows = [np.tile(random.integers(0, len(target.head), LENGTH // 3), 3) for _ in range(count)]
    return torch.from_numpy(np.stack(rows))


def following(ids: Tensor) -> Tensor:
    """What comes next in them, as far as it came before."""
    wanted = ids.roll(-1, 1)
    wanted[:, : LENGTH // 3 - 1] = wanted[:, -1] = -1
    return wanted


def aside(student: Decoder, heads: CopyHeads, ids: Tensor) -> float:
    with torch.no_grad():
        read = list(student.states(ids))[heads.layer]
        return float(heads.aside(student, read, ids, following(ids)))


def student_of(target: Target) -> Decoder:
    """Its second layer looks at the token before, as one of every real model does."""
    student = target.student(LAYERS)
    c, layer = student.config, student.layers[1]
    attention: Any = layer.self_attn
    with torch.no_grad():
        same = torch.full((1, 1, 2, c.head_dim), 4.0)
        turned = Places.of(c, torch.arange(2), None, is_local=False).rotate(same)
        for part, bias in ((attention.q_proj, same[0, 0, 0]), (attention.k_proj, turned[0, 0, 1])):
            part.weight.zero_()
            part.bias.view(-1, c.head_dim)[:] = bias
    return student


def taught(target: Target, steps: int) -> tuple[Decoder, CopyHeads]:
    student = student_of(target)
    heads = CopyHeads.of(student.config)
    assert heads is not None
    ids = repeated(target, 12, 1).numpy()
    texts = [Batch.of(label(target.model, target.head, row[None])) for row in ids]
    head = Head.of(target.head, None)
    teach(student, heads, head, target.head, texts, steps=steps, seed=0, on_step=lambda: None)
    return student, heads


def test_heads_that_look_everywhere(target: Target) -> None:
    """Attention of equal parts misses the wanted token by the logarithm of how rare it is."""
    student = target.student(LAYERS)
    heads = CopyHeads(2)
    layer: Any = student.layers[2]
    ids = repeated(target, 2, 7)
    with torch.no_grad():
        for part in layer.self_attn.q_proj.parameters():
            part.zero_()
    expected = []
    for text, wanted in zip(ids.tolist(), following(ids).tolist(), strict=True):
        for place, token in enumerate(wanted):
            found = text[: place + 1].count(token)
            expected += [np.log((place + 1) / found)] if found else []
    assert aside(student, heads, ids) == pytest.approx(np.mean(expected), rel=1e-5)


def test_nothing_to_look_for(target: Target) -> None:
    student, ids = target.student(LAYERS), repeated(target, 2, 7)
    read = list(student.states(ids))[2]
    assert CopyHeads(2).aside(student, read, ids, torch.full_like(ids, -1)) == 0


def test_they_learn_where_to_look(target: Target) -> None:
    """In texts that they were not taught with."""
    ids = repeated(target, 8, 99)
    before = aside(student_of(target), CopyHeads(2), ids)
    assert aside(*taught(target, 300), ids) < before / 2


def test_nothing_else_is_changed(target: Target) -> None:
    student, heads = taught(target, 20)
    c = student.config
    of_queries, of_group = (
        slice(part.start * c.head_dim, part.stop * c.head_dim)
        for part in (heads.queries(c), slice(heads.group, heads.group + 1))
    )
    name = f"model.layers.{heads.layer}.self_attn"
    own = {
        **{f"{name}.q_proj.{kind}": (of_queries,) for kind in ("weight", "bias")},
        **{f"{name}.k_proj.{kind}": (of_group,) for kind in ("weight", "bias")},
        **{f"{name}.v_proj.{kind}": (of_group,) for kind in ("weight", "bias")},
        f"{name}.o_proj.weight": (slice(None), of_queries),
    }
    before = student_of(target).by_name()
    for name, weight in student.by_name().items():
        changed = weight != before[name]
        if name in own:
            assert changed[own[name]].any(), name
            changed[own[name]] = False
        assert not changed.any(), name
        assert weight.grad is None, name


def test_few_layers_cannot(target: Target) -> None:
    for count, expected in ((1, None), (2, None), (3, CopyHeads(2)), (4, CopyHeads(2))):
        student = target.student((0,) * count)
        assert CopyHeads.of(student.config) == expected
