"""How an export tells of its progress."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Hears of long work as it goes on."""

    def stage(self, title: str, steps: int | None = None) -> None:
        """Something that takes `steps` calls of `advance`, or an unknown time, begins."""
        ...

    def advance(self) -> None: ...


class Silent:
    """A Reporter that says nothing."""

    def stage(self, title: str, steps: int | None = None) -> None:
        """See Reporter."""

    def advance(self) -> None:
        """See Reporter."""
