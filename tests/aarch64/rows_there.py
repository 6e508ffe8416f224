"""Runs on the emulated board: whether rows are the same bits, and how many rows a pass computes.

    python rows_there.py laws NUM_TOKENS,PADDING,BUNDLE...
    python rows_there.py costs BUNDLE

PADDING is `board`, what exactness.py demands here; `two`, at least two rows; `one`, none at all.
Laws prints a JSON array: for each bundle, by way of computing, how many of the rows that it came to
differ from those of single rows, and by how much at most. Costs prints an object: see `costs`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from headrace.models.manifest import TARGET, Bundle
from headrace.runtime import pace
from headrace.runtime.batch import F32, I64, LaneRows, chain
from headrace.runtime.cores import Placement
from headrace.runtime.exactness import Machine, declared_rows, least_rows
from headrace.runtime.ort import MAX_WANTED, OrtBackend
from headrace.runtime.prepare import session_options

CHUNKINGS = ((2,), (3,), (4,), (5,), (7,), (16,), (17,), (32,), (129,), (3, 1, 9, 2), (7, 2, 2, 1))
WIDTHS = range(1, 9)
NUM_LANES = 4

PADDINGS = {"board": None, "two": 2, "one": 1}
"""By name: rows that a pass has at least where the rule of this machine is broken."""

Ways = Iterator[tuple[F32, F32]]
"""Pairs of what was found and what was expected."""


def backend(
    bundle: Bundle, *, lanes: int, capacity: int, padding: str = "board", threads: int = 2
) -> OrtBackend:
    """The bundle's graph as it is, without prepared weights."""
    manifest, machine, unlike_board = bundle.manifest, Machine.here(), PADDINGS[padding]
    session = ort.InferenceSession(
        str(bundle.file(TARGET)),
        session_options(Placement(threads=threads)),
        providers=["CPUExecutionProvider"],
    )
    return OrtBackend(
        session,
        manifest.config,
        kv=manifest.kv,
        lanes=lanes,
        capacity=capacity,
        machine=machine if unlike_board is None else Machine(machine.arch, 1),
        least_rows=unlike_board or least_rows(manifest.quant, manifest.kv, machine),
    )


