"""Which CPUs a model computes on: what a machine's files tell of its cores, and how to stay there.

A CPU is a logical one, by the number Linux gives it. CPUs of a process, and what ONNX Runtime sets
for its threads, are masks of the kernel (sched_setaffinity(2), cpuset(7)).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError

Cpus = tuple[int, ...]
"""Numbers of CPUs, rising and each once."""

CPUINFO = Path("/proc/cpuinfo")
SYSFS = Path("/sys/devices/system/cpu")

_FAST_SHARE = 0.75
"""Of the largest capacity. Clusters of the same core differ in clock, on an RK3588 by a few per
cent; its small cores have about 0.4."""

_SMALL_PARTS = frozenset({0xD03, 0xD04, 0xD05, 0xD46, 0xD80})
"""`CPU part` of Arm's in-order cores: Cortex-A53, A35, A55, A510 and A520."""

_ITEM = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class Placement:
    """Where a model computes, and on how many threads."""

    cpus: Cpus | None = None
    """Each thread may run on any of them; None does not pin."""
    threads: int | None = None
    """The calling one included; None is ONNX Runtime's choice, one a physical core."""

    def __post_init__(self) -> None:
        assert self.cpus is None or self.threads, "ONNX Runtime's choice knows nothing of our CPUs"

    def __str__(self) -> str:
        """`4@4-7`; fit for the name of a file."""
        where = "" if self.cpus is None else f"@{format_cpu_list(self.cpus)}"
        return f"{self.threads or 0}{where}"


ANYWHERE = Placement()
"""All of it is ONNX Runtime's choice."""


