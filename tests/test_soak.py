"""A minute of benchmarks/soak.py: memory stays where it is, and no block is lost."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace import LLM
from headrace.models.plantlog import sample_log

MAX_LEAK_MB = 1.0
"""Of 100,000 tokens, as the lower end of the slope's interval. On a busy machine the run is short, and
a few hundred KB of chance are a steep slope then; what is lost at every token still stands out."""


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("soak")
    sys.path.remove(folder)


def test_a_stream_and_its_forks_take_no_more_memory_with_time(
    soak: ModuleType, endless_bundle: Path, shared_cache: Path
) -> None:
    load = soak.Load(
        tokens=200_000,
        seconds=25,
        window=256,
        warmup=20_000,
        trace_segments=8,
    )

    def open_llm() -> LLM:
        return LLM(
            endless_bundle,
            cache=shared_cache,
            lanes=2,
            ctx=load.window + 2 * 64,
            pool=soak.pool_tokens(load),
            threads=1,
        )

    def is_quiet(report: Any) -> bool:
        found = report.rss.slope().low <= MAX_LEAK_MB and report.trace.is_flat
        return bool(found and report.stats.lane_switches)

    report = soak.run(open_llm, sample_log(), load)
    if not is_quiet(report):  # chance, or a leak: that would be there again
        report = soak.run(open_llm, sample_log(), load)
    slope, stats = report.rss.slope(), report.stats
    assert slope.low <= MAX_LEAK_MB, slope
    assert report.trace.is_flat, report.trace
    assert stats.blocks.held == 0
    assert report.asked == 5 * (report.asked // 5) > 0
    # What this is to wear out was in use.
    assert stats.lane_switches > 0 and stats.prefix.evicted_blocks > 0
