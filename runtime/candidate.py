"""Where a draft can run, in order of preference, and when one that failed is tried again.

A candidate that fails makes room for the next one at once; the first comes back by itself ("circuit
breaker", Nygard, 2007): after a while that doubles with every failure, it is opened anew in a thread
of its own, so that nobody waits for a device that may hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.runtime.draft import DraftModel
from headrace.runtime.pace import PassCosts

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 300.0

RELIABLE_S = 60.0
"""After working so long, the next pause is the first one again."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A draft that is ready."""

    model: DraftModel
    costs: PassCosts


@dataclass(eq=False)
class Breaker:
    """When a candidate may be tried again."""

    clock: Callable[[], float] = time.monotonic
    pause_s: float = 0.0
    """The last one; 0 before the first failure."""
    retry_at: float | None = None
    """None while the candidate works."""
    worked_since: float = 0.0

    def failed(self) -> None:
        now = self.clock()
        if self.retry_at is None and now - self.worked_since >= RELIABLE_S:
            self.pause_s = 0.0
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LAST_PAUSE_S)
        self.retry_at = now + self.pause_s

    def works(self) -> None:
        self.retry_at, self.worked_since = None, self.clock()

    @property
    def is_due(self) -> bool:
        return self.retry_at is not None and self.clock() >= self.retry_at


@dataclass(eq=False)
class Candidate:
    """One place for the draft to run."""

    name: str
    """`npu` or `cpu`."""
    opened: Opened | None
    """None after it failed, and before it was first opened."""
    patience: int
    """Failures in a row after which the next candidate is taken."""
    reopen: Callable[[], Opened] | None = None
    """Opens it anew; None for one that is not tried again."""
    breaker: Breaker = field(default_factory=Breaker)

    def close(self) -> None:
        """May be called again."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.model.close()
