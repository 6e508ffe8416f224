"""Laws of the examination: what each fact of a board's files leads to, on captured trees."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import CommandLine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from npu_bundles import with_npu
from tiny_checkpoints import TINY
from tiny_pairs import pair

from headrace.errors import BundleError
from headrace.models.npu_io import NativeTensor, NpuGeometry, NpuIo, NpuVariant
from headrace.npu.doctor.access import Node, User, may_use
from headrace.npu.doctor.board import read_board
from headrace.npu.doctor.examine import Finding, Needs, examine, worst
from headrace.npu.doctor.sysroot import Sysroot
from headrace.paths import NPU_LIBRARY_FOLDERS

GENERAL = Needs()
NPU, DMC = "/sys/class/devfreq/fdab0000.npu", "/sys/class/devfreq/dmc"
NODE, DEVICE = "/dev/dri/renderD129", "/sys/bus/platform/devices/fdab0000.npu"
POLICIES = {0: 1_800_000, 4: 2_400_000, 6: 2_352_000}
ZONES = ("soc", "bigcore0", "bigcore1", "littlecore", "center", "gpu", "npu")
IS_ROOT = os.geteuid() == 0
GID = 4242 if IS_ROOT else os.getgid()
"""Of device files; only root can give them a group of its own."""

STRANGER = os.getuid() + 4711
"""Files of a test belong to who runs it; the user whom a tree tells of is somebody else."""


class Tree:
    """A small copy of a board's file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, content: str | bytes | int, mode: int | None = None) -> Tree:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else f"{content}\n".encode()
        place.write_bytes(data)
        if mode is not None:
            place.chmod(mode)
            if IS_ROOT:
                os.chown(place, -1, GID)
        return self

    def link(self, path: str, target: str) -> Tree:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
        return self

    def remove(self, path: str) -> Tree:
        place = self.root / path.lstrip("/")
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
        return self

    def examine(self, needs: Needs = GENERAL) -> dict[str, Finding]:
        findings = examine(self.root, needs)
        named = {finding.name: finding for finding in findings}
        assert len(named) == len(findings)
        for finding in findings:
            assert (finding.found + (finding.remedy or "")).isprintable()
        return named

    def status(self, name: str, needs: Needs = GENERAL) -> str:
        return self.examine(needs)[name].status


def elf(machine: int, content: bytes = b"") -> bytes:
    return b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + bytes([machine, 0]) + content


def library(version: str, machine: int = 183) -> bytes:
    banner = f"\0librknnrt version: {version} (429f97ae6b@2025-04-09T09:09:27)\0".encode()
    return elf(machine, bytes(3000) + banner + bytes(100))


def cpuinfo(*parts: int) -> str:
    return "\n".join(
        f"processor\t: {cpu}\nBogoMIPS\t: 48.00\nCPU architecture: 8\nCPU part\t: {part:#x}\n"
        for cpu, part in enumerate(parts)
    )


def devfreq(tree: Tree, folder: str, governor: str, now: int, *steps: int) -> None:
    tree.write(f"{folder}/governor", governor).write(f"{folder}/cur_freq", now)
    tree.write(f"{folder}/min_freq", min(steps)).write(f"{folder}/max_freq", max(steps))
    tree.write(f"{folder}/available_frequencies", " ".join(map(str, steps)))


def machine(tree: Tree, governor: str, degrees: int) -> None:
    """What is no business of the NPU's: cores, clocks, memory, limits."""
    tree.write("/proc/cpuinfo", cpuinfo(*[0xD05] * 4, *[0xD0B] * 4))
    tree.write("/sys/devices/system/cpu/online", "0-7")
    tree.write("/sys/devices/system/cpu/present", "0-7")
    for policy, top in POLICIES.items():
        folder = f"/sys/devices/system/cpu/cpufreq/policy{policy}"
        now = top if governor == "performance" else 408_000
        tree.write(f"{folder}/scaling_governor", governor).write(f"{folder}/scaling_cur_freq", now)
        tree.write(f"{folder}/scaling_min_freq", 408_000).write(f"{folder}/scaling_max_freq", top)
        tree.write(f"{folder}/cpuinfo_max_freq", top)
    meminfo(tree)
    tree.write("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 1 0 100")
    limits(tree, "65536", "1048576")
    for number, zone in enumerate(ZONES):
        tree.write(f"/sys/class/thermal/thermal_zone{number}/type", f"{zone}-thermal")
        tree.write(f"/sys/class/thermal/thermal_zone{number}/temp", (degrees - number) * 1000)
    for number, kind in enumerate(("cpufreq-cpu0", "cpufreq-cpu4", "devfreq-fb000000.gpu")):
        tree.write(f"/sys/class/thermal/cooling_device{number}/type", kind)
        tree.write(f"/sys/class/thermal/cooling_device{number}/cur_state", 0)


