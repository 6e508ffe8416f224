"""`headrace run --trace`: a file that trace viewers read, with spans where something was done."""

from __future__ import annotations

import json
import re
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commandline import CommandLine, finish, started

from headrace import LLM, SamplingParams
from headrace.commands.figures import print_stats, run_measured
from headrace.runtime.trace import TRACKS, Trace

SHORT = ("x y x y x y x y", "--raw", "--max-tokens", "40", "--ignore-eos")


def spans_of(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Start and end in microseconds by track."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found: dict[str, list[tuple[float, float]]] = {track: [] for track in TRACKS}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 <= event["ts"]
            found[names[event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    return found


def require_apart(spans: list[tuple[float, float]]) -> None:
    for (_, end), (start, _) in pairwise(sorted(spans)):
        assert start >= end - 0.2, "two at once; times are rounded to 0.1 us"


def require_nested(spans: list[tuple[float, float]]) -> None:
    """Waiting for the draft is a part of proposing; a viewer wants it within, not across."""
    ends: list[float] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start + 0.2:
            ends.pop()
        assert not ends or end <= ends[-1] + 0.2, "one begins in another and ends after it"
        ends.append(end)


def test_spans_of_host_and_target(
    command: CommandLine, endless_bundle: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    result = command("run", endless_bundle, *SHORT, "--ctx", "256", "--trace", path, "--json")
    assert result.code == 0, result.err
    passes = json.loads(result.out)["speculation"]["passes"]
    spans = spans_of(path)
    assert len(spans["target"]) >= passes
    assert len(spans["host"]) >= 2 * passes
    assert spans["draft"] == []
    require_apart(spans["host"])
    require_apart(spans["target"])


def test_spans_of_the_draft(command: CommandLine, twin_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("what was there before")
    result = command(
        "run", twin_bundle, *SHORT, "--speculate", "4", "--sources", "draft", "--trace", path
    )
    assert result.code == 0, result.err
    spans = spans_of(path)
    assert spans["draft"] and spans["target"] and spans["host"]
    require_nested(spans["host"])
    require_apart(spans["draft"])


def test_it_is_saved_after_ctrl_c(
    endless_bundle: Path, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(shared_cache))
    path = tmp_path / "out.json"
    with started(
        "run", endless_bundle, "x y x y", "--raw", "--ignore-eos", "--max-tokens", "90000",
        "--ctx", "100000", "--lanes", "1", "--trace", path,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.read(1)
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        assert finish(child).code == 130
    spans = spans_of(path)
    assert spans["host"] and spans["target"]


@pytest.mark.parametrize("name", ["missing/out.json", "."])
def test_a_path_that_cannot_be_written_is_refused_first(
    command: CommandLine, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    result = command("run", tmp_path / "no bundle", "x", "--trace", path)
    assert result.code == 2
    assert re.match(f"--trace: {re.escape(str(path))} cannot be written", result.complaint)


def test_a_refusal_leaves_no_file(command: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert command("run", tmp_path / "no bundle", "x", "--trace", path).code == 1
    assert not path.exists() or json.loads(path.read_text())["traceEvents"]


def test_threads_share_a_trace() -> None:
    trace = Trace()
    trace.add("target", "late", 2.0, 3.0)
    trace.add("draft", "early", 1.0, 4.0)
    events = trace.to_json()["traceEvents"]
    assert isinstance(events, list)
    shown = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [("early", 0.0, 3e6), ("late", 1e6, 1e6)]


def test_stats_say_where_tokens_and_time_went(command: CommandLine, twin_bundle: Path) -> None:
    result = command(
        "run", twin_bundle, *SHORT, "--speculate", "4", "--sources", "draft", "--stats"
    )
    assert result.code == 0, result.err
    assert re.search(r"tokens per pass +\d+\.\d\d; \d+ of \d+ .* accepted, \d+ wasted", result.err)
    assert re.search(r"from draft +\d+ of \d+ accepted, first ones \d+%", result.err)
    assert re.search(r"target \d.* s, waiting for the draft \d.* s, host \d.* s", result.err)
    assert re.search(r"draft model +busy .*, idle .*rows became text", result.err)


def test_stats_say_why_the_draft_is_not_asked(
    capsys: pytest.CaptureFixture[str], twin_bundle: Path, shared_cache: Path
) -> None:
    with LLM(twin_bundle, cache=shared_cache) as llm:
        assert llm.engine.speculation is not None and llm.engine.speculation.drafter is not None
        llm.engine.speculation.drafter.broken = "a pass took longer than 5 s"
        answer = llm.generate("x y x y", SamplingParams(max_tokens=8), stream=True)
        measured = run_measured(answer, llm.backend, lambda text: None)
        print_stats(measured, llm.engine)
    assert "not asked any more: a pass took longer than 5 s" in capsys.readouterr().err