def parse_cpu_list(text: str) -> Cpus:
    """The CPUs of a list such as `4-7,0`. Raises UsageError."""
    cpus: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        numbers = match and range(int(match[1]), int(match[2] or match[1]) + 1)
        if not numbers:
            raise UsageError(f"got {text!r}, allowed are CPUs and rising ranges, such as 4-7,0")
        cpus.update(numbers)
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Collection[int]) -> str:
    """The shortest list that `parse_cpu_list` reads as `cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def allowed() -> Cpus:
    """CPUs that the calling thread may run on, and so may be pinned to by an ordinary user."""
    return tuple(sorted(os.sched_getaffinity(0)))


def require_allowed(cpus: Cpus) -> None:
    """Raises UsageError if some of `cpus` do not exist, or are kept from this process."""
    missing, usable = set(cpus) - set(allowed()), format_cpu_list(allowed())
    if missing:
        raise UsageError(
            f"got {format_cpu_list(cpus)}, but {format_cpu_list(missing)} cannot be used by this "
            f"process; choose from {usable}"
        )


def default_here(threads: int | None = None) -> Placement:
    """`default_placement` on this machine, for this process."""
    return default_placement(_read_cpuinfo(), allowed(), read_capacities(SYSFS), threads)


def _read_cpuinfo() -> str:
    """The text of CPUINFO, empty where there is none."""
    try:
        return CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def default_placement(
    cpuinfo: str, allowed: Cpus, capacities: Mapping[int, int], threads: int | None = None
) -> Placement:
    """Where a model computes on a machine, unless told; `threads` are those asked for, if any.

    On its fast cores, if it has slow ones too and the fast ones are enough for `threads`.
    """
    fast = fast_cores(cpuinfo, allowed, capacities)
    if fast is not None and (threads or 0) <= len(fast):
        return Placement(fast, threads or len(fast))
    if threads is None and set(_fields(cpuinfo)) - set(allowed):
        # ONNX Runtime would count all cores of the machine and pin threads to those, too, that
        # this process was to keep off.
        threads = len(one_per_core(cpuinfo, allowed))
    return Placement(threads=threads)


def beside(
    target: Placement, threads: int | None, cpus: Cpus | None, *, at_once: bool
) -> tuple[Placement, bool]:
    """Where a draft computes on this machine, and whether it takes turns with `target` there.

    With neither `threads` nor `cpus` set it is one thread of its own, if the target leaves a core to
    it or both shall compute `at_once` all the same; else it takes turns with the target, on as many
    threads.
    """
    draft = Placement(cpus, threads or 1)
    takes_turns = not at_once and shares_cores(target, draft, _read_cpuinfo(), allowed())
    if takes_turns and threads is None and cpus is None:
        draft = target
    return draft, takes_turns


def shares_cores(one: Placement, other: Placement, cpuinfo: str, allowed: Cpus) -> bool:
    """Whether two models that compute at once need more cores than there are for them."""
    core_of = _physical_cores(cpuinfo)
    ours, theirs = ({core_of(cpu) for cpu in p.cpus or allowed} for p in (one, other))
    num_cores = len(ours | theirs)
    return bool(ours & theirs) and sum(p.threads or num_cores for p in (one, other)) > num_cores


def fast_cores(cpuinfo: str, allowed: Cpus, capacities: Mapping[int, int]) -> Cpus | None:
    """The fast ones of `allowed`; None where nothing tells cores apart.

    Args:
        cpuinfo: the text of /proc/cpuinfo.
        capacities: each CPU's speed as the kernel has it, 1024 for the fastest.
    """
    most = max((capacities.get(cpu, 0) for cpu in allowed), default=0)
    parts = {cpu: _number(fields.get("CPU part")) for cpu, fields in _fields(cpuinfo).items()}
    found = (
        {cpu for cpu in allowed if capacities.get(cpu, most) < most * _FAST_SHARE},
        {cpu for cpu in allowed if parts.get(cpu) in _SMALL_PARTS},
    )
    for small in found:
        if 0 < len(small) < len(allowed):
            return tuple(cpu for cpu in allowed if cpu not in small)
    return None


def one_per_core(cpuinfo: str, allowed: Cpus) -> Cpus:
    """The first CPU of `allowed` on each physical core; all, where the text does not tell."""
    core_of, firsts = _physical_cores(cpuinfo), dict[object, int]()
    for cpu in allowed:
        firsts.setdefault(core_of(cpu), cpu)
    return tuple(firsts.values())


def _physical_cores(cpuinfo: str) -> Callable[[int], object]:
    """What all CPUs of one core have in common; the CPU itself, where the text does not tell."""
    fields = _fields(cpuinfo)

    def core_of(cpu: int) -> object:
        mine = fields.get(cpu, {})
        return (mine.get("physical id"), mine["core id"]) if "core id" in mine else cpu

    return core_of


def read_capacities(folder: Path) -> dict[int, int]:
    """`cpu_capacity` of the CPUs under `folder`, where the kernel tells."""
    capacities = {}
    for path in folder.glob("cpu[0-9]*/cpu_capacity"):
        with contextlib.suppress(OSError, ValueError):
            capacities[int(path.parent.name[3:])] = int(path.read_text(encoding="ascii"))
    return capacities


def affinity_option(placement: Placement) -> str | None:
    """The value of `session.intra_op_thread_affinities`; None where there is nothing to set.

    It has one entry for each thread but the calling one, and counts CPUs from 1
    (onnxruntime_session_options_config_keys.h).
    """
    if placement.cpus is None or placement.threads in (None, 1):
        return None
    # Not one CPU each: a thread would wait for whatever else runs there while others are free.
    entry = ",".join(str(cpu + 1) for cpu in placement.cpus)
    return ";".join([entry] * (placement.threads - 1))


@contextlib.contextmanager
def pinned(cpus: Cpus | None) -> Iterator[None]:
    """The calling thread runs on `cpus` only, until the end; None changes nothing.

    Where the kernel refuses, because those CPUs have gone since, the thread stays where it is:
    slower is better than a failed pass. Takes some microseconds.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _fields(cpuinfo: str) -> dict[int, dict[str, str]]:
    """The lines of /proc/cpuinfo by CPU."""
    by_cpu: dict[int, dict[str, str]] = {}
    for paragraph in cpuinfo.split("\n\n"):
        lines = (line.partition(":") for line in paragraph.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in lines}
        cpu = _number(fields.get("processor"))
        if cpu is not None:  # boards end with a paragraph about themselves
            by_cpu[cpu] = fields
    return by_cpu


def _number(text: str | None) -> int | None:
    """A number in decimal, or after 0x in hexadecimal; None for anything else."""
    try:
        return int(text or "", 0)
    except ValueError:
        return None
