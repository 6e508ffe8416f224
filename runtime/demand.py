"""Demand: how often texts want the draft, by which it is told what reading them costs."""

from __future__ import annotations

_MEMORY = 64.0
"""Passes after which an old one weighs 1/e of a new one."""

_GUESS = 4.0
"""Passes that the first guess is worth: that it is wanted before each, for one token and a half."""


class Demand:
    """Tokens from one pass that wants the draft to the next, of all requests together.

    A draft that was not asked for a while has to read what came in between. If it is wanted again
    after as long a while, that is part of the price each time; if it was wanted all along, and only
    just begins, it is paid once for all passes that it is going to be asked before. Threads may
    share it: it decides no text.
    """

    def __init__(self) -> None:
        self._tokens, self._wants = 1.5 * _GUESS, _GUESS

    def note(self, num_tokens: int, *, is_wanted: bool) -> None:
        """A pass that gave so many tokens, and whether the draft would have been worth its time
        if it had known the text.
        """
        fade = 1 - 1 / _MEMORY
        self._tokens = fade * self._tokens + num_tokens
        self._wants = fade * self._wants + is_wanted

    @property
    def gap(self) -> float:
        """Tokens, at least 1; infinite where it is never wanted."""
        return max(1.0, self._tokens / self._wants) if self._wants else float("inf")

    def rows_a_pass(self, num_unread: int, num_left: int) -> float:
        """Rows that a pass has to pay for, of `num_unread` tokens that the draft does not know, in
        a text that may become `num_left` tokens longer.
        """
        again = min(float(num_unread), self.gap)
        return again + (num_unread - again) / max(1.0, num_left / self.gap)
