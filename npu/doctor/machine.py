"""Judges what slows a board down or lets it run out of something: clocks, cores, memory, heat.

Half of an RK3588's speed is lost to clocks that follow the load, since a pass is over before they rise.
"""

from __future__ import annotations

from headrace.npu.doctor.board import Board, Clock
from headrace.npu.doctor.finding import Finding, Needs, failed, passed, warned
from headrace.sizes import GIB, show_size

_NUM_BIG = 4
"""Big cores of an RK3588."""

_LEAST_MEMORY = 7 * GIB // 2
"""What Linux has of the smallest board meant, one of 4 GB."""

_OPEN_FILES = 4096
"""More than drafts of a few hundred buffers and what else is open take."""

_OTHER_FILES = 256
"""Open files beside the buffers."""

_WARM_DEGREES = 75.0
"""From here on Rockchip's kernels may slow cores down."""

_SYS_CPU = "/sys/devices/system/cpu"


def cores(board: Board) -> Finding:
    """Whether all four Cortex-A76 compute."""
    name, found = "big cores", board.cores
    words = f"{len(found.big)} of {_NUM_BIG} Cortex-A76 online, {len(found.online)} cores in all"
    if len(found.big) >= _NUM_BIG:
        return passed(name, words)
    judge = warned if found.big else failed
    if offline := sorted(set(found.present) - set(found.online)):
        files = " ".join(f"{_SYS_CPU}/cpu{cpu}/online" for cpu in offline)
        return judge(name, words, f"echo 1 | sudo tee {files}")
    if found.capped:
        return judge(
            name,
            f"{words}; the kernel was started with {found.capped}",
            f"take {found.capped} off the kernel's command line, then: sudo reboot",
        )
    return judge(
        name,
        f"{words}; the kernel knows no others",
        "check with `lscpu`: this chip may be a variant with fewer cores, for which "
        "`headrace run --target-threads` sets the number to use",
    )


def npu_clock(board: Board) -> Finding:
    name = "NPU clock"
    if board.npu_clock is None:
        return warned(
            name,
            "the kernel shows no clock of the NPU, so its speed is not known",
            "sudo cat /sys/kernel/debug/clk/clk_summary | grep -i npu",
        )
    return _devfreq(name, board.npu_clock)


def ddr_clock(board: Board) -> Finding:
    name = "DDR clock"
    if board.ddr_clock is None:
        return passed(name, "not scaled: it stays where the boot loader has set it")
    return _devfreq(name, board.ddr_clock)


def _devfreq(name: str, clock: Clock) -> Finding:
    words = f"{clock.governor or 'no governor'}, {_pace(clock)}"
    if clock.top and clock.most and clock.most < clock.top:
        return warned(
            name,
            f"{words}; capped at {_hertz(clock.most)}",
            f"echo {clock.top} | sudo tee {clock.folder}/max_freq",
        )
    is_at_top = clock.now is not None and clock.top is not None and clock.now >= clock.top
    is_held = clock.governor == "performance" or (
        clock.least is not None and clock.top is not None and clock.least >= clock.top
    )
    if not is_held and not (clock.governor == "userspace" and is_at_top):
        return warned(name, words, f"echo performance | sudo tee {clock.folder}/governor")
    if clock.now is not None and clock.top is not None and not is_at_top:
        return warned(
            name,
            f"{words}; something holds it down, most likely heat",
            f"let the board cool down, then: cat {clock.folder}/cur_freq",
        )
    return passed(name, words)


