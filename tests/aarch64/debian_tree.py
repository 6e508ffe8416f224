"""An arm64 Debian with a Python and headrace's dependencies, for qemu-user to run on a PC.

    python tests/aarch64/debian_tree.py

Made once, in the cache folder, by apt-get and pip without any privileges, and found there after
that. Nothing is installed in this machine: where a tool is missing, it says what to install.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.paths import cache_dir

ROOT = Path(__file__).resolve().parents[2]

SUITE, VERSION = "bookworm", "3.11"
PACKAGES = (f"python{VERSION}-minimal", f"libpython{VERSION}-stdlib", "libstdc++6")
RKNN_LITE = "rknn-toolkit-lite2==2.5.0"
PLATFORMS = ("manylinux_2_17", "manylinux2014", "manylinux_2_27", "manylinux_2_28")
MIRROR = os.environ.get("DEBIAN_MIRROR") or "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
QEMUS = ("qemu-aarch64-static", "qemu-aarch64")
CPU = "cortex-a76"
NUM_CPUS = 8

PYTHON = f"""\
#!/bin/sh
# As argv[0], so that what Python starts through sys.executable is emulated as well.
tree=${{0%/usr/bin/python}}
qemu=$(command -v {QEMUS[0]} || command -v {QEMUS[1]}) || exit 127
exec "$qemu" -0 "$0" -cpu {CPU} -L "$tree" "$tree/usr/bin/python{VERSION}" "$@"
"""

# The kernel's own names of a Cortex-A76's features. Without these files onnxruntime's import
# crashes; with the PC's, it would choose by the wrong CPU.
CPUINFO = """\
processor\t: {}
BogoMIPS\t: 48.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc \
dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 0

"""
BOARD_FILES = {
    "proc/cpuinfo": "".join(CPUINFO.format(i) for i in range(NUM_CPUS)),
    **{
        f"sys/devices/system/cpu/{name}": f"0-{NUM_CPUS - 1}\n"
        for name in ("possible", "present", "online")
    },
    # What RKNNLite looks for before it loads Rockchip's library.
    "proc/device-tree/compatible": "radxa,rock-5b\0rockchip,rk3588\0",
    "dev/dri/renderD129": "",
    "sys/bus/platform/devices/fdab0000.npu/uevent": "",
}


def problem() -> str | None:
    """Why nothing can be emulated here, and what to do about it, in a line; None if it can."""
    qemu = next(filter(None, map(shutil.which, QEMUS)), None)
    tools = {
        "qemu-user-static": qemu is not None,
        "apt": shutil.which("apt-get") is not None,
        "dpkg": shutil.which("dpkg-deb") is not None,
        "debian-archive-keyring": KEYRING.exists(),
    }
    if missing := [package for package, is_there in tools.items() if not is_there]:
        names = " ".join(missing)
        return f"make test-arm needs {names}; on Debian and Ubuntu: sudo apt install {names}"
    assert qemu is not None
    known = subprocess.run([qemu, "-cpu", "help"], capture_output=True, text=True, check=False)
    if CPU not in known.stdout:
        return f"{qemu} knows no {CPU}: make test-arm needs QEMU 7.1 or newer"
    return None


def requirements() -> list[str]:
    """What a board installs, with the onnxruntime of this environment: bits depend on it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    same = f"onnxruntime=={importlib.metadata.version('onnxruntime')}"
    base = [r for r in project["dependencies"] if not r.startswith("onnxruntime")]
    return [*base, same, RKNN_LITE]


def folder() -> Path:
    """Where the tree of these pins is, or is to be; one that exists is whole."""
    pins = [SUITE, PACKAGES, requirements(), PLATFORMS, PYTHON, BOARD_FILES]
    key = hashlib.sha256(json.dumps(pins).encode()).hexdigest()[:12]
    return cache_dir() / "test-arm" / f"{SUITE}-{key}"


def obtain() -> Path:
    """The tree. Made under another name, so that one that was cut short is never found."""
    found = folder()
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent, prefix="making-") as made:
            tree = Path(made) / "tree"
            for package in _debian_packages(Path(made) / "apt"):
                _run(["dpkg-deb", "-x", str(package), str(tree)])
            _add_wheels(tree / "site")
            _add_board(tree)
            tree.rename(found)
    return found


def _debian_packages(folder: Path) -> Iterator[Path]:
    """Downloads them with all that they depend on, signatures checked; apt's state is its own."""
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    source = f"deb [signed-by={KEYRING}] {MIRROR} {SUITE} main\n"
    (folder / "sources.list").write_text(source, encoding="utf-8")
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    _run(["apt-get", *options, "update"])
    only = ("--yes", "--download-only", "--no-install-recommends")
    _run(["apt-get", *options, "install", *only, *PACKAGES])
    yield from sorted((folder / "cache/archives").glob("*.deb"))


def _add_wheels(site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(site), "--no-compile", "--only-binary=:all:"]
    command += ["--python-version", VERSION, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_aarch64"]
    _run([*command, *requirements()])


def _add_board(tree: Path) -> None:
    for name, text in BOARD_FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    python = tree / "usr/bin/python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)


def _run(command: Sequence[str]) -> str:
    """What it printed; where it fails, the script ends with what it said."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stderr or done.stdout}{command[0]} failed with code {done.returncode}")
    return done.stdout


def main() -> None:
    if reason := problem():
        sys.exit(reason)
    if folder().exists():
        return
    print(f"Making an arm64 Debian in {folder()}", flush=True)
    began = time.monotonic()
    size = sum(p.stat().st_size for p in obtain().rglob("*") if p.is_file() and not p.is_symlink())
    print(f"made in {time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
