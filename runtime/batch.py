"""What one pass over a model's weights is asked to do: rows of tokens, lane by lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LaneRows:
    """New rows of one lane. They are written to slots `past` .. `past + len(token_ids) - 1`.

    No rows at all is a lane that only rides along between two busy ones.
    """

    lane: int
    token_ids: I64
    """[n]"""
    positions: I64
    """[n] logical positions, what RoPE and local windows go by."""
    past: int
    """Slots in use before this pass; every row sees them and the rows before it."""
    wanted: tuple[int, ...] = ()
    """Rows (0 .. n-1) whose logits are wanted."""
    slot_positions: I64 | None = None
    """[past] logical positions of the slots in use; None where slot i holds position i."""
    hidden: npt.NDArray[np.bool_] | None = None
    """[n, m + n], True where row i must not see one of the last m slots before the pass, or an
    earlier row of it: the branches of a token tree."""
    exact: bool = True
    """Padded so that the bits do not depend on how rows are grouped (exactness.py)."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.positions)
        assert self.slot_positions is None or len(self.slot_positions) == self.past
        if self.hidden is not None:
            assert len(self.hidden) == len(self.token_ids) <= self.hidden.shape[1]
            assert self.hidden.shape[1] <= self.past + len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def chain(lane: int, token_ids: I64, past: int, wanted: tuple[int, ...] = ()) -> LaneRows:
    """Rows that continue a lane whose slots hold positions 0 .. past - 1."""
    return LaneRows(lane, token_ids, np.arange(past, past + len(token_ids)), past, wanted)
