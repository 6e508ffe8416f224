"""A draft for a target: part of a checkpoint whose tokenizer suits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import UsageError
from headrace.export import check
from headrace.export.checkpoint import Checkpoint, is_distilled, open_checkpoint
from headrace.export.distilled import DistilledDraft
from headrace.export.model import WrittenModel
from headrace.export.options import DraftOptions
from headrace.export.pair import check_cutting, match, unmatched_share
from headrace.export.quantize import F32
from headrace.export.reduced import ReducedCheckpoint, kept_layers
from headrace.export.text import I64, Text, read_corpus
from headrace.export.vocab_trim import KeptTokens, most_frequent
from headrace.models.plantlog import calibration_text, sample_log
from headrace.models.records import DraftRecord, Trim, Vocabulary
from headrace.models.vocab_map import NO_TOKEN, VocabMap


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft that suits its target, before its graph is written."""

    checkpoint: ReducedCheckpoint
    text: Text
    vocab_map: VocabMap
    """Of the head as it is kept."""
    unmatched_share: float
    kept: KeptTokens | None

    def reads(self, target_ids: I64) -> I64:
        """As much of a text of the target's tokens as the draft was trained to read."""
        return self.vocab_map.read(target_ids)[: self.checkpoint.config.max_position]

    def columns(self, ids: I64) -> I64:
        """Draft ids as columns of its logits; -1 where the head has none."""
        if self.kept is None:
            return ids
        column = np.full(self.checkpoint.config.vocab_size, -1, np.int64)
        column[self.kept.ids] = np.arange(len(self.kept.ids))
        return np.asarray(column[ids])

    def record(self, written: WrittenModel, target_logits: F32, tokenizer: str) -> DraftRecord:
        """`tokenizer` is the SHA-256 of the target's, and the logits are for the parity text."""
        whole, to_target = self.checkpoint.whole, self.vocab_map.to_target
        num_tokens = len(written.logits)
        return DraftRecord(
            **vars(written.record),
            name=whole.name,
            source=whole.kind,
            layers=self.checkpoint.layers,
            source_layers=whole.config.num_layers,
            agreement=check.agreement(target_logits[:num_tokens], written.logits, to_target),
            vocabulary=Vocabulary(
                tokenizer_sha256=tokenizer,
                target_size=len(self.vocab_map.to_draft),
                proposable=int(np.count_nonzero(to_target != NO_TOKEN)),
                unreadable=int(np.count_nonzero(self.vocab_map.to_draft == NO_TOKEN)),
                unmatched_share=self.unmatched_share,
            ),
            trim=self._trim(written.head_bytes),
        )

    def _trim(self, head_bytes: int | None) -> Trim | None:
        if self.kept is None or head_bytes is None:
            return None
        config = self.checkpoint.config
        dropped = config.vocab_size - config.num_logits
        return Trim(self.kept.coverage, head_bytes // config.num_logits * dropped)


def find_draft(options: DraftOptions, target: Checkpoint, target_text: Text) -> Draft:
    """Reads the draft's checkpoint and texts; nothing is computed yet.

    Raises:
        SourceError, StorageError: the checkpoint cannot be read.
        TokenizerMismatchError: its tokenizer does not suit the target.
        UsageError: its layers or kept tokens cannot be had, or it was distilled from another target.
    """
    folder = Path(options.source).expanduser()
    if is_distilled(folder):
        _refuse_choices(options)
        return _of_distilled(DistilledDraft.open(folder, target, target_text), target_text)
    if (options.vocab_keep is None) != (not options.vocab_corpus):
        raise UsageError("vocab_keep and vocab_corpus: one needs the other; give both or neither")
    whole = open_checkpoint(options.source)
    layers = kept_layers(options.layers, whole)
    text = Text.of(whole)
    check_cutting(text, target_text)
    corpus = read_corpus(options.vocab_corpus, "vocab_corpus")
    counts = text.count(corpus or _built_in())
    full = match(text.tokens, target_text.tokens)
    share = unmatched_share(text, target_text, counts, full.to_target)
    if options.vocab_keep is None:
        return Draft(ReducedCheckpoint(whole, layers, None), text, full, share, None)
    kept = most_frequent(text, counts, options.vocab_keep)
    vocab_map = VocabMap(full.to_target[kept.ids], full.to_draft)
    return Draft(ReducedCheckpoint(whole, layers, kept.ids), text, vocab_map, share, kept)


def _built_in() -> list[str]:
    """Texts that tokens are counted in where no corpus is given."""
    return [sample_log(), calibration_text()]


def _refuse_choices(options: DraftOptions) -> None:
    """Raises UsageError for what a distilled draft leaves no choice of."""
    for name, value, part in (
        ("draft_layers", options.layers, "layers"),
        ("vocab_keep", options.vocab_keep, "head"),
        ("vocab_corpus", options.vocab_corpus or None, "head"),
    ):
        if value is not None:
            raise UsageError(
                f"{name}: {options.source} is a distilled draft and has its {part} already; "
                "leave this out"
            )


def _of_distilled(draft: DistilledDraft, text: Text) -> Draft:
    """`text` is the target's, which is the draft's own."""
    full, ids = match(text.tokens, text.tokens), draft.head_ids
    reduced = ReducedCheckpoint(draft, kept_layers(None, draft), ids)
    if ids is None:
        return Draft(reduced, text, full, 0.0, None)
    kept = KeptTokens.of(ids, text.count(_built_in()))
    return Draft(reduced, text, VocabMap(full.to_target[ids], full.to_draft), 0.0, kept)