def meminfo(tree: Tree, total: int = 8_000_000, swap: int = 4_000_000, cma: int = 16_384) -> None:
    tree.write(
        "/proc/meminfo",
        f"MemTotal:  {total} kB\nMemFree:  900 kB\nMemAvailable:  {total * 3 // 4} kB\n"
        f"SwapTotal:  {swap} kB\nCmaTotal:  {cma} kB\nCmaFree:  {cma} kB",
    )


def limits(tree: Tree, soft: str, hard: str) -> None:
    tree.write(
        "/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max processes             30000                30000                processes \n"
        f"Max open files            {soft:21}{hard:21}files     ",
    )


def user(tree: Tree, *gids: int, uid: int = STRANGER, listed: str = "") -> None:
    tree.write(
        "/proc/self/status",
        f"Name:\tpython3\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
        f"Groups:\t{' '.join(map(str, gids))} ",
    )
    tree.write("/etc/passwd", f"root:x:0:0:root:/root:/bin/bash\nplant:x:{uid}:{uid}::/home/plant:")
    tree.write("/etc/group", f"root:x:0:\nrender:x:{GID}:{listed}\nvideo:x:44:plant")


def board(tree: Tree, model: str, driver: str, kernel: str) -> None:
    tree.link("/proc/device-tree", "/sys/firmware/devicetree/base")
    tree.write("/sys/firmware/devicetree/base/model", model.encode() + b"\0")
    tree.write(
        "/sys/firmware/devicetree/base/compatible", b"xunlong,some-board\0rockchip,rk3588s\0"
    )
    tree.write("/sys/firmware/devicetree/base/npu@fdab0000/status", b"okay\0")
    tree.write("/sys/firmware/devicetree/base/iommu@fdab9000/status", b"okay\0")
    tree.write("/proc/sys/kernel/osrelease", kernel)
    tree.write("/usr/bin/python3", elf(183))
    tree.write("/sys/module/rknpu/version", driver)
    uevent = "DRIVER=RKNPU\nOF_NAME=npu\nOF_COMPATIBLE_0=rockchip,rk3588-rknpu"
    tree.write(f"{DEVICE}/uevent", uevent)
    tree.write("/sys/kernel/iommu_groups/0/type", "DMA")
    tree.link(f"{DEVICE}/iommu_group", "/sys/kernel/iommu_groups/0")
    display = "/sys/bus/platform/devices/display-subsystem"
    tree.write(f"{display}/uevent", "DRIVER=rockchip-drm\nOF_NAME=display-subsystem")
    tree.link("/sys/class/drm/renderD128/device", f"../../..{display.removeprefix('/sys')}")
    tree.link("/sys/class/drm/renderD129/device", DEVICE)
    tree.write("/dev/dri/renderD128", "", 0o666)
    tree.write(NODE, "", 0o660)


def orange_pi(root: Path) -> Tree:
    """An Orange Pi 5 in good order."""
    tree = Tree(root)
    board(tree, "Orange Pi 5", "0.9.8", "6.1.84-vendor-rk35xx")
    user(tree, 44, GID)
    tree.link("/lib", "usr/lib").write("/usr/lib/librknnrt.so", library("2.5.0"))
    machine(tree, "performance", 48)
    devfreq(tree, NPU, "performance", 10**9, 300_000_000, 10**9)
    devfreq(tree, DMC, "performance", 2_112_000_000, 528_000_000, 2_112_000_000)
    return tree


