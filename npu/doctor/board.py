"""What a board's files tell of it: `read_board` copies it into a frozen record and judges nothing.

A fact that cannot be read is None, an empty text or an empty tuple. Paths are those of the board.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.npu.doctor.access import Node, User, read_node, read_user
from headrace.npu.doctor.installed import Library, read_libraries
from headrace.npu.doctor.sysroot import Sysroot, elf_machine, one_line

_DRIVER_FILES = (
    "/sys/module/rknpu/version",
    "/proc/rknpu/version",
    "/sys/kernel/debug/rknpu/version",
)
"""The first is there where the kernel was built with it, and needs no rights; the last needs root."""

_DRIVER_LOGS = ("/var/log/dmesg", "/var/log/kern.log")

_NUMBER = r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}"
"""Of a version."""

_BIG_PART = 0xD0B
"""`CPU part` of Cortex-A76, the big core of an RK3588."""


@dataclass(frozen=True)
class Clock:
    """A clock that the kernel scales, in Hz."""

    folder: str
    governor: str
    now: int | None
    least: int | None
    most: int | None
    """The highest it may take."""
    top: int | None
    """The highest it could take."""


@dataclass(frozen=True)
class Cores:
    online: tuple[int, ...]
    present: tuple[int, ...]
    big: tuple[int, ...]
    """Those of `online` that are Cortex-A76."""
    capped: str
    """The kernel's parameter that leaves cores out, if there is one."""


@dataclass(frozen=True)
class Npu:
    """The kernel's side of the NPU."""

    device: str
    """Name of the platform device, such as fdab0000.npu."""
    driver: str
    """The driver that has taken it."""
    driver_version: str
    status: str
    """`status` of its node in the device tree."""
    has_rocket: bool
    """Whether the kernel has mainline's own driver for it."""
    nodes: tuple[Node, ...]
    """What the runtime opens."""
    render_nodes: tuple[str, ...]
    """Names of all there are, whosever they are."""
    missing_node: str
    """A device file that the kernel knows and /dev does not have."""
    has_iommu: bool | None

    @property
    def is_bound(self) -> bool:
        """Whether Rockchip's driver runs it."""
        return self.driver == "RKNPU" or bool(self.nodes or self.missing_node)


@dataclass(frozen=True)
class Heat:
    zone: str
    """The hottest."""
    degrees: float
    throttled: tuple[str, ...]
    """What is slowed down for it now."""


@dataclass(frozen=True)
class Board:
    """All facts."""

    model: str
    compatible: tuple[str, ...]
    kernel: str
    is_armbian: bool
    architecture: str | None
    user: User | None
    npu: Npu
    libraries: tuple[Library, ...]
    npu_clock: Clock | None
    ddr_clock: Clock | None
    cpu_clocks: tuple[Clock, ...]
    cores: Cores
    memory: dict[str, int]
    """/proc/meminfo in bytes."""
    swaps: tuple[str, ...]
    open_files: tuple[int, int] | None
    """The soft limit and the hard one."""
    heat: Heat | None

    @property
    def is_rk3588(self) -> bool:
        """RK3588S and the like included."""
        return any(name.startswith("rockchip,rk3588") for name in self.compatible)


def read_board(root: Path, library: Path | None = None) -> Board:
    """Reads what is below `root`; `library` is a path of this machine that stands for the search."""
    tree = Sysroot(root)
    clocks = [_devfreq(tree, f"/sys/class/devfreq/{n}") for n in tree.names("/sys/class/devfreq")]
    policies = [n for n in tree.names("/sys/devices/system/cpu/cpufreq") if n.startswith("policy")]
    return Board(
        model=_model(tree),
        compatible=tuple(map(one_line, _device_tree(tree, "compatible").split())),
        kernel=tree.line("/proc/sys/kernel/osrelease"),
        is_armbian=tree.exists("/etc/armbian-release"),
        architecture=_architecture(tree),
        user=read_user(tree),
        npu=_npu(tree),
        libraries=read_libraries(tree, library),
        npu_clock=next((c for c in clocks if c.folder.endswith(".npu")), None),
        ddr_clock=next((c for c in clocks if "dmc" in c.folder.rsplit("/", 1)[1]), None),
        cpu_clocks=tuple(_cpufreq(tree, f"/sys/devices/system/cpu/cpufreq/{n}") for n in policies),
        cores=_cores(tree),
        memory=_memory(tree),
        swaps=_swaps(tree),
        open_files=_open_files(tree),
        heat=_heat(tree),
    )


