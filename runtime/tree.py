"""The shape of a proposal: a tree of tokens as flat arrays, and what a pass over it needs.

Node i stands behind its parent, which is an earlier node or the root, the last token of the text.
A chain is the tree in which every node follows the one before ("tree attention", Miao et al.,
"SpecInfer", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.runtime.batch import I64

ROOT = -1


@dataclass(frozen=True)
class Tree:
    """Proposed tokens; `parents[i]` is below i, or ROOT."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.parents)
        assert all(ROOT <= parent < i for i, parent in enumerate(self.parents))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Tree:
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; a first token has 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def children(self, node: int) -> list[int]:
        """Nodes directly behind `node` or ROOT, in order."""
        if self.is_chain:
            return [node + 1] if node + 1 < len(self) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def cut(self, num_nodes: int) -> Tree:
        """The first nodes; since parents come first, they are a tree."""
        if num_nodes >= len(self):
            return self
        return Tree(self.token_ids[:num_nodes], self.parents[:num_nodes])

    def positions(self, root: int) -> I64:
        """[n] position of each node when that of the root's token is `root`."""
        return root + np.array(self.depths, np.int64)

    def hidden(self, num_before: int = 0) -> npt.NDArray[np.bool_] | None:
        """[before + n, before + n], True where a row must not see an earlier one: it is on another
        branch. `num_before` rows stand before the nodes and are seen by all. None for a chain.
        """
        if self.is_chain:
            return None
        size = num_before + len(self)
        hidden = np.tri(size, k=-1, dtype=np.bool_)
        hidden[:, :num_before] = False
        for i, parent in enumerate(self.parents):
            row = num_before + i
            while parent != ROOT:
                hidden[row, num_before + parent] = False
                parent = self.parents[parent]
        return hidden
