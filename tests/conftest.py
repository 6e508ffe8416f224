"""Fixtures that several test files share."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import CommandLine
from librknnrt import build as double_build
from npu_double import Double, endless_twin, watched
from tiny_checkpoints import TINY

from headrace.export import demo_model
from headrace.export.build import DraftOptions, ExportOptions, export


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, and that is inherited: programs that the
    # tests interrupt would not notice.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as Q4_1 GGUF, from the cache folder."""
    return demo_model.obtain()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with its random weights; its context is 128 tokens. Not to be changed."""
    bundle = tmp_path_factory.mktemp("tiny") / "bundle"
    export(str(TINY / "llama"), bundle, ExportOptions(quant="f32"))
    return bundle


@pytest.fixture(scope="session")
def twin_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama as its own draft. Not to be changed."""
    source, bundle = str(TINY / "llama"), tmp_path_factory.mktemp("twins") / "bundle"
    export(source, bundle, ExportOptions(quant="f32", draft=DraftOptions(source, quant="f32")))
    return bundle


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A text of few different tokens."""
    path = tmp_path / "corpus"
    path.write_text("pump 3 pressure 4.2 bar\n" * 50 + "valve 12\n")
    return path


@pytest.fixture(scope="session")
def endless_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context so long that an answer takes as long as a test wants it to."""
    folder = tmp_path_factory.mktemp("endless")
    source = shutil.copytree(TINY / "llama", folder / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    export(str(source), folder / "bundle", ExportOptions(quant="f32"))
    return folder / "bundle"


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the test run's own, for prepared weights that tests may share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shared_cache: Path
) -> CommandLine:
    """The command line, with a cache folder of the test run's own."""
    monkeypatch.setenv("HEADRACE_CACHE", str(shared_cache))
    return CommandLine(capsys, monkeypatch)


@pytest.fixture(scope="session")
def npu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double of librknnrt.so."""
    missing = double_build.missing()
    if missing is not None:
        pytest.skip(missing)
    return double_build.build(tmp_path_factory.mktemp("double"))


@pytest.fixture
def double(npu_library: Path) -> Iterator[Double]:
    """The same, with nothing left of it and nothing done wrongly when the test has ended."""
    with watched(npu_library) as found:
        yield found


@pytest.fixture(scope="session")
def npu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama as its own draft, on the CPU and on the NPU. Not to be changed."""
    return endless_twin(tmp_path_factory.mktemp("npu"))