def _device_tree(tree: Sysroot, name: str) -> str:
    """A property, by either of the two paths."""
    for base in ("/proc/device-tree", "/sys/firmware/devicetree/base"):
        if text := tree.text(f"{base}/{name}"):
            return text
    return ""


def _model(tree: Sysroot) -> str:
    desktop = (tree.text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))
    return one_line(_device_tree(tree, "model") or " ".join(filter(None, desktop)))


def _architecture(tree: Sysroot) -> str | None:
    """Of the programs, which may have fewer bits than the kernel."""
    for program in ("/proc/self/exe", "/usr/bin/python3", "/bin/sh"):
        if machine := elf_machine(tree.resolve(program)):
            return machine
    return tree.line("/proc/sys/kernel/arch") or None


def _npu(tree: Sysroot) -> Npu:
    devices = "/sys/bus/platform/devices"
    device = next((n for n in tree.names(devices) if n.endswith(".npu")), "")
    address = device.partition(".")[0] or "fdab0000"
    nodes, missing = _nodes(tree)
    return Npu(
        device=device,
        driver=_driver(tree, f"{devices}/{device}") if device else "",
        driver_version=_driver_version(tree),
        status=one_line(_device_tree(tree, f"npu@{address}/status")),
        has_rocket=tree.exists("/sys/bus/platform/drivers/rocket")
        or tree.exists("/dev/accel/accel0"),
        nodes=nodes,
        render_nodes=tuple(n for n in tree.names("/dev/dri") if n.startswith("renderD")),
        missing_node=missing,
        has_iommu=_has_iommu(tree, f"{devices}/{device}") if device else None,
    )


def _has_iommu(tree: Sysroot, device: str) -> bool | None:
    if tree.exists(f"{device}/iommu_group"):
        return True
    status = _device_tree(tree, "iommu@fdab9000/status")
    return False if status or tree.exists("/sys/kernel/iommu_groups") else None


def _driver(tree: Sysroot, device: str) -> str:
    """Of a device in sysfs; empty if no driver has taken it."""
    found = re.search(r"^DRIVER=(\S+)$", tree.text(f"{device}/uevent"), re.MULTILINE)
    return found[1] if found else tree.real_name(f"{device}/driver")


def _driver_version(tree: Sysroot) -> str:
    for path in _DRIVER_FILES:
        if found := re.search(_NUMBER, tree.text(path)):
            return found[0]
    for path in _DRIVER_LOGS:
        if all_found := re.findall(f"Initialized rknpu ({_NUMBER})", tree.tail(path)):
            return str(all_found[-1])
    return ""


def _nodes(tree: Sysroot) -> tuple[tuple[Node, ...], str]:
    """The NPU's device files, and one that should be there and is not."""
    name = next((n for n in tree.names("/sys/class/drm") if _is_npus(tree, n)), "")
    path = f"/dev/dri/{name}" if name else ""
    if not path:
        links = (n for n in tree.names("/dev/dri/by-path") if n.endswith(".npu-render"))
        link = next(links, "")
        path = f"/dev/dri/{tree.real_name(f'/dev/dri/by-path/{link}')}" if link else ""
    if path:
        found = read_node(tree, path)
        return ((found,), "") if found else ((), path)
    if plain := read_node(tree, "/dev/rknpu"):
        # A driver built without DRM takes its memory from a heap.
        heaps = (read_node(tree, f"/dev/dma_heap/{n}") for n in tree.names("/dev/dma_heap"))
        return (plain, *filter(None, heaps)), ""
    return (), ""


