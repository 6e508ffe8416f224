"""The map between a draft's vocabulary and its target's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import BundleError
from headrace.models.manifest import VOCAB_MAP, Bundle

I32 = npt.NDArray[np.int32]

NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class VocabMap:
    """Draft tokens to target tokens and back; NO_TOKEN where the other has none.

    What can be proposed can be read: `to_draft[to_target[row]]` is the id that the draft reads for
    what its logit row `row` proposes.
    """

    to_target: I32
    """[draft's num_logits] the target id that each column of the draft's logits stands for."""
    to_draft: I32
    """[target's vocab_size] the draft id to feed for each target id."""

    def read(self, target_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The target's tokens as draft ids. A token that the draft does not have is replaced by one
        that it has: this is for figures on a text, where hardly any is missing.
        """
        ids = self.to_draft[target_ids].astype(np.int64)
        return np.where(ids == NO_TOKEN, ids.max(), ids)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, to_target=self.to_target, to_draft=self.to_draft)


def load_vocab_map(bundle: Bundle) -> VocabMap:
    """The map of a bundle that has a draft; raises BundleError if it does not fit its models."""
    draft, target = bundle.draft, bundle.manifest.target
    assert draft is not None
    where = bundle.file(VOCAB_MAP)
    try:
        with np.load(where, allow_pickle=False) as arrays:
            found = VocabMap(arrays["to_target"], arrays["to_draft"])
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
        raise BundleError(f"{where}: cannot be read: {error}") from error
    problem = _problem(
        found, draft.config.num_logits, draft.config.vocab_size, target.config.vocab_size
    )
    if problem:
        raise BundleError(f"{where}: {problem}; export or copy the bundle again")
    return found


def _problem(found: VocabMap, num_logits: int, draft_size: int, target_size: int) -> str | None:
    """What is wrong with a map between vocabularies of these sizes, None if nothing is."""
    for name, array, length, ids in (
        ("to_target", found.to_target, num_logits, target_size),
        ("to_draft", found.to_draft, target_size, draft_size),
    ):
        if array.dtype != np.int32 or array.shape != (length,):
            return f"{name} is {array.dtype} {list(array.shape)}, the models need int32 [{length}]"
        if array.min() < NO_TOKEN or array.max() >= ids:
            return f"{name} has ids from {array.min()} to {array.max()}, of a vocabulary of {ids}"
    proposed = found.to_target[found.to_target != NO_TOKEN]
    if not len(proposed):
        return "no token of the draft is one of the target's"
    if len(np.unique(proposed)) != len(proposed):
        return "two tokens of the draft stand for one of the target's"
    if (found.to_draft[proposed] == NO_TOKEN).any():
        return "the draft could not read a token that it proposes"
    return None
