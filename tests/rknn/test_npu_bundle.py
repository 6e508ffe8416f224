"""A whole export with the real toolkit, and the bundle on the double of the runtime library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commandline import CommandLine
from librknnrt import build as double_build
from tiny_checkpoints import TINY

from headrace import LLM, SamplingParams
from headrace.export.build import DraftOptions, ExportOptions, export
from headrace.export.options import NpuOptions
from headrace.models.manifest import PC_ONLY, Bundle

SOURCE = str(TINY / "llama_yarn")
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, speculate=4)


CACHE = os.environ.get("HEADRACE_CACHE")


@pytest.fixture
def with_toolkit(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line, with the cache folder that the toolkit's environment is in."""
    if CACHE is None:
        monkeypatch.delenv("HEADRACE_CACHE")
    else:
        monkeypatch.setenv("HEADRACE_CACHE", CACHE)
    return command


@pytest.fixture(scope="module", params=["fp16", "w8a8"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp(request.param) / "bundle"
    draft = DraftOptions(SOURCE, quant="f32", npu=NpuOptions(quant=request.param))
    export(SOURCE, out, ExportOptions(quant="f32", draft=draft))
    return Bundle.open(out)


def test_the_record_tells_what_was_proven(bundle: Bundle) -> None:
    assert bundle.draft is not None
    npu = bundle.draft.npu
    assert npu is not None and npu.platform == "rk3588"
    assert [v.rows for v in npu.variants] == [1, 4, 8, 32 if npu.quant == "fp16" else 16]
    least = 0.9999 if npu.quant == "fp16" else 0.9
    for variant in npu.variants:
        assert variant.cosine > least and variant.operators > 0
        assert variant.top1_same == variant.top1_clear
    assert npu.largest < 65_504 and npu.weight_bytes > 0
    assert npu.agreement.top1 > (0.99 if npu.quant == "fp16" else 0.5)


def test_it_runs_on_the_double(bundle: Bundle, tmp_path: Path) -> None:
    """Without the files that a board does not need; the double computes in float."""
    if (missing := double_build.missing()) is not None:
        pytest.skip(missing)
    library, texts = double_build.build(tmp_path), []
    for device, path in (("npu", library), ("none", None)):
        with LLM(bundle.path, draft_device=device, npu_library=path) as llm:
            answer = llm.generate("the pump is at 4.2 bar", PARAMS)
            texts.append(answer.text)
            if device == "npu":
                assert answer.speculation is not None
                assert answer.speculation.sources["draft"].accepted[0] > 0
    assert texts[0] == texts[1]


def test_a_text_is_simulated(bundle: Bundle, tmp_path: Path, with_toolkit: CommandLine) -> None:
    text = tmp_path / "text"
    text.write_text("the pump is at 4.2 bar and the valve is shut\n" * 4)
    done = with_toolkit("check", bundle.path, "--npu-sim", text)
    assert done.code == 0 and "accepted, greedy" in done.out, done.err


def test_a_copy_without_its_pc_files_cannot_be(
    bundle: Bundle, tmp_path: Path, command: CommandLine
) -> None:
    kept = {name: bundle.file(name).read_bytes() for name in PC_ONLY}
    text = tmp_path / "text"
    text.write_text("the pump is at 4.2 bar and the valve is shut\n" * 4)
    try:
        for name in PC_ONLY:
            bundle.file(name).unlink()
        done = command("check", bundle.path, "--npu-sim", text)
        assert done.code == 1 and "was left out of this copy" in done.complaint
        assert command("run", bundle.path, "the pump", "--max-tokens", "2").code == 0
    finally:
        for name, content in kept.items():
            bundle.file(name).write_bytes(content)
