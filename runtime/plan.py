"""The bill of memory, before anything is loaded: arithmetic over sizes that are known by then."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import MemoryLimitError, UsageError
from headrace.models.config import ModelConfig
from headrace.models.manifest import TARGET_DATA, TOKENIZER, Bundle
from headrace.models.rope import RopeTable
from headrace.runtime import memory, overhead, prepare
from headrace.runtime.arena import ArenaShape
from headrace.runtime.blocks import BLOCK_TOKENS, blocks_for
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.kv import PoolShape
from headrace.runtime.ort import MAX_BINDINGS, MAX_ROWS, MAX_WANTED
from headrace.runtime.overhead import Overhead
from headrace.runtime.ring import DEFAULT_SINKS, DEFAULT_UNIT, RingLayout
from headrace.sizes import KIB, Bytes, show_size

Basis = Literal["exact", "measured", "estimated"]

_TOKENIZER_GROWTH = 12
"""Memory of a loaded tokenizer over the size of its file: 8 to 12 in five vocabularies."""

_CTX_STEP = 64

_BINDING_BYTES_PER_TENSOR = KIB
"""What ONNX Runtime and Python keep for a tensor of keys or values in a binding; measured 0.8."""


@dataclass(frozen=True)
class Line:
    """An item of the bill."""

    name: str
    num_bytes: Bytes
    is_file: bool
    """File pages, which the kernel may drop and read again; or anonymous memory."""
    basis: Basis
    note: str = ""


@dataclass(frozen=True)
class Limit:
    """How much may be taken."""

    num_bytes: Bytes
    counts_files: bool
    """Against --ram everything counts; against what is available, file pages do not."""
    words: str

    @classmethod
    def of(cls, config: RuntimeConfig, own: Bytes) -> Limit:
        """By `--ram`, else by what is available now; `own` is a part of the bill taken already."""
        if config.ram is not None:
            words = f"--ram {show_size(config.ram)}"
            num_bytes, counts_files = config.ram, True
        else:
            words = "the memory available now"
            num_bytes, counts_files = memory.available() + own, False
        if config.reserve:
            words += f" less a reserve of {show_size(config.reserve)}"
        return cls(num_bytes - config.reserve, counts_files, words)


@dataclass(frozen=True)
class Bill:
    """What a model with these settings takes, item by item, and what there is for it."""

    lines: tuple[Line, ...]
    limit: Limit
    locks_weights: bool = False

    @property
    def file_pages(self) -> Bytes:
        return sum(line.num_bytes for line in self.lines if line.is_file)

    @property
    def anonymous(self) -> Bytes:
        return sum(line.num_bytes for line in self.lines if not line.is_file)

    @property
    def total(self) -> Bytes:
        return self.file_pages + self.anonymous

    @property
    def needed(self) -> Bytes:
        """What counts against the limit."""
        if self.limit.counts_files or self.locks_weights:
            return self.total
        return self.anonymous

    @property
    def remaining(self) -> Bytes:
        """Negative where it does not fit."""
        return self.limit.num_bytes - self.needed

    @property
    def fits(self) -> bool:
        return self.remaining >= 0

    def of(self, name: str) -> Bytes:
        return sum(line.num_bytes for line in self.lines if line.name == name)


@dataclass(frozen=True)
class Facts:
    """What the bill needs to know of a bundle."""

    config: ModelConfig
    kv: str
    tokenizer_file: Bytes
    overhead: Overhead

    @classmethod
    def of(cls, bundle: Bundle, cache: Path) -> Facts:
        """Measured overhead if `bundle` was prepared on this machine in `cache`, else estimated."""
        manifest = bundle.manifest
        folder = prepare.found(cache / "prepared", bundle.target_identity())
        measured = overhead.load(folder) if folder is not None else None
        return cls(
            manifest.config,
            manifest.kv,
            manifest.files[TOKENIZER].size,
            measured or overhead.estimate(manifest.config, manifest.files[TARGET_DATA].size),
        )

    @property
    def block_bytes(self) -> Bytes:
        return PoolShape(self.config, self.kv, 1).block_bytes


def bill(facts: Facts, config: RuntimeConfig, limit: Limit) -> Bill:
    """The bill of `config`. Raises UsageError if the model cannot have its context."""
    capacity, num_blocks = config.capacity(facts.config), config.pool_blocks(facts.config)
    arena = ArenaShape(facts.config, facts.kv, config.lanes, capacity)
    pool = PoolShape(facts.config, facts.kv, num_blocks)
    most_rows = min(MAX_ROWS, arena.slots)
    cost = facts.overhead
    known: Basis = "measured" if cost.is_measured else "estimated"
    lines = [
        Line("weights", cost.weights, True, known),
        Line("code", cost.libraries, True, known, "Python and its libraries"),
        Line("pool", pool.num_bytes, False, "exact", f"{num_blocks * BLOCK_TOKENS:,} tokens"),
        Line("arena", arena.num_bytes, False, "exact", f"{config.lanes} x {capacity:,} tokens"),
        Line("logits", _logits(facts.config), False, "exact", f"{MAX_WANTED} rows, twice"),
        Line("ONNX Runtime", cost.session, False, known, "its session"),
        Line(
            "activations",
            cost.activations(most_rows, arena.slots),
            False,
            known,
            f"a pass of {most_rows} rows",
        ),
        Line("bindings", _bindings(facts.config, config.lanes, arena.slots), False, "estimated"),
        Line("Python", cost.python, False, known),
        Line("tokenizer", facts.tokenizer_file * _TOKENIZER_GROWTH, False, "estimated"),
    ]
    masks = _masks(facts.config, config, arena.slots, most_rows)
    if masks:
        lines.append(Line("masks", masks, False, "exact", f"{most_rows} rows x {arena.slots:,}"))
    return Bill(tuple(lines), limit, config.mlock)


def _logits(config: ModelConfig) -> Bytes:
    """Where a pass writes them, and the copy that its caller reads."""
    return 2 * MAX_WANTED * config.vocab_size * 4


def _bindings(config: ModelConfig, lanes: int, slots: int) -> Bytes:
    """Bindings of many shapes with their inputs, and the remembered cosines."""
    ropes = 2 if config.rope_local is not None else 1
    row_bytes = ropes * config.head_dim * 4 + 8
    one = 2 * config.num_layers * _BINDING_BYTES_PER_TENSOR + 8 * lanes * row_bytes
    remembered = min(slots, RopeTable.BLOCK * RopeTable.MAX_BLOCKS)
    return MAX_BINDINGS * one + remembered * ropes * config.head_dim * 4


def _masks(model: ModelConfig, config: RuntimeConfig, slots: int, most_rows: int) -> Bytes:
    """Attention biases that hold something, at their largest; zeros take up nothing."""
    kinds = int(model.has_local_layers) + int(config.exactness == "tree")
    return kinds * most_rows * slots * 4


def require_memory(bundle: Bundle, config: RuntimeConfig, cache: Path) -> Bill:
    """The bill; raises MemoryLimitError, before anything is loaded, when there is not so much."""
    facts = Facts.of(bundle, cache)
    found = bill(facts, config, limit_here(facts, config))
    require_fit(found)
    return found


def limit_here(facts: Facts, config: RuntimeConfig) -> Limit:
    """What this process may take; the Python that it runs in is on the bill and taken already."""
    return Limit.of(config, min(memory.usage().rss_anon, facts.overhead.python))


def require_fit(found: Bill) -> None:
    """Raises MemoryLimitError with the figures when a bill is beyond its limit."""
    if found.fits:
        return
    limit = max(0, found.limit.num_bytes)
    files = f", {show_size(found.file_pages)} of them file pages" * (found.needed == found.total)
    raise MemoryLimitError(
        f"the model needs {show_size(found.needed)} with these settings{files}; "
        f"{found.limit.words} is {show_size(limit)}: {show_size(-found.remaining)} short; "
        "use a smaller --ctx, fewer --lanes or a smaller --pool"
    )


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
        ring.require_fit(
            model.max_position, model.sliding_window if model.has_local_layers else None
        )
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
    local = model.sliding_window if model.has_local_layers else None
    return window if local is None or window >= local else None


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