def rock(root: Path) -> Tree:
    """A Rock 5B as its image leaves it: old driver, no library, clocks that follow the load."""
    tree = Tree(root)
    board(tree, "Radxa ROCK 5B", "0.9.2", "5.10.110-39-rockchip")
    user(tree, 44, GID)
    machine(tree, "ondemand", 41)
    limits(tree, "1024", "1048576")
    devfreq(tree, NPU, "rknpu_ondemand", 300_000_000, 300_000_000, 10**9)
    devfreq(tree, DMC, "dmc_ondemand", 528_000_000, 528_000_000, 2_112_000_000)
    return tree


def pc(root: Path) -> Tree:
    tree = Tree(root)
    tree.write("/sys/class/dmi/id/sys_vendor", "ACME").write("/sys/class/dmi/id/product_name", "X1")
    tree.write("/proc/sys/kernel/osrelease", "6.12.9-amd64").write("/bin/sh", elf(62))
    machine(tree, "powersave", 90)
    meminfo(tree, swap=0)
    return tree


@pytest.fixture
def good(tmp_path: Path) -> Tree:
    return orange_pi(tmp_path / "board")


def statuses(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.status for name, finding in findings.items()}


def test_a_board_in_good_order_passes(good: Tree) -> None:
    found = good.examine()
    assert set(statuses(found).values()) == {"pass"}, found
    assert worst(list(found.values())) == "pass"
    assert list(found) == [
        "board", "kernel", "architecture", "NPU driver", "NPU device", "NPU IOMMU", "CMA",
        "NPU library", "NPU clock", "DDR clock", "CPU clocks", "big cores", "memory", "swap",
        "open files", "temperature",
    ]  # fmt: skip
    assert found["board"].found == "Orange Pi 5"
    assert "renderD129" in found["NPU device"].found


def test_a_board_as_its_image_leaves_it(tmp_path: Path) -> None:
    found = rock(tmp_path).examine()
    wrong = {name: status for name, status in statuses(found).items() if status != "pass"}
    assert wrong == {
        "NPU driver": "fail",
        "NPU library": "fail",
        "NPU clock": "warn",
        "DDR clock": "warn",
        "CPU clocks": "warn",
        "open files": "warn",
    }
    assert found["NPU clock"].remedy == f"echo performance | sudo tee {NPU}/governor"
    assert "policy*/scaling_governor" in str(found["CPU clocks"].remedy)
    assert "airockchip/rknn-toolkit2" in str(found["NPU library"].remedy)


def test_a_pc_is_told_so_in_one_line(tmp_path: Path) -> None:
    found = pc(tmp_path).examine()
    assert statuses(found) == {
        "board": "warn",
        "kernel": "pass",
        "architecture": "pass",
        "memory": "pass",
    }
    assert found["board"].found.startswith("ACME X1 is no RK3588")


def test_another_board_fails_nothing(good: Tree) -> None:
    good.write("/sys/firmware/devicetree/base/compatible", b"raspberrypi,5\0brcm,bcm2712\0")
    assert "fail" not in statuses(good.examine()).values()
    good.write("/usr/bin/python3", elf(40))
    meminfo(good, total=900_000)
    assert "fail" not in statuses(good.examine(replace(GENERAL, npu_bytes=1 << 40))).values()


@pytest.mark.parametrize(
    ("kernel", "status"),
    [
        ("5.10.160", "pass"),
        ("6.1.115-vendor-rk35xx", "pass"),
        ("6.12.8-edge", "warn"),
        ("6.10.1", "warn"),
        ("", "warn"),
        ("weird", "warn"),
    ],
)
def test_kernels_with_a_driver(good: Tree, kernel: str, status: str) -> None:
    assert good.write("/proc/sys/kernel/osrelease", kernel).status("kernel") == status


def without_driver(tree: Tree) -> Tree:
    tree.remove("/sys/module").remove(f"{DEVICE}/uevent").remove("/dev/dri").remove(
        "/sys/class/drm"
    )
    return tree.write("/proc/sys/kernel/osrelease", "6.18.1-current-rockchip64")


