"""A request's use of the draft model: it asks the drafter, and waits as long as that is worth."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.runtime.draft_mode import DraftMode
from headrace.runtime.drafter import Ask, Drafter, Pays, Place
from headrace.runtime.guess import Guess, Guesser
from headrace.runtime.trace import span

_PATIENCE = 3.0
"""A request waits for this times what its proposal should take, and _GRACE_S."""
_GRACE_S = 0.01

_READ_AHEAD = 3.0
"""Steps of the draft; what takes longer to read is not waited for."""

_PAUSE_PASSES = 16
"""Passes without asking where all lanes of the draft were taken."""


class Drafting:
    """One request's use of the drafter. One thread at a time."""

    def __init__(
        self, drafter: Drafter, guesser: Guesser, tokens: Sequence[int], length: int
    ) -> None:
        """`tokens` are the last ones of a text of `length` tokens."""
        self._drafter, self._guesser, self._place = drafter, guesser, Place()
        self._tokens = list(tokens[-drafter.window :])
        self._length = length
        self._new: list[int] = []
        self.num_behind = len(self._tokens)
        """Tokens that the draft was not told of."""
        self._last: Ask | None = None
        self._passes_to_pause = 0
        self.read_s = 0.0
        """What `Ask.read_s` was of the last one that was in time."""
        self.waited_s = 0.0
        """Seconds in `ask` so far."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that have become output."""
        self._tokens = [*self._tokens, *token_ids][-self._drafter.window :]
        self._length += len(token_ids)
        self._new += token_ids
        self.num_behind += len(token_ids)

    @property
    def is_possible(self) -> bool:
        """Whether it can be asked now: it works, and does not owe an answer. Asked once a pass."""
        drafter = self._drafter
        if self._passes_to_pause:
            self._passes_to_pause -= 1
            return False
        drafter.notice_hang()
        return drafter.broken is None and (self._last is None or self._last.done.is_set())

    @property
    def num_unread(self) -> int:
        """Tokens that the draft has to read before it can say anything."""
        return min(self.num_behind, self._drafter.window)

    def ask(self, want: int, pays: Pays, mode: DraftMode) -> list[tuple[Guess, ...]] | None:
        """Guesses for each of the next places, up to `want`; none if it failed or is late.

        Ends early where another token no longer `pays`. None if it has to read first, which it does
        while the request goes on.
        """
        drafter = self._drafter
        reading_s = drafter.reading.of(self.num_unread)
        if reading_s > _READ_AHEAD * drafter.step_s and not drafter.takes_turns:
            self._submit(0, pays, DraftMode.IN_LINE)
            return None
        patience = _PATIENCE * (want * drafter.step_s + reading_s) + _GRACE_S
        start = time.perf_counter()
        ask = self._submit(want, pays, mode)
        with span(drafter.trace, "host", "wait"):
            is_done = ask.done.wait(patience)
        drafter.counts.late += not is_done
        waited_s = time.perf_counter() - start
        self.waited_s += waited_s
        self.read_s = ask.read_s if is_done else 0.0
        if is_done and ask.error is None and not ask.has_lane:
            self._passes_to_pause = _PAUSE_PASSES
            return []
        chain = ask.chain if is_done and ask.error is None else []
        # Catching up is not what a token costs.
        drafter.note_wait(max(0.0, waited_s - self.read_s), len(chain), mode)
        return chain

    def _submit(self, want: int, pays: Pays, mode: DraftMode) -> Ask:
        ask = Ask(
            self._place,
            self._guesser,
            self._tokens,
            self._length,
            self._new,
            want,
            pays,
            mode,
        )
        self._last, self._new, self.num_behind = ask, [], 0
        self._drafter.submit(ask)
        return ask

    def close(self) -> None:
        """Another request may have the lane."""
        self._place.is_free = True
