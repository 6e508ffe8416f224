"""The bill of memory, before anything is loaded: arithmetic over sizes that are known by then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import MemoryLimitError
from headrace.models.config import ModelConfig
from headrace.models.manifest import (
    DRAFT_DATA,
    NPU,
    NPU_EMBEDDINGS,
    NPU_IO,
    TARGET_DATA,
    TOKENIZER,
    Bundle,
)
from headrace.models.npu_io import NpuIo
from headrace.models.records import NpuRecord
from headrace.models.rope import RopeTable
from headrace.runtime import memory, overhead, prepare
from headrace.runtime.arena import ArenaShape
from headrace.runtime.blocks import BLOCK_TOKENS
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.draft import draft_capacity
from headrace.runtime.kv import PoolShape
from headrace.runtime.on_npu import may_have_npu
from headrace.runtime.ort import MAX_BINDINGS, MAX_ROWS, MAX_WANTED
from headrace.runtime.overhead import Overhead
from headrace.runtime.prior import DEFAULT_CAPACITY, INDEX_BYTES, capacity_for
from headrace.sizes import KIB, Bytes, show_size

Basis = Literal["exact", "measured", "estimated"]

_TOKENIZER_GROWTH = 12
"""Memory of a loaded tokenizer over the size of its file: 8 to 12 in five vocabularies."""

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
class DraftFacts:
    """What it needs to know of a bundle's draft."""

    config: ModelConfig
    kv: str
    overhead: Overhead


@dataclass(frozen=True)
class NpuFacts:
    """What it needs to know of a draft for the NPU."""

    weights: Bytes
    """Of the compiled file, which is copied to where the NPU reads it."""
    embeddings: Bytes
    lane: Bytes
    """Keys and values of one."""
    internal: Bytes
    """Between operators, all variants."""

    @classmethod
    def of(cls, bundle: Bundle, npu: NpuRecord) -> NpuFacts:
        files, io = bundle.manifest.files, NpuIo.load(bundle.file(NPU_IO))
        internal = sum(variant.internal_bytes for variant in npu.variants)
        return cls(files[NPU].size, files[NPU_EMBEDDINGS].size, io.lane_bytes, internal)


@dataclass(frozen=True)
class Facts:
    """What the bill needs to know of a bundle."""

    config: ModelConfig
    kv: str
    tokenizer_file: Bytes
    overhead: Overhead
    draft: DraftFacts | None = None
    npu: NpuFacts | None = None

    @classmethod
    def of(cls, bundle: Bundle, cache: Path) -> Facts:
        """Measured overhead if `bundle` was prepared on this machine in `cache`, else estimated."""
        manifest, draft = bundle.manifest, bundle.draft
        cost = _overhead(
            cache, bundle.target_identity(), manifest.config, manifest.files[TARGET_DATA].size
        )
        draft_facts, npu = None, None
        if draft is not None:
            size = manifest.files[DRAFT_DATA].size
            of_draft = _overhead(cache, bundle.draft_identity(), draft.config, size)
            draft_facts = DraftFacts(draft.config, draft.kv, of_draft)
            npu = None if draft.npu is None else NpuFacts.of(bundle, draft.npu)
        tokenizer = manifest.files[TOKENIZER].size
        return cls(manifest.config, manifest.kv, tokenizer, cost, draft_facts, npu)

    @property
    def block_bytes(self) -> Bytes:
        return PoolShape(self.config, self.kv, 1).block_bytes


def _overhead(cache: Path, identity: str, config: ModelConfig, weights_on_disk: Bytes) -> Overhead:
    folder = prepare.found(cache / "prepared", identity)
    measured = overhead.load(folder) if folder is not None else None
    return measured or overhead.estimate(config, weights_on_disk)


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
        Line("bindings", _bindings(facts.config, config.lanes), False, "estimated"),
        Line("Python", cost.python, False, known),
        Line("tokenizer", facts.tokenizer_file * _TOKENIZER_GROWTH, False, "estimated"),
    ]
    masks = _masks(facts.config, config, arena.slots, most_rows)
    if masks:
        lines.append(Line("masks", masks, False, "exact", f"{most_rows} rows x {arena.slots:,}"))
    if config.speculate != "off":
        lines += _speculation(facts, config)
    return Bill(tuple(lines), limit, config.mlock)


def _speculation(facts: Facts, config: RuntimeConfig) -> list[Line]:
    """Of the draft, if there is one, and of the indexes that are looked up."""
    own = capacity_for(2 * config.capacity(facts.config))
    indexes = (DEFAULT_CAPACITY + config.lanes * own) * INDEX_BYTES
    lines = [Line("lookup", indexes, False, "exact", f"{config.lanes} requests and one they share")]
    if facts.draft is None or config.draft_device == "none":
        return lines
    draft = facts.draft
    arena = ArenaShape(draft.config, draft.kv, config.lanes, draft_capacity(draft.config))
    known: Basis = "measured" if draft.overhead.is_measured else "estimated"
    activations = draft.overhead.activations(min(MAX_ROWS, arena.slots), arena.slots)
    beside = draft.overhead.session + activations + _bindings(draft.config, 1)
    beside += MAX_WANTED * draft.config.num_logits * 4
    return [
        *lines,
        Line("draft weights", draft.overhead.weights, True, known),
        Line("draft arena", arena.num_bytes, False, "exact", f"{config.lanes} x {arena.capacity}"),
        Line("draft session", beside, False, known, "with activations and logits"),
        *_on_npu(facts.npu, config),
    ]


def _on_npu(npu: NpuFacts | None, config: RuntimeConfig) -> list[Line]:
    """Of the draft on the NPU; the one on the CPU stands in for it."""
    if npu is None or not may_have_npu(config):
        return []
    kv = config.lanes * npu.lane
    return [
        Line("NPU embeddings", npu.embeddings, True, "exact"),
        Line("NPU weights", npu.weights + npu.internal, False, "estimated", "and its own memory"),
        Line("NPU keys, values", kv, False, "exact", f"{config.lanes} lanes"),
    ]


def _logits(config: ModelConfig) -> Bytes:
    """Where a pass writes them, and the copy that its caller reads."""
    return 2 * MAX_WANTED * config.vocab_size * 4


def _bindings(config: ModelConfig, lanes: int) -> Bytes:
    """Bindings of many shapes with their inputs, and the cosines that a stream comes to remember."""
    ropes = 2 if config.rope_local is not None else 1
    row_bytes = ropes * config.head_dim * 4 + 8
    one = 2 * config.num_layers * _BINDING_BYTES_PER_TENSOR + 8 * lanes * row_bytes
    remembered = RopeTable.BLOCK * RopeTable.MAX_BLOCKS
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