def test_mainline_has_no_driver(good: Tree) -> None:
    found = without_driver(good).examine()
    assert [n for n, status in statuses(found).items() if status == "fail"] == [
        "kernel",
        "NPU driver",
    ]
    assert not {"NPU device", "NPU IOMMU", "CMA", "NPU clock"} & set(found), "the same once more"
    assert "docs/board.md" in str(found["NPU driver"].remedy)
    good.write("/etc/armbian-release", "BRANCH=current")
    assert "linux-image-vendor-rk35xx" in str(good.examine()["NPU driver"].remedy)
    good.write("/sys/bus/platform/drivers/rocket/bind", "")
    assert "rocket" in good.examine()["NPU driver"].found
    good.write("/sys/firmware/devicetree/base/npu@fdab0000/status", b"disabled\0")
    assert "disabled" in good.examine()["NPU driver"].found
    good.write("/sys/firmware/devicetree/base/npu@fdab0000/status", b"okay\0")
    good.remove("/sys/bus/platform/drivers/rocket").write("/sys/module/rknpu/version", "0.9.8")
    assert "has not taken" in good.examine()["NPU driver"].found


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.9.10", "pass"),
        ("0.10.0", "pass"),
        ("1.0.0", "pass"),
        ("0.9.8", "pass"),
        ("0.9.7", "warn"),
        ("0.9.6", "warn"),
        ("0.9.5", "fail"),
        ("0.8.2", "fail"),
    ],
)
def test_driver_versions_compare_as_numbers(good: Tree, version: str, status: str) -> None:
    assert good.write("/sys/module/rknpu/version", version).status("NPU driver") == status


def test_the_drivers_version_is_looked_for(good: Tree) -> None:
    good.remove("/sys/module")
    found = good.examine()["NPU driver"]
    assert found.status == "warn"
    assert found.remedy == "sudo cat /sys/kernel/debug/rknpu/version"
    line = "[drm] Initialized rknpu {} 20240828 for fdab0000.npu on minor 1\n"
    good.write("/var/log/dmesg", line.format("0.8.2") + line.format("0.9.8"))
    assert good.examine()["NPU driver"].found == "rknpu 0.9.8"
    good.write("/sys/kernel/debug/rknpu/version", "RKNPU driver: v0.9.7")
    assert good.examine()["NPU driver"].found.startswith("rknpu 0.9.7")
    good.write("/etc/armbian-release", "BRANCH=vendor")
    assert "linux-image-vendor-rk35xx" in str(good.examine()["NPU driver"].remedy)


def test_architectures(good: Tree) -> None:
    assert good.write("/usr/bin/python3", elf(40)).status("architecture") == "fail"
    good.remove("/usr/bin/python3")
    assert good.status("architecture") == "warn"
    assert good.write("/proc/sys/kernel/arch", "aarch64").status("architecture") == "pass"
    good.write("/opt/bin/python3.11", elf(183)).link("/proc/self/exe", "/opt/bin/python3.11")
    assert good.write("/proc/sys/kernel/arch", "armv7l").status("architecture") == "pass"


def test_rights_are_those_of_the_mode_bits() -> None:
    node = Node(NODE, 0o660, uid=0, gid=105, group="render", users=(1002,))
    rights = {
        0: True,  # root
        1000: True,  # a member
        1001: False,
        1002: True,  # by the access control list
    }
    for uid, may in rights.items():
        gids = frozenset({uid, 105} if uid == 1000 else {uid})
        assert may_use(node, User(uid, "", gids, frozenset())) == may, uid
    owner = User(7, "", frozenset({105}), frozenset())
    assert not may_use(replace(node, mode=0o060, uid=7), owner), "an owner is no member"
    assert not may_use(replace(node, mode=0o640), User(8, "", frozenset({105}), frozenset()))


def test_a_user_outside_the_group_is_told_how_to_get_in(good: Tree) -> None:
    user(good, 44)
    found = good.examine()["NPU device"]
    assert found.status == "fail"
    assert "usermod -aG render plant" in str(found.remedy)
    user(good, 44, listed="else,plant")
    found = good.examine()["NPU device"]
    assert "log out and in again" in str(found.remedy)
    user(good, 44)
    good.write(NODE, "", 0o600)
    assert "/etc/udev/rules.d/" in str(good.examine()["NPU device"].remedy)
    assert good.write(NODE, "", 0o666).status("NPU device") == "pass"
    good.write(NODE, "", 0o600)
    user(good, uid=0)
    assert good.status("NPU device") == "pass"


def test_an_unknown_user(good: Tree) -> None:
    good.remove("/proc/self/status")
    assert good.status("NPU device") == "warn"
    assert good.write(NODE, "", 0o666).status("NPU device") == "pass"


