"""Bit-exactness on a real model: a token's logits do not depend on how it came to be computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from exported import backend, logits_of, smollm2
from tiny_checkpoints import DATA

from headrace.models.iospec import SPARE_SLOTS
from headrace.models.manifest import Bundle
from headrace.runtime.batch import F32, LaneRows, chain
from headrace.runtime.exactness import Machine, declared_rows, most_padding
from headrace.runtime.ort import OrtBackend

CAPACITY = 160
TAIL = 17
CHUNKINGS = (1, 2, 7, 64, 200)
STEP_WIDTHS = tuple(range(1, 17))


@pytest.fixture(scope="module", params=[("int8", "f16"), ("keep", "f16"), ("int8", "int8")])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return smollm2(*request.param)


@pytest.fixture(scope="module")
def runner(bundle: Bundle) -> OrtBackend:
    return backend(bundle, lanes=2, capacity=CAPACITY)


@pytest.fixture(scope="module")
def ids() -> npt.NDArray[np.int64]:
    with np.load(DATA / "smollm2_logits.npz") as fixture:
        return np.asarray(fixture["input_ids"][:120], np.int64)[:120]


@pytest.fixture(scope="module")
def expected(runner: OrtBackend, ids: npt.NDArray[np.int64]) -> F32:
    """Logits of the last TAIL tokens, two rows a pass after one long prefill."""
    return tail(runner, ids, 200, [2])


def tail(
    runner: OrtBackend, ids: npt.NDArray[np.int64], chunk: int, widths: list[int], lane: int = 0
) -> F32:
    """Logits [TAIL, V]: the tokens before prefilled in chunks, the rest in steps."""
    start = len(ids) - TAIL
    for past in range(0, start, chunk):
        runner.forward([chain(lane, ids[past : min(past + chunk, start)], past)])
    return steps(runner, ids, widths, lane)


def steps(runner: OrtBackend, ids: npt.NDArray[np.int64], widths: list[int], lane: int = 0) -> F32:
    rows, past, turn = [], len(ids) - TAIL, 0
    while past < len(ids):
        part = ids[past : past + widths[turn % len(widths)]]
        wanted = tuple(range(len(part)))
        rows.append(runner.forward([chain(lane, part, past, wanted)]).copy())
        past, turn = past + len(part), turn + 1
    return np.concatenate(rows)


@pytest.mark.parametrize("chunk", CHUNKINGS)
def test_any_chunking_of_the_prompt(
    runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32, chunk: int
) -> None:
    assert (tail(runner, ids, chunk, [2]) == expected).all()


def test_any_width_of_a_step(runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32) -> None:
    for width in STEP_WIDTHS:
        assert (steps(runner, ids, [width]) == expected).all(), f"steps of {width}"
    assert (steps(runner, ids, [3, 1, 16, 2]) == expected).all()


def test_the_other_lane(runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32) -> None:
    assert (tail(runner, ids, 64, [5], lane=1) == expected).all()


@pytest.mark.parametrize("neighbour_rows", [0, 1, 9])
def test_beside_another_lane(
    runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32, neighbour_rows: int
) -> None:
    start, rows = len(ids) - TAIL, []
    for past in range(start, len(ids), 4):
        part = ids[past : past + 4]
        ours = chain(0, part, past, tuple(range(len(part))))
        other = chain(1, ids[:neighbour_rows], 33)
        rows.append(runner.forward([ours, other]).copy())
    assert (np.concatenate(rows) == expected).all()


def test_one_thread(bundle: Bundle, ids: npt.NDArray[np.int64], expected: F32) -> None:
    assert (tail(backend(bundle, capacity=CAPACITY, threads=1), ids, 200, [3]) == expected).all()


def test_garbage_beyond_the_total_is_never_read(
    runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32
) -> None:
    start = len(ids) - TAIL
    for array in (*runner.arena.keys, *runner.arena.values):
        array[:, :, start:] = np.nan if array.dtype.kind == "f" else 113
    assert (steps(runner, ids, [4]) == expected).all()


def test_a_lane_filled_again_from_f16_blocks(
    runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32
) -> None:
    """What a block stores is what the lane had, so parking and staging change nothing."""
    start = len(ids) - TAIL
    for array in (*runner.arena.keys, *runner.arena.values):
        lane = array[0, :, :start]
        block = lane.astype(np.float16) if array.dtype.kind == "f" else lane.copy()
        array[1] = 0
        array[1, :, :start] = block
    assert (steps(runner, ids, [4], lane=1) == expected).all()


def test_a_chain_as_the_trunk_of_a_tree(
    runner: OrtBackend, ids: npt.NDArray[np.int64], expected: F32
) -> None:
    """Rows that a branch hides from the trunk do not touch it."""
    start = len(ids) - TAIL
    trunk, branch = ids[start : start + 4], ids[:2]
    hidden = np.zeros((6, 6), bool)
    hidden[4:, 1:4] = True  # the branch leaves the trunk after its first row
    tree = LaneRows(
        0,
        np.concatenate([trunk, branch]),
        np.array([start, start + 1, start + 2, start + 3, start + 1, start + 2]),
        start,
        (0, 1, 2, 3, 4),
        hidden=hidden,
    )
    logits = runner.forward([tree]).copy()
    assert (logits[:4] == expected[:4]).all()


def test_never_one_row_and_on_arm_multiples_of_four() -> None:
    x86, arm = Machine("x86_64", 1), Machine("aarch64", 4)
    for past in range(40):
        for rows in range(20):
            splits = rows > 1 and rows % 16 == 1
            assert declared_rows(past, rows, x86) == max(2, rows) + splits
            declared = declared_rows(past, rows, arm)
            assert declared >= max(2, rows)
            assert (past + declared) % 4 == 0
            assert declared - rows <= most_padding(arm.row_multiple) == 7
            assert (
                declared_rows(past, rows, x86) - max(1, rows) <= most_padding(x86.row_multiple) == 1
            )


@pytest.mark.parametrize("machine", [Machine("x86_64", 1), Machine("aarch64", 4)], ids=str)
def test_padding_stays_within_the_spare_slots(machine: Machine) -> None:
    """Of a lane of whole blocks, whatever its past, and never leaves a block of one row."""
    for slots in range(16, 320, 16):
        for rows in range(min(slots, 256) + 1):
            for past in {0, (slots - rows) // 2, slots - rows}:
                declared = declared_rows(past, rows, machine)
                assert past + declared <= slots + SPARE_SLOTS
                assert declared % 16 != 1


def test_a_pass_whose_last_block_of_queries_has_one_row(
    bundle: Bundle, ids: npt.NDArray[np.int64]
) -> None:
    """The operator takes 128 rows at a time where heads have 64 values."""
    longer = np.concatenate([ids, ids[:9]])
    runner = backend(bundle, capacity=160)
    runner.forward([chain(0, longer[:64], 0)])
    expected = runner.forward([chain(0, longer[64:], 64, (64,))]).copy()
    assert (runner.forward([chain(0, longer, 0, (128,))]) == expected).all()


def test_all_logits_agree_with_single_steps(runner: OrtBackend, ids: npt.NDArray[np.int64]) -> None:
    few = ids[:24]
    assert (logits_of(runner, few, [1]) == logits_of(runner, few, [24])).all()


def test_a_small_lane_filled_to_its_end(bundle: Bundle, ids: npt.NDArray[np.int64]) -> None:
    """Widths and totals are rounded up, and must still fit a lane that is hardly larger."""
    whole = logits_of(backend(bundle, capacity=70), ids[:70], [70 // 3])
    stepped = logits_of(backend(bundle, capacity=70), ids[:70], [16, 1])
    assert (whole == stepped).all()
    runner = backend(bundle, capacity=70)
    last = runner.forward([chain(0, ids[:70], 0, (69,))])[0]
    assert (last == whole[69]).all()
