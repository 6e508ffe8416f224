"""The base runtime on the board's CPU: it imports, loads, answers, and keeps its promises."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from arm_bundles import of_tiny, twins
from emulator import HERE, Board, board_in

import headrace

FACTS = """
import json, numpy, onnxruntime, platform
from headrace.runtime import cores
from headrace.runtime.exactness import Machine
machine = Machine.here()
print(json.dumps({
    "arch": machine.arch, "row_multiple": machine.row_multiple, "onnxruntime": onnxruntime.__version__,
    "python": platform.python_version_tuple()[:2],
}))
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return board_in(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_tiny("llama", "int8", "f16", tmp_path_factory.mktemp("runtime") / "bundle")


def test_the_machine_is_an_arm(board: Board) -> None:
    assert board("-c", FACTS).json() == {
        "arch": "aarch64",
        "row_multiple": 4,
        "onnxruntime": version("onnxruntime"),
        "python": ["3", "11"],
    }


def test_the_command_line_starts(board: Board) -> None:
    done = board("-m", "headrace", "--version")
    assert (done.code, done.out, done.err) == (0, f"headrace {headrace.__version__}\n", "")


def test_an_answer_repeats(board: Board, bundle: Path) -> None:
    flags = ("--raw", "--temperature", "1", "--seed", "5", "--max-tokens", "24", "--json")
    first, second = (
        board("-m", "headrace", "run", bundle, "pump 3 low, pump 3", *flags).json() for _ in "12"
    )
    assert len(first["token_ids"]) > 4
    assert (first["text"], first["token_ids"]) == (second["text"], second["token_ids"])


def test_a_prompt_in_pieces(board: Board, bundle: Path) -> None:
    """Tokens and log-probabilities are those of the whole prompt, bit for bit."""
    found = board(HERE / "answers_there.py", bundle, *map(str, (0, 1, 2, 3, 7, 16))).json()
    assert found["prompt_len"] > 16
    whole = found["answers"].pop("0")
    assert len(whole) == 20
    for size, answer in found["answers"].items():
        assert answer == whole, f"pieces of {size}"


def test_speculation_keeps_its_promises(board: Board, tmp_path: Path) -> None:
    """A target and itself as the draft, in all pairs of settings."""
    flags: list[str | Path] = []
    for i, text in enumerate(("x y x y x y x y", "pump 3 low, pump 3")):
        (tmp_path / f"prompt{i}").write_text(text)
        flags += ["--prompts", tmp_path / f"prompt{i}"]
    command = ("check", twins("llama", "int8", tmp_path / "twins"), "--lossless", "--json")
    done = board("-m", "headrace", *command, *flags, "--max-tokens", "12", timeout=400)
    found = json.loads(done.out)
    assert done.code == 0, found
    assert found["holds"]
    promised = [
        entry
        for entry in found["cases"]
        if entry["case"]["exactness"] == "exact" and entry["case"]["accept"] == "coupled"
    ]
    assert promised
    assert all(entry["num_same"] == 2 for entry in promised)
    assert sum(entry["num_accepted"] for entry in promised) > 0