def test_device_files_that_are_not_there(good: Tree) -> None:
    good.remove(NODE)
    found = good.examine()["NPU device"]
    assert found.status == "fail"
    assert NODE in found.found
    good.remove("/sys/class/drm/renderD129")
    assert good.status("NPU device") == "warn", "another's render node is no NPU"
    good.remove("/dev/dri")
    assert good.status("NPU device") == "fail"


def test_other_ways_to_tell_the_npus_node(good: Tree) -> None:
    good.remove("/sys/class/drm/renderD129/device")
    good.link("/dev/dri/by-path/platform-fdab0000.npu-render", "../renderD129")
    assert good.status("NPU device") == "pass"
    good.remove("/dev/dri").write("/dev/rknpu", "", 0o660)
    assert good.status("NPU device") == "fail", "no heap"
    good.write("/dev/dma_heap/system", "", 0o600)
    assert "dma_heap" in str(good.examine()["NPU device"].remedy)
    assert good.write("/dev/dma_heap/cma", "", 0o660).status("NPU device") == "pass"


def test_iommu_and_cma(good: Tree) -> None:
    good.remove(f"{DEVICE}/iommu_group")
    good.write("/sys/firmware/devicetree/base/iommu@fdab9000/status", b"disabled\0")
    found = good.examine()
    assert (found["NPU IOMMU"].status, found["CMA"].status) == ("fail", "fail")
    assert "cma=256M" in str(found["CMA"].remedy)
    meminfo(good, cma=524_288)
    found = good.examine()
    assert (found["NPU IOMMU"].status, found["CMA"].status) == ("warn", "pass")
    found = good.examine(replace(GENERAL, npu_bytes=800 << 20))
    assert (found["NPU IOMMU"].status, found["CMA"].status) == ("fail", "fail")
    assert "cma=832M" in str(found["CMA"].remedy)
    good.remove("/sys/firmware/devicetree/base/iommu@fdab9000").remove("/sys/kernel/iommu_groups")
    assert good.status("NPU IOMMU") == "warn"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.3.2", "fail"),
        ("2.4.9", "fail"),
        ("2.5.0", "pass"),
        ("2.5.10", "pass"),
        ("2.10.0", "pass"),
    ],
)
def test_a_runtime_is_as_new_as_the_drafts_compiler(good: Tree, version: str, status: str) -> None:
    good.write("/usr/lib/librknnrt.so", library(version))
    assert good.status("NPU library", Needs(library_version="2.5.0", platform="rk3588")) == status


def test_libraries(good: Tree, tmp_path: Path) -> None:
    path = "/usr/lib/librknnrt.so"
    assert good.write(path, library("1.5.2")).status("NPU library") == "fail"
    assert good.write(path, library("2.0.0b0")).status("NPU library") == "fail"
    assert good.write(path, library("2.5.0", 40)).status("NPU library") == "fail"
    assert good.write(path, elf(183, b"nothing")).status("NPU library") == "warn"
    assert good.write(path, "404: Not Found").status("NPU library") == "fail"
    own = tmp_path / "librknnrt.so"
    needs = replace(GENERAL, library=own)
    assert good.status("NPU library", needs) == "fail"
    own.write_bytes(library("2.3.2"))
    found = good.examine(needs)["NPU library"]
    assert found.status == "pass"
    assert str(own) in found.found


def test_two_libraries_are_too_many(good: Tree) -> None:
    good.write("/usr/local/lib/librknnrt.so", library("2.5.0"))
    assert good.status("NPU library") == "pass", "copies of one version"
    good.write("/usr/lib/librknnrt.so", library("2.3.2"))
    found = good.examine()["NPU library"]
    assert found.status == "warn"
    assert "/lib/librknnrt.so (2.3.2)" in found.found
    assert len(read_board(good.root).libraries) == 2, "/lib is /usr/lib"


def test_a_banner_across_pieces_is_found_whole(good: Tree) -> None:
    banner = b"librknnrt version: 2.13.12 (429f97ae6b)"
    for start in range((1 << 20) - len(banner), 1 << 20, 3):
        good.write("/usr/lib/librknnrt.so", elf(183, bytes(start - 20) + banner + bytes(50)))
        (found,) = read_board(good.root).libraries
        assert found.version == "2.13.12", start


