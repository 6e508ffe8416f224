"""What is read from the toolkit's log, on excerpts of builds of tiny graphs.

`rknn_build.log` has the tables of the tiny llama's first layer in variants of 8 rows and of 1, as
version 2.5.0 printed them, without tensors that are no inputs or outputs.
"""

from __future__ import annotations

import re

import pytest
from tiny_checkpoints import DATA

from headrace.errors import ExportError, RknnToolkitError
from headrace.export import rknn_log
from headrace.export.npu_cost import variant_cost
from headrace.models.npu_io import NativeTensor, NpuTensor, NpuVariant

LOG = (DATA / "rknn_build.log").read_text(encoding="utf-8")

TOPK = """
D RKNN: [15:01:07.527]                        Network Layer Information Table
D RKNN: [15:01:07.527] 0    InputOperator      FLOAT16  CPU    \\                  (1,32,1,4)     0/0/0  0  InputOperator:x
D RKNN: [15:01:07.527] 1    TopK               FLOAT16  CPU    (1,32,1,4),(1)     (1,4,1,4)      0/0/0  0  TopK:y
D RKNN: [15:01:07.527] 2    OutputOperator     FLOAT16  CPU    (1,4,1,4)          \\             0/0/0  0  OutputOperator:y
D RKNN: [15:01:07.527]                        Feature Tensor Information Table
D RKNN: [15:01:07.527] Total Internal Memory Size: 0.5KB
D RKNN: [15:01:07.527] Total Weight Memory Size: 64B
"""


def inputs(rows: int) -> dict[str, tuple[int, ...]]:
    return {
        "embeds": (1, 40, 1, rows),
        "mask": (1, 1, rows, 64 + rows),
        "cos": (1, 8, 1, rows),
        "sin": (1, 8, 1, rows),
        "tail": (10, 8, 1, 32),
        "main.0.key": (5, 8, 1, 32),
        "main.0.value": (5, 8, 1, 32),
    }


def test_tables_of_all_variants() -> None:
    eight, one = rknn_log.parse(LOG)
    assert (eight.inputs, one.inputs) == (inputs(8), inputs(1))
    assert eight.outputs == {"new": (10, 8, 1, 8), "logits": (1, 283, 1, 8)}
    assert len(eight.operators) == 40 and len(eight.computing) == 31
    assert eight.types["Conv"] == 8 and eight.types["exSDPAttention"] == 1
    assert sum(eight.types.values()) == len(eight.computing)
    # the third of the three cycle columns; and a row that has no name
    assert eight.cycles == 1152 + 4 * 190 + 2 * 160 + 255 + 293 + 282 + 1179
    assert eight.operators[8].label == "Conv(1,1,8,72)"
    assert eight.weight_bytes == one.weight_bytes > 0
    assert eight.internal_bytes > one.internal_bytes > 0
    assert eight.traffic_bytes > one.traffic_bytes > 0


def test_variants_are_found_by_their_inputs() -> None:
    logs = rknn_log.parse(LOG)
    found = rknn_log.by_inputs(logs, {rows: inputs(rows) for rows in (1, 8)})
    assert found == {1: logs[1], 8: logs[0]}


@pytest.mark.parametrize("wanted", [(1,), (1, 8, 4), (4,)])
def test_other_variants_than_asked_for_are_an_error(wanted: tuple[int, ...]) -> None:
    with pytest.raises(RknnToolkitError, match="variant"):
        rknn_log.by_inputs(rknn_log.parse(LOG), {rows: inputs(rows) for rows in wanted})


def test_nothing_on_the_cpu() -> None:
    variants = dict(enumerate(rknn_log.parse(LOG)))
    assert not any(map(rknn_log.cpu_operators, variants.values()))
    rknn_log.check_on_npu(variants)


def test_operators_on_the_cpu_are_named() -> None:
    (log,) = rknn_log.parse(TOPK)
    assert (log.internal_bytes, log.weight_bytes) == (512, 64)
    assert [op.label for op in rknn_log.cpu_operators(log)] == ["TopK:y"]
    with pytest.raises(ExportError, match=r"4 rows.*TopK"):
        rknn_log.check_on_npu({4: log})


UNREADABLE = {
    "empty": ("", ""),
    "no table": ("Network Layer", "Layer"),
    "no tensor table": ("Feature Tensor Information Table", "Tensors"),
    "no memory": ("Total Weight Memory Size", "Weights"),
    "another unit": ("KB", "KiB"),
    "a row of another form": (
        "11   Conv               FLOAT16  NPU",
        "11   Conv               NPU",
    ),
    "another target": ("Split              FLOAT16  NPU", "Split              FLOAT16  DSP"),
    "the last row of another form": ("4            OutputOperator:log", "?            Output:log"),
    "a row too few": ("D RKNN: [15:01:47.055] 12   Conv", "D RKNN: [15:01:47.055] Conv"),
}


