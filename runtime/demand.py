"""What a draft has to read before it can propose, and which pass has to pay for that."""

from __future__ import annotations

import math

from headrace.runtime.pace import PassCosts

_MEMORY = 32.0
"""Passes after which an old one weighs 1/e of a new one."""

_GUESS = 4.0
"""Passes that the first guess is worth: that it is wanted before each, for one token and a half."""

_MEASURED = 17
"""Rows of the widest pass that was measured before."""

_READ_SHARE = 0.3
"""Of the last long reading in what one is believed to take."""


class Reading:
    """Seconds that a draft takes to catch up with a text, beyond a pass for its last token."""

    def __init__(self, costs: PassCosts) -> None:
        self._first_s = costs.of(1)
        self._few_s = [costs.of(rows) for rows in range(_MEASURED + 1)]
        self._row_s = self._few_s[-1] / _MEASURED

    def of(self, num_tokens: float) -> float:
        """As measured for few tokens. Of many each is cheaper, by how much is learned."""
        if num_tokens > _MEASURED:
            return self._beyond(num_tokens * self._row_s)
        least = math.floor(num_tokens)
        low, high = self._few_s[least], self._few_s[math.ceil(num_tokens)]
        return self._beyond(low + (num_tokens - least) * (high - low))

    def noted(self, num_tokens: int, seconds: float) -> float:
        """The same of a pass that took so many seconds, by which it learns."""
        if num_tokens > _MEASURED:
            self._row_s += _READ_SHARE * (seconds / num_tokens - self._row_s)
        return self._beyond(seconds)

    def _beyond(self, seconds: float) -> float:
        return max(0.0, seconds - self._first_s)


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
        """Tokens, at least 1."""
        return max(1.0, self._tokens / self._wants)

    def price_s(self, reading: Reading, num_unread: int, num_left: int) -> float:
        """Seconds that a pass has to pay for `num_unread` tokens that the draft does not know, of a
        text that may become `num_left` tokens longer.
        """
        again = reading.of(min(float(num_unread), self.gap))
        return again + max(0.0, reading.of(num_unread) - again) / max(1.0, num_left / self.gap)
