"""What Rockchip's real toolkit does with graphs of ours: `make test-rknn`.

It is a compiler and a simulator on a PC; nothing here shows what an NPU does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from commandline import CommandLine
from onnx import helper, numpy_helper
from tiny_checkpoints import TINY, read_weights

from headrace.errors import ExportError, RknnToolkitError
from headrace.export.npu_graph import build_npu
from headrace.export.npu_text import FP16_MASK, INT8_MASK, Feeds, NpuText, ort_run, passes
from headrace.export.rknn import RknnBuild, Toolkit
from headrace.export.rknn_log import LogTensor, check_on_npu
from headrace.export.simulator import activations, compare
from headrace.models.config import ModelConfig
from headrace.models.npu_io import NpuGeometry, NpuTensor, npu_inputs

ROWS = (1, 4, 8, 32)
GEOMETRY = NpuGeometry(sinks=4, window=60, unit=16, nodes=16, rows=ROWS)
TOKENS = np.arange(3, 43)


@dataclass(frozen=True)
class Draft:
    """A tiny model's graph and the feeds of a text in each variant."""

    graph: Path
    config: ModelConfig
    feeds: dict[int, list[Feeds]]

    @property
    def variants(self) -> dict[int, list[NpuTensor]]:
        return {rows: npu_inputs(self.config, GEOMETRY, rows) for rows in ROWS}


def draft(folder: Path, mask: float, name: str = "qwen3") -> Draft:
    config, weights = read_weights(TINY / name)
    graph = folder / "npu.onnx"
    build_npu(graph, config, GEOMETRY, weights.__getitem__)
    run, feeds = ort_run(graph), {}
    for rows in ROWS:
        table = weights["model.embed_tokens.weight"] * np.float32(config.embed_scale)
        text = NpuText(config, GEOMETRY, table, mask)
        feeds[rows] = [feed for feed, _, _ in passes(run, text, TOKENS, rows)]
    return Draft(graph, config, feeds)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    return draft(tmp_path_factory.mktemp("draft"), FP16_MASK)


@pytest.fixture(scope="module")
def toolkit() -> Iterator[Toolkit]:
    with Toolkit() as toolkit:
        yield toolkit


@pytest.fixture(scope="module")
def built(toolkit: Toolkit, tiny: Draft) -> RknnBuild:
    """The tiny draft in float16; it stays the toolkit's last build."""
    return toolkit.build(tiny.graph, tiny.graph.with_suffix(".rknn"), tiny.variants)


def test_all_operators_are_the_npus(built: RknnBuild, tiny: Draft) -> None:
    check_on_npu(built.variants)
    for variant in built.variants.values():
        assert variant.types["exSDPAttention"] == tiny.config.num_layers
        assert variant.types["exNorm"] == 4 * tiny.config.num_layers + 1


def test_figures_of_a_build(built: RknnBuild, tiny: Draft) -> None:
    assert set(built.variants) == set(ROWS)
    assert built.path.stat().st_size == built.file_bytes
    assert 1e8 < built.peak_rss_bytes < 1e9
    assert len({variant.weight_bytes for variant in built.variants.values()}) == 1
    cycles = [built.variants[rows].cycles for rows in ROWS]
    assert cycles == sorted(cycles)


def test_the_simulator_agrees_with_onnx_runtime(
    toolkit: Toolkit, built: RknnBuild, tiny: Draft
) -> None:
    for rows, found in compare(toolkit, tiny.graph, tiny.feeds).items():
        assert min(found.cosine.values()) > 0.9999, (rows, found)
        assert max(found.max_error.values()) < 0.2, (rows, found)
        assert found.positions == len(tiny.feeds[rows]) * rows
        assert found.decided > 0.7 * found.positions, (rows, found)
        assert found.decided_same == found.decided, (rows, found)


def test_a_single_kv_head_and_local_layers_are_the_npus_too(tmp_path: Path) -> None:
    """What spreads a head over its queries is the one operator that no other form replaces."""
    gemma = draft(tmp_path, FP16_MASK, "gemma3")
    assert gemma.config.num_kv_heads == 1 and gemma.config.rope_local is not None
    with Toolkit() as toolkit:
        built = toolkit.build(gemma.graph, gemma.graph.with_suffix(".rknn"), gemma.variants)
        check_on_npu(built.variants)
        for rows, found in compare(toolkit, gemma.graph, gemma.feeds).items():
            assert found.cosine["logits"] > 0.999, (rows, found)
            assert found.decided_same == found.decided, (rows, found)


def test_activations_fit_float16(tiny: Draft) -> None:
    found = activations(tiny.graph, tiny.feeds[8])
    assert not found.beyond
    assert found.largest >= -FP16_MASK


