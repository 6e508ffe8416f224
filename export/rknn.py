"""Compiles a graph for the NPU with Rockchip's toolkit, and runs it in the toolkit's simulator."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx

from headrace.closing import Closing
from headrace.errors import RknnToolkitError
from headrace.export import rknn_log
from headrace.export.quantize import F32
from headrace.export.report import Reporter, Silent
from headrace.export.rknn_env import find_env
from headrace.export.rknn_log import VariantLog
from headrace.models.npu_io import NpuTensor
from headrace.paths import cache_dir

PLATFORM = "rk3588"
QUANTS = ("fp16", "w8a8")

_MAX_OPSET = 19
_BUILT_ONE = b"build graph["
_POLL_S = 0.25


@dataclass(frozen=True)
class RknnBuild:
    """A compiled graph, and what compiling it took and showed."""

    path: Path
    """The .rknn."""
    toolkit: str
    """The version that compiled it."""
    platform: str
    quant: str
    seconds: float
    peak_rss_bytes: int
    """Of the toolkit's process."""
    file_bytes: int
    variants: dict[int, VariantLog]
    """By rows."""
    log: Path
    """All that the toolkit printed. It goes away with the Toolkit."""


class Toolkit(Closing):
    """Rockchip's toolkit as a process of its own, which ends with the block.

    The thread that builds must outlive the block: the process goes down with it.
    """

    def __init__(self, report: Reporter | None = None, folder: Path | None = None) -> None:
        """Intermediate files go into a folder of their own in `folder`, by default the system's
        temporary one; they take about four times the graph's size.
        """
        self._report = report or Silent()
        self._parent = folder
        self._folder: Path | None = None
        self._worker: _Worker | None = None
        self._variants: dict[int, list[NpuTensor]] = {}
        self._outputs: list[str] = []
        self._number = 0

    def __enter__(self) -> Self:
        """Raises RknnToolkitError when there is no toolkit."""
        self._python = find_env()
        self._folder = Path(tempfile.mkdtemp(prefix=".rknn-", dir=self._parent))
        return self

    def close(self) -> None:
        """May be called again."""
        self._stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def build(
        self,
        graph: Path,
        out: Path,
        variants: Mapping[int, Sequence[NpuTensor]],
        *,
        platform: str = PLATFORM,
        quant: str = "fp16",
        calibration: Sequence[Mapping[str, F32]] = (),
    ) -> RknnBuild:
        """Compiles an ONNX file; `variants` are its inputs by rows, in graph order.

        `calibration`, for w8a8, are inputs of the variant with the most rows. After it `run` runs
        this graph. Raises RknnToolkitError.
        """
        assert self._folder is not None
        assert quant in QUANTS and (quant == "w8a8") == bool(calibration)
        self._stop()
        self._variants = {rows: list(inputs) for rows, inputs in variants.items()}
        self._outputs = _check_graph(graph, self._variants)
        self._number += 1
        folder = self._folder / f"build-{self._number}"
        folder.mkdir()
        request = {
            "do": "build",
            "onnx": str(graph.absolute()),
            "shapes": [[list(t.dims) for t in inputs] for inputs in self._variants.values()],
            "platform": platform,
            "quant": quant,
            "calibration": self._write_calibration(folder, calibration),
            "out": str(out.absolute()),
        }
        self._worker = _Worker(self._python, folder, self._report, f"{graph.name}: ")
        done = self._worker.ask(request, steps=len(variants))
        log = self._worker.log
        for rest in folder.glob("check*.onnx"):  # the graph between the compiler's stages
            rest.unlink()
        wanted = {rows: {t.name: t.dims for t in inputs} for rows, inputs in self._variants.items()}
        return RknnBuild(
            path=out,
            toolkit=done["toolkit"],
            platform=platform,
            quant=quant,
            seconds=done["seconds"],
            peak_rss_bytes=done["peak_rss_bytes"],
            file_bytes=out.stat().st_size,
            variants=rknn_log.by_inputs(
                rknn_log.parse(log.read_text(encoding="utf-8", errors="replace")), wanted
            ),
            log=log,
        )

    def run(self, variant_rows: int, feeds: Mapping[str, F32]) -> dict[str, F32]:
        """Outputs by name of the graph that was built last, in the simulator.

        Raises RknnToolkitError.
        """
        assert self._worker is not None, "nothing was built"
        inputs = self._variants[variant_rows]
        assert {t.name: t.dims for t in inputs} == {n: a.shape for n, a in feeds.items()}
        folder = self._worker.folder
        paths = [folder / f"input-{i}.npy" for i in range(len(inputs))]
        outputs = [folder / f"output-{i}.npy" for i in range(len(self._outputs))]
        for path, tensor in zip(paths, inputs, strict=True):
            np.save(path, np.asarray(feeds[tensor.name], np.float32))
        request = {"do": "run", "inputs": [*map(str, paths)], "outputs": [*map(str, outputs)]}
        self._worker.ask(request)
        found = {
            name: np.asarray(np.load(path), np.float32)
            for name, path in zip(self._outputs, outputs, strict=True)
        }
        for path in (*paths, *outputs):
            path.unlink()
        return found

    def _write_calibration(self, folder: Path, samples: Sequence[Mapping[str, F32]]) -> str | None:
        """The list of samples: a line each, of files in graph order."""
        if not samples:
            return None
        inputs = self._variants[max(self._variants)]
        lines = []
        for number, sample in enumerate(samples):
            assert {t.name: t.dims for t in inputs} == {n: a.shape for n, a in sample.items()}
            names = [f"sample-{number}-{i}.npy" for i in range(len(inputs))]
            for name, tensor in zip(names, inputs, strict=True):
                np.save(folder / name, np.asarray(sample[tensor.name], np.float32))
            lines.append(" ".join(names))
        path = folder / "samples.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _check_graph(graph: Path, variants: Mapping[int, Sequence[NpuTensor]]) -> list[str]:
    """Names of the outputs. Raises RknnToolkitError for what the toolkit cannot read."""
    model = onnx.load(graph, load_external_data=False)
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset > _MAX_OPSET:
        raise RknnToolkitError(
            f"{graph}: has opset {opset}; the toolkit reads at most {_MAX_OPSET}"
        )
    names = [i.name for i in model.graph.input]
    for inputs in variants.values():
        assert [t.name for t in inputs] == names, f"inputs in another order than in {graph}"
    return [o.name for o in model.graph.output]


