"""The draft model's side of speculation: a text in a lane, and behind it tokens that may come.

Nothing here has to be exact, since the target decides. So a draft keeps a small window of its own
(ring.py), is caught up in one go after it was not asked for a while, and skips the middle of a text
that is longer than its window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.models.config import ModelConfig
from headrace.models.vocab_map import NO_TOKEN, VocabMap
from headrace.runtime.arena import KV
from headrace.runtime.backend import LaneBackend
from headrace.runtime.batch import F32, I64, LaneRows
from headrace.runtime.blocks import BLOCK_TOKENS
from headrace.runtime.guess import Guess, Guesser, Head
from headrace.runtime.kv import SinkRotation
from headrace.runtime.ring import RingLayout, RingState

MAX_NODES = 48
"""Tokens that may come, in one lane."""

_SINKS, _UNIT, _WINDOW = 16, 64, 448


def draft_layout(config: ModelConfig) -> RingLayout:
    """Its window: at least what its local layers see, at most what it was trained on."""
    window = max(_WINDOW, config.local_window or 0)
    window = min(
        -(-window // _UNIT) * _UNIT, (config.max_position - _SINKS - _UNIT) // _UNIT * _UNIT
    )
    if window >= _UNIT:
        return RingLayout(_SINKS, window, _UNIT)
    small = (config.max_position - 2 * BLOCK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    return RingLayout(BLOCK_TOKENS, max(BLOCK_TOKENS, small), BLOCK_TOKENS)


def draft_capacity(config: ModelConfig) -> int:
    """Tokens that a lane of the draft's arena must hold."""
    return draft_layout(config).capacity + MAX_NODES


@dataclass(eq=False)
class Node:
    """A computed token that may come. Its slot is the lane's `num_slots` plus its index."""

    token_id: int
    parent: int
    """Index of the node before it; -1 for the root, the text's last token."""
    depth: int
    """0 for the root."""
    reach: float
    """Probability to become text."""
    guesses: tuple[Guess, ...] = ()


class DraftModel:
    """A backend with the map to the target's tokens."""

    def __init__(
        self,
        backend: LaneBackend,
        config: ModelConfig,
        kv: str,
        vocab_map: VocabMap,
        layout: RingLayout,
    ) -> None:
        """A lane of the backend holds `layout`, and nodes in what it has beyond."""
        self.backend, self.config, self.layout = backend, config, layout
        self.max_nodes = backend.facts.capacity - layout.capacity
        self.rotation = SinkRotation(config, kv)
        self.pass_began: float | None = None
        """When the pass that is running began."""
        self.head = Head.of(vocab_map)
        known = vocab_map.to_draft[vocab_map.to_draft != NO_TOKEN]
        self._ids = np.where(vocab_map.to_draft == NO_TOKEN, known[-1], vocab_map.to_draft)

    def read(self, token_ids: Sequence[int]) -> I64:
        """The target's tokens as the draft's. One that it does not have is replaced by some other:
        that costs accepted proposals and nothing else.
        """
        return self._ids[np.array(token_ids, np.int64)].astype(np.int64)

    def forward(self, rows: LaneRows) -> F32:
        """A pass of one lane."""
        self.pass_began = time.perf_counter()
        try:
            return self.backend.forward([rows])
        finally:
            self.pass_began = None

    def close(self) -> None:
        """May be called again."""
        self.backend.close()


