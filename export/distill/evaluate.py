"""How well a draft foretells its target, text by text: what a speed-up rests on, without a clock.

Everything here follows from the two models' distributions; costs and speed are the runtime's to
measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from headrace.errors import UnsupportedModelError, UsageError
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.corpus import WHOLE, CorpusFile, apart
from headrace.export.distill.decoder import Cache, Decoder
from headrace.export.distill.options import WINDOW
from headrace.export.distill.student import Head, Target
from headrace.export.distill.systems import request
from headrace.export.distill.writing import ChatForm, chat, write
from headrace.export.distilled import DistilledDraft
from headrace.export.report import Reporter
from headrace.export.text import I64, Text

MAX_DEPTH = 8
TEMPERATURE = 0.8
CHATS = "chat answers"

_NUM_TEXTS = 16
_AT_ONCE = 4
_ROWS = 128
"""Of logits [rows, V] at once: what fits a cache is not written to memory and read again."""
_PREFIXES = (0.4, 0.65, 0.9)
"""Where in a text chains begin, as shares of its length."""
_LEAST_LENGTH = 3
"""Of a text, so that there is something before each chain."""
_SEED = 20_260_101
"""Other requests than any training's."""


@dataclass(frozen=True)
class Figures:
    """Of one kind of text; means over its tokens."""

    name: str
    tokens: int
    overlap: float
    """Sum of the smaller probabilities: acceptance by rejection sampling at temperature 1."""
    top1: float
    """Share with the same most likely token: greedy acceptance."""
    coupled: float
    """Share with the same token when both are drawn with the same noise at TEMPERATURE."""
    coverage: float
    """What the target expects of the tokens that the draft's head has."""
    by_depth: tuple[float, ...]
    """Probability that a greedy chain is accepted up to a depth of 1, 2, …, MAX_DEPTH."""

    def tokens_per_pass(self, length: int) -> float:
        """Of chains of `length` proposals: those accepted, and the target's own token."""
        return 1 + sum(self.by_depth[:length])

    def to_json(self) -> dict[str, object]:
        passes = [self.tokens_per_pass(n) for n in range(1, MAX_DEPTH + 1)]
        return {**asdict(self), "tokens_per_pass": passes}


def evaluate(
    source: str, draft_folder: Path, corpus: Sequence[Path], report: Reporter
) -> list[Figures]:
    """Of each file, and of the target's own chat answers if it chats.

    Raises SourceError, TokenizerMismatchError for a draft that is not this target's, UsageError.
    """
    files = [CorpusFile.check(path) for path in corpus]
    report.stage(f"reading {source} and {draft_folder}")
    checkpoint = open_checkpoint(source)
    text = Text.of(checkpoint)
    draft = DistilledDraft.open(draft_folder, checkpoint, text)
    pair = _Pair.load(Target.load(checkpoint), draft)
    length = min(WINDOW, checkpoint.config.max_position - MAX_DEPTH - 1)
    if length < _LEAST_LENGTH:
        raise UnsupportedModelError(
            f"{checkpoint.name}: its context has {checkpoint.config.max_position} positions, to "
            f"evaluate takes {_LEAST_LENGTH + MAX_DEPTH + 1}"
        )
    form = ChatForm.of(text)
    if form is None and not files:
        raise UsageError(f"corpus: {checkpoint.name} does not chat; give texts with --corpus")
    kinds: dict[str, I64] = {
        name: file.windows(text, _NUM_TEXTS, length, _SEED, WHOLE)
        for name, file in zip(apart(corpus), files, strict=True)
    }
    report.stage("comparing", len(kinds) + (form is not None))
    if form is not None:
        kinds[CHATS] = _chats(pair.target, text, form, length)
    figures = []
    for name, ids in kinds.items():
        figures.append(pair.figures(name, ids))
        report.advance()
    return figures


def _chats(target: Target, text: Text, form: ChatForm, length: int) -> I64:
    random = Random(_SEED)
    scripts = [chat(form, [text.pieces(request(random))]) for _ in range(_NUM_TEXTS)]
    written = write(target.model, target.head, scripts, length, form.ends, _SEED)
    return written.ids.astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Pair:
    target: Target
    draft: Decoder
    head: Head

    @classmethod
    def load(cls, target: Target, draft: DistilledDraft) -> _Pair:
        model = target.beside(draft)
        model.requires_grad_(False)
        return cls(target, model, Head.of(target.head, draft.head_ids))

    @torch.no_grad()
    def figures(self, name: str, ids: I64) -> Figures:
        noise = torch.Generator().manual_seed(_SEED)
        rows, depths = [], []
        for part in torch.from_numpy(ids).split(_AT_ONCE):
            capacity = part.shape[1] + MAX_DEPTH
            cache = Cache.empty(self.target.checkpoint.config, len(part), capacity)
            hidden = self.target.model.extend(part, cache)
            both = torch.stack((hidden, self.draft(part))).flatten(1, 2)  # [2, rows, D]
            rows += [self._compare(some[0], some[1], noise) for some in both.split(_ROWS, 1)]
            depths += self._depths(part, hidden, cache)
        overlap, top1, coupled, coverage = torch.cat(rows).mean(0).tolist()
        depth = torch.cat(depths)
        reached = [float((depth >= d).float().mean()) for d in range(1, MAX_DEPTH + 1)]
        return Figures(name, ids.size, overlap, top1, coupled, coverage, tuple(reached))

    def _compare(self, target: Tensor, draft: Tensor, noise: torch.Generator) -> Tensor:
        """Of hidden states [rows, D], [rows, 4]: overlap, same first choice, same draw, coverage."""
        log_p = torch.log_softmax(target @ self.target.head.T, -1)  # [rows, V]
        log_q = torch.log_softmax(draft @ self.head.rows.T, -1)  # [rows, K]
        seen_p = log_p[:, self.head.ids]  # [rows, K]
        overlap = torch.minimum(seen_p.exp(), log_q.exp()).sum(-1)
        top1 = log_p.argmax(-1) == self.head.ids[log_q.argmax(-1)]
        gumbel = -torch.empty_like(log_p).exponential_(generator=noise).log()
        ours = self.head.ids[(log_q / TEMPERATURE + gumbel[:, self.head.ids]).argmax(-1)]
        coupled = (log_p / TEMPERATURE + gumbel).argmax(-1) == ours
        return torch.stack((overlap, top1.float(), coupled.float(), seen_p.exp().sum(-1)), -1)

    def _depths(self, ids: Tensor, hidden: Tensor, cache: Cache) -> list[Tensor]:
        """[B] for each prefix, how many tokens of a greedy chain behind it the target accepts.

        A chain is accepted as long as it is what the target goes on with, so it is enough to let
        the target go on, and to ask the draft along that.
        """
        found = []
        for share in sorted(_PREFIXES, reverse=True):
            length = int(share * ids.shape[1])
            wanted = self.target.go_on(length, MAX_DEPTH, hidden, cache)
            rows = self.draft(torch.cat([ids[:, :length], wanted[:, :-1]], 1))[:, -MAX_DEPTH:]
            proposed = self.head.ids[(rows @ self.head.rows.T).argmax(-1)]
            found.append((proposed == wanted).long().cumprod(1).sum(1))
        return found