def test_a_drafts_chip(good: Tree) -> None:
    assert good.status("draft", Needs(platform="rk3588")) == "pass"
    assert good.status("draft", Needs(platform="rk3576")) == "fail"


@pytest.mark.parametrize("folder", [NPU, DMC])
def test_clocks_that_the_kernel_scales(good: Tree, folder: str) -> None:
    name = "NPU clock" if folder == NPU else "DDR clock"
    top = 10**9 if folder == NPU else 2_112_000_000
    for governor in ("simple_ondemand", "rknpu_ondemand", "powersave", "", "userspace"):
        good.write(f"{folder}/governor", governor).write(f"{folder}/cur_freq", top // 2)
        found = good.examine()[name]
        assert found.status == "warn", governor
        assert found.remedy == f"echo performance | sudo tee {folder}/governor"
    good.write(f"{folder}/cur_freq", top)
    assert good.status(name) == "pass", "userspace, at the top"
    good.write(f"{folder}/governor", "simple_ondemand").write(f"{folder}/min_freq", top)
    assert good.status(name) == "pass", "it cannot go lower"
    good.write(f"{folder}/governor", "performance").write(f"{folder}/cur_freq", top // 2)
    assert "heat" in good.examine()[name].found
    good.write(f"{folder}/max_freq", top // 2)
    assert good.examine()[name].remedy == f"echo {top} | sudo tee {folder}/max_freq"
    good.remove(folder)
    assert good.status(name) == ("warn" if folder == NPU else "pass")


def test_cpu_clocks(good: Tree) -> None:
    folder = "/sys/devices/system/cpu/cpufreq"
    good.write(f"{folder}/policy6/scaling_max_freq", 1_200_000)
    found = good.examine()["CPU clocks"]
    assert found.status == "warn"
    assert found.remedy == f"echo 2352000 | sudo tee {folder}/policy6/scaling_max_freq"
    good.write(f"{folder}/policy0/scaling_governor", "schedutil")
    assert "scaling_governor && echo 2352000" in str(good.examine()["CPU clocks"].remedy)
    assert good.remove(folder).status("CPU clocks") == "warn"


def test_cores(good: Tree) -> None:
    good.write("/proc/cpuinfo", cpuinfo(*[0xD05] * 4, *[0xD0B] * 2))
    good.write("/sys/devices/system/cpu/online", "0-5")
    found = good.examine()["big cores"]
    assert found.status == "warn"
    assert str(found.remedy).endswith("cpu6/online /sys/devices/system/cpu/cpu7/online")
    good.write("/sys/devices/system/cpu/present", "0-5")
    assert "lscpu" in str(good.examine()["big cores"].remedy)
    good.write("/proc/cmdline", "root=/dev/mmcblk0p1 maxcpus=6 quiet")
    assert "maxcpus=6" in str(good.examine()["big cores"].remedy)


def test_small_cores_alone_fail(good: Tree) -> None:
    good.write("/proc/cpuinfo", cpuinfo(*[0xD05] * 4))
    good.write("/sys/devices/system/cpu/online", "0-3")
    assert good.status("big cores") == "fail"


def test_memory_and_swap(good: Tree) -> None:
    meminfo(good, total=3_900_000, swap=0)
    found = good.examine()
    assert (found["memory"].status, found["swap"].status) == ("pass", "warn")
    assert "zram-tools" in str(found["swap"].remedy)
    good.write("/etc/armbian-release", "BRANCH=vendor")
    assert "armbian-zram-config" in str(good.examine()["swap"].remedy)
    meminfo(good, total=1_900_000)
    assert good.status("memory") == "warn"
    assert good.status("memory", replace(GENERAL, npu_bytes=3 << 30)) == "fail"
    meminfo(good, total=4_000_000)
    assert good.status("memory", replace(GENERAL, npu_bytes=3 << 30)) == "warn", "little is free"
    found = good.write("/proc/meminfo", "").examine()
    assert (found["memory"].status, found["swap"].status) == ("warn", "warn")


def test_open_files(good: Tree) -> None:
    limits(good, "1024", "1048576")
    found = good.examine()["open files"]
    assert found.status == "warn"
    assert str(found.remedy).startswith("ulimit -n 4096 ")
    assert good.status("open files", replace(GENERAL, num_buffers=900)) == "fail"
    limits(good, "1024", "2048")
    assert "limits.conf" in str(good.examine()["open files"].remedy)
    limits(good, "unlimited", "unlimited")
    assert good.status("open files") == "pass"
    assert good.remove("/proc/self/limits").status("open files") == "warn"


def test_heat(good: Tree) -> None:
    good.write("/sys/class/thermal/thermal_zone6/temp", 84_500)
    found = good.examine()["temperature"]
    assert (found.status, "84 °C" in found.found, "npu-thermal" in found.found) == (
        "warn",
        True,
        True,
    )
    good.write("/sys/class/thermal/thermal_zone6/temp", 60_000)
    good.write("/sys/class/thermal/cooling_device3/type", "pwm-fan")
    good.write("/sys/class/thermal/cooling_device3/cur_state", 4)
    assert good.status("temperature") == "pass", "a fan that turns slows nothing down"
    good.write("/sys/class/thermal/cooling_device1/cur_state", 3)
    found = good.examine()["temperature"]
    assert found.status == "warn"
    assert "cpufreq-cpu4" in found.found
    assert good.remove("/sys/class/thermal").status("temperature") == "warn"


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "fail" not in statuses(Tree(tmp_path).examine()).values()


def files(root: Path) -> Iterator[Path]:
    yield from sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())


GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"", b"\n", b"-1", b"9" * 5000, b"0-99999", b"\xff" * 9, b":::\n\n:", b"9.9." * 3000]
    ),
    st.text("0123456789-.,: \nABMUacdgimopsuvx\0\t", max_size=60).map(str.encode),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_garbage_in_a_file_is_a_finding(good: Tree, data: st.DataObject) -> None:
    """Any two files may hold anything; a beginning that looks right may be followed by garbage."""
    chosen = st.lists(st.sampled_from(list(files(good.root))), max_size=2, unique=True)
    before = {place: place.read_bytes() for place in data.draw(chosen)}
    after = {
        place: content[: data.draw(st.integers(0, len(content)))] + data.draw(GARBAGE)
        for place, content in before.items()
    }
    try:
        for place, content in after.items():
            place.write_bytes(content)
        good.examine()
    finally:
        for place, content in before.items():
            place.write_bytes(content)


