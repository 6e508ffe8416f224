"""Settings of the runtime; the command line takes its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import UsageError
from headrace.models.config import ModelConfig
from headrace.runtime import cores
from headrace.runtime.blocks import blocks_for
from headrace.runtime.cores import Placement
from headrace.runtime.request import Exactness, Speculate, checked_speculate, one_of
from headrace.sizes import Bytes, parse_size

DEFAULT_CTX = 4096
MIN_CTX = 16
MAX_LANES = 64
MAX_POOL = 2**31
MAX_THREADS = 256

Defer = Literal["auto", "on", "off"]

DraftDevice = Literal["auto", "npu", "npu-lite", "cpu", "none"]
NpuCores = Literal["auto", "0", "1", "2", "0_1", "0_1_2"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a bundle is loaded. Raises UsageError for a value out of range.

    Sizes of memory may also be given as texts, `ram="4GiB"`.
    """

    ctx: int | None = None
    """Tokens a sequence can hold; unless set, the smaller of the trained context and 4,096."""
    lanes: int = 4
    """Sequences that can be in the arena at once; others wait their turn."""
    pool: int | None = None
    """Tokens that the pool of keys and values holds; unless set, as many as all lanes together."""
    prefix_cache: bool = True
    """Compute what prompts begin with only once, as long as the pool still holds it."""
    target_threads: int | None = None
    """Threads of the target's passes; unless set, one for each of --target-cpus, of a machine's
    fast cores or, where all are alike, of its physical cores."""
    target_cpus: str | None = None
    """CPUs that the target computes on (4-7); unless set, the fast cores where there are slow ones
    too, else any."""
    draft_threads: int | None = None
    """Threads of the draft's passes on the CPU; unless set, one, or as many as the target's where
    that leaves no core to the draft and both compute in turns."""
    draft_cpus: str | None = None
    """CPUs that the draft computes on (0-3); unless set, any, or the target's where both compute in
    turns."""
    draft_device: DraftDevice = "auto"
    """Where the bundle's draft runs: `auto` is the NPU if there is one and the bundle has a draft
    for it, else the CPU; `npu` insists, `npu-lite` goes through Rockchip's Python package, and `none`
    leaves the draft out."""
    npu_library: Path | None = None
    """The NPU's runtime library; unless set, the system's librknnrt.so."""
    npu_cores: NpuCores = "auto"
    """NPU cores that the draft may use."""
    exactness: Exactness = "exact"
    """`exact` promises the same bits however rows are grouped, and refuses models that cannot keep
    that; `tree` promises the distribution only, and may propose trees of tokens."""
    speculate: Speculate = "auto"
    """Tokens to propose for a pass, from what the text repeats and from the bundle's draft: `auto`
    goes by what pays on this machine, a number up to 16 proposes as many, `off` none."""
    defer: Defer = "auto"
    """Whether the draft goes on while the target verifies: `auto` takes what is faster here. With
    each of them it is left unasked where that is faster still."""
    prior: Path | None = None
    """A corpus whose continuations are proposed (`headrace prior build`)."""
    ram: Bytes | None = None
    """Memory that all of it may take, weights included (4GiB); unless set, what is available."""
    reserve: Bytes = 0
    """Memory to leave to other programs and the system (512MiB)."""
    mlock: bool = False
    """Keep the weights' pages resident."""
    cache: Path | None = None
    """Where prepared weights are kept; None is the project's cache folder."""

    def __post_init__(self) -> None:
        for name in ("ram", "reserve"):
            object.__setattr__(self, name, _size(name, getattr(self, name)))
        object.__setattr__(self, "speculate", checked_speculate(self.speculate))
        one_of("exactness", self.exactness, Exactness)
        one_of("defer", self.defer, Defer)
        one_of("draft_device", self.draft_device, DraftDevice)
        one_of("npu_cores", self.npu_cores, NpuCores)
        if self.npu_library is not None and self.draft_device in ("cpu", "none"):
            raise UsageError(
                f"npu_library: got one, but draft_device is {self.draft_device} and no NPU is used"
            )
        if self.prior is not None and self.speculate == "off":
            raise UsageError("prior: got one, but speculate is off and nothing is looked up")
        _check("lanes", self.lanes, 1, MAX_LANES)
        if self.pool is not None:
            _check("pool", self.pool, MIN_CTX, MAX_POOL)
        _check_cpus("target", self.target_cpus, self.target_threads)
        _check_cpus("draft", self.draft_cpus, self.draft_threads)

    def capacity(self, config: ModelConfig) -> int:
        """Tokens a lane holds; raises UsageError beyond what the model was trained for."""
        if self.ctx is None:
            return min(config.max_position, DEFAULT_CTX)
        _check("ctx", self.ctx, MIN_CTX, config.max_position, " (the model's trained context)")
        return self.ctx

    def pool_blocks(self, config: ModelConfig) -> int:
        """Blocks of the pool: whole ones that hold at least the tokens asked for."""
        return blocks_for(self.pool or self.lanes * self.capacity(config))

    def target_placement(self) -> Placement:
        """Where the target computes; asks the machine unless CPUs are listed."""
        if self.target_cpus is None:
            return cores.default_here(self.target_threads)
        cpus = cores.parse_cpu_list(self.target_cpus)
        return Placement(cpus, self.target_threads or len(cpus))

    @property
    def asks_of_draft(self) -> bool:
        """Whether something is set that only a draft could do."""
        placed = (self.draft_threads, self.draft_cpus, self.npu_library) != (None, None, None)
        return placed or self.defer == "on" or self.draft_device not in ("auto", "none")

    def draft_placement(self) -> tuple[Placement, bool]:
        """Where the draft computes, as long as it does so on the CPU, and whether it takes turns
        with the target there.
        """
        cpus = None if self.draft_cpus is None else cores.parse_cpu_list(self.draft_cpus)
        target = self.target_placement()
        return cores.beside(target, self.draft_threads, cpus, at_once=self.defer == "on")


def _check_cpus(model: str, listed: object, threads: int | None) -> None:
    if threads is not None:
        _check(f"{model}_threads", threads, 1, MAX_THREADS)
    if listed is None:
        return
    try:
        if not isinstance(listed, str):
            raise UsageError(f"got {listed!r}, allowed is a text such as '4-7,0'")
        cpus = cores.parse_cpu_list(listed)
        cores.require_allowed(cpus)
    except UsageError as error:
        raise UsageError(f"{model}_cpus: {error}") from None
    if threads is not None and threads > len(cpus):
        raise UsageError(
            f"{model}_threads: got {threads}, but {model}_cpus {listed} are {len(cpus)}; "
            "use fewer threads or list more CPUs"
        )


def _check(name: str, value: object, low: int, high: int, note: str = "") -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    if not good:
        raise UsageError(f"{name}: got {value!r}, allowed are {low} to {high}{note}")


def _size(name: str, value: object) -> Bytes | None:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    if value is None and name == "ram":
        return None
    _check(name, value, 0, 2**50, " bytes, or a text such as 4GiB")
    assert isinstance(value, int)
    return value
