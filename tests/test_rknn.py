"""The toolkit's process: what it answers, how it fails, and that nothing of it is left.

All with a toolkit of a few lines; the real one has tests/rknn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_toolkit import FakeToolkit, fake_toolkit, variant, write_graph

from headrace.errors import RknnToolkitError
from headrace.export import rknn_worker
from headrace.export.rknn import RknnBuild, Toolkit
from headrace.paths import cache_dir

__all__ = ["fake_toolkit"]

ROWS = (1, 8)

F32 = np.float32


class Heard:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.steps = 0

    def stage(self, title: str, steps: int | None = None) -> None:
        self.stages.append((title, steps))

    def advance(self) -> None:
        self.steps += 1


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "graph.onnx")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def build(toolkit: Toolkit, graph: Path, **options: object) -> RknnBuild:
    out, variants = graph.with_suffix(".rknn"), {rows: variant(rows) for rows in ROWS}
    return toolkit.build(graph, out, variants, **options)  # type: ignore[arg-type]


def feeds(rows: int) -> dict[str, np.typing.NDArray[np.float32]]:
    rng = np.random.default_rng(rows)
    return {t.name: rng.standard_normal(t.dims, F32) for t in variant(rows)}


def test_a_build_tells_what_it_took(fake_toolkit: FakeToolkit, graph: Path, work: Path) -> None:
    heard = Heard()
    with Toolkit(heard, work) as toolkit:
        built = build(toolkit, graph)
        assert built.log.exists()
    assert built.path.read_bytes() == b"RKNN" and built.file_bytes == 4
    assert (built.toolkit, built.platform, built.quant) == ("2.5.0", "rk3588", "fp16")
    assert set(built.variants) == set(ROWS)
    assert len(built.variants[8].computing) == 31
    assert 1e6 < built.peak_rss_bytes < 1e9 and 0 < built.seconds < 60
    assert [steps for _, steps in heard.stages] == [None, 2]
    assert not list(work.iterdir())


def test_the_graph_runs(fake_toolkit: FakeToolkit, graph: Path) -> None:
    with Toolkit() as toolkit:
        build(toolkit, graph)
        for rows in (8, 1, 8):
            given = feeds(rows)
            found = toolkit.run(rows, given)
            assert list(found) == ["logits", "new"]
            np.testing.assert_array_equal(found["logits"], given["embeds"] + 1)
            np.testing.assert_array_equal(found["new"], given["mask"])


def test_calibration_reaches_the_toolkit(
    fake_toolkit: FakeToolkit, graph: Path, work: Path
) -> None:
    samples = [feeds(8) for _ in range(3)]
    with Toolkit(folder=work) as toolkit:
        assert build(toolkit, graph, quant="w8a8", calibration=samples).quant == "w8a8"
        (listed,) = work.glob("*/*/samples.txt")
        lines = [line.split() for line in listed.read_text().splitlines()]
        assert [len(line) for line in lines] == [7, 7, 7]
        last = np.load(listed.parent / lines[2][1])
        np.testing.assert_array_equal(last, samples[2]["mask"])


FAILURES = {
    "fail": r"build failed with -1: no room for conv 3; its log: .*failed\.log",
    "raise": "TypeError: bad shape; its log",
    "exit": "no licence; its log",
    "killed": "killed, probably because the memory was used up",
    "crash": "crashed",
}


@pytest.mark.parametrize("mode", FAILURES)
def test_failures_are_one_line(
    fake_toolkit: FakeToolkit, graph: Path, work: Path, mode: str
) -> None:
    fake_toolkit.behave(mode)
    with pytest.raises(RknnToolkitError, match=FAILURES[mode]) as raised, Toolkit(None, work) as t:
        build(t, graph)
    assert "\n" not in str(raised.value)
    kept = Path(str(raised.value).rpartition("its log: ")[2])
    assert "Network Layer Information Table" in kept.read_text()
    assert not list(work.iterdir())


def test_a_log_that_cannot_be_kept_is_not_named(fake_toolkit: FakeToolkit, graph: Path) -> None:
    fake_toolkit.behave("crash")
    (cache_dir() / "rknn-env" / "failed.log").mkdir()
    with pytest.raises(RknnToolkitError, match="crashed") as raised, Toolkit() as toolkit:
        build(toolkit, graph)
    assert "log" not in str(raised.value)


def test_a_run_may_fail_too(fake_toolkit: FakeToolkit, graph: Path) -> None:
    with Toolkit() as toolkit:
        build(toolkit, graph)
        fake_toolkit.behave("mute")
        with pytest.raises(RknnToolkitError, match="inference failed"):
            toolkit.run(1, feeds(1))


def test_another_build_after_one_that_failed(fake_toolkit: FakeToolkit, graph: Path) -> None:
    with Toolkit() as toolkit:
        fake_toolkit.behave("crash")
        with pytest.raises(RknnToolkitError):
            build(toolkit, graph)
        fake_toolkit.behave("work")
        assert build(toolkit, graph).file_bytes == 4


def test_a_newer_graph_is_refused_before_all_else(
    fake_toolkit: FakeToolkit, tmp_path: Path
) -> None:
    graph = write_graph(tmp_path / "new.onnx", opset=20)
    with Toolkit() as toolkit, pytest.raises(RknnToolkitError, match=r"opset 20.*at most 19"):
        build(toolkit, graph)


PROGRAM = """
import sys
from pathlib import Path
from fake_toolkit import variant
from headrace.export.rknn import Toolkit

graph, work = map(Path, sys.argv[1:])
with Toolkit(folder=work) as toolkit:
    toolkit.build(graph, graph.with_suffix(".rknn"), {8: variant(8), 1: variant(1)})
"""


def pid_of_worker(work: Path) -> int:
    limit = time.monotonic() + 60
    while True:
        for path in work.glob("*/*/pid"):
            if text := path.read_text():
                return int(text)
        assert time.monotonic() < limit, "no worker"
        time.sleep(0.02)


def ends(pid: int) -> bool:
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":  # nobody waits for orphans in some containers
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(
    fake_toolkit: FakeToolkit, graph: Path, work: Path, number: signal.Signals
) -> None:
    fake_toolkit.behave("hang")
    program = [sys.executable, "-c", PROGRAM, str(graph), str(work)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(program, env=environment, stderr=subprocess.PIPE) as parent:
        try:
            worker = pid_of_worker(work)
            parent.send_signal(number)
            _, err = parent.communicate(timeout=30)
        finally:
            parent.kill()
    assert ends(worker)
    if number is signal.SIGINT:
        assert b"KeyboardInterrupt" in err
        assert not list(work.iterdir())


def test_the_worker_needs_nothing_but_the_toolkit() -> None:
    """It runs where headrace is not installed."""
    program = """
import runpy, sys
runpy.run_path(sys.argv[1])
print([name for name in sys.modules if name.split(".")[0] in ("headrace", "onnx")])
"""
    command = [sys.executable, "-c", program, rknn_worker.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