@dataclass(eq=False)
class DraftLane:
    """One text in a lane. All but its last token are committed; that one is the root."""

    model: DraftModel
    lane: int
    guesser: Guesser | None = None
    state: RingState = field(init=False)
    sinks: KV | None = None
    """Keys and values of the sinks as they were computed, from the first eviction on."""
    nodes: list[Node] = field(default_factory=list)
    """Parents before children; the first is the root, unless there are none."""
    length: int = 0
    """Committed tokens of the text; the draft may have skipped some of them."""
    kept: list[int] = field(default_factory=list)
    """The last of those."""
    num_true: int = 0
    """Nodes that became text."""

    def __post_init__(self) -> None:
        self.state = RingState(self.model.layout)

    # following the text

    def agrees(self, tokens: Sequence[int], length: int) -> bool:
        """Whether its text is a beginning of one of `length` tokens that ends with `tokens`."""
        start = length - len(tokens)
        first = max(start, self.length - len(self.kept))
        if not first <= self.length < length:
            return False
        mine = self.kept[len(self.kept) - (self.length - first) :]
        return bool(self.length) and mine == list(tokens[first - start : self.length - start])

    def begin(self, guesser: Guesser) -> None:
        """Another request on the same text."""
        self.guesser = guesser
        self.nodes.clear()

    def restart(self) -> None:
        self.state, self.length, self.sinks = RingState(self.model.layout), 0, None
        self.nodes.clear()
        self.kept.clear()

    def follow(self, tokens: Sequence[int], length: int) -> int:
        """Makes the text one of `length` tokens that ends with `tokens`, and its last the root.

        What was computed and came true is kept, the rest dropped, in one move. Returns the rows
        that had to be computed.
        """
        num_new = length - self.length
        if num_new > min(len(tokens), self.state.layout.window):
            # Its window alone would be left of them.
            self.restart()
            num_new = min(len(tokens), self.state.layout.window)
        new = list(tokens[len(tokens) - num_new :])
        path = self._matched(new)
        self.num_true += max(0, len(path) - 1)
        is_computed = len(path) == len(new)
        committed, survivors = (path[:-1], self._below(path[-1])) if is_computed else (path, [])
        self._reorganise(committed, survivors)
        self.length = length - 1
        self.kept = [*self.kept, *new[:-1]][-self.state.layout.capacity :]
        if not is_computed:
            self._feed(new[len(path) :])
        return 0 if is_computed else len(new) - len(path)

    def _matched(self, new: Sequence[int]) -> list[int]:
        """Nodes along `new`, as far as they were computed."""
        path: list[int] = []
        for token_id in new:
            node = self.child(path[-1] if path else -1, token_id)
            if node is None:
                break
            path.append(node)
        return path

    def _below(self, node: int) -> list[int]:
        """The node and all that stand behind it, in order."""
        found = {node}
        for i, n in enumerate(self.nodes):
            if n.parent in found:
                found.add(i)
        return sorted(found)

    def _reorganise(self, path: Sequence[int], survivors: Sequence[int]) -> None:
        """Commits the nodes of `path`; the subtree of `survivors` stands behind them."""
        base = self.state.num_slots
        keep = [*path, *survivors]
        self.model.backend.arena.gather(self.lane, [base + i for i in keep], base)
        place = {old: new for new, old in enumerate(survivors)}
        reached = self.nodes[survivors[0]].reach if survivors else 1.0
        depth = self.nodes[survivors[0]].depth if survivors else 0
        self.nodes = [
            Node(n.token_id, place.get(n.parent, -1), n.depth - depth, n.reach / reached, n.guesses)
            for n in (self.nodes[i] for i in survivors)
        ]
        self._commit(len(path))

    def _commit(self, num_rows: int) -> None:
        """The rows behind the committed ones become committed; nodes follow them."""
        arena, layout = self.model.backend.arena, self.state.layout
        left = num_rows
        while left:
            step = min(left, self.state.room)
            after, eviction = self.state.commit(step)
            left -= step
            if eviction is not None:
                if self.sinks is None:
                    self.sinks = arena.read(self.lane, 0, layout.sinks)
                arena.move(self.lane, eviction.source, eviction.destination)
                # From the pristine copy each time: roundings would add up.
                keys = self.model.rotation.shifted(self.sinks[0], eviction.sink_shift)
                arena.write(self.lane, 0, np.stack([keys, self.sinks[1].astype(keys.dtype)]))
                behind = range(layout.capacity, layout.capacity + left + len(self.nodes))
                arena.gather(self.lane, behind, layout.tail_start)
            self.state = after

    def _feed(self, new: Sequence[int]) -> None:
        """Computes tokens of the text; the last becomes the root. There are no nodes."""
        while True:
            most = min(self.state.room, self.model.backend.facts.max_rows)
            chunk, new = new[:most], new[most:]
            logits = self._forward(chunk, range(1, 1 + len(chunk)), None, not new)
            if not new:
                break
            self._commit(len(chunk))
        self._commit(len(chunk) - 1)
        self.nodes = [Node(chunk[-1], -1, 0, 1.0)]
        self._guess(0, logits[0])

    # what may come

    @property
    def num_free(self) -> int:
        """Nodes that it has room for."""
        return self.model.max_nodes - len(self.nodes)

    def path(self, node: int) -> list[int]:
        """Tokens from behind the root to `node`."""
        tokens: list[int] = []
        while self.nodes[node].parent != -1:
            tokens.append(self.nodes[node].token_id)
            node = self.nodes[node].parent
        return tokens[::-1]

    def child(self, node: int, token_id: int) -> int | None:
        """The node that was computed for a token behind `node`; the root is behind -1."""
        for i, n in enumerate(self.nodes):
            if n.parent == node and n.token_id == token_id:
                return i
        return None

    def compute(self, wanted: Sequence[tuple[int, Guess, float]]) -> None:
        """One pass that makes nodes of guesses: (node they stand behind, guess, its reach)."""
        first = len(self.nodes)
        assert first + len(wanted) <= self.model.max_nodes
        for parent, guess, reach in wanted:
            depth = self.nodes[parent].depth + 1
            self.nodes.append(Node(guess.token_id, parent, depth, reach))
        new = self.nodes[first:]
        try:
            logits = self._forward(
                [n.token_id for n in new], [1 + n.depth for n in new], self._hidden(first), True
            )
            for i in range(first, len(self.nodes)):
                self._guess(i, logits[i - first])
        except BaseException:
            del self.nodes[first:]
            raise

    def _hidden(self, first: int) -> np.ndarray | None:
        """[new, nodes] True where a new node must not see one that is not before it."""
        if all(n.parent == i - 1 for i, n in enumerate(self.nodes)):
            return None
        hidden = np.ones((len(self.nodes) - first, len(self.nodes)), np.bool_)
        for row in range(len(hidden)):
            node = first + row
            while node != -1:
                hidden[row, node] = False
                node = self.nodes[node].parent
        return hidden

    def _forward(
        self,
        token_ids: Sequence[int],
        offsets: Sequence[int],
        hidden: np.ndarray | None,
        is_last_wanted: bool,
    ) -> F32:
        """Logits of a pass behind committed tokens and nodes; `offsets` are from the last committed
        token. Of a text the last row's, of nodes all rows'.
        """
        state, num_nodes = self.state, len(self.nodes)
        is_text = num_nodes == 0
        num_before = num_nodes if is_text else num_nodes - len(token_ids)
        wanted: tuple[int, ...] = ()
        if is_last_wanted:
            wanted = (len(token_ids) - 1,) if is_text else tuple(range(len(token_ids)))
        positions = state.num_tokens - 1 + np.array(offsets, np.int64)
        slot_positions = None
        if state.num_evictions:
            depths = [n.depth for n in self.nodes[:num_before]]
            behind = state.num_tokens + np.array(depths, np.int64)
            slot_positions = np.concatenate([state.slot_positions(), behind])
        rows = LaneRows(
            self.lane,
            self.model.read(token_ids),
            positions,
            state.num_slots + num_before,
            wanted,
            slot_positions,
            hidden,
            exact=False,
        )
        return self.model.forward(rows)

    def _guess(self, node: int, logits: F32) -> None:
        assert self.guesser is not None
        path = self.path(node)
        # The root is the text's last token, at `length`; what is guessed comes behind it.
        position = self.length + len(path) + 1
        self.nodes[node].guesses = self.guesser.guess(logits, position, path)


def frontier(lane: DraftLane) -> Iterator[tuple[int, Guess, int]]:
    """(node, guess, its rank) of every guess that was not computed yet."""
    for i, node in enumerate(lane.nodes):
        for rank, guess in enumerate(node.guesses):
            if lane.child(i, guess.token_id) is None:
                yield i, guess, rank
