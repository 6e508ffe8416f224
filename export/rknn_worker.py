"""Compiles one graph with Rockchip's toolkit, then runs it in the toolkit's simulator.

A program of its own, run by the toolkit's Python with two descriptors: requests come in on the
first, answers go out on the second, a JSON object a line. Arrays travel as .npy files. The working
folder takes what the toolkit drops there, stdout and stderr are its log (rknn.py has both at hand).

    {"do": "build", "onnx", "shapes", "platform", "quant", "calibration", "out"}
    {"do": "run", "inputs", "outputs"}      paths, in the order of the graph

Each is answered by {"done": …} or {"error": …}, with "returned" where the log says more; a build
says {"stage": …} in between. The end of the requests ends the program, and so does its parent's
death, at any time.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_PR_SET_PDEATHSIG = 1
_IOLBF = 1
_BUILT = {"fp16": False, "w8a8": True}

Request = dict[str, Any]
Say = Callable[[Request], None]


class Failure(Exception):
    """The toolkit returned an error; why is in its log alone."""


def main(requests_fd: int, answers_fd: int, parent: int) -> None:
    _die_with(parent)
    _print_whole_lines()
    with (
        os.fdopen(requests_fd, encoding="utf-8") as requests,
        os.fdopen(answers_fd, "w", encoding="utf-8") as answers,
    ):

        def say(answer: Request) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        worker = Worker(say)
        for line in requests:
            say(_answer(worker, json.loads(line)))


def _answer(worker: Worker, request: Request) -> Request:
    try:
        return {"done": worker.build(request) if request["do"] == "build" else worker.run(request)}
    except Failure as error:
        return {"error": str(error), "returned": True}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the toolkit raises what it likes
        # what it raises may hold a whole traceback as its text
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"error": lines[-1] if lines else type(error).__name__}


class Worker:
    def __init__(self, say: Say) -> None:
        self._say = say
        self._toolkit: Any = None
        self._simulated = False

    def build(self, request: Request) -> Request:
        self._say({"stage": "import"})
        started = time.monotonic()
        toolkit = importlib.import_module("rknn.api").RKNN(verbose=True)
        quantize = _BUILT[request["quant"]]
        self._say({"stage": "read"})
        settings = {"target_platform": request["platform"], "dynamic_input": request["shapes"]}
        _must(toolkit.config(**settings), "config")
        _must(toolkit.load_onnx(request["onnx"]), "load_onnx")
        self._say({"stage": "compile"})
        _must(
            toolkit.build(do_quantization=quantize, dataset=request["calibration"]),
            "build",
        )
        _must(toolkit.export_rknn(request["out"]), "export_rknn")
        self._toolkit = toolkit
        return {
            "seconds": time.monotonic() - started,
            "peak_rss_bytes": _peak_rss_bytes(),
            "toolkit": importlib.metadata.version("rknn-toolkit2"),
        }

    def run(self, request: Request) -> Request:
        if not self._simulated:
            # Never with a target: it would start a server for devices that outlives this program.
            _must(self._toolkit.init_runtime(), "init_runtime")
            self._simulated = True
        inputs = [np.load(path) for path in request["inputs"]]
        started = time.monotonic()
        outputs = self._toolkit.inference(inputs, data_format=["nchw"] * len(inputs))
        seconds = time.monotonic() - started
        if outputs is None or len(outputs) != len(request["outputs"]):
            raise Failure("inference failed")
        for path, output in zip(request["outputs"], outputs, strict=True):
            np.save(path, output)
        return {"seconds": seconds}


def _must(code: int, what: str) -> None:
    if code != 0:
        raise Failure(f"{what} failed with {code}")


def _peak_rss_bytes() -> int:
    """Of this program alone; getrusage's figure is never less than the parent's was."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _die_with(parent: int) -> None:
    """Not even a compiler in full swing outlives the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        sys.exit(1)


def _print_whole_lines() -> None:
    """The compiler prints through the C library, which would keep its last lines to itself."""
    libc = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    libc.setvbuf(stdout, None, _IOLBF, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