@pytest.mark.parametrize("change", UNREADABLE)
def test_a_log_of_another_form_is_an_error_and_never_a_pass(change: str) -> None:
    old, new = UNREADABLE[change]
    assert old in LOG
    with pytest.raises(RknnToolkitError, match="toolkit's log"):
        rknn_log.parse(LOG.replace(old, new) if old else "")


def test_colours_and_progress_bars_do_not_matter() -> None:
    noise = "\x1b[1;33mW\x1b[0m a warning\r\nI Loading :   0%|\rI Loading : 100%|"
    noisy = LOG.replace("D RKNN", "\x1b[1mD RKNN", 3).replace("\n", f"\n{noise}\n", 1)
    assert rknn_log.parse(noisy + noise) == rknn_log.parse(LOG)


def test_a_line_that_begins_behind_another_counts() -> None:
    row = re.search(r"D RKNN: \S+ 10 +Conv.*", LOG)
    assert row
    glued = LOG.replace(f"\n{row[0]}", f" I building ...{row[0]}")
    assert rknn_log.parse(glued) == rknn_log.parse(LOG)


def test_complaints() -> None:
    log = (
        "I fine\n\x1b[1;31mE\x1b[0m \x1b[1;31mbuild: Traceback (most recent call last):\x1b[0m\n"
        "E RKNN: [15:01:07.528] Unkown op target: 0\nE rknn-toolkit2 version: 2.5.0\nE =====\n"
    )
    assert rknn_log.complaints(log) == ["Unkown op target: 0"]


def variant(rows: int, tensors: dict[str, NativeTensor]) -> NpuVariant:
    sides = [
        tuple(
            tensors.get(name) or native(name, dims)
            for name, dims in side.items()
        )
        for side in (inputs(rows), {"logits": (1, 283, 1, rows), "new": (10, 8, 1, rows)})
    ]  # fmt: skip
    return NpuVariant(rows, sides[0], sides[1])


def native(name: str, dims: tuple[int, ...], *, c2: int = 8) -> NativeTensor:
    """Without padding but for what makes whole C2."""
    n, c, h, w = dims
    c1 = -(-c // c2)
    return NativeTensor(
        name, (n, c, h, w), "float16", (n, c1, h, w, c2), w, 2 * n * c1 * h * w * c2
    )


@pytest.mark.parametrize(("index", "rows"), [(0, 8), (1, 1)])
def test_how_boundary_tensors_lie(index: int, rows: int) -> None:
    """A mask, with one channel, has C2 = 1 and rows of whole 16 bytes; all else is without padding,
    at one row too. Embeddings are planned at twice their bytes.
    """
    log = rknn_log.parse(LOG)[index]
    keys = -(-(64 + rows) // 8) * 8
    wide = (1, 1, rows, keys, 1)
    special = {
        "mask": NativeTensor(
            "mask", (1, 1, rows, 64 + rows), "float16", wide, keys, 2 * rows * keys
        ),
    }
    assert not rknn_log.layout_differences(log, variant(rows, special))
    plain = rknn_log.layout_differences(log, variant(rows, {}))
    assert [line.split()[1] for line in plain] == ["mask", "mask"]


def test_missing_and_wrong_tensors_differ() -> None:
    log = rknn_log.parse(LOG)[0]
    wanted = variant(8, {"logits": native("lodgits", (1, 283, 1, 8), c2=16)})
    text = "\n".join(rknn_log.layout_differences(log, wanted))
    assert "outputs: the log has new, logits" in text
    assert "output lodgits: not in the log" in text


def test_a_native_tensor_of_the_rule_is_compared() -> None:
    tensor = NpuTensor("tail", (10, 8, 1, 32))
    log = rknn_log.parse(LOG)[0]
    expected = NativeTensor.expected(tensor, is_output=False)
    found = [t for t in log.tensors if t.name == "tail"]
    assert [(t.type, t.dims, t.size) for t in found] == [
        (expected.type, expected.dims, expected.size)
    ]


def test_cost_of_a_variant() -> None:
    log = rknn_log.parse(LOG)[0]
    cost = variant_cost(log)
    assert cost.by_cycles_ms == pytest.approx(log.cycles / 1e6)
    assert cost.by_bytes_ms == pytest.approx(8.1 + log.weight_bytes * 32.2e-9)
