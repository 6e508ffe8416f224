"""Weights as file pages instead of anonymous memory.

ONNX Runtime repacks every MatMul weight for the CPU it runs on and keeps the copy on the heap.
Here the optimised graph is saved once per machine and version together with those copies; a
session over the saved files maps them, so the kernel may drop and share them.

The data file holds the original weights too and cannot be trimmed: each load repacks them, tensor
by tensor, and compares. That is also why a copy made for other kernels still gives the right
logits (it falls back to the heap), while damaged originals would give wrong ones: hence stamp.py.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from headrace.errors import BundleError, HeadraceError, StorageError
from headrace.runtime.cores import ANYWHERE, Placement, affinity_option
from headrace.runtime.memory import LockedPages, mapped_ranges
from headrace.runtime.stamp import Key, is_whole, machine, stamped_key, write_stamp

FORMAT = 2
MODEL = "model.onnx"
DATA = "model.data"
OVERHEAD = "overhead.json"
PROVIDERS = ("CPUExecutionProvider",)

_FILES = (MODEL, DATA, OVERHEAD)

# Smaller tensors stay inside the graph file.
_MIN_EXTERNAL_BYTES = 1024
# Layout optimisations, the only level above, concern convolutions and are tied to the machine.
_LEVEL = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
# What the saved copy takes beside the bundle's own files; measured 1.6 to 2.06.
_GROWTH = 2.1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A graph saved for this machine; load `model` with `session_options(prepared=True)`."""

    folder: Path
    built: bool
    """Whether this call made it, or found it."""

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @property
    def data(self) -> Path:
        """The file whose pages are the weights."""
        return self.folder / DATA

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.model.stat().st_size + self.data.stat().st_size


def session_options(
    placement: Placement = ANYWHERE,
    *,
    allow_spinning: bool = True,
    takes_turns: bool = False,
    prepared: bool = False,
) -> ort.SessionOptions:
    """Options for every session over a target graph, so that all optimise alike.

    A prepared graph has been optimised; running no rewrite on it again keeps the same bits.
    The threads it adds to the calling one stay on the CPUs of `placement`; the bits do not depend
    on it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = placement.threads or 0
    options.inter_op_num_threads = 1
    # A pattern is one more block of memory for each new shape of a pass, and saves no time here.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    options.graph_optimization_level = (
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL if prepared else _LEVEL
    )
    affinities = affinity_option(placement)
    if affinities is not None:
        options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
    if not allow_spinning:  # naming the default makes ONNX Runtime print a warning
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if takes_turns:
        # Threads that wait for the next pass would do so on a core that the other session needs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def prepare(
    graph: Path,
    *,
    cache: Path,
    identity: str,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Finds or makes the copy of `graph` for this machine, in a folder of its own under `cache`.

    `identity` is the content hash of the graph and its data; it must change when they do. A copy
    that is stale, foreign or damaged is made anew. Any number of processes may call this at once:
    one builds, the others wait. An interrupted build leaves nothing that is ever used.
    Raises StorageError if the cache cannot be written, BundleError if the graph does not load.
    """
    say = progress or _ignore
    key = _key(identity)
    folder = cache / _folder_name(identity, key)
    if _is_valid(folder, key, say):
        return Prepared(folder, built=False)
    try:
        graph.open("rb").close()
    except OSError as error:
        raise BundleError(f"{graph}: {error.strerror}") from error
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache, say) as lock:
            if _is_valid(folder, key, say):
                return Prepared(folder, built=False)
            _clear(folder)
            _build(graph, folder, key, threads, lock, say)
            _remove_stale(folder, key)
    except OSError as error:
        raise _storage_error(cache, error) from error
    return Prepared(folder, built=True)


def found(cache: Path, identity: str) -> Path | None:
    """The folder of the copy for this machine, if there is one; its files are not checked."""
    key = _key(identity)
    folder = cache / _folder_name(identity, key)
    return folder if stamped_key(folder) == key else None


def mlock(prepared: Prepared) -> LockedPages:
    """Keeps the weights resident until the result is closed.

    Call it after the session over `prepared` is made: what the session still maps then is what
    its runs read, about half of the file. Raises HeadraceError when the limit is too low.
    """
    ranges = mapped_ranges(prepared.data)
    assert ranges or not prepared.data.stat().st_size, "the session is not made yet"
    return LockedPages(prepared.data, ranges)


