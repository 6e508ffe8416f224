"""Rows on the board's CPU are the same bits however they are computed, and what that costs.

docs/exactness.md, rule 2: slots in use after a pass are a multiple of 4, and no lane declares fewer
than two rows. Without either rows differ, so these tests can fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from arm_bundles import of_heads, of_tiny
from emulator import HERE, Board, board_in

Way = dict[str, float]
Laws = dict[str, Way]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return board_in(tmp_path_factory.mktemp("board"))


@dataclass(frozen=True)
class Job:
    """A bundle whose rows are compared."""

    source: str | int
    """A tiny checkpoint, or the values of a head of random weights."""
    quant: str
    kv: str
    num_tokens: int
    padding: str = "board"

    def __str__(self) -> str:
        return f"{self.source}-{self.quant}-{self.kv}-{self.padding}"

    def argument(self, folder: Path) -> str:
        """As rows_there.py wants it; exports the bundle."""
        out = folder / f"bundle-{self.source}-{self.quant}-{self.kv}"
        if not out.exists():
            if isinstance(self.source, str):
                of_tiny(self.source, self.quant, self.kv, out)
            else:
                of_heads(self.source, self.quant, self.kv, out)
        return f"{self.num_tokens},{self.padding},{out}"


EXACT = [
    Job("llama", "int8", "f16", 64),
    Job("llama", "f32", "f16", 32),
    Job("gemma3", "int8", "f16", 40),
    Job("qwen3", "int8", "int8", 40),
    Job("llama_wide", "int4", "int8", 40),
    Job(64, "int4", "f16", 134),
    Job(128, "int8", "f16", 40),
    Job(192, "int4", "f16", 32),
    Job(256, "int8", "f16", 32),
    Job(256, "int4", "int8", 32),
]
BROKEN = [
    Job("llama", "int8", kv, 24, padding) for kv in ("f16", "int8") for padding in ("two", "one")
]
ODD = Job("llama", "int4", "int8", 24)


@pytest.fixture(scope="module")
def laws(board: Board, tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Laws]:
    """All by one process: the first lines of Python cost more there than a tiny model."""
    jobs, folder = [*EXACT, *BROKEN, ODD], tmp_path_factory.mktemp("laws")
    arguments = [job.argument(folder) for job in jobs]
    found = board(HERE / "rows_there.py", "laws", *arguments, timeout=900).json()
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize("job", EXACT, ids=str)
def test_rows_are_those_of_single_rows(laws: dict[Job, Laws], job: Job) -> None:
    """Chunks, steps behind any past, other lanes, ragged lanes, a tree's trunk, one thread."""
    found = laws[job]
    assert len(found) >= 15
    assert all(way["rows"] for way in found.values())
    assert {name: way for name, way in found.items() if way["differ"]} == {}


@pytest.mark.parametrize("job", BROKEN, ids=str)
def test_rows_differ_where_the_rule_is_broken(laws: dict[Job, Laws], job: Job) -> None:
    for name in ("chunks of 4", "steps of 1 to 8 behind any past", "ragged lanes"):
        assert laws[job][name]["differ"] > 0, name


def test_four_bits_in_rows_of_broken_blocks_are_not_exact(laws: dict[Job, Laws]) -> None:
    """Matrices of 4 bits whose rows are more than one block and no whole number of blocks: the rows
    of a pass behind its last group of four have another kernel, whatever the slots.
    """
    assert laws[ODD]["chunks of 2"]["differ"] > 0


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
