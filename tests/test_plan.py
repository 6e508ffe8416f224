"""Laws of the bill of memory, and a process that is measured against its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import CommandLine
from exported import smollm2
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import TINY

from headrace import LLM
from headrace.errors import MemoryLimitError, UsageError
from headrace.export.checkpoint import open_checkpoint
from headrace.models.manifest import NPU, NPU_EMBEDDINGS, NPU_IO, Bundle
from headrace.models.npu_io import NpuIo
from headrace.paths import cache_dir
from headrace.runtime import memory
from headrace.runtime.arena import ArenaShape
from headrace.runtime.bill import Bill, Facts, Limit, bill, limit_here, require_fit, require_memory
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.kv import PoolShape
from headrace.runtime.load import prepare_target
from headrace.runtime.overhead import Overhead, estimate
from headrace.runtime.plan import Wish, largest_window, plan, suffices
from headrace.sizes import GIB, MIB, exact_size, parse_size, show_size

MODEL = dataclasses.replace(open_checkpoint(str(TINY / "llama")).config, max_position=8192)
COST = Overhead(30 * MIB, 12 * MIB, 7 * MIB, 100.5, 200 * MIB, 30 * MIB)

configs = st.builds(
    RuntimeConfig,
    ctx=st.integers(16, MODEL.max_position),
    lanes=st.integers(1, 64),
    pool=st.none() | st.integers(16, 1 << 20),
)


def facts(kv: str = "f16", **changes: Any) -> Facts:
    return Facts(dataclasses.replace(MODEL, **changes), kv, 1 * MIB, COST)


def of(config: RuntimeConfig, limit: int = GIB, kv: str = "f16") -> Bill:
    return bill(facts(kv), config, Limit(limit, True, "--ram"))


@given(configs, st.sampled_from(["f16", "f32", "int8"]))
def test_the_total_is_the_sum_of_its_lines(config: RuntimeConfig, kv: str) -> None:
    found = of(config, kv=kv)
    assert found.total == sum(line.num_bytes for line in found.lines)
    assert found.file_pages + found.anonymous == found.total
    assert found.remaining == GIB - found.total
    assert all(line.num_bytes >= 0 for line in found.lines)
    capacity, num_blocks = config.capacity(MODEL), config.pool_blocks(MODEL)
    assert found.of("arena") == ArenaShape(MODEL, kv, config.lanes, capacity).num_bytes
    assert found.of("pool") == PoolShape(MODEL, kv, num_blocks).num_bytes


@given(configs, configs)
def test_more_of_anything_never_costs_less(a: RuntimeConfig, b: RuntimeConfig) -> None:
    less, more = (
        dataclasses.replace(
            a,
            ctx=pick(a.ctx or 16, b.ctx or 16),
            lanes=pick(a.lanes, b.lanes),
            pool=pick(a.pool or 16, b.pool or 16),
        )
        for pick in (min, max)
    )
    assert of(less).total <= of(more).total


@given(
    st.integers(256 * MIB, 2 * GIB),
    st.none() | st.integers(16, 8192),
    st.integers(1, 8),
    st.none() | st.integers(16, 40_000),
    st.none() | st.integers(1, 12),
)
def test_the_largest_window_fits_and_the_next_does_not(
    ram: int, ctx: int | None, lanes: int, pool: int | None, sessions: int | None
) -> None:
    config = RuntimeConfig(ctx=ctx, lanes=lanes, pool=pool)
    known = facts(num_layers=24, layer_types=(), num_kv_heads=5)
    limit, wish = Limit(ram, True, "--ram"), Wish(sessions=sessions)
    largest = largest_window(known, config, wish, limit)
    if largest is not None:
        found = plan(known, config, dataclasses.replace(wish, window=largest), limit)
        assert found.bill.fits
        assert found.num_sessions >= (sessions or lanes)
        assert found.largest_window == largest
    following = (largest or 0) + wish.unit
    ring = wish.ring(following)
    assert ring.capacity > (ctx or MODEL.max_position) or not suffices(
        known, config, dataclasses.replace(wish, window=following), limit
    )


@given(st.integers(1, 40), st.booleans(), st.integers(1, 16))
def test_the_proposed_pool_holds_the_sessions(num: int, is_stream: bool, lanes: int) -> None:
    wish = Wish(sessions=num, window=1024 if is_stream else None)
    found = plan(facts(), RuntimeConfig(lanes=lanes), wish, Limit(GIB, True, "--ram"))
    assert found.num_sessions == num
    assert found.session_blocks == (1152 if is_stream else 4096) // 16
    more = plan(
        facts(), RuntimeConfig(lanes=lanes), Wish(num + 1, wish.window), Limit(GIB, True, "--ram")
    )
    assert more.bill.total > found.bill.total


@given(st.integers(241 * MIB, 400 * MIB), st.integers(1, 16))
def test_every_remedy_is_one(ram: int, lanes: int) -> None:
    """And one step more of the same flag would not be."""
    limit = Limit(ram, True, "--ram")
    known = facts(num_layers=24, layer_types=(), num_kv_heads=5)
    found = plan(known, RuntimeConfig(lanes=lanes), Wish(), limit)
    assert bool(found.shortfall) == (not found.bill.fits)
    for remedy in found.remedies:
        flag, value = remedy.removeprefix("--").split()
        step = {"lanes": 1, "ctx": 64, "pool": 16}[flag]
        given: dict[str, Any] = {"lanes": lanes}
        changed = [RuntimeConfig(**{**given, flag: int(value) + more}) for more in (0, step)]
        assert [bill(known, config, limit).fits for config in changed] == [True, False], remedy


def test_local_layers_need_masks_and_a_window_above_theirs() -> None:
    kinds = ("sliding",) * MODEL.num_layers
    local = facts(layer_types=kinds, sliding_window=1000)
    limit = Limit(GIB, True, "--ram")
    assert bill(local, RuntimeConfig(), limit).of("masks") == 256 * 4100 * 4
    assert largest_window(local, RuntimeConfig(ctx=1024), Wish(), limit) is None
    with pytest.raises(UsageError, match="at least 1024"):
        plan(local, RuntimeConfig(), Wish(window=512), limit)


def test_file_pages_count_against_ram_alone() -> None:
    here = limit_here(facts(), RuntimeConfig(reserve=MIB))
    found = bill(facts(), RuntimeConfig(), here)
    assert found.needed == found.anonymous < found.total
    assert abs(here.num_bytes - memory.available()) < 512 * MIB
    assert "reserve of 1.0 MiB" in here.words
    locked = bill(facts(), RuntimeConfig(mlock=True), here)
    assert locked.needed == locked.total
    fixed = limit_here(facts(), RuntimeConfig(ram="1GiB", reserve="24MiB"))  # type: ignore[arg-type]
    assert (fixed.num_bytes, fixed.counts_files) == (1000 * MIB, True)


def test_a_refusal_has_the_figures() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        require_fit(of(RuntimeConfig(lanes=1), 100 * MIB))
    line = str(caught.value)
    assert caught.value.exit_code == 1
    for words in ("needs 2", "--ram is 100.0 MiB", "short", "--ctx", "--lanes", "--pool"):
        assert words in line, line


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("1.8GiB", 1932735283),
        ("512 mib", 512 << 20),
        ("4GB", 4 * 10**9),
        ("0.5kB", 500),
        ("1048576", 1 << 20),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(exact_size(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "4 parsecs", "1e9", "4GiBs", "nan", "9999TiB"]
)
def test_no_sizes(text: str, command: CommandLine, tiny_bundle: Path) -> None:
    with pytest.raises(UsageError):
        parse_size(text)
    with pytest.raises(UsageError, match="reserve: got"):
        RuntimeConfig(reserve=text)  # type: ignore[arg-type]
    result = command("plan", tiny_bundle, f"--ram={text}")
    assert result.code == 2
    assert result.complaint.startswith("ram: got")


def test_shown_sizes() -> None:
    assert [show_size(n) for n in (7, 1536, 5 << 30)] == ["7 B", "1.5 KiB", "5.0 GiB"]


def test_plan_of_a_bundle(command: CommandLine, tiny_bundle: Path) -> None:
    assert command("prepare", tiny_bundle).code == 0
    result = command("plan", tiny_bundle, "--ram", "4GiB", "--reserve", "1.8GiB", "--json")
    assert (result.code, result.err) == (0, "")
    value = json.loads(result.out)
    assert value["fits"] and value["measured"]
    assert value["total"] == sum(line["num_bytes"] for line in value["lines"])
    assert value["remaining"] == parse_size("4GiB") - parse_size("1.8GiB") - value["total"]
    assert value["num_sessions"] == 4 < value["max_sessions"]
    table = command("plan", tiny_bundle, "--ram", "4GiB")
    for words in ("pool", "arena", "file pages", "remaining", "headrace run", "--ram 4GiB"):
        assert words in table.out, words


def test_a_draft_on_the_npu_of_another_machine(command: CommandLine, npu_bundle: Path) -> None:
    """It is counted beside the CPU's, which stands in for it."""
    bundle = Bundle.open(npu_bundle)
    io = NpuIo.load(bundle.file(NPU_IO))
    names = {}
    for device in ("cpu", "npu"):
        done = command("plan", npu_bundle, "--lanes", "2", "--draft-device", device, "--json")
        assert done.code == 0
        value = json.loads(done.out)
        assert value["run"].endswith(f"--lanes 2 --draft-device {device}")
        names[device] = {line["name"]: line["num_bytes"] for line in value["lines"]}
    assert names["npu"].items() - names["cpu"].items() == {
        ("NPU embeddings", bundle.manifest.files[NPU_EMBEDDINGS].size),
        ("NPU weights", bundle.manifest.files[NPU].size),
        ("NPU keys, values", 2 * io.lane_bytes),
    }


