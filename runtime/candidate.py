"""Where a draft can run, in order of preference, and when one that failed is tried again.

A candidate that fails makes room for the next one at once; the first comes back by itself ("circuit
breaker", Nygard, 2007): after a while that doubles with every failure, it is opened anew in a thread
of its own, so that nobody waits for a device that may hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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
    takes_turns: bool = False
    """Whether target and draft compute one after the other, on the same cores."""


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


class Candidates:
    """All places for one draft, and which of them it is in."""

    def __init__(self, candidates: Sequence[Candidate], log: Callable[[str], None]) -> None:
        """In order of preference; one at least must be open. Changes are told to `log`, a line each."""
        self.all, self._log = list(candidates), log
        self.current = next(c for c in self.all if c.opened is not None)
        self.num_failed_openings = 0
        self._opener: threading.Thread | None = None
        # Of the same thread again: a finalizer may call `stop` in the midst of anything.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def opened(self) -> Opened:
        """Of the current one."""
        assert self.current.opened is not None
        return self.current.opened

    def fall_back(self, error: Exception) -> bool:
        """To the next place after the current one failed; False if there is none."""
        failed = self.current
        left = self.all[self.all.index(failed) + 1 :]
        other = next((c for c in left if c.opened is not None), None)
        if other is None:
            return False
        failed.breaker.failed()
        self.current = other
        self._log(
            f"the draft on the {failed.name.upper()} failed ({error}); it goes on on the "
            f"{other.name.upper()}, and the {failed.name.upper()} is tried again later"
        )
        return True

    def reopen_what_is_due(self, is_back: Callable[[Candidate], None]) -> None:
        """Opens a better place than the current one if its time has come, and tells `is_back`; in a
        thread of its own, since a device that failed may hang.
        """
        better = self.all[: self.all.index(self.current)]
        due = next((c for c in better if c.reopen is not None and c.breaker.is_due), None)
        with self._lock:
            is_busy = self._opener is not None and self._opener.is_alive()
            if due is None or is_busy or self._is_closed:
                return
            self._opener = threading.Thread(
                target=self._reopen, args=(due, is_back), name="headrace-npu", daemon=True
            )
            try:
                self._opener.start()
            except RuntimeError:  # no thread to be had now
                self._failed_to_open(due)

    def _reopen(self, candidate: Candidate, is_back: Callable[[Candidate], None]) -> None:
        assert candidate.reopen is not None
        try:
            candidate.close()
            opened = candidate.reopen()
        except Exception:  # noqa: BLE001  that it failed was said once; this only takes longer
            self._failed_to_open(candidate)
            return
        with self._lock:
            candidate.opened, is_wanted = opened, not self._is_closed
            # Not when it is taken back: until then it would be due, and be opened again.
            candidate.breaker.works()
        if is_wanted:
            is_back(candidate)
        else:
            candidate.close()

    def _failed_to_open(self, candidate: Candidate) -> None:
        self.num_failed_openings += 1
        candidate.breaker.failed()

    def take_back(self, candidate: Candidate) -> None:
        """It drafts again."""
        self.current = candidate
        self._log(f"the draft is back on the {candidate.name.upper()}")

    def stop(self, timeout_s: float) -> None:
        """Opens nothing any more, and waits for what is being opened. May be called by the thread
        that opens, which then closes what it has opened.
        """
        with self._lock:
            self._is_closed, opener = True, self._opener
        if opener is not None and opener.is_alive() and opener is not threading.current_thread():
            opener.join(timeout=timeout_s)

    def close(self) -> None:
        """May be called again; nobody may be using them."""
        for candidate in self.all:
            candidate.close()
