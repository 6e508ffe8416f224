"""Commands as they are used: at a terminal, in a pipe, interrupted."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from commandline import PATIENCE_S, CommandLine, at_terminal, finish, started
from tiny_checkpoints import TINY

from headrace.commands.chat import Chat
from headrace.commands.talk import Talk
from headrace.runtime.llm import LLM
from headrace.runtime.request import SamplingParams

ENDLESS = ("--ctx", "90000", "--max-tokens", "80000", "--ignore-eos")


@pytest.fixture(autouse=True)
def _cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(shared_cache))


def test_a_chat(tiny_bundle: Path) -> None:
    with at_terminal("run", tiny_bundle, "--max-tokens", "8", "--ctx", "90") as chat:
        chat.read_to(">>> ")
        chat.type("/stats\n")
        assert "no finished answer" in chat.read_to(">>> ")
        chat.type("pump\n")
        chat.read_to("pump\n")
        assert chat.read_to("(?s).+\n>>> ")
        chat.type("/help\n")
        assert "/clear" in chat.read_to("never a command.*\n>>> ")
        chat.type("/stats\n")
        assert "time to first token" in chat.read_to("peak.*\n(?s:.*)>>> ")
        chat.type("/nonsense\n")
        assert "no such command" in chat.read_to(">>> ")
        chat.type("\n")
        chat.read_to(">>> ")
        chat.type("x" * 200 + "\n")
        assert "raise --ctx" in chat.read_to("raise.*\n>>> ")
        chat.type("/system be brief\n")
        assert "is set" in chat.read_to("set\n>>> ")
        chat.type("/clear\n")
        assert "forgotten" in chat.read_to("forgotten\n>>> ")
        chat.type("/exit\n")
        assert chat.code() == 0


def test_ctrl_c_ends_the_answer_and_not_the_chat(endless_bundle: Path) -> None:
    with at_terminal("run", endless_bundle, *ENDLESS) as chat:
        chat.read_to(">>> ")
        chat.type("pump\n")
        chat.read_to("pump\n(?s:.{200})")
        chat.type("\x03")
        chat.read_to("\n>>> ")
        chat.type("half a line")
        chat.read_to("half a line")
        chat.interrupt()
        chat.read_to("\n>>> ")
        chat.interrupt()
        assert chat.code() == 0


def test_ctrl_d_leaves_a_chat(tiny_bundle: Path) -> None:
    with at_terminal("run", tiny_bundle) as chat:
        chat.read_to(">>> ")
        chat.type("\x04")
        assert chat.code() == 0


def test_a_chat_is_no_json(tiny_bundle: Path) -> None:
    with at_terminal("run", tiny_bundle, "--json") as terminal:
        assert "--json needs a PROMPT" in terminal.read_to("headrace: .*\n")
        assert terminal.code() == 2


class _Impatient(io.StringIO):
    """A terminal whose user presses Ctrl-C at the fifth piece of text."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 5:
            raise KeyboardInterrupt
        return super().write(text)


def test_what_was_said_before_ctrl_c_is_remembered(
    endless_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["pump 3?", None])
    monkeypatch.setattr("headrace.commands.chat._read_line", lambda: next(lines))
    out = _Impatient()
    with LLM(endless_bundle) as llm:
        chat = Chat(Talk(llm, SamplingParams(max_tokens=500, ignore_eos=True)), stats=False)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            chat.run()
        question, answer = chat.messages
        assert question["content"] == "pump 3?"
        assert answer["content"].startswith(out.getvalue().removesuffix("\n"))
        assert 0 < len(answer["content"]) < 100
        # and the lane is free again
        assert llm.generate("pump", SamplingParams(max_tokens=1)).token_ids


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_an_answer_that_is_interrupted(endless_bundle: Path, number: int, code: int) -> None:
    with started("run", endless_bundle, "pump", *ENDLESS) as child:
        assert child.stdout
        assert child.stdout.read(20)
        child.send_signal(number)
        result = finish(child)
    assert result.code == code
    # the first start of a bundle tells what takes long, and nothing else is said
    assert "Traceback" not in result.err and "headrace:" not in result.err, result.err
    assert result.out.endswith("\n")


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A calibration text that nobody writes: an export that reads it waits for good."""
    path = tmp_path / "text"
    os.mkfifo(path)
    return path


def _wait_for_reader(fifo: Path) -> int:
    limit = time.monotonic() + PATIENCE_S
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO and time.monotonic() < limit
            time.sleep(0.02)


def _unread(fd: int) -> int:
    """Bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_an_export_that_is_interrupted(
    tmp_path: Path, blocked: Path, number: int, code: int
) -> None:
    """It leaves nothing, also when the user is impatient."""
    out = tmp_path / "new" / "bundle"
    arguments = ("export", TINY / "llama", "-o", out, "--quant", "int4", "--calibrate", blocked)
    with started(*arguments) as child:
        fd = _wait_for_reader(blocked)
        os.write(fd, b"x")
        while _unread(fd):  # then it has not just opened the file, but reads
            time.sleep(0.01)
        assert [path.suffix for path in out.parent.iterdir()] == [".partial"]
        child.send_signal(number)
        child.send_signal(number)
        # the signal may come just before the next read, which would then not end by itself
        os.close(fd)
        result = finish(child)
    assert result.code == code
    assert "Traceback" not in result.err and "headrace:" not in result.err
    assert list(tmp_path.iterdir()) == [blocked]


def test_nobody_reads_on(endless_bundle: Path, tiny_bundle: Path) -> None:
    """As before `| head`."""
    for arguments in (("run", endless_bundle, "pump", *ENDLESS), ("inspect", tiny_bundle)):
        with started(*arguments) as child:
            assert child.stdout
            child.stdout.read(1)
            child.stdout.close()
            child.stdout = None
            result = finish(child)
        assert (result.code, result.err) == (1, ""), arguments


def test_an_output_that_is_full(tiny_bundle: Path) -> None:
    arguments = ("run", tiny_bundle, "pump", "--max-tokens", "3")
    with open("/dev/full", "wb") as full, started(*arguments, stdout=full) as child:
        result = finish(child)
    assert result.code == 1
    assert "No space left" in result.complaint


def test_a_closed_stdin_is_an_empty_prompt(tiny_bundle: Path) -> None:
    script = 'exec "$@" <&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "headrace", "run", str(tiny_bundle)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: the prompt is empty")


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    arguments = ("export", TINY / "llama", "-o", tmp_path / "bundle", "--quant", "f32")
    with at_terminal(*arguments) as terminal:
        assert "mean KL" in terminal.read_to("time .*s")
        assert terminal.code() == 0


def test_lines_in_a_pipe(command: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    result = command("export", TINY / "llama", "-o", out, "--quant", "f32")
    assert result.err.splitlines()[-1] == "hashing"
    assert "\x1b" not in result.out + result.err
