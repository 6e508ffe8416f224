"""Rows on the board's CPU are the same bits however they are computed, and what that costs.

docs/exactness.md, rule 2: slots in use after a pass are a multiple of 4, and no lane declares fewer
than two rows. Without either rows differ, so these tests can fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arm_bundles import of_heads, of_tiny
from emulator import HERE, Board, board_in

MODELS = [
    # source, or values of a head, quant, kv, tokens
    ("llama", "int8", "f16", 72),
    ("llama", "f32", "f16", 40),
    ("gemma3", "int8", "f16", 48),
    ("qwen3", "int8", "int8", 48),
    ("llama_wide", "int4", "int8", 48),
    (64, "int4", "f16", 136),
    (128, "int8", "f16", 48),
    (256, "int8", "f16", 40),
    (256, "int4", "int8", 40),
]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return board_in(tmp_path_factory.mktemp("board"))


def laws(
    board: Board,
    source: str | int,
    quant: str,
    kv: str,
    folder: Path,
    num_tokens: int,
    padding: str,
) -> dict[str, dict[str, float]]:
    make = of_tiny if isinstance(source, str) else of_heads
    bundle = make(source, quant, kv, folder / "bundle")  # type: ignore[arg-type]
    arguments = (HERE / "rows_there.py", "laws", str(num_tokens), padding, bundle)
    found: dict[str, dict[str, float]] = board(*arguments, timeout=300).json()
    return found


@pytest.mark.parametrize(("source", "quant", "kv", "num_tokens"), MODELS)
def test_rows_are_those_of_single_rows(
    board: Board, source: str | int, quant: str, kv: str, num_tokens: int, tmp_path: Path
) -> None:
    """Chunks, steps behind any past, other lanes, ragged lanes, a tree's trunk, one thread."""
    found = laws(board, source, quant, kv, tmp_path, num_tokens, "board")
    assert len(found) >= 15
    assert all(way["rows"] for way in found.values())
    assert {name: way for name, way in found.items() if way["differ"]} == {}


@pytest.mark.parametrize("padding", ["two", "one"])
@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_rows_differ_where_the_rule_is_broken(
    board: Board, padding: str, kv: str, tmp_path: Path
) -> None:
    """By more than rounding: int8 activations make it larger."""
    found = laws(board, "llama", "int8", kv, tmp_path, 40, padding)
    assert found["chunks of 3"]["differ"] > 0
    assert found["steps of 1 to 8 behind any past"]["most"] > 1e-3


def test_four_bits_in_rows_of_broken_blocks_are_not_exact(board: Board, tmp_path: Path) -> None:
    """Matrices of 4 bits with more than one block a row, the last of them shorter than 32: the last
    rows of a pass that do not fill a group of four have another kernel, wherever they begin.
    """
    found = laws(board, "llama", "int4", "int8", tmp_path, 40, "board")
    assert found["chunks of 2"]["differ"] > 0


def test_what_padding_costs(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows and more become 1.5 more in the mean over pasts; one row becomes 3.5."""
    bundle = of_tiny("llama", "int8", "f16", tmp_path / "bundle")
    found = board(HERE / "rows_there.py", "costs", bundle, timeout=200).json()
    assert found["computed"] == [
        [4, 4, 4, 4, 8, 8, 8, 8],
        [3, 3, 3, 7, 7, 7, 7, 11],
        [2, 2, 6, 6, 6, 6, 10, 10],
        [5, 5, 5, 5, 5, 9, 9, 9],
    ]
    measured = list(found["measured"].values())
    assert measured == sorted(measured)
    assert measured[0] > 0
    with capsys.disabled():
        print(f"\n{table(found)}")


def table(found: dict[str, Any]) -> str:
    """Seconds of the emulator: only their proportions mean anything, and those little."""
    plain = found["measured"]["1"]
    lines = ["rows asked  rows computed, past % 4 = 0 1 2 3  mean  c(T)/c(1)  planned with"]
    for i, row in enumerate(zip(*found["computed"], strict=True)):
        cost = sum(phase[i] for phase in found["seconds"]) / len(found["seconds"])
        lines.append(
            f"{i + 1:10}  {'  '.join(f'{n:2}' for n in row):>36}  {sum(row) / 4:4.1f}"
            f"  {cost / plain:9.2f}  {found['planned'][i] / plain:12.2f}"
        )
    return "\n".join(lines)
