"""A draft's head cut down to the tokens that a domain's texts are made of.

A draft reads every token but only ever proposes, so its embeddings stay whole while its head, which
is much of a small model's work, keeps the rows of the frequent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.errors import UsageError
from headrace.export.text import I64, Text


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens that a head keeps."""

    ids: I64
    """[K], ascending."""
    coverage: float
    """Their share of the corpus."""

    @classmethod
    def of(cls, ids: I64, counts: I64) -> KeptTokens:
        """`counts` [vocab_size] are of all tokens in the corpus."""
        return cls(ids, float(counts[ids].sum() / max(1, counts.sum())))


def most_frequent(text: Text, counts: I64, num_kept: int) -> KeptTokens:
    """The tokens that come most often, by their counts [vocab_size] in a corpus.

    Among equals the lower id goes first. Control tokens and those of a single byte are always
    kept: an answer must be able to end, and anything can be spelled. Raises UsageError if there
    are not as many tokens, or not even room for those.
    """
    tokens = text.tokens
    ids = np.array([i for i, token in enumerate(tokens) if token is not None], np.int64)
    always = [
        i for i, token in enumerate(tokens) if token and (token.control or len(token.data) == 1)
    ]
    if not len(always) <= num_kept <= len(ids):
        raise UsageError(
            f"vocab_keep: got {num_kept}, allowed are {len(always)} to {len(ids)} for "
            f"{text.name}: its control and single-byte tokens are always kept"
        )
    rank = counts.astype(np.int64)
    rank[always] = np.iinfo(np.int64).max
    kept = np.sort(ids[np.argsort(-rank[ids], kind="stable")[:num_kept]])
    return KeptTokens.of(kept, counts)
