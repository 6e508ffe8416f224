"""Examines a board: what of it stands in the way of a draft on the NPU, and what mends it.

Only reads. Facts are gathered by `board.py`; `machine.py` judges what has nothing to do with the NPU.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from headrace.npu.doctor import machine
from headrace.npu.doctor.access import Node, User, may_use
from headrace.npu.doctor.board import Board, read_board
from headrace.npu.doctor.finding import Finding, Needs, Status, failed, passed, warned
from headrace.npu.doctor.installed import Library
from headrace.npu.librknnrt import MIN_DRIVER, version_tuple
from headrace.sizes import MIB, show_size

__all__ = ["Finding", "Needs", "Status", "examine", "judge", "worst"]

GOOD_DRIVER = "0.9.8"
"""What Rockchip has tested its newer runtimes with."""

_KERNELS = ((5, 10), (6, 1))
"""Those that Rockchip publishes its driver in."""

_CMA = 256 * MIB
"""Where the NPU has no IOMMU: the least that a small draft's weights and buffers take."""

_RULE = 'SUBSYSTEM=="drm", KERNEL=="renderD*", GROUP="render", MODE="0660"'
_PLAIN_RULE = 'KERNEL=="rknpu", GROUP="render", MODE="0660"'
_HEAP_RULE = 'SUBSYSTEM=="dma_heap", GROUP="render", MODE="0660"'

_GET_LIBRARY = (
    "wget https://github.com/airockchip/rknn-toolkit2/raw/master/rknpu2/runtime/Linux/"
    "librknn_api/aarch64/librknnrt.so && sudo install -m 644 librknnrt.so /usr/lib/ && sudo ldconfig"
)


def examine(root: Path, needs: Needs) -> list[Finding]:
    """Judges the machine below `root`: `/`, or a copy of parts of a board's file system.

    On what is no RK3588 nothing fails. Raises nothing for what files hold.
    """
    return judge(read_board(root, needs.library), needs)


def worst(findings: list[Finding]) -> Status:
    """The worst status of all."""
    found = {finding.status for finding in findings}
    return "fail" if "fail" in found else "warn" if "warn" in found else "pass"


def judge(board: Board, needs: Needs) -> list[Finding]:
    """The findings, those that others depend on first."""
    general = [_kernel(board), _architecture(board)]
    if not board.is_rk3588:
        return [_elsewhere(board), *general, machine.memory(board, needs)]
    findings = [passed("board", board.model or board.compatible[0]), *general, _driver(board)]
    if board.npu.is_bound:
        # Without a driver these would all say the same once more.
        findings += [_device(board), _iommu(board, needs), _cma(board, needs)]
    findings.append(_library(board, needs))
    if needs.platform is not None:
        findings.append(_platform(needs.platform))
    if board.npu.is_bound:
        findings.append(machine.npu_clock(board))
    return [
        *findings,
        machine.ddr_clock(board),
        machine.cpu_clocks(board),
        machine.cores(board),
        machine.memory(board, needs),
        machine.swap(board),
        machine.open_files(board, needs),
        machine.temperature(board),
    ]


def _elsewhere(board: Board) -> Finding:
    return warned(
        "board",
        f"{board.model or 'this machine'} is no RK3588: headrace runs here on the CPU alone, and "
        "there is no NPU to examine",
        "run `headrace doctor` on the board",
    )


def _kernel(board: Board) -> Finding:
    name, release = "kernel", board.kernel
    if not release:
        return warned(name, "version not known", "uname -r")
    if not board.is_rk3588 or version_tuple(release)[:2] in _KERNELS:
        return passed(name, release)
    if board.npu.is_bound:
        return warned(
            name,
            f"{release}, with a port of a driver that Rockchip publishes for 5.10 and 6.1 only",
            f"if passes fail, {_new_kernel(board)}",
        )
    return failed(name, f"{release}, not Rockchip's 5.10 or 6.1", _new_kernel(board))


