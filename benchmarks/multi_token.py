"""Would a draft that proposes several tokens in one pass be worth it? An experiment, not a product.

    python benchmarks/multi_token.py TARGET DRAFT_DIR [--tokens 60000] [--json]

On an NPU a row more costs next to nothing and a pass does not, so that three tokens of one pass may
beat three passes even if they are guessed less well. Here a distilled draft is trained on: rows with
embeddings of their own stand behind the last token and answer for the tokens after the next one
(look-ahead embeddings as in Monea et al., 2023, PaSS). Compared on texts held out: how far greedy
proposals are accepted, of that one pass and of a chain of passes of the draft as it was. Needs the
extra `train`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.export.calibrate import FloatWeights
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.decoder import Cache, Decoder, Places
from headrace.export.distill.labels import Labelled
from headrace.export.distill.student import Batch, Head, Target, divergence
from headrace.export.distill.texts import BuiltInCorpus, Library
from headrace.export.distilled import DistilledDraft
from headrace.export.report import Silent
from headrace.export.text import Text

LENGTH, FIRST, EVERY, AHEAD = 192, 32, 8, 3
"""Tokens of a text; where in it the first look-ahead stands, and every how many; rows of each."""
BATCH, LEARNING_RATE = 4, 3e-4


class LookAhead(torch.nn.Module):
    """A draft with AHEAD rows behind each of the anchors in a text."""

    def __init__(self, draft: Decoder) -> None:
        super().__init__()
        self.draft = draft
        self.rows = torch.nn.Parameter(draft.embedding.mean(0).repeat(AHEAD, 1))  # [AHEAD, D]
        anchors = torch.arange(FIRST, LENGTH - AHEAD - 1, EVERY)
        places = torch.arange(LENGTH)
        ahead = (anchors[:, None] + torch.arange(1, AHEAD + 1)).flatten()
        self.anchors, self.positions = anchors, torch.cat([places, ahead])
        group = torch.cat(
            [torch.full((LENGTH,), -1), torch.arange(len(anchors)).repeat_interleave(AHEAD)]
        )
        limit = torch.cat([places, anchors.repeat_interleave(AHEAD)])
        is_text = group < 0
        sees_text = is_text[None, :] & (self.positions[None, :] <= limit[:, None])
        same = (group[:, None] == group[None, :]) & ~is_text[:, None] & ~is_text[None, :]
        self.visible = sees_text | (same & (self.positions[None, :] <= self.positions[:, None]))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] of the text's own rows, and [B, anchors, AHEAD, D] of those ahead."""
        x = F.embedding(ids, self.draft.embedding)
        ahead = self.rows.repeat(len(self.anchors), 1).expand(len(ids), -1, -1)
        x = torch.cat([x, ahead], 1) * self.draft.config.embed_scale
        places = Places.of(self.draft.config, self.positions, None, False, self.visible)
        for number, layer in enumerate(self.draft.layers):
            x = layer(x, places, number)
        x = self.draft.norm(x)
        return x[:, :LENGTH], x[:, LENGTH:].unflatten(1, (-1, AHEAD))


def loss_of(model: LookAhead, head: Head, texts: Labelled) -> Tensor:
    batch = Batch.of(texts)
    own, ahead = model(batch.ids)
    base = divergence(own.flatten(0, 1), head, batch)
    # a row ahead answers for what the target says once it knows the tokens between
    at = (model.anchors[:, None] + torch.arange(1, AHEAD + 1)).flatten()
    picked = Labelled(
        *(getattr(texts, n)[:, at.numpy()] for n in ("ids", "top_ids", "top_log_probs", "hidden"))
    )
    return base + divergence(ahead.flatten(0, 2), head, Batch.of(picked))


