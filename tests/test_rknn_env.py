"""Making the toolkit's environment: found, missing, impossible, interrupted, twice at once.

An interpreter of a few lines of shell stands for Python and pip.
"""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from commandline import CommandLine, at_terminal, finish, started

from headrace.errors import RknnToolkitError, StorageError
from headrace.export import rknn_env, rknn_torch

PYTHON = """#!/bin/sh
here="{folder}"
case "$*" in
  *version_info*) cat "$here/version" ;;
  *ensurepip*|*"-m venv"*)
    [ -e "$here/no-venv" ] && {{ echo "No module named ensurepip" >&2; exit 1; }}
    for last; do :; done
    mkdir -p "$last/bin" "$last/lib/python3.12/site-packages"
    cp "$0" "$last/bin/python" ;;
  *"-m pip"*)
    echo pip >> "$here/calls"
    sleep "$(cat "$here/seconds")"
    [ -e "$here/no-net" ] && {{
      echo "WARNING: Retrying" >&2
      echo "ERROR: Could not find a version of numpy (from versions: none)" >&2
      echo "ERROR: No matching distribution found" >&2; exit 1; }}
    : ;;
  *"import rknn.api"*)
    [ -e "$here/broken" ] && {{ echo "ImportError: libGL.so.1: cannot open" >&2; exit 1; }}
    : ;;
esac
"""


class FakePython:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "python"
        self.path.write_text(PYTHON.format(folder=folder))
        self.path.chmod(0o755)
        (folder / "version").write_text("3 12\n")
        (folder / "seconds").write_text("0")

    def calls_of_pip(self) -> int:
        return (self.folder / "calls").read_text().count("pip")

    def make(self) -> Path:
        return rknn_env.make_env(str(self.path))


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePython:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "fake").mkdir()
    return FakePython(tmp_path / "fake")


def test_a_missing_environment_says_how_to_make_it(python: FakePython) -> None:
    with pytest.raises(RknnToolkitError, match="run `headrace rknn-env`"):
        rknn_env.find_env()


def test_made_once_and_found(python: FakePython) -> None:
    made = python.make()
    assert made == rknn_env.find_env() == python.make()
    assert python.calls_of_pip() == 1
    (stub,) = rknn_env.home().glob("lib/*/site-packages/torch/__init__.py")
    assert stub.read_text() == Path(rknn_torch.__file__).read_text()
    (lines,) = rknn_env.home().glob("requirements.txt")
    assert lines.read_text().splitlines() == list(rknn_env.PINS)


def test_other_pins_are_another_environment(
    python: FakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    python.make()
    monkeypatch.setattr(rknn_env, "PINS", ("rknn-toolkit2==2.6.0",))
    with pytest.raises(RknnToolkitError):
        rknn_env.find_env()


def test_one_that_was_interrupted_is_made_again(python: FakePython) -> None:
    made = python.make()
    (rknn_env.home() / "complete").unlink()
    (made.parent / "half").touch()
    with pytest.raises(RknnToolkitError):
        rknn_env.find_env()
    assert python.make() == rknn_env.find_env()
    assert not (made.parent / "half").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no-venv", r"cannot make virtual environments.*python3-venv.*ensurepip"),
        ("no-net", r"could not install.*Could not find a version of numpy.*needs the net"),
        ("broken", r"cannot be imported: ImportError: libGL"),
    ],
)
def test_what_fails_leaves_nothing_and_can_be_mended(
    python: FakePython, fault: str, message: str
) -> None:
    (python.folder / fault).touch()
    with pytest.raises(RknnToolkitError, match=message):
        python.make()
    assert not rknn_env.home().exists()
    (python.folder / fault).unlink()
    assert python.make() == rknn_env.find_env()


def test_two_at_once_make_one(python: FakePython) -> None:
    (python.folder / "seconds").write_text("0.5")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(python.make())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [rknn_env.find_env()] * 3
    assert python.calls_of_pip() == 1


