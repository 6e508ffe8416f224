"""What sources offer becomes one proposal under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.runtime.pace import F64, Acceptance, Origin, Pace, Plan
from headrace.runtime.sampling import Candidates
from headrace.runtime.tree import ROOT, Tree
from headrace.runtime.verify import Sibling

_NOTHING = Tree()


@dataclass(frozen=True, eq=False)
class Proposal:
    """Tokens that may come next."""

    tree: Tree = _NOTHING
    origins: tuple[Origin, ...] = ()
    """[n]"""
    drawn_from: tuple[Candidates | None, ...] = ()
    """[n] what a token was drawn from; None for one that was picked, `verify.Sibling`."""

    def __post_init__(self) -> None:
        assert len(self.tree) == len(self.origins) == len(self.drawn_from)

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int],
        origins: Sequence[Origin],
        drawn_from: Sequence[Candidates | None] | None = None,
    ) -> Proposal:
        drawn = (None,) * len(token_ids) if drawn_from is None else tuple(drawn_from)
        return cls(Tree.chain(token_ids), tuple(origins), drawn)

    @property
    def is_sampled(self) -> bool:
        return any(drawn is not None for drawn in self.drawn_from)

    def __len__(self) -> int:
        return len(self.tree)

    def siblings(self, node: int, tree: Tree) -> list[Sibling]:
        """What is proposed behind a node of `tree`, a beginning of this proposal's."""
        return [Sibling(i, tree.token_ids[i], self.drawn_from[i]) for i in tree.children(node)]

    def reach(self, acceptance: Acceptance) -> F64:
        """[n] probability of each node to become text."""
        reach = np.empty(len(self))
        left: dict[int, float] = {ROOT: 1.0}
        """Of each node's own reach, what its children so far do not account for."""
        for i, (origin, parent) in enumerate(zip(self.origins, self.tree.parents, strict=True)):
            reach[i] = left[parent] * acceptance.rate(origin, self.tree.depths[i])
            left[parent] -= reach[i]
            left[i] = float(reach[i])
        return reach

    def first(self, num_nodes: int) -> Proposal:
        tree = self.tree.cut(num_nodes)
        return Proposal(tree, self.origins[:num_nodes], self.drawn_from[:num_nodes])


@dataclass(frozen=True)
class Room:
    """What a proposal may cost."""

    most: int
    """Tokens at most."""
    lanes: int = 1
    rows: tuple[int, ...] | None = None
    """That the lane computes for 0, 1, … proposed tokens, padding included; None pads nothing."""
    fixed: int | None = None


def best_chain(offers: Sequence[Proposal], pace: Pace, room: Room) -> tuple[Proposal, Plan]:
    """The beginning of one offer that promises the most tokens a second."""
    best, best_plan = Proposal(), planned(pace, np.empty(0), room)
    for offer in offers:
        reach = offer.reach(pace.acceptance)[: room.most]
        plan = planned(pace, reach, room)
        if plan.tokens_per_s > best_plan.tokens_per_s or (room.fixed and not len(best)):
            best, best_plan = offer.first(plan.num_tokens), plan
    return best, best_plan


def best_tree(offers: Sequence[Proposal], pace: Pace, room: Room) -> tuple[Proposal, Plan]:
    """All offers in one tree, and of that the nodes that promise the most tokens a second."""
    whole = merged(offers)
    reach = whole.reach(pace.acceptance)
    # A child is no likelier than its parent, and comes after it where they are equal.
    order = np.argsort(-reach, kind="stable")[: room.most]
    plan = planned(pace, reach[order], room)
    return _part(whole, order[: plan.num_tokens], reach), plan


def merged(offers: Sequence[Proposal]) -> Proposal:
    """One tree of all offers; what several propose is one node, of the first of them."""
    found: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    origins: list[Origin] = []
    for offer in offers:
        assert not offer.is_sampled, "leaving out a drawn token because it is there is a bias"
        places: list[int] = []
        for token_id, parent, origin in zip(
            offer.tree.token_ids, offer.tree.parents, offer.origins, strict=True
        ):
            key = (ROOT if parent == ROOT else places[parent], token_id)
            if key not in found:
                found[key] = len(tokens)
                is_second = key[0] in parents
                tokens.append(token_id)
                parents.append(key[0])
                origins.append(_ranked(origin, is_second))
            places.append(found[key])
    return Proposal(Tree(tuple(tokens), tuple(parents)), tuple(origins), (None,) * len(tokens))


def _ranked(origin: Origin, is_second: bool) -> Origin:
    if is_second and not origin.rank:
        return Origin(origin.source, 1, origin.sureness, origin.is_after_boundary)
    return origin


def _part(whole: Proposal, nodes: npt.NDArray[np.intp], reach: F64) -> Proposal:
    """Some nodes with all their ancestors among them, the likeliest path first: on it the bits are
    those of a chain, and nothing has to be moved if it is accepted.
    """
    wanted = set(nodes.tolist())
    order: list[int] = []
    stack = [ROOT]
    while stack:
        node = stack.pop()
        if node != ROOT:
            order.append(node)
        children = [i for i in wanted if whole.tree.parents[i] == node]
        stack += sorted(children, key=lambda i: (reach[i], -i))
    place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    return Proposal(
        Tree(
            tuple(whole.tree.token_ids[i] for i in order),
            tuple(place[whole.tree.parents[i]] for i in order),
        ),
        tuple(whole.origins[i] for i in order),
        tuple(whole.drawn_from[i] for i in order),
    )


def planned(pace: Pace, reach: F64, room: Room, extra_s: float = 0.0, once_s: float = 0.0) -> Plan:
    """`Pace.plan` of tokens that become text with the probabilities `reach`."""
    return pace.plan(
        reach,
        lanes=room.lanes,
        rows=room.rows,
        extra_s=extra_s,
        once_s=once_s,
        fixed=room.fixed,
    )
