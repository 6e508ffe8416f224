"""Laws of the prepared weights: same bits, made once, never trusted when anything is off."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.errors import BundleError, HeadraceError, StorageError
from headrace.runtime import prepare as prepare_module
from headrace.runtime import stamp
from headrace.runtime.cores import Placement
from headrace.runtime.memory import mapped_ranges, usage
from headrace.runtime.prepare import PROVIDERS, Prepared, mlock, prepare, session_options

IDS = np.arange(23, dtype=np.int64) * 7
LAYERS = 2


def write_graph(path: Path, *, vocab: int, hidden: int) -> Path:
    """A small decoder without attention, its layers 8- and 4-bit in turn, and external data.

    Values pass through float16 once, as KV does, which no optimisation may take away.
    """
    rng = np.random.default_rng(0)
    tensors: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def tensor(name: str, values: np.ndarray) -> str:
        tensors.append(numpy_helper.from_array(values, name))
        return name

    def node(op: str, inputs: list[str], output: str, domain: str = "", **attributes: int) -> str:
        nodes.append(helper.make_node(op, inputs, [output], domain=domain))
        for key, value in attributes.items():
            nodes[-1].attribute.append(helper.make_attribute(key, value))
        return output

    def linear(x: str, name: str, n: int, k: int, bits: int) -> str:
        codes = rng.integers(0, 256, (n, k // 32, 4 * bits), dtype=np.uint8)
        scales = (rng.standard_normal((n, k // 32)) / 2 ** (bits + 3)).astype(np.float32)
        inputs = [x, tensor(f"{name}.codes", codes), tensor(f"{name}.scales", scales)]
        shape = {"K": k, "N": n, "bits": bits, "block_size": 32, "accuracy_level": 4}
        return node("MatMulNBits", inputs, name, "com.microsoft", **shape)

    table = rng.standard_normal((vocab, hidden)).astype(np.float32)
    norm = tensor("norm", np.ones(hidden, np.float32))
    x = node("Gather", [tensor("embedding", table), "input_ids"], "x")
    for layer in range(LAYERS):
        bits = (8, 4)[layer % 2]
        y = node("RMSNormalization", [x, norm], f"normed{layer}")
        y = linear(y, f"up{layer}", 2 * hidden, hidden, bits)
        y = node("Mul", [y, node("Sigmoid", [y], f"gate{layer}")], f"silu{layer}")
        y = node("Cast", [y], f"half{layer}", to=TensorProto.FLOAT16)
        y = node("Cast", [y], f"single{layer}", to=TensorProto.FLOAT)
        x = node("Add", [x, linear(y, f"down{layer}", hidden, 2 * hidden, bits)], f"x{layer}")
    square = rng.standard_normal((hidden, hidden)).astype(np.float32) / 16
    x = node("MatMul", [x, tensor("mix", square)], "mixed")
    linear(node("RMSNormalization", [x, norm], "last"), "logits", vocab, hidden, 8)

    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["T"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["T", vocab])],
        tensors,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.data")
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("bundle") / "target.onnx", vocab=1024, hidden=256)


@pytest.fixture(scope="module")
def made(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A prepared copy that no test changes."""
    return prepare(graph, cache=tmp_path_factory.mktemp("made"), identity="a")


@pytest.fixture
def cache(made: Prepared, tmp_path: Path) -> Path:
    """A cache of its own for each test, with the same prepared copy in it."""
    return Path(shutil.copytree(made.folder.parent, tmp_path / "cache"))


def run(model: Path, *, prepared: bool, threads: int = 2) -> bytes:
    options = session_options(Placement(threads=threads), prepared=prepared)
    session = ort.InferenceSession(str(model), options, providers=PROVIDERS)
    outputs = [session.run(None, {"input_ids": ids})[0] for ids in (IDS, IDS[:1])]
    assert all(np.isfinite(output).all() for output in outputs)
    return b"".join(output.tobytes() for output in outputs)