@dataclass(frozen=True)
class Model:
    """A backend whose lanes hold `ids`, and the logits [T, V] of those as single rows."""

    runner: OrtBackend
    other: OrtBackend
    """On one thread."""
    ids: I64
    expected: F32

    def feed(self, runner: OrtBackend, widths: Sequence[int], lane: int = 0) -> Ways:
        """All ids, in passes of these widths in turn."""
        past, turn = 0, 0
        while past < len(self.ids):
            width = widths[turn % len(widths)]
            yield self.rows(runner, past, width, lane)
            past, turn = past + width, turn + 1

    def rows(self, runner: OrtBackend, past: int, width: int, lane: int = 0) -> tuple[F32, F32]:
        """Of one pass; of many rows only the last logits are wanted."""
        ids = self.ids[past : past + width]
        wanted = tuple(range(len(ids)))[-MAX_WANTED:]
        found = runner.forward([chain(lane, ids, past, wanted)]).copy()
        return found, self.expected[past : past + len(ids)][-MAX_WANTED:]

    def ways(self) -> Iterator[tuple[str, Ways]]:
        for widths in CHUNKINGS:
            if max(widths) < len(self.ids):
                yield f"chunks of {', '.join(map(str, widths))}", self.feed(self.runner, widths)
        yield "single rows again, in another lane", self.feed(self.runner, [1], NUM_LANES - 1)
        yield "chunks of 6, one thread", self.feed(self.other, [6])
        yield "steps of 1 to 8 behind any past", self.steps()
        yield "ragged lanes", self.ragged()
        yield "the trunk of a tree", self.trunks()
        yield "garbage behind the lane's end", self.beside_garbage()

    def pasts(self, step: int) -> range:
        """Falling: padding rows write behind a pass, where no later one looks."""
        return range(len(self.ids) - max(WIDTHS), 0, -step)

    def steps(self) -> Ways:
        for past in self.pasts(1):
            # With every past, all of a step's sizes modulo 4 and two of its widths.
            for width in (past % 8 + 1, (past + past // 8 + 3) % 8 + 1):
                yield self.rows(self.runner, past, width)

    def ragged(self) -> Ways:
        """Other pasts and widths in every lane; now and then one has no rows, or a long chunk."""
        for lane in range(NUM_LANES):
            self.runner.forward([chain(lane, self.ids, 0)])
        chance = np.random.default_rng(2)
        for most in self.pasts(5):
            rows, wanted = [], []
            for lane in range(NUM_LANES):
                past = max(0, most - int(chance.integers(0, 4)))
                width = int(chance.choice([0, 1, 1, 2, 3, 4, 5, 7, 8]))
                rows.append(chain(lane, self.ids[past : past + width], past, tuple(range(width))))
                wanted.append(self.expected[past : past + width])
            if any(r.num_rows for r in rows):
                yield self.runner.forward(rows).copy(), np.concatenate(wanted)

    def trunks(self) -> Ways:
        """Rows of a trunk, then two of a branch that leaves it after its first row."""
        self.runner.forward([chain(0, self.ids, 0)])
        for past in self.pasts(3):
            length = 2 + past % 5
            ids = np.concatenate([self.ids[past : past + length], self.ids[:2]])
            positions = np.concatenate([np.arange(past, past + length), [past + 1, past + 2]])
            hidden = np.zeros((length + 2, length + 2), bool)
            hidden[length:, 1:length] = True
            tree = LaneRows(0, ids, positions, past, tuple(range(length)), hidden=hidden)
            found = self.runner.forward([tree]).copy()
            yield found, self.expected[past : past + length]

    def beside_garbage(self) -> Ways:
        self.runner.forward([chain(0, self.ids, 0)])
        for past in self.pasts(7):
            for array in (*self.runner.arena.keys, *self.runner.arena.values):
                array[:, :, past:] = np.nan if array.dtype.kind == "f" else 113
            yield self.rows(self.runner, past, past % 3 + 1)


def laws(job: str) -> dict[str, Any]:
    number, padding, path = job.split(",", 2)
    num_tokens = int(number)
    bundle = Bundle.open(Path(path))
    runner, other = (
        backend(bundle, lanes=lanes, capacity=num_tokens, padding=padding, threads=threads)
        for lanes, threads in ((NUM_LANES, 2), (1, 1))
    )
    vocab_size = bundle.manifest.config.vocab_size
    ids = np.random.default_rng(1).integers(3, vocab_size - 3, num_tokens)
    nothing = np.empty((len(ids), bundle.manifest.config.num_logits), np.float32)
    single = Model(runner, other, ids, nothing)
    expected = np.concatenate([found for found, _ in single.feed(runner, [1])])
    model = Model(runner, other, ids, expected)
    return {name: compared(pairs) for name, pairs in model.ways()}


def compared(pairs: Ways) -> dict[str, float]:
    num_rows = num_other = 0
    most = 0.0
    for found, expected in pairs:
        assert found.shape == expected.shape and np.isfinite(expected).all()
        num_rows += len(found)
        num_other += int((found != expected).any(1).sum())
        most = max(most, float(np.abs(found - expected).max(initial=0)))
    return {"rows": num_rows, "differ": num_other, "most": most}


def costs(path: str) -> dict[str, Any]:
    """What `pace.measure` measures, and the rows of an exact pass behind a past.

    `computed[past % 4][rows - 1]` rows go through every matrix where so many are asked for.
    """
    bundle = Bundle.open(Path(path))
    runner = backend(bundle, lanes=1, capacity=bundle.manifest.config.max_position)
    measured = pace.measure(runner)
    past = pace.measured_past(runner.facts)
    ids = np.ones(8, np.int64)
    computed, seconds = [], []
    for phase in range(4):
        rows = [chain(0, ids[:n], past - past % 4 + phase - 4) for n in WIDTHS]
        computed.append([declared_rows(r.past, r.num_rows, Machine.here()) for r in rows])
        seconds.append([fastest(runner, r) for r in rows])
    return {
        "past": past,
        "measured": measured.seconds,
        "planned": [measured.of(max(n, runner.facts.least_rows)) for n in WIDTHS],
        "computed": computed,
        "seconds": seconds,
    }


def fastest(runner: OrtBackend, rows: LaneRows) -> float:
    found = []
    for _ in range(5):
        began = time.perf_counter()
        runner.forward([rows])
        found.append(time.perf_counter() - began)
    return min(found[1:])


def main(arguments: list[str]) -> None:
    match arguments:
        case ["laws", *jobs]:
            print(json.dumps([laws(job) for job in jobs]))
        case ["costs", path]:
            print(json.dumps(costs(path)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
