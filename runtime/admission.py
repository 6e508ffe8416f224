"""Who may come to hold how many blocks: reservations, as integers.

The blocks of those that were admitted always suffice: what they hold never exceeds what they
reserved, the sum of that never exceeds the pool, and whatever else is in the pool can be evicted
(cached blocks) or dropped (sequences that reserved nothing, since they can be computed again).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Reservation:
    num_blocks: int
    is_lasting: bool


class Admission:
    """Reservations of a pool's blocks by their owners."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._reserved: dict[Hashable, _Reservation] = {}

    @property
    def num_reserved(self) -> int:
        return sum(r.num_blocks for r in self._reserved.values())

    @property
    def num_lasting(self) -> int:
        """Blocks reserved by streams and pinned prefixes, for as long as they exist."""
        return sum(r.num_blocks for r in self._reserved.values() if r.is_lasting)

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._reserved

    def ever_fits(self, num_blocks: int) -> bool:
        """Whether it fits once every request has ended."""
        return num_blocks <= self.num_blocks - self.num_lasting

    def reserve(self, owner: Hashable, num_blocks: int, *, is_lasting: bool) -> bool:
        """Whether so many blocks are the owner's now, instead of what it had reserved before."""
        before = self._reserved.get(owner)
        others = self.num_reserved - (before.num_blocks if before else 0)
        if others + num_blocks > self.num_blocks:
            return False
        self._reserved[owner] = _Reservation(num_blocks, is_lasting)
        return True

    def release(self, owner: Hashable) -> None:
        """Of an owner without a reservation, nothing."""
        self._reserved.pop(owner, None)
