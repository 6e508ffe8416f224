"""In-line or deferred drafting: which of them is faster here."""

from __future__ import annotations

import threading


class DeferChoice:
    """In-line or deferred: `on`, `off`, or by what gives more tokens a second, measured in turns."""

    _PHASE = 16
    """Proposals before it is thought about again."""
    _EVERY = 8
    """Phases of the better mode to one of the other."""

    def __init__(self, defer: str) -> None:
        self._fixed = {"on": True, "off": False}.get(defer)
        self._speeds: dict[bool, float] = {}
        self._is_deferred = True
        self._lock = threading.Lock()
        self._tokens = self._seconds = 0.0
        self._proposals = self._phases = 0

    @property
    def is_deferred(self) -> bool:
        return self._is_deferred if self._fixed is None else self._fixed

    def __str__(self) -> str:
        """The mode, and the speeds that it was chosen by."""
        mode = "deferred" if self.is_deferred else "in-line"
        if self._fixed is not None:
            return mode
        speeds = ", ".join(
            f"{'deferred' if kind else 'in-line'} {speed:.1f} tokens/s"
            for kind, speed in sorted(self._speeds.items())
        )
        return f"{mode} ({speeds or 'nothing measured yet'})"

    def note(self, num_tokens: int, seconds: float) -> None:
        """What a proposal, and its pass, gave."""
        if self._fixed is None:
            with self._lock:
                self._note(num_tokens, seconds)

    def _note(self, num_tokens: int, seconds: float) -> None:
        self._tokens += num_tokens
        self._seconds += seconds
        self._proposals += 1
        if self._proposals < self._PHASE:
            return
        speed, mode = self._tokens / self._seconds, self._is_deferred
        self._speeds[mode] = speed if mode not in self._speeds else (self._speeds[mode] + speed) / 2
        self._tokens = self._seconds = 0.0
        self._proposals, self._phases = 0, self._phases + 1
        better = max(self._speeds, key=self._speeds.__getitem__)
        is_other_due = len(self._speeds) < 2 or self._phases % self._EVERY == 0
        self._is_deferred = (not better) if is_other_due else better
