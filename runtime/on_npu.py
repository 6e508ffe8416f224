"""The NPU as a place for the draft. `headrace.npu` is imported on use: most machines have none."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

from headrace.errors import (
    BundleError,
    NpuDeviceError,
    NpuError,
    NpuMemoryError,
    NpuMissingError,
    NpuTimeoutError,
)
from headrace.models.manifest import NPU, NPU_EMBEDDINGS, NPU_IO, Bundle
from headrace.models.npu_io import NpuFiles, NpuIo
from headrace.models.records import DraftRecord
from headrace.models.vocab_map import load_vocab_map
from headrace.paths import NPU_LIBRARY_FOLDERS, NPU_LIBRARY_NAME
from headrace.runtime.candidate import Candidate, Opened
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.draft import DraftModel
from headrace.runtime.pace import costs_of
from headrace.runtime.ring import RingLayout

TRANSPORTS = {"npu": "headrace.npu.backend", "npu-lite": "headrace.npu.lite"}
"""Modules with a function `open_backend`, by what `draft_device` calls them."""

OPEN_S = 120.0
"""Loading a model does not wait longer for the NPU."""

_TRANSIENT = (NpuDeviceError, NpuMemoryError, NpuTimeoutError)
"""What may be over after a while."""


def may_have_npu(config: RuntimeConfig) -> bool:
    """Whether an NPU would be tried: one is asked for, or its library is installed."""
    if config.draft_device != "auto" or config.npu_library is not None:
        return config.draft_device not in ("cpu", "none")
    return any(Path(folder, NPU_LIBRARY_NAME).exists() for folder in NPU_LIBRARY_FOLDERS)


def npu_candidates(
    bundle: Bundle, config: RuntimeConfig, cache: Path, say: Callable[[str], None]
) -> list[Candidate]:
    """The NPU, opened, or to be tried again later; nothing where there is none.

    Raises BundleError, NpuError where `config` insists on it.
    """
    record, wanted = bundle.draft, config.draft_device
    if record is None or record.npu is None:
        if wanted in TRANSPORTS:
            raise BundleError(
                f"{bundle.path}: has no draft for an NPU; export it with --platform, or leave "
                "--draft-device out"
            )
        return []
    name = wanted if wanted in TRANSPORTS else "npu"
    opener = _Opener(name, bundle, record, config, cache, say)
    candidate = Candidate(name, None, patience=1, reopen=opener.open)
    try:
        candidate.opened = open_within(OPEN_S, opener.open)
    except NpuError as error:
        if wanted in TRANSPORTS:
            raise
        # A library that is there, or was named, and cannot be loaded is not as good as none.
        is_none = isinstance(error, NpuMissingError) and not may_have_npu(config)
        why = "there is no NPU" if is_none else f"the NPU cannot be used: {error}"
        say(f"the draft runs on the CPU: {why}")
        if not isinstance(error, _TRANSIENT):
            return []
        candidate.breaker.failed()
    return [candidate]


def open_within(seconds: float, open_it: Callable[[], Opened]) -> Opened:
    """In a thread of its own, since a device may hang; what is opened too late is closed again.

    Raises what `open_it` raises, and NpuTimeoutError.
    """
    found: queue.SimpleQueue[Opened | BaseException] = queue.SimpleQueue()
    lock, is_late = threading.Lock(), threading.Event()

    def work() -> None:
        result: Opened | BaseException
        try:
            result = open_it()
        except BaseException as error:  # noqa: BLE001  it is the caller's
            result = error
        with lock:
            if not is_late.is_set():
                found.put(result)
                return
        if isinstance(result, Opened):
            result.model.close()

    threading.Thread(target=work, name="headrace-npu", daemon=True).start()
    try:
        result = found.get(timeout=seconds)
    except queue.Empty:
        raise NpuTimeoutError(f"opening the NPU took longer than {seconds:g} s") from None
    finally:
        with lock:
            is_late.set()
    if isinstance(result, BaseException):
        raise result
    return result


class _Opener:
    """Opens the draft on the NPU, and again after it failed."""

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        record: DraftRecord,
        config: RuntimeConfig,
        cache: Path,
        say: Callable[[str], None],
    ) -> None:
        self._name, self._bundle, self._record = name, bundle, record
        self._config, self._cache, self._say = config, cache, say

    def open(self) -> Opened:
        """Raises NpuError, BundleError."""
        bundle, config = self._bundle, self._record.config
        io = NpuIo.load(bundle.file(NPU_IO))
        files = NpuFiles(bundle.file(NPU), bundle.file(NPU_EMBEDDINGS), io, config)
        backend = importlib.import_module(TRANSPORTS[self._name]).open_backend(
            files,
            library=self._config.npu_library,
            lanes=self._config.lanes,
            cores=self._config.npu_cores,
        )
        try:
            g = io.geometry
            layout = RingLayout(g.sinks, g.window, g.unit)
            model = DraftModel(backend, config, "f16", load_vocab_map(bundle), layout)
            costs = costs_of(backend, self._costs_path(backend.version), self._say)
        except BaseException:
            backend.close()
            raise
        return Opened(model, costs)

    def _costs_path(self, version: str) -> Path:
        """Of this model with this library, driver and choice of cores."""
        what = self._bundle.manifest.files[NPU].sha256 + self._config.npu_cores + version
        digest = hashlib.sha256(what.encode()).hexdigest()[:16]
        words = re.sub(r"[^0-9.]+", "-", version).strip("-")
        folder = self._cache / "npu"
        with contextlib.suppress(OSError):  # then they are measured each time
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"costs-{self._name}-{words}-{digest}.json"