def native_bytes(tensor: LogTensor, kind: str) -> int:
    """Positions in fours, but for a single one; channels in C2, of a convolution's output in 2 C2;
    a mask's one channel alone, its rows in 16 bytes; embeddings twice in float16.
    """
    size, c2 = {"fp16": (2, 8), "w8a8": (1, 16)}[kind]
    n, c, h, w = tensor.dims
    if c == 1:
        return n * h * round_up(w, 16 // size) * size
    positions = 1 if h * w == 1 else round_up(h * w, 4)
    channels = round_up(c, 2 * c2 if tensor.name == "logits" else c2)
    twice = 2 if tensor.name == "embeds" and kind == "fp16" else 1
    return n * channels * positions * size * twice


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def boundary(built: RknnBuild) -> Iterator[LogTensor]:
    for variant in built.variants.values():
        for name in (*variant.inputs, *variant.outputs):
            seen = [t for t in variant.tensors if t.name == name]
            of_output = [t for t in seen if t.user == "OutputOperator"]
            yield (of_output or seen)[0]


def test_how_the_compiler_lays_out_inputs_and_outputs(built: RknnBuild) -> None:
    sizes = {(t.name, t.dims): (t.size, native_bytes(t, "fp16")) for t in boundary(built)}
    assert len(sizes) > 20
    assert not {key: pair for key, pair in sizes.items() if pair[0] != pair[1]}
    assert {t.layout for t in boundary(built)} == {"NC1HWC2"}
    assert {(t.name, t.printed[-1]) for t in boundary(built) if t.printed[-1] != 8} == {("mask", 1)}


def test_int8_builds_with_a_calibration(toolkit: Toolkit, tmp_path: Path) -> None:
    small = draft(tmp_path, INT8_MASK)
    with Toolkit() as other:
        built = other.build(
            small.graph,
            tmp_path / "npu.rknn",
            small.variants,
            quant="w8a8",
            calibration=small.feeds[ROWS[-1]],
        )
        check_on_npu(built.variants)
        sizes = {(t.name, t.dims): (t.size, native_bytes(t, "w8a8")) for t in boundary(built)}
        assert not {key: pair for key, pair in sizes.items() if pair[0] != pair[1]}
        assert {t.type for t in boundary(built)} == {"int8"}
        found = compare(other, small.graph, {8: small.feeds[8]})[8]
        assert found.cosine["logits"] > 0.9, found


def graph_of(path: Path, nodes: Sequence[onnx.NodeProto], out: tuple[int, ...]) -> Path:
    """Of an input x [1, 32, 1, T]."""
    four = numpy_helper.from_array(np.array([4], np.int64), "four")
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", 1, [1, 32, 1, "T"])],
        [helper.make_tensor_value_info("y", 1, [*out, "T"])],
        [four],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


X = {rows: [NpuTensor("x", (1, 32, 1, rows))] for rows in (1, 4)}


def test_what_falls_back_to_the_cpu_is_named(tmp_path: Path) -> None:
    topk = helper.make_node("TopK", ["x", "four"], ["y", "index"], axis=1)
    graph = graph_of(tmp_path / "topk.onnx", [topk], (1, 4, 1))
    with Toolkit() as toolkit:
        built = toolkit.build(graph, tmp_path / "topk.rknn", X)
    with pytest.raises(ExportError, match=r"TopK"):
        check_on_npu(built.variants)


def test_a_graph_that_the_toolkit_refuses_is_one_line(tmp_path: Path) -> None:
    det = helper.make_node("Det", ["x"], ["y"])
    graph = graph_of(tmp_path / "det.onnx", [det], (1,))
    with Toolkit() as toolkit, pytest.raises(RknnToolkitError, match=r"Det node") as raised:
        toolkit.build(graph, tmp_path / "det.rknn", X)
    assert "\n" not in str(raised.value)


PROGRAM = """
import sys
from pathlib import Path
from headrace.export.rknn import Toolkit
from headrace.models.npu_io import NpuGeometry, npu_inputs
from tiny_checkpoints import TINY, read_weights

graph = Path(sys.argv[1])
config, _ = read_weights(TINY / "qwen3")
geometry = NpuGeometry(sinks=4, window=60, unit=16, nodes=16, rows=(1, 4, 8, 32))
variants = {rows: npu_inputs(config, geometry, rows) for rows in geometry.rows}
with Toolkit() as toolkit:
    while True:
        toolkit.build(graph, Path(sys.argv[2]), variants)
"""


@pytest.mark.parametrize("seconds", [1.5, 3.0])
def test_a_parent_that_is_killed_takes_the_compiler_along(
    tiny: Draft, tmp_path: Path, seconds: float
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny.graph), str(tmp_path / "out.rknn")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, env=environment) as parent:
        while not _workers(parent.pid):
            assert parent.poll() is None
            time.sleep(0.05)
        time.sleep(seconds)  # somewhere in a build
        parent.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 10
    while _workers(parent.pid):
        assert time.monotonic() < limit, "it goes on"
        time.sleep(0.05)


def _workers(parent: int) -> list[int]:
    """Processes of rknn_worker.py that were started by `parent`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(w.endswith(b"rknn_worker.py") for w in words) and words[-2] == str(parent).encode():
            found.append(int(path.parent.name))
    return found


def _servers() -> set[int]:
    """Processes of the program that speaks with devices; somebody else's may run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == "adb":
                found.add(int(path.parent.name))
    return found


BEFORE = _servers()


def test_no_server_for_devices_is_started(toolkit: Toolkit, built: RknnBuild, tiny: Draft) -> None:
    toolkit.run(8, tiny.feeds[8][0])
    assert _servers() <= BEFORE


def test_the_self_test(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the environment that was made for these tests
    done = command("rknn-env", "--check")
    assert done.code == 0, done.err
