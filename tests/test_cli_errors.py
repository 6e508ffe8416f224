"""Mistakes and damage: one line on stderr, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commandline import CommandLine, Result
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import TINY
from tiny_gguf import write_gguf

from headrace.intact import sha256
from headrace.models.manifest import (
    MANIFEST,
    TARGET,
    TARGET_DATA,
    TOKENIZER,
    Bundle,
    FileRecord,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(TINY / "llama", tmp_path / "source")


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may damage."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


USAGE = {
    "temperature: got -1.0": ["--temperature", "-1"],
    "temperature: got nan": ["--temperature", "nan"],
    "'warm' is not a valid float": ["--temperature", "warm"],
    "top_k: got -1": ["--top-k", "-1"],
    "top_p: got 0.0": ["--top-p", "0"],
    "top_p: got 1.5": ["--top-p", "1.5"],
    "min_p: got 2.0": ["--min-p", "2"],
    "repeat_penalty: got 0.0": ["--repeat-penalty", "0"],
    "presence_penalty: got 9.0": ["--presence-penalty", "9"],
    "frequency_penalty: got inf": ["--frequency-penalty", "inf"],
    "seed: got -1": ["--seed", "-1"],
    "max_tokens: got 0": ["--max-tokens", "0"],
    "logprobs: got 51": ["--logprobs", "51"],
    "stop: got ''": ["--stop", ""],
    "stop: got 17 strings": ["--stop", "x"] * 17,
    "got '5', expected ID=B": ["--logit-bias", "5"],
    "got 'a=1', expected ID=B": ["--logit-bias", "a=1"],
    "token id 99999": ["--logit-bias", "99999=1"],
    "logit_bias of 5: got nan": ["--logit-bias", "5=nan"],
    "ctx: got 5": ["--ctx", "5"],
    "ctx: got 4096, allowed are 16 to 128": ["--ctx", "4096"],
    "lanes: got 0": ["--lanes", "0"],
    "lanes: got 1000000": ["--lanes", "1000000"],
    "target_threads: got -2": ["--target-threads", "-2"],
    "draft_threads: got 0": ["--draft-threads", "0"],
    "target_cpus: got '3-1'": ["--target-cpus", "3-1"],
    "draft_cpus: got ''": ["--draft-cpus", ""],
    "target_cpus: got 9999": ["--target-cpus", "9999"],
    "'loose' is not one of": ["--exactness", "loose"],
    "'ours' is not one of": ["--sampling", "ours"],
    "No such option '--warmth'": ["--warmth", "3"],
    "got 'thinking', expected NAME=VALUE": ["--template-arg", "thinking"],
    "nowhere cannot be read: No such file": ["--chat-template", "nowhere"],
    "/ cannot be read: Is a directory": ["--chat-template", "/"],
    "--system has no meaning with --raw": ["--raw", "--system", "x"],
    "--template-arg has no meaning with --raw": ["--raw", "--template-arg", "a=1"],
}


@pytest.mark.parametrize("words", USAGE)
def test_parameters(command: CommandLine, tiny_bundle: Path, words: str) -> None:
    result = command("run", tiny_bundle, "pump", *USAGE[words])
    assert result.code == 2
    assert words in result.complaint
    assert result.out == ""


@pytest.mark.parametrize(
    ("words", "prompt", "stdin"),
    [
        ("the prompt is empty", [""], b"unread"),
        ("the prompt is empty", [], b""),
        ("the prompt is empty", ["-"], b" \n"),
        ("is not UTF-8 (byte 2 of 4)", [], b"ab\xff\xfe"),
        ("PROMPT is not valid UTF-8", ["\udcff"], b""),
    ],
)
def test_prompts(
    command: CommandLine, tiny_bundle: Path, words: str, prompt: list[str], stdin: bytes
) -> None:
    result = command("run", tiny_bundle, *prompt, stdin=stdin)
    assert result.code == 2
    assert words in result.complaint


def test_a_prompt_that_does_not_fit_names_both_lengths(
    command: CommandLine, tiny_bundle: Path
) -> None:
    result = command("run", tiny_bundle, "x" * 300, "--ctx", "64")
    assert result.code == 1
    assert re.search(r"has 3\d\d tokens and the context holds 64", result.complaint)


def test_a_template_that_fails(command: CommandLine, tiny_bundle: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    for text in ("{{ raise_exception('no\nsystem') }}", "{% if %}", "{{ 1 / 0 }}"):
        template.write_text(text)
        result = command("run", tiny_bundle, "pump", "--chat-template", template)
        assert result.code == 2
        assert "template" in result.complaint
    template.write_bytes(b"\xff")
    assert "not UTF-8" in command("run", tiny_bundle, "x", "--chat-template", template).complaint


@pytest.mark.parametrize("arguments", [["exprot"], ["run"], ["export", "x"], ["--lanes", "2"]])
def test_usage(command: CommandLine, arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.code == 2
    assert "--help" in result.complaint


@pytest.mark.parametrize("name", ["run", "score", "prepare", "inspect"])
def test_no_bundle(command: CommandLine, tmp_path: Path, name: str) -> None:
    for where, words in ((tmp_path / "nothing", "no such bundle"), (tmp_path, "not a bundle")):
        result = command(name, where, *(["pump"] if name == "run" else []), stdin=b"pump 3")
        assert result.code == 1
        assert words in result.complaint


def use(command: CommandLine, bundle: Path) -> list[Result]:
    """What every command says about a damaged bundle."""
    return [
        command("run", bundle, "pump"),
        command("score", bundle, stdin=b"pump 3"),
        command("prepare", bundle),
        command("inspect", bundle),
    ]


@pytest.mark.parametrize("name", [TARGET, TARGET_DATA, TOKENIZER])
def test_an_edited_file(command: CommandLine, bundle: Path, name: str) -> None:
    """Found by its hash, even when its size and its times are as they were."""
    path = bundle / name
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for result in use(command, bundle):
        assert result.code == 1
        assert name in result.complaint


def test_truncated_and_missing_files(command: CommandLine, bundle: Path) -> None:
    os.truncate(bundle / TARGET_DATA, 1000)
    for result in use(command, bundle):
        assert result.code == 1
        assert TARGET_DATA in result.complaint
    (bundle / TARGET_DATA).unlink()
    for result in use(command, bundle):
        assert result.code == 1
        assert TARGET_DATA in result.complaint


def test_a_newer_version(command: CommandLine, bundle: Path) -> None:
    data = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**data, "version": 99}))
    for result in use(command, bundle):
        assert result.code == 1
        assert "bundle version 99" in result.complaint and "update headrace" in result.complaint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "headrace-bundle", "version": 1}'])
def test_a_manifest_that_is_none(command: CommandLine, bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    for result in use(command, bundle):
        assert result.code == 1
        assert MANIFEST in result.complaint


def test_inspect_of_what_is_no_graph(command: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a graph")
    result = command("inspect", path)
    assert result.code == 1
    assert "model.onnx" in result.complaint


def exported(command: CommandLine, source: Path | str, *flags: str) -> Result:
    """A failing export; asserts that it leaves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        result = command("export", source, "-o", Path(folder) / "deep" / "bundle", *flags)
        assert not list(Path(folder).iterdir())
    assert result.out == ""
    assert result.code == 1, result.err
    return result


