"""`headrace demo` from end to end, with a tiny model in the place of SmolLM2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commandline import CommandLine
from gguf import GGMLQuantizationType
from tiny_checkpoints import TINY
from tiny_distilled import distilled
from tiny_gguf import write_gguf

from headrace.export import demo_model
from headrace.models.manifest import TOKENIZER


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """With a context as long as SmolLM2's."""
    source = shutil.copytree(TINY / "llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    path = tmp_path / "model.gguf"
    write_gguf(source, path, GGMLQuantizationType.Q8_0)
    return path


def test_the_demo(
    command: CommandLine,
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second run reuses the bundle, and a bundle that was damaged is made again."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    draft = distilled(tmp_path / "draft", tiny_gguf)
    monkeypatch.setattr(demo_model, "obtain", lambda: tiny_gguf)
    monkeypatch.setattr(demo_model, "draft", lambda: draft)
    first = command("demo")
    assert first.code == 0, first.err
    again = command("demo")
    assert again.code == 0, again.err
    assert "is there already" in again.err
    (bundle,) = (tmp_path / "cache" / "bundles").glob("SmolLM2*")
    (bundle / TOKENIZER).write_text("{}")
    healed = command("demo")
    assert healed.code == 0, healed.err
    assert "making it again" in healed.err
    for run in (first, again, healed):
        for words in ("Question: ", "lines 181-200", "plain decoding", "speed-up", "peak memory"):
            assert words in run.out, words