@torch.no_grad()
def depths(model: LookAhead, head: Head, held_out: list[Labelled], wanted: Tensor) -> list[float]:
    """How far the proposals of one pass are the target's greedy continuation: P(at least d)."""
    right = []
    for texts, continuation in zip(held_out, wanted, strict=True):
        own, ahead = model(torch.from_numpy(texts.ids).long())
        rows = torch.cat([own[:, model.anchors, None], ahead], 2)  # [1, anchors, 1 + AHEAD, D]
        proposed = head.ids[(rows @ head.rows.T).argmax(-1)][0]
        right.append((proposed == continuation).long().cumprod(-1).sum(-1))
    reached = torch.cat(right)
    return [float((reached >= d).float().mean()) for d in range(1, AHEAD + 2)]


@torch.no_grad()
def chains(
    draft: Decoder, head: Head, held_out: list[Labelled], wanted: Tensor, anchors: Tensor
) -> list[float]:
    """The same of a chain of passes of the plain draft."""
    right = []
    for texts, continuation in zip(held_out, wanted, strict=True):
        for anchor, tokens in zip(anchors.tolist(), continuation, strict=True):
            ids = torch.from_numpy(texts.ids[0, : anchor + 1]).long()
            rows = draft(torch.cat([ids, tokens[:-1]])[None])[0, anchor:]
            proposed = head.ids[(rows @ head.rows.T).argmax(-1)]
            right.append((proposed == tokens).long().cumprod(0).sum())
    reached = torch.stack(right)
    return [float((reached >= d).float().mean()) for d in range(1, AHEAD + 2)]


@torch.no_grad()
def continuations(target: Target, held_out: list[Labelled], anchors: Tensor) -> Tensor:
    """[texts, anchors, 1 + AHEAD] tokens that the target goes on with, greedily."""
    ids = torch.from_numpy(np.concatenate([texts.ids for texts in held_out])).long()
    cache = Cache.empty(target.checkpoint.config, len(ids), LENGTH + AHEAD)
    hidden = target.model.extend(ids, cache)
    lengths = [1 + anchor for anchor in reversed(anchors.tolist())]
    found = [target.go_on(length, 1 + AHEAD, hidden, cache) for length in lengths]
    return torch.stack(found[::-1], 1)


def run(source: str, folder: Path, tokens: int, held: int) -> dict[str, Any]:
    checkpoint = open_checkpoint(source)
    text = Text.of(checkpoint)
    target = Target.load(checkpoint)
    made = DistilledDraft.open(folder, checkpoint, text)
    plain = Decoder(made.config, FloatWeights(made), target.embedding).requires_grad_(False)
    model = LookAhead(Decoder(made.config, FloatWeights(made), target.embedding))
    head = Head.of(target.head, made.head_ids)
    num_texts = tokens // LENGTH
    with tempfile.TemporaryDirectory() as work:
        library = Library(Path(work), target, text, BuiltInCorpus(text), length=LENGTH, seed=77)
        shelf = library.fill(num_texts + held, Silent())
        numbers = np.random.default_rng(0).permutation(len(shelf)).tolist()
        held_out = [shelf.take([n]) for n in numbers[:held]]
        learned = numbers[held:]
        wanted = continuations(target, held_out, model.anchors)
        before = chains(plain, head, held_out, wanted, model.anchors)
        optimizer = torch.optim.AdamW(
            model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0
        )
        steps, began = len(learned) // BATCH, time.monotonic()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (1 - step / steps)
            loss = loss_of(model, head, shelf.take(learned[step * BATCH : (step + 1) * BATCH]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not step % 20:
                print(f"step {step} of {steps}: {loss.item():.3f}", file=sys.stderr, flush=True)
        after = depths(model, head, held_out, wanted)
    return {
        "draft": folder.name,
        "trained_tokens": steps * BATCH * LENGTH,
        "seconds": time.monotonic() - began,
        "chain_of_passes": before,
        "one_pass": after,
        "places": int(wanted.shape[0] * wanted.shape[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--held-out", type=int, default=16, help="texts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = run(args.target, args.draft, args.tokens, args.held_out)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