def test_ctrl_c_leaves_nothing(python: FakePython) -> None:
    (python.folder / "seconds").write_text("30")
    with at_terminal("rknn-env", "--python", python.path) as terminal:
        limit = time.monotonic() + 10
        while not (python.folder / "calls").exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        terminal.interrupt()
        assert terminal.code() == 130
    assert not rknn_env.home().exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_pip_started_ends_with_us(python: FakePython, number: signal.Signals) -> None:
    """A signal may be for this process alone, and what is left would write into the folder."""
    (python.folder / "seconds").write_text("30.125")
    with started("rknn-env", "--python", python.path) as child:
        limit = time.monotonic() + 10
        while not (python.folder / "calls").exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        child.send_signal(number)
        assert finish(child).code == 128 + number
    assert not rknn_env.home().exists()
    limit = time.monotonic() + 10
    while sleeping(b"30.125"):
        assert time.monotonic() < limit
        time.sleep(0.01)


def sleeping(seconds: bytes) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == b"sleep\0" + seconds + b"\0":
                return True
    return False


@pytest.mark.parametrize(
    ("version", "message"),
    [("3 13\n", "is Python 3.13"), ("3 10\n", "is Python 3.10"), ("", "is no Python")],
)
def test_a_named_python_must_suit(python: FakePython, version: str, message: str) -> None:
    (python.folder / "version").write_text(version)
    with pytest.raises(RknnToolkitError, match=f"{message}; the toolkit needs 3.12 or 3.11"):
        python.make()


def test_a_named_python_must_be_there(python: FakePython) -> None:
    with pytest.raises(RknnToolkitError, match="is no Python"):
        rknn_env.make_env("/nowhere/python")


def test_another_python_is_looked_for_on_the_path(
    python: FakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setenv("PATH", f"{python.folder}:/bin:/usr/bin")
    monkeypatch.setattr(rknn_env, "PYTHONS", ((3, 12),))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RknnToolkitError, match=r"none on PATH.*--python"):
        rknn_env.find_python()
    monkeypatch.setattr(shutil, "which", lambda name: str(python.folder / "python"))
    assert rknn_env.find_python() == str(python.path)


@pytest.mark.parametrize(("system", "machine"), [("linux", "riscv64"), ("darwin", "arm64")])
def test_other_machines_are_refused(
    python: FakePython, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(RknnToolkitError, match=f"on {machine}: export on another machine"):
        python.make()


def test_a_cache_that_cannot_be_written(python: FakePython, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(StorageError, match="HEADRACE_CACHE"):
        python.make()


def test_the_command_prints_the_path(command: CommandLine, python: FakePython) -> None:
    done = command("rknn-env", "--python", python.path)
    assert (done.code, done.out) == (0, f"{rknn_env.find_env()}\n")
    (python.folder / "version").write_text("3 9\n")
    assert command("rknn-env", "--python", python.path).code == 0  # it is made already


def test_the_commands_complaint_is_one_line(command: CommandLine, python: FakePython) -> None:
    (python.folder / "no-net").touch()
    done = command("rknn-env", "--python", python.path)
    assert done.code == 1
    assert done.complaint.startswith("pip could not install Rockchip's toolkit")


def test_the_stub_passes_for_torch(tmp_path: Path) -> None:
    """As the toolkit uses it when it is loaded."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(Path(rknn_torch.__file__).read_text())
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.nn.functional as F
import torch.nn as nn
from torch.autograd import Function
from torch.utils.data import DataLoader, Dataset

class Net(nn.Module):
    kind = torch.float32

    @torch.no_grad()
    def run(self):
        return 3

class Data(Dataset): pass
class Round(Function): pass

assert Net().run() == 3 and torch.nn.functional is F
assert not hasattr(torch, "__path_of_none__") and torch.__version__ == "2.4.0"
assert torch.nn.Parameter(torch.zeros(3)).data is not None
"""
    subprocess.run([sys.executable, "-I", "-c", program, str(tmp_path)], check=True)