def test_plan_that_does_not_fit(command: CommandLine, tiny_bundle: Path) -> None:
    assert command("prepare", tiny_bundle).code == 0
    result = command("plan", tiny_bundle, "--ram", "10MiB", "--json")
    assert result.code == 1
    value = json.loads(result.out)
    assert not value["fits"]
    assert value["shortfall"] == value["needed"] - 10 * MIB > 0
    assert "short" in result.complaint
    few = command("plan", tiny_bundle, "--pool", "256", "--sessions", "3")
    assert few.code == 1
    assert "2 of 3 sessions" in few.complaint and "--pool 384" in few.complaint


def test_plan_without_preparing_estimates(
    command: CommandLine, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    result = command("plan", tiny_bundle, "--json")
    assert (result.code, result.err) == (0, "")
    assert "headrace prepare" in command("plan", tiny_bundle).err
    bases = {line["name"]: line["basis"] for line in json.loads(result.out)["lines"]}
    assert bases["ONNX Runtime"] == "estimated" and bases["pool"] == "exact"
    assert not list(tmp_path.iterdir())


def test_windows_that_contradict(command: CommandLine, tiny_bundle: Path) -> None:
    for flags, words in (
        (("--window", "100"), "multiple of 16"),
        (("--window", "1024"), "trained context"),
        (("--window", "16", "--ctx", "64", "--sinks", "16"), "multiple of the eviction unit"),
        (("--sessions", "0"), "sessions: got 0"),
    ):
        result = command("plan", tiny_bundle, *flags)
        assert result.code == 2
        assert words in result.complaint


LOAD = """
import json, sys
from pathlib import Path
import numpy as np
from headrace.runtime import llm, memory
from headrace.runtime.batch import chain
model = llm.LLM(Path(sys.argv[1]), lanes=4, ctx=1024, target_threads=2)
figures = [memory.usage().rss_anon]
backend, ids = model.backend, np.arange(1024) % 97 + 300
for lane in range(4):
    for past in (0, 768):
        backend.forward([chain(lane, ids[past : past + 256], past, (255,))])
    figures.append(memory.usage().rss_anon)
for first in range(4):
    for lanes in range(1, 5 - first):
        for rows in (1, 2, 5, 16):
            together = [chain(first + i, ids[:rows], 16 * rows, (0,)) for i in range(lanes)]
            backend.forward(together)
backend.forward([chain(0, ids[:32], 992, tuple(range(32)))]).copy()
figures.append(memory.usage().rss_anon)
print(json.dumps(figures))
"""


def test_a_process_under_full_load_is_what_its_bill_says() -> None:
    bundle = smollm2("int8", "f16")
    config = RuntimeConfig(lanes=4, ctx=1024, target_threads=2)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(bundle.path)],
        env={**os.environ, "HEADRACE_CACHE": str(cache_dir())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout)
    found = require_memory(bundle, config, cache_dir())
    assert all(line.basis != "estimated" or line.num_bytes < 20 * MIB for line in found.lines)
    for rss_anon in figures:
        assert abs(found.anonymous / rss_anon - 1) < 0.1, (found.anonymous, figures)


def test_the_estimate_is_near_what_is_measured() -> None:
    bundle = smollm2("int8", "f16")
    prepare_target(bundle, cache_dir(), None, lambda message: None)
    measured = Facts.of(Bundle.open(bundle.path), cache_dir()).overhead
    guessed = estimate(bundle.manifest.config, bundle.manifest.files["target/model.data"].size)
    assert measured.is_measured and not guessed.is_measured
    for name in ("python", "session", "passes", "weights", "libraries"):
        ratio = getattr(guessed, name) / getattr(measured, name)
        assert 0.6 < ratio < 1.7, (name, ratio)


def test_a_model_beyond_its_memory_is_refused_before_it_is_loaded(
    command: CommandLine, tiny_bundle: Path
) -> None:
    done = command("run", tiny_bundle, "a", "--ram", "10MiB")
    assert done.code == 1
    assert not done.out
    assert "10.0 MiB" in done.err and "short" in done.err, done.err
    with pytest.raises(MemoryLimitError, match="short"):
        LLM(tiny_bundle, ram="10MiB")
