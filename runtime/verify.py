"""Acceptance: which proposed tokens the target keeps, and what it says after the last of them.

Both rules leave the text's distribution what it is without proposals. `coupled` leaves the text
itself: the target chooses with noise that is a function of seed, position and token (noise.py), and
keeps a proposal if it is what it chose. `rejection` is speculative sampling (Leviathan et al., 2023;
Chen et al., 2023): a token x drawn from the draft's q is kept with probability min(1, p(x) / q(x)),
else one is drawn from the positive part of p - q. Siblings are tried in turn against what is left
of p, each with the q that it was drawn from after those before it (Miao et al., "SpecInfer", 2023;
Yang et al., "Multi-candidate speculative decoding", 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.runtime.noise import draw, uniform
from headrace.runtime.request import Accept
from headrace.runtime.sampling import Candidates, Choice, Row, Sampler, TokenCounts

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sibling:
    """One of the tokens that are proposed for a place."""

    node: int
    token_id: int
    drawn_from: Candidates | None = None
    """The distribution that it was really drawn from, without the siblings before it; None for a
    token that was picked (looked up, or the likeliest), which is a point mass."""


@dataclass(frozen=True)
class Accepted:
    """What a pass adds to the text."""

    token_ids: tuple[int, ...]
    path: tuple[int, ...]
    """Nodes of the proposal that became text: all but the last of the tokens."""


Rule = Callable[[Sampler, Row, int, TokenCounts, Iterable[Sibling]], tuple[Choice, Sibling | None]]
"""From logits [V], position and output so far: the token, and the sibling that proposed it."""


def coupled(
    sampler: Sampler, row: Row, position: int, counts: TokenCounts, siblings: Iterable[Sibling]
) -> tuple[Choice, Sibling | None]:
    """The target's own choice, and the sibling that is it."""
    choice = sampler.choose(row, position, counts)
    return choice, next((s for s in siblings if s.token_id == choice.token_id), None)


def rejection(
    sampler: Sampler, row: Row, position: int, counts: TokenCounts, siblings: Iterable[Sibling]
) -> tuple[Choice, Sibling | None]:
    """The first sibling that is kept, or what is drawn from the rest of the distribution."""
    target = sampler.distribution(row, counts)
    ids, p = target.ids, np.exp(target.log_probs())  # [n]
    for i, stage in enumerate(stages(ids, p, siblings)):
        if uniform(sampler.seed, position, i) < stage.kept:
            return sampler.report(row, stage.sibling.token_id), stage.sibling
        p = stage.rest
    with np.errstate(divide="ignore"):
        scores = np.log(p).astype(np.float32)
    return sampler.report(row, int(ids[draw(scores, ids, sampler.seed, position)])), None


@dataclass(frozen=True, eq=False)
class Stage:
    """A sibling's turn in `rejection`."""

    sibling: Sibling
    kept: float
    """Probability that it is kept, given that those before it were not."""
    rest: F64
    """[n] the distribution that is left if it is not."""


def stages(ids: npt.NDArray[np.uint32], p: F64, siblings: Iterable[Sibling]) -> Iterator[Stage]:
    """What happens to siblings in turn, where the target's distribution is p [n] over ids [n]."""
    for sibling in siblings:
        q = _on(ids, sibling)
        at = int(np.searchsorted(ids, sibling.token_id))
        # A token that the target's filters leave out is never kept.
        is_candidate = at < len(ids) and ids[at] == sibling.token_id
        kept = min(1.0, float(p[at] / q[at])) if is_candidate else 0.0
        rest = np.maximum(p - q, 0.0)
        total = rest.sum()
        # Nothing is left only where p is q: then the token is kept, but for rounding.
        p = rest / total if total > 0 else p
        yield Stage(sibling, kept, p)


RULES: dict[Accept, Rule] = {"coupled": coupled, "rejection": rejection}


def _on(ids: npt.NDArray[np.uint32], sibling: Sibling) -> F64:
    """[n] probabilities of `ids` under what a sibling was drawn from."""
    q = np.zeros(len(ids))
    if sibling.drawn_from is None:
        q[ids == sibling.token_id] = 1.0
        return q
    drawn = sibling.drawn_from
    places = np.searchsorted(drawn.ids, ids)
    places[places == len(drawn.ids)] = 0
    has = drawn.ids[places] == ids
    q[has] = np.exp(drawn.log_probs())[places[has]]
    return q