def test_a_file_may_be_empty_a_folder_a_pipe_or_absent(good: Tree) -> None:
    kinds: list[Callable[[Path], object]] = [Path.touch, Path.mkdir, os.mkfifo, lambda place: None]
    damages = itertools.cycle(kinds)
    for place, damage in zip(files(good.root), damages, strict=False):
        content = place.read_bytes()
        place.unlink()
        damage(place)
        good.examine()
        if place.is_dir():
            place.rmdir()
        place.unlink(missing_ok=True)
        place.write_bytes(content)


def test_unreadable_files(good: Tree) -> None:
    for place in files(good.root):
        place.chmod(0)
    good.examine()


@pytest.mark.parametrize("path", ["/proc/meminfo", "/usr/lib/librknnrt.so", "/var/log/kern.log"])
def test_huge_files_are_not_read_whole(good: Tree, path: str) -> None:
    good.write(path, elf(183))
    os.truncate(good.root / path.lstrip("/"), 1 << 36)
    good.examine()


def test_links_stay_below_the_root(good: Tree, tmp_path: Path) -> None:
    """A copy never shows the facts of the machine it lies on."""
    outside = tmp_path / "outside"
    outside.write_text("0.1.0\n")
    tree = Sysroot(good.root)
    for target in (str(outside), "../" * 30 + str(outside).lstrip("/")):
        good.link("/etc/link", target)
        assert tree.text("/etc/link") == ""
        assert not tree.exists("/etc/link")
        good.remove("/etc/link")
    good.link("/etc/link", "loop").link("/etc/loop", "link")
    assert not tree.exists("/etc/link")
    good.link("/etc/up", "./../.././proc/../proc/meminfo")
    assert tree.text("/etc/up") == tree.text("/proc/meminfo") != ""


def test_nothing_is_written(good: Tree) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {p: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in good.root.rglob("*")}

    before = state()
    good.examine()
    assert state() == before


# The command