def test_no_source(command: CommandLine, tmp_path: Path) -> None:
    assert "no such file" in exported(command, tmp_path / "model.gguf").complaint
    assert "no config.json" in exported(command, tmp_path).complaint


def test_a_truncated_gguf(command: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(TINY / "llama", path, GGMLQuantizationType.Q8_0)
    size = path.stat().st_size
    for length in (size - 100, size // 2, 1000, 10, 0):
        os.truncate(path, length)
        assert "model.gguf" in exported(command, path).complaint


def test_truncated_safetensors(command: CommandLine, source: Path) -> None:
    path = source / "model.safetensors"
    size = path.stat().st_size
    for length in (size - 100, size // 2, 100, 4, 0):
        os.truncate(path, length)
        assert "model.safetensors" in exported(command, source).complaint


def test_weights_that_are_no_numbers(command: CommandLine, source: Path) -> None:
    path = source / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    for value in (np.nan, np.inf):
        weights[name] = weights[name].copy()
        weights[name][3, 5] = value
        save_file(weights, path)
        for quant in ("f32", "int4"):
            assert name in exported(command, source, "--quant", quant).complaint


def test_a_tokenizer_of_another_model(command: CommandLine, source: Path) -> None:
    path = source / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"]["another"] = 400
    path.write_text(json.dumps(document))
    assert "do not belong together" in exported(command, source).complaint
    path.write_text("{")
    assert "tokenizer" in exported(command, source).complaint


def test_a_parity_that_is_too_bad(command: CommandLine) -> None:
    """A tiny model with random weights does not survive 4 bits."""
    assert "--force" in exported(command, TINY / "qwen3", "--quant", "int4").complaint


def test_what_is_there_is_not_touched(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path, tmp_path / "file"):
        result = command("export", TINY / "llama", "-o", out)
        assert result.code == 2
        assert "exists" in result.complaint
    assert (tmp_path / "file").read_text() == "mine"


def test_a_calibration_text_that_is_none(command: CommandLine, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        flags = ("--quant", "int4", "--calibrate", str(path))
        result = command("export", TINY / "llama", "-o", tmp_path / "bundle", *flags)
        assert result.code == 2
        assert str(path) in result.complaint
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can make a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(
    command: CommandLine, tiny_bundle: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = command("export", TINY / "llama", "-o", small_disk / "bundle", "--quant", "f32")
    assert result.code == 1
    assert "disk is full" in result.complaint
    assert not list(small_disk.iterdir())
    monkeypatch.setenv("HEADRACE_CACHE", str(small_disk))
    for arguments in (("prepare", tiny_bundle), ("run", tiny_bundle, "pump")):
        result = command(*arguments)
        assert result.code == 1
        assert str(small_disk) in result.complaint


# The first call, with all rights, imports what the second needs: others may not be allowed to read
# the interpreter's libraries.
WITHOUT_RIGHTS = """
import os, sys
from headrace.cli import main
cut = sys.argv.index("--then")
assert main(sys.argv[1:cut]) == 0
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print("now", file=sys.stderr)
sys.exit(main(sys.argv[cut + 1 :]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that all may read and only root may write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(warm: list[str | Path], arguments: list[str | Path], cache: Path) -> Result:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, *map(str, warm), "--then", *map(str, arguments)],
        env={**os.environ, "HEADRACE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "now\n" in done.stderr, done.stderr
    return Result(done.returncode, done.stdout, done.stderr.split("now\n")[1])


def test_no_permission_to_write(public: Path, tmp_path: Path) -> None:
    shutil.copytree(TINY / "llama", public / "source")
    export: list[str | Path] = ["export", public / "source", "--quant", "f32", "-o"]
    result = as_nobody([*export, tmp_path / "bundle"], [*export, public / "bundle"], tmp_path)
    assert result.code == 1
    assert "cannot be written: Permission denied" in result.complaint
    assert [path.name for path in public.iterdir()] == ["source"]


def test_no_permission_to_read(public: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    whole, locked = public / "whole", public / "locked"
    for name in (MANIFEST, TARGET_DATA, TOKENIZER):
        shutil.copytree(tiny_bundle, whole, dirs_exist_ok=True)
        shutil.copytree(tiny_bundle, locked, dirs_exist_ok=True)
        (locked / name).chmod(0)
        result = as_nobody(["run", whole, "pump"], ["run", locked, "pump"], tmp_path)
        assert result.code == 1
        assert name in result.complaint and "ermission" in result.complaint
        shutil.rmtree(locked)


def test_a_cache_that_cannot_be_written(public: Path, tiny_bundle: Path) -> None:
    """What it holds can be used, and what it does not hold is an error."""
    shutil.copytree(tiny_bundle, public / "bundle")
    other = shutil.copytree(tiny_bundle, public / "other")
    manifest = Bundle.open(other).manifest
    with (other / TARGET_DATA).open("ab") as file:
        file.write(bytes(64))
    path = other / TARGET_DATA
    manifest.files[TARGET_DATA] = FileRecord(path.stat().st_size, sha256(path))
    (other / MANIFEST).write_text(json.dumps(manifest.to_json()))
    warm: list[str | Path] = ["run", public / "bundle", "pump"]
    assert as_nobody(warm, warm, public / "cache").code == 0
    result = as_nobody(warm, ["run", other, "pump"], public / "cache")
    assert result.code == 1
    assert "cache" in result.complaint and "ermission" in result.complaint
