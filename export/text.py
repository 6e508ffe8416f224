"""The text side of an export: a checkpoint's tokenizer, loaded, and the texts a user names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from headrace.errors import (
    BundleError,
    ExportError,
    TokenizerMismatchError,
    UnsupportedModelError,
    UsageError,
)
from headrace.export.checkpoint import Checkpoint, TokenizerSource
from headrace.export.tokenizer import drop_tokens_without_row
from headrace.models.config import ModelConfig
from headrace.models.pieces import read_spelling

I64 = npt.NDArray[np.int64]

_PART_CHARACTERS = 1 << 16
_PARTS_AT_ONCE = 64  # an encoding takes far more memory than its text


@dataclass(frozen=True)
class Token:
    """What a vocabulary entry means: two tokens that are equal are the same text."""

    control: bool
    data: bytes
    """The bytes it stands for; the name of a control token."""
    entry: str = field(compare=False)
    """How the vocabulary writes it: `A` and `<0x41>` are equal tokens."""


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenizer that was found to fit its model."""

    name: str
    """The checkpoint's."""
    source: TokenizerSource
    config: ModelConfig
    inner: Any
    """The package's Tokenizer."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Text:
        """Raises SourceError, ExportError or TokenizerMismatchError."""
        source, config = checkpoint.tokenizer(), checkpoint.config
        # Gemma3's text models come with a token for images that has no row.
        fitted, _ = drop_tokens_without_row(source.tokenizer_json, config.vocab_size)
        inner = _load(fitted, checkpoint.name, config.vocab_size)
        return cls(checkpoint.name, replace(source, tokenizer_json=fitted), config, inner)

    def encode(self, text: str, max_tokens: int) -> I64:
        """Token ids with the start token before them: its keys are unlike all others."""
        ids = self.pieces(text)
        if self.source.bos_id is not None:
            ids = [self.source.bos_id, *ids]
        return np.array(ids[: min(max_tokens, self.config.max_position)], np.int64)

    def pieces(self, text: str) -> list[int]:
        """Token ids of the text alone."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, texts: Sequence[str]) -> I64:
        """How often each id [vocab_size] comes in the texts."""
        counts = np.zeros(self.config.vocab_size, np.int64)
        for start in range(0, len(texts), _PARTS_AT_ONCE):
            batch = texts[start : start + _PARTS_AT_ONCE]
            for encoding in self.inner.encode_batch(batch, add_special_tokens=False):
                counts += np.bincount(encoding.ids, minlength=len(counts))
        return counts

    @cached_property
    def tokens(self) -> tuple[Token | None, ...]:
        """The token of every row of the model; None for rows without one."""
        decoder = self.inner.decoder
        try:
            spelling = read_spelling(
                None if decoder is None else json.loads(decoder.__getstate__())
            )
        except BundleError as error:
            raise UnsupportedModelError(f"{self.name}: {error}") from error
        tokens: list[Token | None] = [None] * self.config.vocab_size
        for entry, token_id in self.inner.get_vocab(with_added_tokens=True).items():
            tokens[token_id] = Token(False, spelling.to_bytes(entry), entry)
        ends = {self.source.bos_id, *self.source.eos_ids}
        for token_id, added in self.inner.get_added_tokens_decoder().items():
            control = added.special or token_id in ends
            name = added.content
            data = name.encode() if control else spelling.added_to_bytes(name)
            tokens[token_id] = Token(control, data, name)
        return tuple(tokens)


def _load(tokenizer_json: str, name: str, vocab_size: int) -> Any:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise ExportError(f"{name}: its tokenizer does not load: {error}") from error
    kind = type(tokenizer.model).__name__
    if kind != "BPE":
        # The others find control tokens in plain text by themselves.
        raise UnsupportedModelError(
            f"{name}: a tokenizer of kind {kind}, known are BPE ones (byte-level and "
            "SentencePiece-style)"
        )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise TokenizerMismatchError(
            f"{name}: the tokenizer has token id {highest}, the model's vocabulary is "
            f"{vocab_size}; they do not belong together"
        )
    for token in json.loads(tokenizer_json).get("added_tokens") or []:
        actual = tokenizer.token_to_id(token["content"])
        if actual != token["id"]:
            raise TokenizerMismatchError(
                f"{name}: the tokenizer gives {token['content']!r} the id {token['id']}, but with "
                f"its vocabulary that token gets {actual}"
            )
    # What a json was saved with for training must not cut texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_text(path: Path, option: str) -> str:
    """A text that the user named for `option`; raises UsageError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: {path} is not a readable UTF-8 text: {error}") from error


def read_corpus(paths: Sequence[Path], option: str) -> list[str]:
    """Texts in parts of whole lines, small enough to be tokenised side by side."""
    parts: list[str] = []
    for path in paths:
        text = read_text(path, option)
        if not text.strip():
            raise UsageError(f"{option}: {path} is empty; give a text like those in service")
        parts += _parts(text)
    return parts


def _parts(text: str) -> list[str]:
    parts, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PART_CHARACTERS) + 1 or len(text)
        parts.append(text[start:end])
        start = end
    return parts