def pack(graph: Path, folder: Path, threads: int | None) -> None:
    """Saves the optimised graph and the repacked weights in `folder`."""
    options = session_options(Placement(threads=threads))
    options.optimized_model_filepath = str(folder / MODEL)
    for name, value in (
        ("optimized_model_external_initializers_file_name", DATA),
        ("optimized_model_external_initializers_min_size_in_bytes", str(_MIN_EXTERNAL_BYTES)),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{name}", value)
    ort.InferenceSession(str(graph), options, providers=PROVIDERS)
    # ONNX Runtime writes none when no tensor is large enough.
    (folder / DATA).touch()


def _key(identity: str) -> Key:
    """Everything the saved files depend on. Threads and where they run are not among it."""
    return {
        "format": FORMAT,
        "identity": identity,
        "onnxruntime": [ort.__version__, ort.get_build_info()],
        "level": _LEVEL.name,
        **machine(),
    }


def _folder_name(identity: str, key: Key) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{_bundle_prefix(identity)}{digest[:16]}"


def _bundle_prefix(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:16] + "-"


def _is_valid(folder: Path, key: Key, say: Progress) -> bool:
    return is_whole(folder, key, _FILES, lambda: say("checking the prepared weights"))


@contextmanager
def _lock(cache: Path, say: Progress) -> Iterator[int]:
    """One build at a time in a cache: two would need twice the memory. Yields the lock's fd."""
    fd = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is preparing weights")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _clear(folder: Path) -> None:
    """Removes a damaged copy and, under the lock, what builds that died have left."""
    for leftover in folder.parent.glob("*.tmp"):
        shutil.rmtree(leftover)
    if folder.exists():
        shutil.rmtree(folder)


def _build(
    graph: Path, folder: Path, key: Key, threads: int | None, lock: int, say: Progress
) -> None:
    """Makes `folder`, whole or not at all."""
    needed = _bytes_needed(graph)
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise StorageError(
            f"preparing {graph.name} needs about {needed >> 20} MiB in {folder.parent}, and"
            f" {free >> 20} MiB are free: make room or choose another cache folder"
        )
    say(f"preparing the weights for this machine, once (about {needed >> 20} MiB)")
    draft = folder.with_name(f"{folder.name}.tmp")
    draft.mkdir()
    try:
        _pack_apart(graph, draft, threads, lock)
        _measure_apart(graph, draft, threads, lock)
        _sync(*(draft / name for name in _FILES))
        write_stamp(draft, key, _FILES)
        _sync(draft)
        draft.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _bytes_needed(graph: Path) -> int:
    """An upper estimate from the graph's size and that of the data files named after it."""
    beside = graph.absolute().parent.iterdir()
    files = (path for path in beside if path.name.startswith(graph.stem) and path.is_file())
    return int(sum(path.stat().st_size for path in files) * _GROWTH)


def _pack_apart(graph: Path, folder: Path, threads: int | None, lock: int) -> None:
    """Packs in a process of its own, whose peak of memory ends with it."""
    arguments = (str(graph.absolute()), str(folder.absolute()), str(threads or 0))
    if not _run_apart("prepare", arguments, graph, folder, lock):
        _explain(graph, folder, _pack_or_reason(graph, folder, threads))


def _measure_apart(graph: Path, folder: Path, threads: int | None, lock: int) -> None:
    """Loads the copy once and writes down what memory it takes; nothing without a process."""
    arguments = (str(folder.absolute()), str(threads or 0))
    if not _run_apart("overhead", arguments, graph, folder, lock):
        (folder / OVERHEAD).write_text("null", encoding="utf-8")


def _run_apart(
    module: str, arguments: tuple[str, ...], graph: Path, folder: Path, lock: int
) -> bool:
    """Runs a module's `_child` in a process that Ctrl-C ends; False when none can be started.

    The child holds the lock too, so that no other build starts while it runs on as an orphan.
    """
    code = f"import sys; from headrace.runtime import {module} as m; sys.exit(m._child(sys.argv))"
    # -P: nothing is imported from where the user happens to stand.
    command = [sys.executable, "-P", "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, pass_fds=(lock,)
        )
    except OSError:
        # No interpreter to start: one that is embedded, or emulated.
        return False
    try:
        _, errors = child.communicate()
    finally:
        child.kill()
        child.wait()
    if child.returncode == -signal.SIGKILL:
        raise HeadraceError(
            f"preparing {graph.name} was killed, most likely for want of memory: it needs about"
            f" {_bytes_needed(graph) >> 20} MiB for a moment; prepare it before other work starts"
        )
    if child.returncode:
        _explain(graph, folder, (errors.strip() or f"exit code {child.returncode}"))
    return True


def _child(arguments: list[str]) -> str | None:
    """The other side of `_pack_apart`; what it returns is printed to stderr, exit code 1."""
    graph, folder, threads = arguments[1:]
    return _pack_or_reason(Path(graph), Path(folder), int(threads) or None)


def _pack_or_reason(graph: Path, folder: Path, threads: int | None) -> str | None:
    try:
        pack(graph, folder, threads)
    except Exception as error:  # noqa: BLE001  ONNX Runtime's have no other common base
        return str(error) or repr(error)
    return None


def _explain(graph: Path, folder: Path, reason: str | None) -> None:
    """Raises OSError if the disk is full, else BundleError; nothing if there is no reason."""
    if reason is None:
        return
    # ONNX Runtime does not pass the system's error on, so ask the disk.
    with (folder / "probe").open("wb") as probe:
        probe.write(bytes(1 << 20))
        probe.flush()
        os.fsync(probe.fileno())
    raise BundleError(f"{graph}: ONNX Runtime cannot prepare it: {reason.splitlines()[-1]}")


def _remove_stale(folder: Path, key: Key) -> None:
    """Removes what older versions made of the same bundle for this machine; others' stay."""
    ours = (key["machine"], key["cpu"])
    for sibling in folder.parent.glob(_bundle_prefix(key["identity"]) + "*"):
        claimed = stamped_key(sibling) or {}
        if sibling != folder and (claimed.get("machine"), claimed.get("cpu")) == ours:
            shutil.rmtree(sibling, ignore_errors=True)


def _sync(*paths: Path) -> None:
    """A rename must not reach the disk before what it names."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _storage_error(cache: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"{cache}: the disk is full: make room or choose another cache folder")
    return StorageError(
        f"{cache}: cannot keep prepared weights here ({error.strerror}): choose another cache"
        " folder"
    )


def _ignore(message: str) -> None:
    """The progress of a caller that wants none."""