def _is_npus(tree: Sysroot, name: str) -> bool:
    """Whether a render node in sysfs belongs to the NPU's driver."""
    if not re.fullmatch(r"renderD[0-9]+", name):
        return False
    device = f"/sys/class/drm/{name}/device"
    return _driver(tree, device) == "RKNPU" or tree.real_name(device).endswith(".npu")


def _devfreq(tree: Sysroot, folder: str) -> Clock:
    steps = re.findall(r"\b[0-9]{1,15}\b", tree.text(f"{folder}/available_frequencies"))
    most = tree.number(f"{folder}/max_freq")
    return Clock(
        folder,
        tree.line(f"{folder}/governor"),
        tree.number(f"{folder}/cur_freq"),
        tree.number(f"{folder}/min_freq"),
        most,
        max(map(int, steps), default=most),
    )


def _cpufreq(tree: Sysroot, folder: str) -> Clock:
    def hertz(name: str) -> int | None:
        value = tree.number(f"{folder}/{name}")
        return None if value is None else value * 1000

    return Clock(
        folder,
        tree.line(f"{folder}/scaling_governor"),
        hertz("scaling_cur_freq"),
        hertz("scaling_min_freq"),
        hertz("scaling_max_freq"),
        hertz("cpuinfo_max_freq"),
    )


def _cores(tree: Sysroot) -> Cores:
    parts = {}
    for paragraph in tree.text("/proc/cpuinfo").split("\n\n"):
        cpu = re.search(r"^processor\s*:\s*([0-9]{1,4})$", paragraph, re.MULTILINE)
        part = re.search(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", paragraph, re.MULTILINE)
        if cpu:
            parts[int(cpu[1])] = int(part[1], 16) if part else 0
    folder = "/sys/devices/system/cpu"
    online = _cpu_list(tree.text(f"{folder}/online")) or tuple(sorted(parts))
    capped = re.search(r"\b(?:max|nr_)cpus=\S+", tree.text("/proc/cmdline"))
    return Cores(
        online,
        _cpu_list(tree.text(f"{folder}/present")) or online,
        tuple(sorted(cpu for cpu, part in parts.items() if part == _BIG_PART)),
        one_line(capped[0]) if capped else "",
    )


def _cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a list such as `0-3,6`; what is no such list has none."""
    if not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", text):
        return ()
    cpus: set[int] = set()
    for item in text.split(","):
        first, _, last = item.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def _memory(tree: Sysroot) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB$", tree.text("/proc/meminfo"), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in lines}


def _swaps(tree: Sysroot) -> tuple[str, ...]:
    """Files and devices; the first line is a heading."""
    rows = (line.split() for line in tree.text("/proc/swaps").splitlines()[1:])
    return tuple(one_line(row[0]) for row in rows if row)


def _open_files(tree: Sysroot) -> tuple[int, int] | None:
    words = r"([0-9]{1,18}|unlimited)\s+([0-9]{1,18}|unlimited)\b"
    found = re.search(rf"^Max open files\s+{words}", tree.text("/proc/self/limits"), re.MULTILINE)
    if found is None:
        return None
    soft, hard = (1 << 30 if word == "unlimited" else int(word) for word in found.groups())
    return soft, hard


def _heat(tree: Sysroot) -> Heat | None:
    folder = "/sys/class/thermal"
    found, throttled = [], []
    for name in tree.names(folder):
        kind = tree.line(f"{folder}/{name}/type")
        reading = tree.number(f"{folder}/{name}/temp") or 0
        if name.startswith("thermal_zone") and 0 < reading < 200_000:
            found.append((reading / 1000, kind or name))
        # fans are cooling devices too, and no loss when they turn
        is_brake = re.search("cpufreq|devfreq", kind) is not None
        if is_brake and (tree.number(f"{folder}/{name}/cur_state") or 0) > 0:
            throttled.append(kind)
    if not found:
        return None
    degrees, zone = max(found)
    return Heat(zone, degrees, tuple(throttled))
