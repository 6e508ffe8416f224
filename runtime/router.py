"""Holds text back until it can no longer change: what could still become a stop string waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    """The first `depth` characters of `word`, a stop string."""

    word: str
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    shorter: _Node | None = None
    """The node of the longest proper suffix that is the start of a stop string."""
    stop: str | None = None
    """The longest stop string that these characters end with."""

    @property
    def prefix(self) -> str:
        return self.word[: self.depth]


class StopRouter:
    """Text in pieces in, text that is safe to show out, cut before the first stop string.

    First is the one that ends first; of those that end together, the longest. Time is linear in
    the text (Aho and Corasick, "Efficient string matching", CACM 1975).
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Stop strings are not empty."""
        self.stopped: str | None = None
        """The stop string that was found; later pieces are ignored."""
        self._root = self._node = _automaton(stops)

    def push(self, text: str) -> str:
        """The text that became safe with this piece; it may be empty."""
        if self.stopped is not None:
            return ""
        # What waits is always the node's prefix, so it needs no buffer.
        before = self._node
        for length, char in enumerate(text, 1):
            self._node = self._step(char)
            if self._node.stop is not None:
                self.stopped = self._node.stop
                return _joined(before, text, before.depth + length - len(self.stopped))
        return _joined(before, text, before.depth + len(text) - self._node.depth)

    def finish(self) -> str:
        """What still waits, once no more text will come."""
        rest = "" if self.stopped is not None else self._node.prefix
        self._node = self._root
        return rest

    def _step(self, char: str) -> _Node:
        node: _Node | None = self._node
        while node is not None:
            if char in node.next:
                return node.next[char]
            node = node.shorter
        return self._root


def _joined(waiting: _Node, text: str, length: int) -> str:
    """The first `length` characters of waiting + text, without building what is not returned."""
    return waiting.word[: min(length, waiting.depth)] + text[: max(length - waiting.depth, 0)]


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node("", 0)
    for stop in stops:
        assert stop
        node = root
        for depth, char in enumerate(stop, 1):
            node = node.next.setdefault(char, _Node(stop, depth))
        node.stop = stop
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            shorter = node.shorter
            while shorter is not None and char not in shorter.next:
                shorter = shorter.shorter
            child.shorter = root if shorter is None else shorter.next[char]
            child.stop = child.stop or child.shorter.stop
            queue.append(child)
    return root
