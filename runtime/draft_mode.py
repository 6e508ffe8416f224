"""Whether and how the draft model is asked: whatever gives the most tokens a second here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import StrEnum


class DraftMode(StrEnum):
    """What becomes of the draft while the target computes, or whether there is any."""

    DEFERRED = "deferred"
    """It goes on while the target verifies."""
    IN_LINE = "in-line"
    """It waits for the verdict."""
    UNASKED = "not asked"
    """A draft may cost more than its steps: memory bandwidth, caches, and cores that the target's
    threads wait for."""


def modes_of(defer: str, *, takes_turns: bool) -> tuple[DraftMode, ...]:
    """To choose from: `defer` is `auto`, `on` or `off`; `takes_turns` where nothing is left to the
    draft while the target computes.
    """
    if defer == "auto":
        asked = [DraftMode.IN_LINE] if takes_turns else [DraftMode.DEFERRED, DraftMode.IN_LINE]
    else:
        asked = [DraftMode.DEFERRED if defer == "on" else DraftMode.IN_LINE]
    return (*asked, DraftMode.UNASKED)


class ModeChoice:
    """Takes the mode with the most tokens a second, measured in turns.

    Measured are the passes before which the draft promises something, in every mode, so that all
    see the same kind of text. Another mode than the one taken is tried after a while and held
    against what that gave just before; each time it is slower, it rests twice as long, and from the
    first time on as long as keeps trials within their budget.
    """

    _PHASE = 16
    """Passes before it is thought about again."""
    _STAKE = 0.25
    """Of a phase's time: a trial that has lost so much is over."""
    _BUDGET = 0.01
    """Of all time, what trials of a mode may lose."""
    _RESTS = 4, 64
    """Phases between trials of a mode, at first and at most."""

    def __init__(self, modes: Sequence[DraftMode]) -> None:
        """The first is taken until another one was tried."""
        self._taken = self._mode = modes[0]
        self._speed: float | None = None
        """Tokens a second in the mode that is taken, mostly of late."""
        self._phase_s = 0.0
        """What its last phase took."""
        self._shares: dict[DraftMode, float | None] = dict.fromkeys(modes)
        """What each mode gives of that; None if it was never tried."""
        self._tried: set[DraftMode] = set()
        """Modes whose share rests on a trial of theirs against the one that is taken."""
        self._rests = dict.fromkeys(modes, self._RESTS[0])
        self._due = dict.fromkeys(modes, 0)
        """Phase from which each is tried again."""
        self._lock = threading.Lock()
        self._phases = self._passes = 0
        self._tokens = self._seconds = 0.0

    @property
    def mode(self) -> DraftMode:
        """For the next pass."""
        return self._mode

    def __str__(self) -> str:
        """The mode that is taken, and what the others give of its speed."""
        if self._speed is None:
            return f"{self._taken}, nothing measured yet"
        others = [
            f"{mode} {share:.2f} of that"
            for mode, share in self._shares.items()
            if share is not None and mode is not self._taken
        ]
        return ", ".join([f"{self._taken}: {self._speed:.1f} tokens/s", *others])

    def note(self, mode: DraftMode, num_tokens: int, seconds: float) -> None:
        """What a pass in `mode` gave, the wait for its proposal included."""
        with self._lock:
            if mode is self._mode:  # else of a pass that began before it changed
                self._note(num_tokens, seconds)

    def _note(self, num_tokens: int, seconds: float) -> None:
        self._tokens += num_tokens
        self._seconds += seconds
        self._passes += 1
        trial = None if self._mode is self._taken else self._speed
        lost_s = 0.0 if trial is None else self._seconds - self._tokens / trial
        if self._passes < self._PHASE and lost_s <= self._STAKE * self._phase_s:
            return
        self._phases += 1
        speed = self._tokens / self._seconds
        if trial is not None:
            self._judge(speed / trial, lost_s / self._phase_s)
        else:
            self._speed = speed if self._speed is None else (self._speed + speed) / 2
            self._phase_s = self._seconds
        self._tokens = self._seconds = 0.0
        self._passes = 0
        due = [m for m in self._shares if m is not self._taken and self._phases >= self._due[m]]
        # between two trials the mode that is taken has a phase, which the next one is held against
        self._mode = due[0] if due and trial is None else self._taken

    def _judge(self, share: float, lost: float) -> None:
        """Of the mode that was tried, which has given this share of the other's speed, and lost so
        much of a phase's time by that.
        """
        assert self._speed is not None
        mode, first, most = self._mode, *self._RESTS
        before = self._shares[mode] if mode in self._tried else None
        share = share if before is None else (before + share) / 2
        self._tried.add(mode)
        if share <= 1:
            self._shares[mode] = share
            rest = min(most, max(self._rests[mode], round(lost / self._BUDGET)))
            self._due[mode] = self._phases + rest
            self._rests[mode] = min(most, 2 * self._rests[mode])
            return
        # the one that was taken is tried soon, lest chance has decided
        self._due[self._taken] = self._phases + first
        self._shares = {m: s and s / share for m, s in self._shares.items()}
        self._shares |= {self._taken: 1 / share, mode: 1.0}
        self._tried.clear()
        self._taken, self._speed, self._rests[mode] = mode, share * self._speed, first
        self._phase_s = self._seconds
