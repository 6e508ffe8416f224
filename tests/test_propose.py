"""Laws of trees and of merging: what is offered is what can be walked, within the budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.pace import Acceptance, Origin, Pace, PassCosts
from headrace.runtime.propose import Proposal, Room, best_chain, best_tree, merged
from headrace.runtime.request import MAX_PROPOSED
from headrace.runtime.tree import ROOT, Tree

FREE = PassCosts({1: 1.0, 17: 1.0})
DEAR = PassCosts({1: 1.0, 17: 17.0})

tokens = st.integers(0, 3)
chains = st.lists(tokens, min_size=1, max_size=8).map(tuple)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    ids = draw(st.lists(tokens, max_size=12))
    return Tree(tuple(ids), tuple(draw(st.integers(ROOT, i - 1)) for i in range(len(ids))))


def offer(chain: tuple[int, ...], source: str = "a", sureness: int = 0) -> Proposal:
    return Proposal.chain(chain, [Origin(source, 0, sureness)] * len(chain))


def path(tree: Tree, node: int) -> tuple[int, ...]:
    found: list[int] = []
    while node != ROOT:
        found.append(tree.token_ids[node])
        node = tree.parents[node]
    return tuple(reversed(found))


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {path(tree, node) for node in range(len(tree))}


@given(trees(), st.integers(0, 3))
def test_a_row_sees_what_is_before_it_and_its_ancestors(tree: Tree, num_before: int) -> None:
    hidden = tree.hidden(num_before)
    if hidden is None:
        assert tree.is_chain
        hidden = np.zeros((num_before + len(tree),) * 2, bool)
    for node in range(len(tree)):
        seen = set()
        above = tree.parents[node]
        while above != ROOT:
            seen.add(above)
            above = tree.parents[above]
        row = hidden[num_before + node]
        assert not row[:num_before].any()
        for other in range(node):
            assert row[num_before + other] == (other not in seen)


@given(trees())
def test_positions_are_depths(tree: Tree) -> None:
    assert tree.positions(7).tolist() == [7 + len(path(tree, i)) for i in range(len(tree))]


@given(trees(), st.integers(0, 12))
def test_a_cut_tree_is_a_tree(tree: Tree, num_nodes: int) -> None:
    cut = tree.cut(num_nodes)
    assert len(cut) == min(num_nodes, len(tree))
    assert paths(cut) <= paths(tree)


@given(trees())
def test_children_are_all_that_stand_behind(tree: Tree) -> None:
    found = [i for node in range(ROOT, len(tree)) for i in tree.children(node)]
    assert sorted(found) == list(range(len(tree)))


@given(st.lists(chains, max_size=4))
def test_merging_keeps_every_path_once(offered: list[tuple[int, ...]]) -> None:
    tree = merged([offer(chain) for chain in offered]).tree
    expected = {chain[: i + 1] for chain in offered for i in range(len(chain))}
    assert paths(tree) == expected
    assert len(tree) == len(expected), "siblings differ"


@given(st.lists(chains, max_size=4), st.integers(1, MAX_PROPOSED))
def test_a_tree_stays_within_its_budget_and_its_first_path_is_the_likeliest(
    offered: list[tuple[int, ...]], most: int
) -> None:
    pace = Pace(FREE)
    offers = [offer(chain, "ab"[i % 2]) for i, chain in enumerate(offered)]
    proposal, plan = best_tree(offers, pace, Room(most))
    assert len(proposal) == plan.num_tokens <= most
    assert paths(proposal.tree) <= {c[: i + 1] for c in offered for i in range(len(c))}
    reach = proposal.reach(pace.acceptance)
    assert all(
        reach[i] <= (1.0 if parent == ROOT else reach[parent]) + 1e-12
        for i, parent in enumerate(proposal.tree.parents)
    )
    if len(proposal):
        assert reach[0] == max(reach[i] for i in proposal.tree.children(ROOT))


@given(st.lists(chains, max_size=4), st.integers(1, MAX_PROPOSED))
def test_a_chain_is_the_beginning_of_one_offer(offered: list[tuple[int, ...]], most: int) -> None:
    proposal, _ = best_chain([offer(chain) for chain in offered], Pace(FREE), Room(most))
    assert proposal.tree.is_chain and len(proposal) <= most
    assert not len(proposal) or any(
        chain[: len(proposal)] == proposal.tree.token_ids for chain in offered
    )
    assert bool(len(proposal)) == bool(offered), "what is free is proposed"


def test_the_surer_source_is_taken_and_what_is_too_dear_is_not() -> None:
    pace = Pace(DEAR)
    for _ in range(60):
        for depth in (1, 2, 3):
            pace.acceptance.note(Origin("sure", 0, 0), depth, accepted=True)
        pace.acceptance.note(Origin("wild", 0, 0), 1, accepted=False)
    wild, sure = offer((1, 2, 3), "wild"), offer((2, 2, 2), "sure")
    assert not len(best_chain([wild, sure], pace, Room(16))[0])
    assert len(best_chain([wild], Pace(DEAR), Room(16, fixed=2))[0]) == 2, "whatever it costs"
    cheap = Pace(PassCosts({1: 1.0, 17: 1.6}))
    cheap.acceptance = pace.acceptance
    assert best_chain([wild, sure], cheap, Room(16))[0].tree.token_ids == (2, 2, 2)


def test_siblings_share_what_the_first_leaves() -> None:
    proposal = merged([offer((1,)), offer((2,))])
    acceptance = Acceptance()
    first, second = proposal.reach(acceptance)
    assert proposal.origins[1].rank == 1
    assert first + second <= 1
    assert second == (1 - first) * acceptance.rate(proposal.origins[1], 1)