def only_folder(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def is_rebuilt(graph: Path, cache: Path) -> bool:
    """Whether `prepare` builds anew; either way the result must be right and found again."""
    result = prepare(graph, cache=cache, identity="a")
    assert run(result.model, prepared=True) == run(graph, prepared=False)
    again = prepare(graph, cache=cache, identity="a")
    assert (again.folder, again.built) == (result.folder, False)
    assert not list(cache.glob("*.tmp"))
    return result.built


def start(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


PREPARE = """
import sys
from pathlib import Path
from headrace.runtime.prepare import prepare
print(prepare(Path(sys.argv[1]), cache=Path(sys.argv[2]), identity="a").built)
"""


def test_same_bits_as_the_plain_session(graph: Path, made: Prepared) -> None:
    plain = run(graph, prepared=False)
    assert run(made.model, prepared=True) == plain
    assert run(made.model, prepared=True, threads=1) == plain


def test_optimising_changes_no_bit(graph: Path) -> None:
    assert run(graph, prepared=True) == run(graph, prepared=False)


def test_files_do_not_depend_on_the_number_of_threads(
    graph: Path, made: Prepared, tmp_path: Path
) -> None:
    other = prepare(graph, cache=tmp_path, identity="a", threads=1)
    assert other.data.read_bytes() == made.data.read_bytes()
    assert other.model.read_bytes() == made.model.read_bytes()


def test_made_once(graph: Path, made: Prepared) -> None:
    before = made.data.stat()
    lines: list[str] = []
    again = prepare(graph, cache=made.folder.parent, identity="a", progress=lines.append)
    assert (again.folder, again.built, lines) == (made.folder, False, [])
    assert again.data.stat() == before
    assert again.nbytes == before.st_size + made.model.stat().st_size


def test_a_copied_cache_is_hashed_once_and_then_believed(graph: Path, cache: Path) -> None:
    hashed: list[bool] = []
    for _ in range(2):
        lines: list[str] = []
        assert not prepare(graph, cache=cache, identity="a", progress=lines.append).built
        hashed.append(lines == ["checking the prepared weights"])
    assert hashed == [True, False]


def test_hashed_again_after_a_boot(
    graph: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(graph, cache=cache, identity="a")
    monkeypatch.setattr(stamp, "_boot_id", lambda: "another boot")
    lines: list[str] = []
    assert not prepare(graph, cache=cache, identity="a", progress=lines.append).built
    assert lines == ["checking the prepared weights"]


@pytest.mark.parametrize("name", ["model.data", "model.onnx"])
def test_a_flipped_byte_is_found(graph: Path, cache: Path, name: str) -> None:
    prepare(graph, cache=cache, identity="a")
    path = only_folder(cache) / name
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_rebuilt(graph, cache)


@pytest.mark.parametrize("name", ["model.data", "model.onnx", "stamp.json"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_truncated_file_is_found(graph: Path, cache: Path, name: str, size: int) -> None:
    path = only_folder(cache) / name
    os.truncate(path, size % path.stat().st_size)
    assert is_rebuilt(graph, cache)


@pytest.mark.parametrize("name", ["model.data", "model.onnx", "stamp.json"])
def test_a_missing_file_is_found(graph: Path, cache: Path, name: str) -> None:
    (only_folder(cache) / name).unlink()
    assert is_rebuilt(graph, cache)


@pytest.mark.parametrize(
    "edit",
    [
        {"onnxruntime": ["1.0.0", ""]},
        {"cpu": ["CPU part: 0xd0b"]},
        {"machine": "riscv64"},
        {"identity": "b"},
        {"format": 0},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_a_stamp_with_another_key_is_not_trusted(
    graph: Path, cache: Path, edit: dict[str, object]
) -> None:
    path = only_folder(cache) / "stamp.json"
    content = json.loads(path.read_text())
    content["key"].update(edit)
    path.write_text(json.dumps(content))
    assert is_rebuilt(graph, cache)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"key": 1, "files": 2}', '{"files": {"model.onnx": 1, "model.data": null}}'],
)
def test_a_stamp_that_makes_no_sense_is_not_trusted(graph: Path, cache: Path, content: str) -> None:
    path = only_folder(cache) / "stamp.json"
    key = json.loads(path.read_text())["key"]
    made_up = json.loads(content)
    path.write_text(json.dumps({"key": key} | made_up if isinstance(made_up, dict) else made_up))
    assert is_rebuilt(graph, cache)


def test_another_version_replaces_its_predecessor(
    graph: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = only_folder(cache)
    monkeypatch.setattr(ort, "__version__", "99.0")
    assert is_rebuilt(graph, cache)
    assert only_folder(cache) != before


def test_another_machine_keeps_its_own_copy(
    graph: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = only_folder(cache)
    other = {"machine": platform.machine(), "cpu": ["CPU part: 0xd0b"]}
    monkeypatch.setattr(prepare_module, "machine", lambda: other)
    assert is_rebuilt(graph, cache)
    assert before.exists()


def test_another_bundle_is_prepared_apart(graph: Path, cache: Path) -> None:
    assert prepare(graph, cache=cache, identity="b").built
    assert not prepare(graph, cache=cache, identity="a").built


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_trusted(
    graph: Path, tmp_path: Path, number: signal.Signals
) -> None:
    child = start(PREPARE, graph, tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.tmp")):
        assert child.poll() is None and time.monotonic() < deadline, "it never began"
        time.sleep(0.002)
    child.send_signal(number)
    assert child.communicate()[0] == ""
    assert child.returncode != 0
    left = sorted(path.suffix for path in tmp_path.iterdir() if path.is_dir())
    assert left == ([] if number == signal.SIGINT else [".tmp"])
    assert is_rebuilt(graph, tmp_path)


def test_two_processes_at_once(graph: Path, tmp_path: Path) -> None:
    children = [start(PREPARE, graph, tmp_path) for _ in range(2)]
    answers = sorted(child.communicate()[0].strip() for child in children)
    assert answers == ["False", "True"]
    assert not is_rebuilt(graph, tmp_path)


def test_a_cache_that_is_a_file(graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.touch()
    with pytest.raises(StorageError, match="cannot keep prepared weights here"):
        prepare(graph, cache=path, identity="a")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a process without root rights can reach, as pytest's own are not."""
    folder = Path("/var/tmp") / f"headrace-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


UNWRITABLE = """
import os, sys
from pathlib import Path
from headrace.errors import StorageError
from headrace.runtime.prepare import prepare
if os.getuid() == 0:
    os.setuid(65534)
try:
    prepare(Path(sys.argv[1]), cache=Path(sys.argv[2]), identity="a")
except StorageError as error:
    print(error)
"""


def test_an_unwritable_cache(graph: Path, open_folder: Path) -> None:
    files = Path(shutil.copytree(graph.parent, open_folder / "bundle"))
    for path in [files, *files.iterdir()]:
        path.chmod(0o755)
    cache = open_folder / "cache"
    cache.mkdir(mode=0o555)
    child = start(UNWRITABLE, files / graph.name, cache)
    assert "cannot keep prepared weights here (Permission denied)" in child.communicate()[0]
    assert not list(cache.iterdir())


def test_a_valid_copy_in_an_unwritable_cache_is_used(
    made: Prepared, graph: Path, open_folder: Path
) -> None:
    cache = Path(shutil.copytree(made.folder.parent, open_folder / "cache"))
    for path in [cache, *cache.rglob("*")]:
        path.chmod(0o555)
    code = UNWRITABLE.replace("    prepare(", "    print(prepare(").replace('"a")', '"a").built)')
    child = start(code, open_folder / graph.name, cache)
    assert child.communicate()[0] == "False\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]
    if not mount or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root rights")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_too_little_room_is_seen_before(graph: Path, small_disk: Path) -> None:
    with pytest.raises(StorageError, match=r"needs about \d+ MiB in .* and \d+ MiB are free"):
        prepare(graph, cache=small_disk, identity="a")
    assert [path.name for path in small_disk.iterdir()] == [".lock"]


def test_a_disk_that_fills_up(
    graph: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_bytes_needed", lambda graph: 0)
    with pytest.raises(StorageError, match="the disk is full"):
        prepare(graph, cache=small_disk, identity="a")
    assert [path.name for path in small_disk.iterdir()] == [".lock"]


def test_a_graph_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "target.onnx"
    with pytest.raises(BundleError, match="No such file"):
        prepare(path, cache=tmp_path / "cache", identity="a")
    path.write_bytes(b"not a graph")
    with pytest.raises(BundleError, match="ONNX Runtime cannot prepare it: "):
        prepare(path, cache=tmp_path / "cache", identity="a")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_an_interpreter_to_start_it_builds_in_process(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert is_rebuilt(graph, tmp_path)


def test_a_build_killed_for_want_of_memory(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "killed"
    script.write_text("#!/bin/sh\nkill -KILL $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(HeadraceError, match="want of memory"):
        prepare(graph, cache=tmp_path / "cache", identity="a")


def test_a_graph_without_large_weights(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    body = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [info], [out])
    opsets = [helper.make_opsetid("", 23)]
    path = tmp_path / "target.onnx"
    onnx.save(helper.make_model(body, opset_imports=opsets, ir_version=11), path)
    assert prepare(path, cache=tmp_path / "cache", identity="a").built
    assert not prepare(path, cache=tmp_path / "cache", identity="a").built


GROWTH = """
import sys
import onnxruntime as ort
from headrace.runtime.memory import usage
from headrace.runtime.cores import Placement
from headrace.runtime.prepare import PROVIDERS, session_options
options = session_options(Placement(threads=1), prepared=sys.argv[2] == "prepared")
before = usage()
session = ort.InferenceSession(sys.argv[1], options, providers=PROVIDERS)
session.run(None, {"input_ids": [1, 2, 3]})
print(usage().rss_anon - before.rss_anon)
"""


def test_loading_takes_little_anonymous_memory(tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "target.onnx", vocab=8192, hidden=1024)
    ready = prepare(graph, cache=tmp_path / "cache", identity="a")
    plain = int(start(GROWTH, graph, "plain").communicate()[0])
    grown = int(start(GROWTH, ready.model, "prepared").communicate()[0])
    packed = 8192 * 1024 + 2 * (1024 * 2048) * 3 // 2
    assert plain > packed and grown < plain / 2, (plain, grown, packed)


def test_mlock_holds_what_the_session_maps(made: Prepared) -> None:
    options = session_options(Placement(threads=1), prepared=True)
    session = ort.InferenceSession(str(made.model), options, providers=PROVIDERS)
    ranges = mapped_ranges(made.data)
    anon = usage().rss_anon
    with mlock(made) as pages:
        assert locked() == pages.nbytes == sum(part.length for part in ranges)
        assert usage().rss_anon - anon < pages.nbytes / 4
        session.run(None, {"input_ids": IDS})
    assert locked() == 0
    weights = made.data.stat().st_size
    assert weights / 3 < pages.nbytes < weights * 0.8, (pages.nbytes, weights)


def locked() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmLck" in x)
    return int(line.split()[1]) * 1024
