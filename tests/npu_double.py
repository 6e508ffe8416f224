"""The double of librknnrt as tests hold it, and tiny drafts for it."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_bundles import GEOMETRY, TOOLKIT, with_npu
from tiny_pairs import copy_of, edit_json, pair

from headrace.export.checkpoint import open_checkpoint
from headrace.export.npu_draft import write_npu_files
from headrace.models.manifest import NPU, NPU_EMBEDDINGS, NPU_IO
from headrace.models.npu_io import NativeTensor, NpuFiles, NpuGeometry, NpuIo
from headrace.npu.backend import RknnBackend
from headrace.npu.librknnrt import Library

RING = NpuGeometry(sinks=16, window=32, unit=16, nodes=32, rows=(1, 4, 8, 32))
"""A text of 200 tokens goes round its ring several times."""


class Double:
    """The loaded library; it counts and remembers over the whole process until `reset`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.double_report.restype = ctypes.c_char_p

    def library(self) -> Library:
        return Library(str(self.path))

    def play(self, faults: str) -> None:
        """A script, as in tests/librknnrt/script.c."""
        assert self._library.double_script(faults.encode()) == 0, faults

    def reset(self) -> None:
        self._library.double_reset()

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._library.double_report())
        return found

    def calls(self, name: str) -> int:
        return int(self.report()["trace"]["calls"][name])

    @property
    def held(self) -> dict[str, int]:
        """What is not given back."""
        report = self.report()
        return {k: report[k] for k in ("contexts", "mems", "bytes", "fds", "outputs") if report[k]}

    @property
    def violations(self) -> list[str]:
        return [v["text"] for v in self.report()["violations"]]


@contextmanager
def watched(path: Path) -> Iterator[Double]:
    """The double, from a clean slate; nothing may be left of it, and nothing was done wrongly."""
    double = Double(path)
    double.reset()
    assert double.held == {}, "of an earlier test"
    files_before = open_files()
    try:
        yield double
        assert double.violations == []
        assert double.held == {}
        assert open_files() <= files_before
    finally:
        double.reset()


def open_files() -> int:
    """Of this process, those of device memory."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            found += "librknnrt-double" in os.readlink(entry.path)
        except OSError:
            continue  # the one that lists them
    return found


@dataclass(frozen=True)
class TinyDraft:
    """Of a tiny checkpoint, the files and where they are."""

    source: Path
    folder: Path
    files: NpuFiles


def tiny_draft(folder: Path, source: Path, geometry: NpuGeometry = GEOMETRY) -> TinyDraft:
    """All of an NPU draft but the compiler's own file, which the double reads the name of."""
    checkpoint = open_checkpoint(str(source))
    (folder / NPU).parent.mkdir(parents=True, exist_ok=True)
    io = write_npu_files(
        checkpoint, folder, geometry, platform="rk3588", toolkit=TOOLKIT, quant="fp16"
    )
    (folder / NPU).write_bytes(b"a compiled model that only its name is read of\n")
    files = NpuFiles(folder / NPU, folder / NPU_EMBEDDINGS, io, checkpoint.config)
    return TinyDraft(source, folder, files)


@contextmanager
def opened(files: NpuFiles, double: Double, lanes: int = 1) -> Iterator[RknnBackend]:
    backend = RknnBackend(files, double.library(), lanes=lanes, timeout_ms=200)
    try:
        yield backend
    finally:
        backend.close()


def padded(tensor: NativeTensor, more: int) -> NativeTensor:
    """Rows `more` places longer than they need to be."""
    stride = tensor.w_stride + more
    size = tensor.size // tensor.w_stride * stride
    return dataclasses.replace(tensor, w_stride=stride, size=size)


def changed(
    draft: TinyDraft, folder: Path, change: Callable[[NativeTensor], NativeTensor]
) -> NpuFiles:
    """The same draft as another compiler might lay it out."""
    io = draft.files.io
    variants = tuple(
        dataclasses.replace(
            v, inputs=tuple(map(change, v.inputs)), outputs=tuple(map(change, v.outputs))
        )
        for v in io.variants
    )
    made = tiny_draft(folder, draft.source)
    dataclasses.replace(io, variants=variants).save(folder / NPU_IO)
    return dataclasses.replace(made.files, io=NpuIo.load(folder / NPU_IO))


def endless_twin(folder: Path) -> Path:
    """A bundle of the tiny llama with a long context, its own draft on the CPU and on the NPU."""
    source = copy_of("llama", folder / "source")
    edit_json(source / "config.json", max_position_embeddings=100_000)
    return with_npu(pair(folder / "bundle", source, target=source), source, RING).path
