"""The ring of a streaming lane: which slot holds which token, as arithmetic on a token count.

Attention sinks and a window of recent tokens, as in StreamingLLM (Xiao et al., 2023), with a tail
in which new tokens wait until it is full:

      0 ······ S ······················ S+W ······ S+W+E
      │ sinks  │         ring           │   tail   │ spare slots for padding

While the lane grows, token p goes to slot p. The tail is full for the first time when S+W+E tokens
are committed. A full tail overwrites the E oldest slots of the ring, and is empty again. A token's
home is where it is then: slot p for a sink, else S + (p - S) mod W.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import UsageError
from headrace.runtime.blocks import BLOCK_TOKENS, blocks_for

I64 = npt.NDArray[np.int64]

DEFAULT_SINKS = 64
DEFAULT_UNIT = 64


@dataclass(frozen=True)
class RingLayout:
    """Sizes of a streaming lane's regions, in tokens. Raises UsageError for the rule it breaks."""

    sinks: int
    window: int
    unit: int = DEFAULT_UNIT
    """Tokens that are evicted at once; the tail's size."""

    def __post_init__(self) -> None:
        for name, size in (("sinks", self.sinks), ("unit", self.unit), ("window", self.window)):
            _require_blocks(name, size)
        if self.window % self.unit:
            raise UsageError(
                f"window {self.window} is not a multiple of the eviction unit, {self.unit}; "
                f"use {_neighbours(self.window, self.unit)}"
            )

    @classmethod
    def filling(
        cls,
        lane_capacity: int,
        *,
        sinks: int | None = None,
        window: int | None = None,
        unit: int | None = None,
        system_prompt_len: int = 0,
    ) -> RingLayout:
        """The sizes given; of the others, sinks for the system prompt, at least 64, a unit of 64,
        and the largest window that a lane has room for, at least a unit. Raises UsageError.
        """
        if sinks is None:
            sinks = max(DEFAULT_SINKS, blocks_for(system_prompt_len) * BLOCK_TOKENS)
        if unit is None:
            unit = DEFAULT_UNIT
        if window is None:
            _require_blocks("sinks", sinks)
            _require_blocks("unit", unit)
            window = max(unit, (lane_capacity - sinks - unit) // unit * unit)
        return cls(sinks, window, unit)

    @property
    def capacity(self) -> int:
        """Slots of sinks, ring and tail: what the lane must hold, spare slots apart."""
        return self.sinks + self.window + self.unit

    @property
    def num_blocks(self) -> int:
        """The most blocks a stream's table ever has."""
        return self.capacity // BLOCK_TOKENS

    @property
    def tail_start(self) -> int:
        return self.sinks + self.window

    @property
    def num_indexable_blocks(self) -> int:
        """Blocks of a stream that lie wholly before its first eviction.

        Keys and values of later ones depend on what was evicted, so the prefix cache must not see
        them.
        """
        return self.capacity // BLOCK_TOKENS

    def require_fit(
        self,
        trained_context: int,
        local_window: int | None = None,
        system_prompt_len: int = 0,
    ) -> None:
        """Raises UsageError unless the model and its system prompt can live in this layout.

        Args:
            trained_context: `ModelConfig.max_position`.
            local_window: `ModelConfig.local_window`.
            system_prompt_len: tokens that must never be evicted.
        """
        if self.capacity > trained_context:
            most = (trained_context - self.sinks - self.unit) // self.unit * self.unit
            remedy = (
                f"use a window of at most {most}"
                if most > 0
                else "use fewer sinks or a smaller unit"
            )
            raise UsageError(
                f"sinks {self.sinks} + window {self.window} + unit {self.unit} are "
                f"{self.capacity} tokens, beyond the model's trained context of "
                f"{trained_context}; {remedy}"
            )
        if local_window is not None and self.window < local_window:
            least = -(-local_window // self.unit) * self.unit
            raise UsageError(
                f"window {self.window} is below the {local_window} tokens that the model's local "
                f"layers see; use at least {least}"
            )
        if self.sinks < system_prompt_len:
            raise UsageError(
                f"sinks {self.sinks} do not hold the system prompt's {system_prompt_len} tokens; "
                f"use at least {blocks_for(system_prompt_len) * BLOCK_TOKENS}"
            )

    def home(self, position: int) -> int:
        """The slot where token `position` is once the tail was moved."""
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.window


def _require_blocks(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise UsageError(f"{name}: got {size!r}, allowed is a whole number of tokens")
    if size < BLOCK_TOKENS:
        raise UsageError(f"{name} {size}: a stream needs at least one block, {BLOCK_TOKENS} tokens")
    if size % BLOCK_TOKENS:
        raise UsageError(
            f"{name} {size} is not a multiple of {BLOCK_TOKENS}, the tokens of a block; "
            f"use {_neighbours(size, BLOCK_TOKENS)}"
        )


def _neighbours(size: int, multiple: int) -> str:
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def entries(slots: range) -> range:
    """Entries of the block table that hold any of `slots`."""
    return range(slots.start // BLOCK_TOKENS, blocks_for(slots.stop))


@dataclass(frozen=True)
class Eviction:
    """What moves when the tail is full: E rows in the lane, E / 16 ids in the table."""

    source: range
    """The tail's slots."""
    destination: range
    """The oldest slots of the ring, as many; each is the home of the token it gets."""
    evicted: range
    """Positions of the tokens that are gone."""
    sink_shift: int
    """`RingState.sink_shift` from now on: the sinks must be rotated to it."""

    @property
    def source_entries(self) -> range:
        return entries(self.source)

    @property
    def destination_entries(self) -> range:
        return entries(self.destination)


@dataclass(frozen=True)
class RingState:
    """Where everything is after `num_tokens` committed tokens; token p is the stream's p-th."""

    layout: RingLayout
    num_tokens: int = 0

    @property
    def num_evictions(self) -> int:
        return max(0, self.num_tokens - self.layout.tail_start) // self.layout.unit

    @property
    def num_evicted(self) -> int:
        """Tokens that are gone: S .. S + num_evicted - 1."""
        return self.num_evictions * self.layout.unit

    @property
    def num_slots(self) -> int:
        """Slots in use, from 0 on without gaps: the `past` of the next pass."""
        return self.num_tokens - self.num_evicted

    @property
    def room(self) -> int:
        """The most rows the next pass may have, at least one: it must not cross an eviction."""
        return self.layout.capacity - self.num_slots

    @property
    def sink_shift(self) -> int:
        """How far the sinks were moved: sink i is rotated to position i + sink_shift.

        So they stay directly before the window, at the distances that the model was trained on.
        """
        return self.num_evicted

    @property
    def num_indexable_blocks(self) -> int:
        """Blocks of the stream so far, counted from its start, that the prefix cache may index.

        Once something was evicted the table no longer has all of them: what was not indexed
        before `BlockTable.evict` cannot be any more.
        """
        return min(self.num_tokens // BLOCK_TOKENS, self.layout.num_indexable_blocks)

    def new_slots(self, num_rows: int) -> range:
        """Slots of the next pass's rows, proposals included; none is in use. At most `room`."""
        assert 0 <= num_rows <= self.room, f"{num_rows} rows, room for {self.room}"
        return range(self.num_slots, self.num_slots + num_rows)

    def new_positions(self, num_rows: int) -> range:
        """Positions of the next pass's rows."""
        return range(self.num_tokens, self.num_tokens + num_rows)

    def commit(self, num_rows: int) -> tuple[RingState, Eviction | None]:
        """The state after the first `num_rows` of a pass became context, at most `room`.

        Returns:
            the new state, and the eviction that must be carried out before it is true.
        """
        assert 0 <= num_rows <= self.room, f"{num_rows} rows, room for {self.room}"
        after = RingState(self.layout, self.num_tokens + num_rows)
        if after.num_evictions == self.num_evictions:
            return after, None
        oldest = self.layout.sinks + self.num_evicted
        destination = self.layout.home(oldest)
        unit = self.layout.unit
        return after, Eviction(
            source=range(self.layout.tail_start, self.layout.capacity),
            destination=range(destination, destination + unit),
            evicted=range(oldest, oldest + unit),
            sink_shift=after.sink_shift,
        )

    def slot_of(self, position: int) -> int | None:
        """Where token `position` is; None when it was evicted."""
        assert 0 <= position < self.num_tokens
        oldest = self.layout.sinks + self.num_evicted
        if self.layout.sinks <= position < oldest:
            return None
        if position < oldest + self.layout.window:
            return self.layout.home(position)
        return position - self.num_evicted

    def slot_tokens(self) -> I64:
        """[num_slots] which token each slot in use holds."""
        tokens = np.arange(self.num_slots, dtype=np.int64)
        sinks, window, gone = self.layout.sinks, self.layout.window, self.num_evicted
        if gone:
            ring = np.arange(window, dtype=np.int64)  # slots from the ring's start
            tokens[sinks : sinks + window] = sinks + gone + (ring - gone) % window
            tokens[sinks + window :] += gone
        return tokens

    def slot_positions(self) -> I64:
        """[num_slots] the position each slot's key is rotated to: `LaneRows.slot_positions`.

        As `slot_tokens`, but for the sinks, which move.
        """
        positions = self.slot_tokens()
        positions[: self.layout.sinks] += self.sink_shift
        return positions
