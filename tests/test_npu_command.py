"""The command `headrace run` with the draft on the NPU, as a process of its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from commandline import CommandLine, Result, finish, started

from headrace import LLM, SamplingParams
from headrace.models.manifest import PC_ONLY

PROMPT = "the pump is at 4.2 bar and the valve "


def run_command(
    bundle: Path, folder: Path, cache: Path, script: str, *flags: str | Path
) -> tuple[Result, dict[str, Any]]:
    """How it ended, and the double's own report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    env = {
        **os.environ,
        "HEADRACE_CACHE": str(cache),
        "HEADRACE_DOUBLE_SCRIPT": script,
        "HEADRACE_DOUBLE_REPORT": str(report),
    }
    common = ("--raw", "--max-tokens", "200", "--ignore-eos", "--seed", "4", "--speculate", "4")
    with started("run", bundle, PROMPT, *common, *flags, env=env) as child:
        result = finish(child)
    return result, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize(
    ("temperature", "script"), [("0", "run:+120:-1:2"), ("0.8", "")], ids=["outage", "well"]
)
def test_the_command(
    npu_bundle: Path,
    npu_library: Path,
    shared_cache: Path,
    tmp_path: Path,
    temperature: str,
    script: str,
) -> None:
    flags = ("--temperature", temperature, "--draft-device", "npu", "--npu-library", npu_library)
    result, report = run_command(npu_bundle, tmp_path, shared_cache, script, *flags)
    assert result.code == 0, result.err
    params = SamplingParams(
        max_tokens=200, ignore_eos=True, seed=4, temperature=float(temperature), speculate="off"
    )
    with LLM(npu_bundle, cache=shared_cache, draft_device="none") as alone:
        text = alone.generate(PROMPT, params).text
    assert result.out.rstrip("\n") == text.rstrip("\n")
    assert report["num_violations"] == 0, report["violations"]
    assert [report[name] for name in ("contexts", "mems", "bytes", "fds")] == [0, 0, 0, 0]
    assert report["trace"]["calls"]["rknn_run"] > 20
    assert result.err.count("the draft on the NPU failed") == bool(script), result.err


def test_the_command_refuses_in_one_line(
    npu_bundle: Path, npu_library: Path, shared_cache: Path, tmp_path: Path
) -> None:
    flags = ("--npu-library", npu_library, "--draft-device")
    result, report = run_command(npu_bundle, tmp_path, shared_cache, "init:-1", *flags, "npu")
    assert result.code == 1 and result.out == ""
    assert "rknn_init" in result.complaint
    assert report["contexts"] == report["mems"] == 0
    result, _ = run_command(npu_bundle, tmp_path, shared_cache, "init:-6", *flags, "auto")
    assert result.code == 0
    told = [line for line in result.err.splitlines() if "NPU" in line]
    assert len(told) == 1 and "the draft runs on the CPU" in told[0]


def test_a_copy_for_a_board_does_without_what_a_pc_compiles_from(
    npu_bundle: Path, tmp_path: Path, command: CommandLine
) -> None:
    copy = shutil.copytree(npu_bundle, tmp_path / "copy")
    for name in PC_ONLY:
        (copy / name).unlink()
    done = command("inspect", copy, "--json")
    assert done.code == 0, done.err
    states = {file["name"]: file["state"] for file in json.loads(done.out)["files"]}
    assert {name for name, state in states.items() if state == "left out"} == PC_ONLY
    (copy / "draft/npu.onnx").touch()  # there, but not what it was
    assert "draft/npu.onnx not as exported" in command("inspect", copy).complaint
    (copy / "draft/npu.onnx").unlink()
    (copy / "draft/npu.rknn").unlink()
    assert "draft/npu.rknn not as exported" in command("inspect", copy).complaint
