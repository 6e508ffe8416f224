"""The environment of Rockchip's toolkit: a venv in the cache folder, with versions of its own.

The toolkit needs versions of numpy, onnx and protobuf that headrace's other parts cannot use. It is
only ever run as a process of that venv's Python (rknn_worker.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import RknnToolkitError, StorageError
from headrace.export.report import Reporter, Silent
from headrace.paths import cache_dir

TOOLKIT = "2.5.0"

PINS = (
    f"rknn-toolkit2=={TOOLKIT}",
    "fast-histogram==0.14",
    "flatbuffers==25.12.19",
    "numpy==1.26.4",
    "onnx==1.18.0",
    "onnxruntime==1.26.0",
    "opencv-python-headless==4.11.0.86",
    "packaging==26.4",
    'pillow==11.3.0; platform_machine == "aarch64"',
    "protobuf==4.25.4",
    "psutil==7.2.2",
    "ruamel.yaml==0.19.1",
    "scipy==1.17.1",
    "setuptools==80.9.0",
    "tqdm==4.70.1",
    "typing_extensions==4.16.0",
)
"""All that is installed; no requirement of theirs is followed, or torch would come too."""

PYTHONS = ((3, 12), (3, 11))
"""The newest that the toolkit is made for, best first."""

MACHINES = ("x86_64", "aarch64")

_STAMP = "complete"
_INSTRUCTION = "run `headrace rknn-env`"


def home() -> Path:
    """The environment's folder, not necessarily existing; other pins have another one."""
    content = "\n".join((*PINS, _torch()))
    return cache_dir() / "rknn-env" / hashlib.sha256(content.encode()).hexdigest()[:16]


def find_env() -> Path:
    """The environment's Python. Raises RknnToolkitError, which says how to make it."""
    folder = home()
    if not (folder / _STAMP).exists():
        raise RknnToolkitError(
            f"compiling for the NPU needs Rockchip's toolkit, which is not in {folder.parent}: "
            f"{_INSTRUCTION}"
        )
    return _python_of(folder)


def make_env(python: str | None = None, report: Reporter | None = None) -> Path:
    """Makes the environment where it is missing or was not finished; returns its Python.

    Two processes may do so at once: the second waits, and finds it made.

    Raises:
        RknnToolkitError: this machine or `python` is not one for the toolkit, or pip failed.
        StorageError: the cache folder cannot be written.
    """
    report, folder = report or Silent(), home()
    if (folder / _STAMP).exists():
        return _python_of(folder)
    check_machine()
    interpreter = find_python(python)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock")):
            if not (folder / _STAMP).exists():
                _make(folder, interpreter, report)
    except OSError as error:
        raise StorageError(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}); "
            "set HEADRACE_CACHE to another one"
        ) from error
    return _python_of(folder)


def check_machine() -> None:
    """Raises RknnToolkitError where there is no toolkit."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise RknnToolkitError(
            f"Rockchip's toolkit runs on Linux on {' and '.join(MACHINES)}; this is "
            f"{platform.system()} on {machine}: export on another machine, and copy the bundle"
        )


def find_python(wanted: str | None = None) -> str:
    """An interpreter that the toolkit is made for: `wanted`, this one, or one that is on PATH.

    Raises RknnToolkitError when there is none, or `wanted` is not one.
    """
    names = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    if wanted is not None:
        if (version := _version(wanted)) not in PYTHONS:
            got = "no Python" if version is None else f"Python {version[0]}.{version[1]}"
            raise RknnToolkitError(f"--python: {wanted} is {got}; the toolkit needs {names}")
        return wanted
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found and _version(found) == (major, minor):
            return found
    raise RknnToolkitError(
        f"the toolkit needs Python {names}, and there is none on PATH; install one, "
        "or name it with --python"
    )


def _version(python: str) -> tuple[int, int] | None:
    """None for what is no Python."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = _run([python, "-I", "-c", code])
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError):
        return None


def _make(folder: Path, python: str, report: Reporter) -> None:
    """Holds the lock. What an interrupted run left is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        report.stage(f"making {folder}")
        _create(folder, python)
        report.stage(f"installing Rockchip's toolkit {TOOLKIT} (625 MB)")
        _install(folder)
        report.stage("importing it")
        _import(folder)
        # Last, and on the disk only after the rest.
        os.sync()
        (folder / _STAMP).write_text("\n".join(PINS) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _create(folder: Path, python: str) -> None:
    done = _run([python, "-I", "-m", "venv", str(folder)])
    if done.returncode != 0:
        raise RknnToolkitError(
            f"{python} cannot make virtual environments; on Debian and Ubuntu: "
            f"sudo apt install python3-venv ({_last_line(done)})"
        )


def _install(folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(PINS) + "\n", encoding="utf-8")
    command = [str(_python_of(folder)), "-I", "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary", ":all:"]
    done = _run([*command, "--requirement", str(requirements)])
    if done.returncode != 0:
        raise RknnToolkitError(
            f"pip could not install Rockchip's toolkit: {_last_line(done)}; it needs the net, or "
            "a package index that pip is configured for"
        )
    stub = next(folder.glob("lib/python3*/site-packages")) / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text(_torch(), encoding="utf-8")


def _import(folder: Path) -> None:
    done = _run([str(_python_of(folder)), "-I", "-c", "import rknn.api"])
    if done.returncode != 0:
        raise RknnToolkitError(f"Rockchip's toolkit cannot be imported: {_last_line(done)}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """In a session of its own: an interrupt is for us, and what the program started goes with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Of what a program complained; pip ends with the less telling one of its errors."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors[:1] or lines[-1:] or ["no message"])[0].rstrip(".")


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _torch() -> str:
    return Path(__file__).with_name("rknn_torch.py").read_text(encoding="utf-8")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; a lock ends with its process."""
    fd = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