def compiled(toolkit: str = "2.5.0", platform: str = "rk3588") -> NpuIo:
    """A draft of two layers and two variants."""
    main = [f"main.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    variants = tuple(
        NpuVariant(
            rows,
            (tensor("embeds", 100 * rows), *(tensor(name, 4096) for name in main)),
            (tensor("logits", 1000), tensor("new", 10)),
        )
        for rows in (1, 8)
    )
    geometry = NpuGeometry(sinks=4, window=60, unit=16, nodes=16, rows=(1, 8))
    return NpuIo(platform, toolkit, "fp16", -1e4, geometry, variants)


def tensor(name: str, size: int) -> NativeTensor:
    return NativeTensor(name, (1, 8, 1, 1), "float16", (1, 1, 1, 1, 8), 1, size)


def test_needs_of_a_draft() -> None:
    needs = Needs.of_draft(compiled(), 1_000_000)
    assert (needs.library_version, needs.platform) == ("2.5.0", "rk3588")
    # four sequences' main inputs, two widths of embeds, two outputs of each variant
    assert needs.num_buffers == 4 * 4 + 2 + 4
    assert needs.npu_bytes == 1_000_000 + 4 * 4 * 4096 + 900 + 2 * 1010
    broken = replace(compiled(), variants=None)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match="export it again"):
        Needs.of_draft(broken, 0)


def test_the_command_prints_a_table_and_remedies(command: CommandLine, tmp_path: Path) -> None:
    rock(tmp_path)
    result = command("doctor", "--sysroot", tmp_path)
    assert (result.code, result.err) == (1, "")
    assert "Radxa ROCK 5B" in result.out
    assert f"NPU clock: echo performance | sudo tee {NPU}/governor\n" in result.out
    good = orange_pi(tmp_path / "good")
    result = command("doctor", "--sysroot", good.root)
    assert result.code == 0
    assert "mends" not in result.out


def test_json_is_one_object(command: CommandLine, tmp_path: Path) -> None:
    result = command("doctor", "--sysroot", rock(tmp_path).root, "--json")
    assert result.code == 1
    value = json.loads(result.out)
    assert set(value) == {"status", "needs", "findings"}
    assert value["status"] == "fail"
    for finding in value["findings"]:
        assert set(finding) == {"name", "status", "found", "remedy"}
        assert (finding["remedy"] is None) == (finding["status"] == "pass")


def test_this_machine_can_be_examined(command: CommandLine) -> None:
    result = command("doctor", "--json")
    assert result.err == ""
    assert json.loads(result.out)["findings"][0]["name"] == "board"


def test_a_bundle_says_what_is_needed(
    command: CommandLine, good: Tree, tiny_bundle: Path, tmp_path: Path
) -> None:
    result = command("doctor", tiny_bundle, "--sysroot", good.root)
    assert result.code == 0
    assert "general minimums" in result.err
    bundle = with_npu(pair(tmp_path / "bundle", TINY / "llama"), TINY / "llama").path
    compiled("2.6.0").save(bundle / "draft/npu.io.json")
    result = command("doctor", bundle, "--sysroot", good.root)
    assert (result.code, result.err) == (1, "")
    assert "compiled with 2.6.0" in result.out
    own = tmp_path / "own.so"
    own.write_bytes(library("2.6.1"))
    result = command("doctor", bundle, "--sysroot", good.root, "--npu-library", own, "--json")
    assert result.code == 0
    assert json.loads(result.out)["needs"]["platform"] == "rk3588"
    (bundle / "draft/npu.io.json").write_text("[]")
    assert "npu.io.json" in command("doctor", bundle, "--sysroot", good.root).complaint
    (bundle / "draft/npu.io.json").unlink()
    assert "npu.io.json" in command("doctor", bundle, "--sysroot", good.root).complaint


def test_mistakes_are_one_line(command: CommandLine, tmp_path: Path) -> None:
    result = command("doctor", "--sysroot", tmp_path / "absent")
    assert (result.code, "no folder" in result.complaint) == (2, True)
    assert "no such bundle" in command("doctor", tmp_path / "absent").complaint


def test_the_library_is_looked_for_where_it_is_installed() -> None:
    assert {"/usr/lib", "/usr/local/lib"} <= set(NPU_LIBRARY_FOLDERS)
