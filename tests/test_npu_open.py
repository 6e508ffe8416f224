"""Opening a draft on the NPU: at every step that can fail, one clear line, and nothing left behind."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from npu_bundles import GEOMETRY, TOOLKIT
from npu_double import Double, TinyDraft, changed, opened, padded, tiny_draft
from tiny_checkpoints import TINY

from headrace.errors import (
    NpuDeviceError,
    NpuError,
    NpuMemoryError,
    NpuMissingError,
    NpuModelError,
    NpuVersionError,
)
from headrace.models.npu_io import NativeTensor, NpuFiles, NpuIo
from headrace.npu import librknnrt
from headrace.npu.abi import Flag
from headrace.npu.backend import RknnBackend
from headrace.npu.librknnrt import Buffer, Library


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyDraft:
    return tiny_draft(tmp_path_factory.mktemp("llama"), TINY / "llama")


def refused(files: NpuFiles, double: Double, kind: type[NpuError], *words: str) -> None:
    """One line, of this kind, and all is given back."""
    with pytest.raises(NpuError) as caught:
        RknnBackend(files, double.library(), lanes=2)
    text = str(caught.value)
    assert type(caught.value) is kind, text
    assert "\n" not in text and len(text) < 250, text
    assert [word for word in words if word not in text] == [], text
    assert double.held == {} and double.violations == []


def test_memory_that_runs_out_at_any_moment(llama: TinyDraft, double: Double) -> None:
    RknnBackend(llama.files, double.library(), lanes=2).close()
    number = double.calls("rknn_create_mem")
    assert number > 20
    for i in range(1, number + 1):
        double.reset()
        double.play(f"create_mem:{i}")
        refused(llama.files, double, NpuMemoryError, "no memory that the NPU can reach")
    double.reset()
    double.play(f"create_mem:{number + 1}")
    RknnBackend(llama.files, double.library(), lanes=2).close()


def test_closing_again_calls_nothing(llama: TinyDraft, double: Double) -> None:
    """And what was memory is none any more."""
    flags = Flag.PRIOR_MEDIUM | Flag.DISABLE_FLUSH_INPUT | Flag.DISABLE_FLUSH_OUTPUT
    context = double.library().init(llama.files.rknn, flags)
    buffer = context.allocate(100)
    assert buffer.bytes.size == 100 and not buffer.bytes.any()
    for _ in range(2):
        buffer.close()
        assert buffer.bytes.size == 0
    for _ in range(2):
        context.close()
    assert double.calls("rknn_destroy_mem") == double.calls("rknn_destroy") == 1


@pytest.mark.parametrize("at", [1, 7, 20])
def test_a_flush_that_fails_while_opening(
    llama: TinyDraft, double: Double, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    flush, number = Buffer.to_device, itertools.count(1)

    def fail(buffer: Buffer) -> None:
        if next(number) == at:
            raise NpuDeviceError("rknn_mem_sync: the call failed (FAIL, -1)")
        flush(buffer)

    monkeypatch.setattr(Buffer, "to_device", fail)
    refused(llama.files, double, NpuDeviceError, "rknn_mem_sync")


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("init:-1", NpuDeviceError, ["rknn_init", "the call failed"]),
        ("init:-3", NpuDeviceError, ["not available"]),
        ("init:-6", NpuModelError, ["the model is invalid"]),
        ("init:-10", NpuVersionError, ["do not go together"]),
        ("init:-13", NpuModelError, ["another chip"]),
        ("init:-77", NpuDeviceError, ["-77", "do not know"]),
        ("version:2.3.1", NpuVersionError, ["library", "2.3.1", TOOLKIT, "headrace doctor"]),
        ("version:1.5.2", NpuVersionError, ["library", "1.5.2"]),
        ("version:none", NpuVersionError, ["library", TOOLKIT]),
        ("driver:0.9.2", NpuVersionError, ["driver", "0.9.2", "0.9.6"]),
        ("driver:0.8.8", NpuVersionError, ["driver", "0.8.8"]),
    ],
)
def test_what_cannot_be_opened(
    llama: TinyDraft, double: Double, fault: str, kind: type[NpuError], words: list[str]
) -> None:
    double.play(fault)
    refused(llama.files, double, kind, *words)


@pytest.mark.parametrize("version", ["2.3.2", "2.10.0", "3.0"])
def test_versions_count_as_numbers(llama: TinyDraft, double: Double, version: str) -> None:
    double.play(f"version:{version} driver:0.10.0")
    with opened(llama.files, double) as backend:
        assert backend.version.startswith(f"{version} ")


def test_every_variant_is_told_its_cores(llama: TinyDraft, double: Double) -> None:
    with opened(llama.files, double):
        assert double.calls("rknn_set_core_mask") == len(GEOMETRY.rows)


def _first_input(io: NpuIo, **values: object) -> NpuIo:
    """The narrowest variant's mask said to be something else."""
    first = io.variants[0]
    inputs = tuple(
        dataclasses.replace(t, **values) if t.name == "mask" else t  # type: ignore[arg-type]
        for t in first.inputs
    )
    return dataclasses.replace(
        io, variants=(dataclasses.replace(first, inputs=inputs), *io.variants[1:])
    )


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"name": "musk"}, "musk"),
        ({"type": "int8"}, "int8"),
        ({"dims": (1, 1, 1, 191)}, "191"),
    ],
    ids=str,
)
def test_a_description_of_another_model(
    llama: TinyDraft, double: Double, values: dict[str, object], word: str
) -> None:
    files = dataclasses.replace(llama.files, io=_first_input(llama.files.io, **values))
    refused(files, double, NpuModelError, word, "export")


def test_a_description_with_an_input_too_many(llama: TinyDraft, double: Double) -> None:
    first, *others = llama.files.io.variants
    more = dataclasses.replace(first, inputs=(*first.inputs, first.inputs[0]))
    io = dataclasses.replace(llama.files.io, variants=(more, *others))
    refused(dataclasses.replace(llama.files, io=io), double, NpuModelError, "inputs", "export")


def test_variants_that_cannot_share_their_memory(
    llama: TinyDraft, double: Double, tmp_path: Path
) -> None:
    mains = iter(range(10**6))

    def change(tensor: NativeTensor) -> NativeTensor:
        return padded(tensor, next(mains) % 3) if tensor.name == "main.0.key" else tensor

    files = changed(llama, tmp_path, change)
    refused(files, double, NpuModelError, "main.0.key", "cannot share", "export")


@pytest.mark.parametrize("content", [b"", b"short"])
def test_embeddings_cut_short(
    llama: TinyDraft, double: Double, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "npu.embeddings"
    path.write_bytes(content)
    files = dataclasses.replace(llama.files, embeddings=path)
    refused(files, double, NpuModelError, "npu.embeddings", "export")


def test_no_library_and_one_that_is_another(tmp_path: Path) -> None:
    with pytest.raises(NpuMissingError, match="headrace doctor"):
        Library(str(tmp_path / "librknnrt.so"))
    with pytest.raises(NpuVersionError, match="has no rknn_init"):
        Library("libc.so.6")


def test_a_file_of_this_folder_must_be_named(
    npu_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that was only fetched into it is not the installed one."""
    name = "librknnrt-fetched.so"
    (tmp_path / name).symlink_to(npu_library)
    monkeypatch.chdir(tmp_path)
    assert Library(name).path == name
    monkeypatch.setattr(librknnrt, "DEFAULT_PATH", name)
    with pytest.raises(NpuMissingError, match=name):
        Library()
