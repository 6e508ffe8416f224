"""A minute of benchmarks/soak.py: memory stays where it is, and no block is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.models.plantlog import sample_log

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"

MAX_LEAK_MB = 1.0
"""Of 100,000 tokens, as the lower end of the slope's interval. On a busy machine the run is short, and
a few hundred KB of chance are a steep slope then; what is lost at every token still stands out."""


def test_a_stream_and_its_forks_take_no_more_memory_with_time(
    endless_bundle: Path, shared_cache: Path, tmp_path: Path
) -> None:
    """In a process of its own: what a thousand tests have left in this one's heap is no measure."""
    log = tmp_path / "log"
    log.write_text(sample_log())
    load = ["--seconds", "25", "--window", "256", "--warmup", "20000", "--trace-segments", "8"]
    done = subprocess.run(
        [sys.executable, SOAK, endless_bundle, "--text", log, "--threads", "1", "--json", *load],
        env={**os.environ, "HEADRACE_CACHE": str(shared_cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    slope, stats = report["rss"]["slope_mb_per_100k"], report["stats"]
    assert slope["low"] <= MAX_LEAK_MB, slope
    assert not [said for said in report["complaints"] if "tracemalloc" in said], report["trace"]
    assert stats["blocks"]["held"] == 0
    assert report["asked"] == 5 * (report["asked"] // 5) > 0
    # What this is to wear out was in use.
    assert stats["lane_switches"] > 0 and stats["prefix"]["evicted_blocks"] > 0
