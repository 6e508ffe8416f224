"""What settings are good for: sessions and windows that fit, and settings that would."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.models.config import ModelConfig
from headrace.runtime.bill import Bill, Facts, Limit, bill
from headrace.runtime.blocks import BLOCK_TOKENS, blocks_for
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.ring import DEFAULT_SINKS, DEFAULT_UNIT, RingLayout
from headrace.sizes import Bytes

_CTX_STEP = 64
"""Contexts that are tried as a remedy."""


@dataclass(frozen=True)
class Wish:
    """What is asked of a plan. Raises UsageError."""

    sessions: int | None = None
    window: int | None = None
    """Tokens of a stream's window; None asks about sessions that end when the context is full."""
    sinks: int = DEFAULT_SINKS
    unit: int = DEFAULT_UNIT

    def __post_init__(self) -> None:
        if self.sessions is not None and self.sessions < 1:
            raise UsageError(f"sessions: got {self.sessions}, allowed are 1 and more")

    def ring(self, window: int) -> RingLayout:
        return RingLayout(self.sinks, window, self.unit)


@dataclass(frozen=True)
class Plan:
    """A bill for settled settings, and what they are good for."""

    config: RuntimeConfig
    """With ctx and pool as proposed, where they were not given."""
    bill: Bill
    ctx: int
    """Tokens that a lane holds."""
    session_blocks: int
    """Blocks that one session may come to hold."""
    pool_blocks: int
    wanted_sessions: int | None
    max_sessions: int
    """Sessions that fit when the pool takes all that remains, or has the size that was given."""
    largest_window: int | None
    """Of as many streams as were wished for, else one a lane; None where not even one unit fits."""
    remedies: tuple[str, ...]
    """Flags of which each alone would make a bill fit that does not."""

    @property
    def num_sessions(self) -> int:
        """That the pool holds at their fullest."""
        return self.pool_blocks // self.session_blocks

    @property
    def shortfall(self) -> Bytes:
        return max(0, -self.bill.remaining)


def settle(model: ModelConfig, config: RuntimeConfig, wish: Wish) -> RuntimeConfig:
    """`config` with what it leaves open and the wish decides.

    Lanes as long as the window's ring, and a pool of as many sessions as are wished for (one a
    lane unless that is said). Raises UsageError if lanes or model cannot hold the ring.
    """
    if wish.window is not None:
        ring = wish.ring(wish.window)
        ring.require_fit(model.max_position, model.local_window)
        if config.ctx is None:
            config = dataclasses.replace(config, ctx=ring.capacity)
        elif ring.capacity > config.ctx:
            raise UsageError(
                f"window: sinks {ring.sinks} + window {ring.window} + unit {ring.unit} are "
                f"{ring.capacity} tokens, and a lane of --ctx {config.ctx} does not hold them; "
                f"use --ctx {ring.capacity} or a smaller window"
            )
    if config.pool is None and (wish.sessions or wish.window):
        num_blocks = (wish.sessions or config.lanes) * session_blocks(model, config, wish)
        config = dataclasses.replace(config, pool=num_blocks * BLOCK_TOKENS)
    return config


def session_blocks(model: ModelConfig, config: RuntimeConfig, wish: Wish) -> int:
    """Blocks that one session reserves: a stream for its life, others at their fullest."""
    if wish.window is not None:
        return wish.ring(wish.window).num_blocks
    return blocks_for(config.capacity(model))


def plan(facts: Facts, config: RuntimeConfig, wish: Wish, limit: Limit) -> Plan:
    """Raises UsageError where the wish contradicts the settings or the model."""
    settled = settle(facts.config, config, wish)
    found = bill(facts, settled, limit)
    blocks = session_blocks(facts.config, settled, wish)
    pool_blocks = settled.pool_blocks(facts.config)
    most_blocks = pool_blocks
    if config.pool is None:
        most_blocks = max(0, pool_blocks + found.remaining // facts.block_bytes)
    return Plan(
        config=settled,
        bill=found,
        ctx=settled.capacity(facts.config),
        session_blocks=blocks,
        pool_blocks=pool_blocks,
        wanted_sessions=wish.sessions,
        max_sessions=most_blocks // blocks,
        largest_window=largest_window(facts, config, wish, limit),
        remedies=() if found.fits else _remedies(facts, config, wish, limit),
    )


def largest_window(facts: Facts, config: RuntimeConfig, wish: Wish, limit: Limit) -> int | None:
    """The longest window, in whole units, with which model, lanes, pool and memory suffice."""
    model, unit = facts.config, wish.unit
    most = model.max_position if config.ctx is None else min(config.ctx, model.max_position)
    windows = range(unit, max(unit, most - wish.sinks - unit + 1), unit)

    def is_beyond(window: int) -> bool:
        return not suffices(facts, config, dataclasses.replace(wish, window=window), limit)

    num_good = bisect.bisect_left(windows, True, key=is_beyond)
    if not num_good:
        return None
    window = windows[num_good - 1]
    return window if window >= (model.local_window or 0) else None


def suffices(facts: Facts, config: RuntimeConfig, wish: Wish, limit: Limit) -> bool:
    """Whether memory and pool do, for a window that model and lanes hold."""
    assert wish.window is not None
    ring = wish.ring(wish.window)
    ctx = config.ctx or ring.capacity
    num_blocks = (wish.sessions or config.lanes) * ring.num_blocks
    if config.pool is not None and num_blocks > config.pool_blocks(facts.config):
        return False
    pool = config.pool or num_blocks * BLOCK_TOKENS
    return bill(facts, dataclasses.replace(config, ctx=ctx, pool=pool), limit).fits


def _remedies(facts: Facts, config: RuntimeConfig, wish: Wish, limit: Limit) -> tuple[str, ...]:
    """The largest value of each flag with which all fits, the others as they are."""
    model = facts.config

    def fits(**changes: Any) -> bool:
        try:
            changed = settle(model, dataclasses.replace(config, **changes), wish)
        except UsageError:  # the window would no longer fit a lane
            return False
        return bill(facts, changed, limit).fits

    def largest(flag: str, values: range) -> str | None:
        num_good = bisect.bisect_left(values, True, key=lambda v: not fits(**{flag: v}))
        return f"--{flag} {values[num_good - 1]}" if num_good else None

    settled = settle(model, config, wish)
    found = [largest("lanes", range(1, config.lanes))]
    if wish.window is None:
        found.append(largest("ctx", range(_CTX_STEP, settled.capacity(model), _CTX_STEP)))
        if wish.sessions is None:
            least = session_blocks(model, settled, wish) * BLOCK_TOKENS
            most = settled.pool_blocks(model) * BLOCK_TOKENS
            found.append(largest("pool", range(least, most, BLOCK_TOKENS)))
    return tuple(remedy for remedy in found if remedy is not None)