def _new_kernel(board: Board) -> str:
    if board.is_armbian:
        return (
            "sudo apt update && sudo apt install linux-image-vendor-rk35xx linux-dtb-vendor-rk35xx"
            " && sudo reboot"
        )
    return "write an image with Rockchip's kernel 5.10 or 6.1 to the board (docs/board.md)"


def _architecture(board: Board) -> Finding:
    name, found = "architecture", board.architecture
    if found is None:
        return warned(name, "not known", "uname -m")
    if found == "aarch64" or (found == "x86_64" and not board.is_rk3588):
        return passed(name, found)
    remedy = "write a 64-bit image to the board (docs/board.md)"
    return (failed if board.is_rk3588 else warned)(
        name, f"{found}; ONNX Runtime and librknnrt need aarch64", remedy
    )


def _driver(board: Board) -> Finding:
    name, npu = "NPU driver", board.npu
    version, log = npu.driver_version, "sudo dmesg | grep -i rknpu"
    if not npu.is_bound:
        if npu.status == "disabled":
            return failed(
                name,
                "none: the device tree has the NPU disabled",
                "enable it in the boot settings of the image (Radxa: sudo rsetup, Overlays), or "
                + _new_kernel(board),
            )
        if npu.has_rocket:
            words = "none of Rockchip's: this is mainline's rocket, which librknnrt cannot use"
            return failed(name, words, _new_kernel(board))
        if version:
            return failed(name, f"rknpu {version} is there and has not taken the NPU", log)
        return failed(name, "none: this kernel has no rknpu", _new_kernel(board))
    if not version:
        return warned(
            name,
            f"rknpu, version not readable without root; {MIN_DRIVER} is the least",
            "sudo cat /sys/kernel/debug/rknpu/version",
        )
    found = version_tuple(version)
    if found >= version_tuple(GOOD_DRIVER):
        return passed(name, f"rknpu {version}")
    # It is part of the kernel.
    newer = _new_kernel(board)
    if not board.is_armbian:
        newer = (
            f"sudo apt update && sudo apt full-upgrade && sudo reboot; if that is no newer, {newer}"
        )
    if found >= version_tuple(MIN_DRIVER):
        return warned(name, f"rknpu {version}; {GOOD_DRIVER} is better", newer)
    return failed(name, f"rknpu {version}; {MIN_DRIVER} is the least", newer)


def _device(board: Board) -> Finding:
    name, npu, user = "NPU device", board.npu, board.user
    if npu.missing_node:
        return failed(
            name,
            f"the kernel has {npu.missing_node}, /dev does not",
            "sudo udevadm trigger; in a container, pass the device in",
        )
    if not npu.nodes:
        others = ", ".join(npu.render_nodes)
        words = f"none of {others} is marked as the NPU's" if others else "no device file"
        return (warned if others else failed)(name, words, "ls -l /dev/dri/by-path /dev/rknpu")
    # The first is the NPU; behind it come heaps, of which one is enough.
    main, *heaps = npu.nodes
    if main.path == "/dev/rknpu" and not heaps:
        return failed(
            name,
            "/dev/rknpu, but nothing in /dev/dma_heap to take memory from",
            f"if this kernel stays as it is, it cannot be mended: {_new_kernel(board)}",
        )
    if user is None:
        if main.mode & 0o006 == 0o006:
            return passed(name, _words(main))
        return warned(name, f"{_words(main)}; who will use it is not known", "id")
    if not may_use(main, user):
        return _forbidden(name, main, user)
    if heaps and not any(may_use(heap, user) for heap in heaps):
        return _forbidden(name, heaps[0], user)
    return passed(name, _words(main))


def _words(node: Node) -> str:
    return f"{node.path}, mode {node.mode:04o}, group {node.group}"


