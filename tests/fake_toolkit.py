"""An environment of a toolkit that is none: the worker runs in this Python, with a `rknn.api` of a few
lines whose graph adds one to its first input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest
from onnx import helper
from tiny_checkpoints import DATA

from headrace.export import rknn_env
from headrace.models.npu_io import NpuTensor

_PYTHON = """#!{python} -Iu
import runpy, sys

sys.path.insert(0, {modules!r})
del sys.argv[0], sys.argv[:2]  # the flags of the real one
runpy.run_path(sys.argv[0], run_name="__main__")
"""

_API = """
import os, signal, sys, time
from pathlib import Path

MODE = Path(__file__).with_name("mode")

class RKNN:
    def __init__(self, verbose):
        assert verbose

    def config(self, target_platform, dynamic_input):
        assert target_platform == "rk3588"
        return 0

    def load_onnx(self, path):
        return 0

    def build(self, do_quantization, dataset):
        Path("pid").write_text(str(os.getpid()))
        print(Path({log!r}).read_text())
        mode = MODE.read_text()
        if mode == "hang":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(600)
        if mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "crash":
            os.abort()
        if mode == "exit":
            sys.exit("no licence")
        if mode == "raise":
            raise ValueError("Traceback (most recent call last):\\n  File x\\nTypeError: bad shape")
        if mode == "fail":
            print("E RKNN: [15:01:07.528] no room for conv 3")
            return -1
        if do_quantization:
            lines = Path(dataset).read_text().splitlines()
            assert all(Path(name).exists() for line in lines for name in line.split())
        return 0

    def export_rknn(self, path):
        Path(path).write_bytes(b"RKNN")
        return 0

    def init_runtime(self):
        return 0

    def inference(self, inputs, data_format):
        assert data_format == ["nchw"] * len(inputs)
        return None if MODE.read_text() == "mute" else [inputs[0] + 1, inputs[1]]
"""

_METADATA = "Metadata-Version: 2.1\nName: rknn-toolkit2\nVersion: 2.5.0\n"

INPUTS = {
    "embeds": (1, 40, 1, 0),
    "mask": (1, 1, 0, 64),
    "cos": (1, 8, 1, 0),
    "sin": (1, 8, 1, 0),
    "tail": (10, 8, 1, 32),
    "main.0.key": (5, 8, 1, 32),
    "main.0.value": (5, 8, 1, 32),
}
"""Of the stored log's variants, for no rows."""


def variant(rows: int) -> list[NpuTensor]:
    found = []
    for name, (n, c, h, w) in INPUTS.items():
        if name == "mask":
            h, w = rows, w + rows
        found.append(NpuTensor(name, (n, c, h, w or rows)))
    return found


def write_graph(path: Path, *, opset: int = 17) -> Path:
    """Only its inputs' and outputs' names are looked at."""
    inputs, outputs = (
        [helper.make_tensor_value_info(name, 1, ["n", "c", "h", "w"]) for name in names]
        for names in (INPUTS, ("logits", "new"))
    )
    graph = helper.make_graph([], "graph", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


class FakeToolkit:
    def __init__(self, folder: Path) -> None:
        self._mode = folder / "rknn" / "mode"

    def behave(self, mode: str) -> None:
        self._mode.write_text(mode)


@pytest.fixture
def fake_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    """In a cache folder of its own, at `tmp_path / "cache"`."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    modules = tmp_path / "modules"
    (modules / "rknn").mkdir(parents=True)
    (modules / "rknn" / "__init__.py").touch()
    log = str(DATA / "rknn_build.log")
    (modules / "rknn" / "api.py").write_text(_API.replace("{log!r}", repr(log)))
    (modules / "rknn_toolkit2-2.5.0.dist-info").mkdir()
    (modules / "rknn_toolkit2-2.5.0.dist-info" / "METADATA").write_text(_METADATA)
    python = rknn_env.home() / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_PYTHON.format(python=sys.executable, modules=str(modules)))
    python.chmod(0o755)
    (rknn_env.home() / "complete").touch()
    fake = FakeToolkit(modules)
    fake.behave("work")
    return fake
