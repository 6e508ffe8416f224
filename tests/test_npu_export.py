"""The draft's graph for the NPU beside the reference, and what an export refuses before it computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from commandline import CommandLine
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import F32, I64, NAMES, TINY, reference_logits

from headrace.errors import BundleError, UsageError
from headrace.export.build import ExportOptions, export
from headrace.export.checkpoint import open_checkpoint
from headrace.export.npu_build import NpuJob
from headrace.export.npu_draft import embeddings, write_npu_files
from headrace.export.npu_text import FP16_MASK, NpuText, TextPasses, ort_run, text_logits
from headrace.export.options import DraftOptions, NpuOptions
from headrace.models.config import ModelConfig
from headrace.models.manifest import NPU_GRAPH, NPU_IO
from headrace.models.npu_io import NpuGeometry, NpuIo, NpuProbe, geometry_for, npu_inputs
from headrace.models.rope import plain

GEOMETRY = NpuGeometry(sinks=32, window=96, unit=32, nodes=32, rows=(1, 4, 8, 32))
IDS: I64 = np.random.default_rng(5).integers(0, 280, 90)


def config(**changes: object) -> ModelConfig:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position": 2048}
    rest = {"family": "llama", "rms_eps": 1e-5, "rope": plain(16, 1e4)}
    return ModelConfig(**{**sizes, **heads, **rest, **changes})  # type: ignore[arg-type]


def written(name: str, folder: Path, scale: float) -> NpuText:
    (folder / "draft").mkdir()
    checkpoint = open_checkpoint(str(TINY / name))
    write_npu_files(
        checkpoint,
        folder,
        GEOMETRY,
        platform="rk3588",
        toolkit="2.5.0",
        quant="fp16",
        residual_scale=scale,
    )
    config = checkpoint.config
    return NpuText(config, GEOMETRY, embeddings(folder, config), FP16_MASK)


def error(logits: F32, expected: F32) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("scale", [1.0, 2.0**-8])
@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_model_at_any_width_and_scale(
    name: str, scale: float, tmp_path: Path
) -> None:
    """Weights in float16 are what is left of a difference."""
    text, expected = written(name, tmp_path, scale), reference_logits(TINY / name, IDS)
    run = ort_run(tmp_path / NPU_GRAPH)
    whole = text_logits(run, text, IDS, 32)
    assert error(whole, expected) < 0.01
    for rows in (1, 8):
        fresh = NpuText(text._config, GEOMETRY, text._embeddings, FP16_MASK)
        assert error(text_logits(run, fresh, IDS, rows), whole) < 1e-5


def test_feeds_are_spread_over_the_text_and_begin_with_it(tmp_path: Path) -> None:
    text = written("llama", tmp_path, 1.0)
    io = NpuIo.load(tmp_path / NPU_IO)
    passes = TextPasses(text._config, io, text._embeddings, tmp_path / NPU_GRAPH, IDS)
    feeds = passes.feeds(4, 3)
    pasts = [int((f["mask"][0, 0, 0, : GEOMETRY.main] == 0).sum()) for f in feeds]
    assert pasts == [0, 43, 86]
    assert {name: a.shape for name, a in feeds[0].items()} == {
        t.name: t.dims for t in npu_inputs(text._config, GEOMETRY, 4)
    }


@given(st.sampled_from(NAMES), st.sampled_from(["float16", "int8"]))
@settings(max_examples=10, deadline=None)
def test_a_description_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: str
) -> None:
    path = tmp_path_factory.mktemp("io") / "npu.io.json"
    config = open_checkpoint(str(TINY / name)).config
    io = NpuIo.expected(
        config, GEOMETRY, platform="rk3588", toolkit="", quant="fp16", mask=FP16_MASK
    )
    io = io.compiled("2.5.0", {t.name: kind for t in io.variants[0].inputs})
    io = dataclasses.replace(io, probe=NpuProbe((1, 2), (3,), (0.1,), 0.05))
    io.save(path)
    assert NpuIo.load(path) == io
    assert {t.type for v in io.variants for t in v.inputs} == {kind}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"format": "x"}', b"\xff\xfe", b"[" * 9999]
)
def test_a_description_that_is_none_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "npu.io.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="export the model again"):
        NpuIo.load(path)


@given(st.integers(32, 5000), st.one_of(st.none(), st.integers(1, 1024)))
def test_a_geometry_fits_the_trained_context_and_the_local_layers(
    trained: int, local: int | None
) -> None:
    sliding = {"sliding_window": local, "layer_types": ("full", "sliding")} if local else {}
    model = config(max_position=trained, **sliding)
    try:
        g = geometry_for(model)
    except UsageError as error:
        least = 32 + -(-max(32, local or 0) // 32) * 32 + 32
        assert trained < least and str(least) in str(error)
        return
    assert g.main + g.unit <= trained and g.window >= (local or 0)
    assert g.window % g.unit == 0 and g.tail == g.unit + g.nodes
    assert g.main == 512 or trained < 512 + 32 or (local or 0) > 480


@pytest.mark.parametrize("ctx", [0, 63, 100, 4096])
def test_a_context_that_cannot_be_is_refused_with_what_can(ctx: int) -> None:
    with pytest.raises(UsageError, match="multiples of 32 from 64 to 2016"):
        geometry_for(config(), ctx)


def test_heads_that_do_not_fill_the_groups_are_refused() -> None:
    checkpoint = open_checkpoint(str(TINY / "llama"))
    nothing = np.zeros((0, 0), np.float32)
    ids = np.zeros(0, np.int64)
    job = NpuJob(checkpoint, NpuOptions(), ids, ids, nothing, ids.astype(np.int32), force=False)
    with pytest.raises(UsageError, match="a head of 8 channels"):
        job.geometry()


@pytest.mark.parametrize(
    ("npu", "words"),
    [
        (NpuOptions(platform="rk3566"), "platform: got 'rk3566', allowed are rk3588"),
        (NpuOptions(quant="w4a16"), "npu_quant: got 'w4a16', allowed are fp16, w8a8"),
    ],
)
def test_an_unknown_choice_names_the_known_ones(
    npu: NpuOptions, words: str, tmp_path: Path
) -> None:
    source = str(TINY / "llama")
    with pytest.raises(UsageError, match=words):
        export(source, tmp_path / "b", ExportOptions(draft=DraftOptions(source, npu=npu)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--platform", "rk3588"), "need --draft SOURCE"),
        (("--npu-quant", "w8a8"), "need --platform"),
        (("--npu-ctx", "512", "--draft", "x"), "need --platform"),
        (("--draft", str(TINY / "llama"), "--platform", "rk3566"), "'rk3566' is not"),
    ],
)
def test_choices_about_an_npu_need_one(
    arguments: tuple[str, ...], words: str, tmp_path: Path, command: CommandLine
) -> None:
    done = command("export", TINY / "llama", "-o", tmp_path / "b", *arguments)
    assert done.code == 2 and words in done.err
    assert len(done.err.splitlines()) == 1


def test_without_the_toolkit_an_export_says_how_to_get_it(
    tmp_path: Path, command: CommandLine
) -> None:
    source = TINY / "llama"
    done = command(
        "export", source, "-o", tmp_path / "b", "--draft", source, "--platform", "rk3588"
    )
    assert done.code == 1 and "headrace rknn-env" in done.err
    assert len(done.err.splitlines()) == 1 and not (tmp_path / "b").exists()


def test_a_long_text_is_used_as_far_as_it_fits(tmp_path: Path) -> None:
    text = written("llama", tmp_path, 1.0)
    ids = np.tile(IDS, 3)
    io = NpuIo.load(tmp_path / NPU_IO)
    passes = TextPasses(text._config, io, text._embeddings, tmp_path / NPU_GRAPH, ids)
    assert len(passes.logits(passes.run)) == GEOMETRY.main