def _forbidden(name: str, node: Node, user: User) -> Finding:
    who = shlex.quote(user.name) if user.name else '"$USER"'
    words = f"{_words(node)}: {user.name or f'user {user.uid}'} may not use it"
    if node.group in user.listed:
        return failed(name, words, f"log out and in again: you are in {node.group} from then on")
    if node.mode & 0o060 == 0o060 and node.gid != 0:
        remedy = f"sudo usermod -aG {shlex.quote(node.group)} {who}, then log out and in again"
        return failed(name, words, remedy)
    rule = _RULE if "/dri/" in node.path else _PLAIN_RULE
    rule = _HEAP_RULE if "/dma_heap/" in node.path else rule
    return failed(
        name,
        words,
        f"echo '{rule}' | sudo tee -a /etc/udev/rules.d/70-rknpu.rules && sudo udevadm control -R"
        f" && sudo udevadm trigger && sudo usermod -aG render {who}, then log out and in again",
    )


def _iommu(board: Board, needs: Needs) -> Finding:
    name = "NPU IOMMU"
    if board.npu.has_iommu:
        return passed(name, "on")
    if board.npu.has_iommu is None:
        return warned(name, "not known", "sudo dmesg | grep -i 'rknpu iommu'")
    judge = warned if board.memory.get("CmaTotal", 0) >= max(_CMA, needs.npu_bytes) else failed
    return judge(
        name,
        "off: the NPU reaches reserved memory (CMA) only",
        "set the status of /iommu@fdab9000 in the board's device tree to okay, for example: sudo "
        "fdtput -t s /boot/dtb/rockchip/YOUR-BOARD.dtb /iommu@fdab9000 status okay && sudo reboot",
    )


def _cma(board: Board, needs: Needs) -> Finding:
    name, total = "CMA", board.memory.get("CmaTotal", 0)
    least = max(_CMA, needs.npu_bytes)
    if board.npu.has_iommu is not False:
        return passed(name, f"{show_size(total)}; not needed with the IOMMU on")
    words = f"{show_size(total)}, {show_size(board.memory.get('CmaFree', 0))} free"
    if total >= least:
        return passed(name, words)
    size = -(-least // (64 * MIB)) * 64
    where = " (Armbian: extraargs in /boot/armbianEnv.txt)" if board.is_armbian else ""
    return failed(
        name,
        f"{words}; without the IOMMU {show_size(least)} are needed",
        f"turn the IOMMU on, or add cma={size}M to the kernel's command line{where}, then: "
        "sudo reboot",
    )


def _library(board: Board, needs: Needs) -> Finding:
    name, found = "NPU library", board.libraries
    if not found:
        where = f"{needs.library} does not exist" if needs.library else "no librknnrt.so"
        return failed(name, where, _GET_LIBRARY)
    library = found[0]
    if library.machine is None:
        return failed(name, f"{library.path} is no library", _GET_LIBRARY)
    if library.machine != "aarch64":
        return failed(name, f"{library.path} is for {library.machine}", _GET_LIBRARY)
    if library.version is None:
        return warned(name, f"{library.path} does not tell its version", _GET_LIBRARY)
    words = f"{library.path}, version {library.version}"
    least = needs.library_version
    if version_tuple(library.version) < version_tuple(least):
        reason = "the draft was compiled with" if needs.platform else "the least is"
        return failed(name, f"{words}; {reason} {least}", _GET_LIBRARY)
    return _only(name, words, found)


def _only(name: str, words: str, found: tuple[Library, ...]) -> Finding:
    """A warning if there are others, of which the loader may take any."""
    others = [library for library in found[1:] if library.version != found[0].version]
    if not others:
        return passed(name, words)
    listed = ", ".join(f"{library.path} ({library.version or 'unknown'})" for library in others)
    remedy = " && ".join(f"sudo mv {library.path} {library.path}.old" for library in others)
    return warned(name, f"{words}; others: {listed}", f"{remedy} && sudo ldconfig")


def _platform(platform: str) -> Finding:
    name = "draft"
    if platform.lower() == "rk3588":
        return passed(name, "compiled for rk3588")
    return failed(
        name,
        f"compiled for {platform}, and this is an rk3588",
        "on the PC, `headrace export` again for rk3588",
    )