def cpu_clocks(board: Board) -> Finding:
    """Of all clusters in one line."""
    name = "CPU clocks"
    if not board.cpu_clocks:
        return warned(
            name,
            "the kernel does not scale them, so their speed is not known",
            "sudo cat /sys/kernel/debug/clk/clk_summary | grep -i armclk",
        )
    words = "; ".join(
        f"{clock.folder.rsplit('/', 1)[1]} {clock.governor or 'no governor'}, {_pace(clock)}"
        for clock in board.cpu_clocks
    )
    capped = [c for c in board.cpu_clocks if c.most and c.top and c.most < c.top]
    lines = []
    if any(clock.governor != "performance" for clock in board.cpu_clocks):
        lines.append(f"echo performance | sudo tee {_SYS_CPU}/cpufreq/policy*/scaling_governor")
    lines += [f"echo {(c.top or 0) // 1000} | sudo tee {c.folder}/scaling_max_freq" for c in capped]
    return warned(name, words, " && ".join(lines)) if lines else passed(name, words)


def _pace(clock: Clock) -> str:
    return f"{_hertz(clock.now)} of {_hertz(clock.top)}"


def _hertz(value: int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e9:.2f} GHz" if value >= 10**9 else f"{value / 1e6:.0f} MHz"


def memory(board: Board, needs: Needs) -> Finding:
    name = "memory"
    total, available = board.memory.get("MemTotal"), board.memory.get("MemAvailable")
    if total is None:
        return warned(name, "not known: /proc/meminfo cannot be read", "cat /proc/meminfo")
    words = show_size(total)
    if available is not None:
        words += f", {show_size(available)} available"
    if needs.npu_bytes:
        words += f"; the draft takes {show_size(needs.npu_bytes)} on the NPU"
    if board.is_rk3588 and total < needs.npu_bytes:
        return failed(name, words, "`headrace export` again with a smaller draft")
    if total < _LEAST_MEMORY or (available is not None and available < needs.npu_bytes):
        return warned(
            name, words, "`headrace plan BUNDLE` says what fits and with which flags; free the rest"
        )
    return passed(name, words)


def swap(board: Board) -> Finding:
    name, total = "swap", board.memory.get("SwapTotal")
    if total is None:
        return warned(name, "not known: /proc/meminfo cannot be read", "swapon -s")
    if total:
        where = ", ".join(board.swaps) or "unknown place"
        return passed(name, f"{show_size(total)}: {where}")
    remedy = "sudo apt install zram-tools && sudo systemctl restart zramswap"
    if board.is_armbian:  # which brings a service of its own
        remedy = "sudo systemctl enable armbian-zram-config && sudo reboot"
    return warned(name, "none: when memory runs short the kernel ends a process at once", remedy)


def open_files(board: Board, needs: Needs) -> Finding:
    name = "open files"
    least = needs.num_buffers + _OTHER_FILES
    wanted = max(_OPEN_FILES, least)
    if board.open_files is None:
        return warned(name, "limit not known: /proc/self/limits cannot be read", "ulimit -n")
    soft, hard = board.open_files
    words = f"up to {'any number' if soft >= 1 << 30 else soft}"
    if needs.num_buffers:
        words += f"; the draft holds {needs.num_buffers} buffers on the NPU, one each"
    if soft >= wanted:
        return passed(name, words)
    goal = 1 << (wanted - 1).bit_length()
    in_shell = f"ulimit -n {goal}"
    if hard < goal:
        line = f"* hard nofile {goal}"
        in_shell = (
            f"echo '{line}' | sudo tee -a /etc/security/limits.conf, log in again, then: {in_shell}"
        )
    judge = failed if needs.num_buffers and soft < least else warned
    return judge(name, words, f"{in_shell} (in a systemd unit: LimitNOFILE={goal})")


def temperature(board: Board) -> Finding:
    name, heat = "temperature", board.heat
    look = "cat /sys/class/thermal/thermal_zone*/temp"
    if heat is None:
        return warned(name, "not known: no thermal zone can be read", look)
    words = f"{heat.degrees:.0f} °C at most ({heat.zone})"
    if heat.throttled:
        words += f"; slowed down for it: {', '.join(heat.throttled)}"
    elif heat.degrees < _WARM_DEGREES:
        return passed(name, words)
    else:
        words += f"; from {_WARM_DEGREES:.0f} °C on clocks go down"
    return warned(name, words, f"give the board a heat sink or a fan, then: {look}")
