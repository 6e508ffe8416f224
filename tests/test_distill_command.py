"""`headrace distill` before torch is needed: what it refuses, and what it says where torch is missing.

The training is tested in tests/train.
"""

from __future__ import annotations

import sys

import pytest
from commandline import CommandLine
from tiny_checkpoints import TINY

TARGET = str(TINY / "llama")

REFUSED = {
    ("-o", "x", "--time", "soon"): "--time: got 'soon', expected a time such as 60m",
    ("-o", "x", "--time", "5 parsecs"): "expected a time such as 60m",
    (): "-o DRAFT_DIR is missing",
    ("-o", "x", "--json"): "--no-speed and --json need --eval",
    ("--eval", "x", "-o", "y"): "--eval trains nothing",
    ("--eval", "x", "--layers", "2"): "--eval trains nothing",
    ("--eval", "x", "--seed", "0"): "--eval trains nothing",
    ("plant.log", "-o", "x"): "texts are given with --corpus",
    ("-o", "x", "--storage", "int3"): "int3",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_refused(arguments: tuple[str, ...], command: CommandLine) -> None:
    done = command("distill", TARGET, *arguments)
    assert done.code == 2
    assert REFUSED[arguments] in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", (("-o", "x"), ("--eval", "x")))
def test_without_torch_it_says_what_to_install(
    arguments: tuple[str, ...], command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = command("distill", TARGET, *arguments)
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        "headrace: distilling needs torch, which is not installed: pip install 'headrace[train]'"
    )