class _Worker:
    """rknn_worker.py as a process, and the two pipes to it."""

    def __init__(self, python: Path, folder: Path, report: Reporter, title: str) -> None:
        self.folder, self.log = folder, folder / "log"
        self._report, self._title = report, title
        request_end, self._requests = os.pipe()
        self._answers, answer_end = os.pipe()
        self._buffer = b""
        command = [str(python), "-I", "-u", str(Path(__file__).with_name("rknn_worker.py"))]
        command += [str(request_end), str(answer_end), str(os.getpid())]
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(request_end, answer_end),
                    start_new_session=True,  # Ctrl-C is for us; we then kill all of it
                )
        except BaseException:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            os.close(request_end)
            os.close(answer_end)

    def ask(self, request: Mapping[str, Any], steps: int | None = None) -> dict[str, Any]:
        """The answer. `steps` are lines about variants that the log will show.

        Raises RknnToolkitError when the worker fails or dies.
        """
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure(self._death()) from None
        shown = 0
        while True:
            ready = select.select([self._answers], [], [], _POLL_S if steps else None)[0]
            if steps and (built := self.log.read_bytes().count(_BUILT_ONE)) > shown:
                for _ in range(built - shown):
                    self._report.advance()
                shown = built
            for answer in self._read() if ready else ():
                if "stage" in answer:
                    self._tell(answer["stage"], steps)
                elif "error" in answer:
                    raise self._failure(answer["error"], logged=answer.get("returned", False))
                else:
                    done: dict[str, Any] = answer["done"]
                    return done

    def stop(self) -> None:
        """Ends it, whatever it is doing, and waits for its end."""
        os.close(self._requests)
        os.close(self._answers)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> Iterator[dict[str, Any]]:
        """Raises RknnToolkitError at the end of the answers."""
        data = os.read(self._answers, 65536)
        if not data:
            raise self._failure(self._death())
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        yield from map(json.loads, lines)

    def _tell(self, stage: str, steps: int | None) -> None:
        if stage == "read":
            self._report.stage(f"{self._title}the toolkit reads it")
        elif stage == "compile":
            self._report.stage(f"{self._title}compiling for the NPU", steps)

    def _death(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "it was killed, probably because the memory was used up"
        return f"it crashed with {code}"

    def _failure(self, what: str, *, logged: bool = True) -> RknnToolkitError:
        """Keeps the log, which says more than a line can; `logged` where it says what."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        said = rknn_log.complaints(text) if logged else []
        because = f": {said[-1]}" if said else ""
        kept, where = cache_dir() / "rknn-env" / "failed.log", ""
        with suppress(OSError):
            shutil.copyfile(self.log, kept)
            where = f"; its log: {kept}"
        return RknnToolkitError(f"{self._title}Rockchip's toolkit failed: {what}{because}{where}")


def self_test(report: Reporter | None = None) -> None:
    """Compiles a graph of one operator and runs it. Raises RknnToolkitError."""
    dims = (1, 16, 1, 4)
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["a", "b"], ["sum"])],
        "toy",
        [onnx.helper.make_tensor_value_info(name, kind, dims) for name in ("a", "b")],
        [onnx.helper.make_tensor_value_info("sum", kind, dims)],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    with tempfile.TemporaryDirectory() as folder, Toolkit(report) as toolkit:
        path = Path(folder) / "toy.onnx"
        onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
        inputs = [NpuTensor(name, dims) for name in ("a", "b")]
        toolkit.build(path, path.with_suffix(".rknn"), {4: inputs})
        a = np.arange(64, dtype=np.float32).reshape(dims)
        found = toolkit.run(4, {"a": a, "b": a})["sum"]
    if found.shape != dims or not np.array_equal(found, 2 * a):
        raise RknnToolkitError("Rockchip's toolkit computes a sum wrongly; make it anew")
