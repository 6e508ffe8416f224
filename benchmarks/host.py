"""Host time of a speculated step: proposing, sampling, accepting, committing, and text.

    python benchmarks/host.py BUNDLE [--proposed 7] [--passes 400] [--json]

The whole path of a request over the bundle's geometry and tokenizer, with a target that takes no
time: a backend that answers with stored logits, in which a text of period 64 goes on for ever. So
all that is proposed is accepted, and every row is sampled. Milliseconds a pass, and bytes that the
process holds more of after 1,000 passes (tracemalloc). The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace import SamplingParams
from headrace.models.config import ModelConfig
from headrace.models.manifest import Bundle
from headrace.runtime.answer import Answer
from headrace.runtime.arena import Arena, ArenaShape
from headrace.runtime.backend import BackendFacts
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.engine import Engine
from headrace.runtime.load import load_tokenizer
from headrace.runtime.pace import Pace, PassCosts
from headrace.runtime.prefix import Root
from headrace.runtime.prior import SharedIndex
from headrace.runtime.speculate import Speculation
from headrace.runtime.tokenizer import Tokenizer

PERIOD = 64
CAPACITY = 8192
STYLES = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "everything": {
        "temperature": 0.8,
        "top_k": 200,
        "top_p": 0.95,
        "min_p": 0.01,
        "repeat_penalty": 1.02,
        "logprobs": 3,
        "seed": 1,
    },
}


class Recorded:
    """A backend that knows what comes next and takes no time for it."""

    def __init__(self, config: ModelConfig, kv: str) -> None:
        self.arena = Arena(ArenaShape(config, kv, 1, CAPACITY))
        self.seconds_in_passes = self.cpu_s = 0.0
        size = config.num_logits
        chance = np.random.default_rng(0)
        self._base = chance.normal(0, 2.5, (8, size)).astype(np.float32)
        self._logits = np.zeros((32, size), np.float32)
        self.facts = BackendFacts(config.vocab_size, size, 1, CAPACITY, 256, 32, 2, 1)
        self.cycle = chance.permutation(np.arange(1000, 1000 + PERIOD))
        self._next = {
            int(t): int(n) for t, n in zip(self.cycle, np.roll(self.cycle, -1), strict=True)
        }

    def forward(self, rows: Sequence[LaneRows]) -> F32:
        start, cpu_start = time.perf_counter(), time.thread_time()
        made = 0
        for lane in rows:
            for row in lane.wanted:
                token = int(lane.token_ids[row])
                self._logits[made] = self._base[token % len(self._base)]
                self._logits[made, self._next[token]] += 22
                made += 1
        self.seconds_in_passes += time.perf_counter() - start
        self.cpu_s += time.thread_time() - cpu_start
        return self._logits[:made]

    def close(self) -> None:
        self.arena.close()


def engine_of(backend: Recorded, bundle: Bundle, tokenizer: Tokenizer, proposed: int) -> Engine:
    manifest = bundle.manifest
    pace = Pace(PassCosts({1: 0.015, 17: 0.05}))
    return Engine(
        backend,
        manifest.config,
        manifest.kv,
        CAPACITY // 16,
        Root(manifest.kv, "exact", "recorded"),
        speculation=Speculation(pace, proposed, tokenizer.ends_segment, SharedIndex()),
    )


def answered(
    engine: Engine, tokenizer: Tokenizer, cycle: list[int], params: SamplingParams
) -> Answer:
    sequence = engine.sequence()
    sequence.append(cycle * 8)
    return Answer(engine, tokenizer, sequence, params)


def figures(
    backend: Recorded, engine: Engine, tokenizer: Tokenizer, style: str, passes: int
) -> dict[str, float]:
    """Milliseconds of host time a pass: the median, the ninth decile, and the median of what the
    thread was given of a processor (on a busy machine the less noisy one).
    """
    params = SamplingParams(max_tokens=7000, ignore_eos=True, **STYLES[style])  # type: ignore[arg-type]
    answer = answered(engine, tokenizer, backend.cycle.tolist(), params)
    taken: list[float] = []
    cpu: list[float] = []
    for _ in range(20):  # bindings and tables warm up
        next(answer)
    for _ in range(passes):
        before, cpu_before = backend.seconds_in_passes, backend.cpu_s
        start, cpu_start = time.perf_counter(), time.thread_time()
        next(answer)
        taken.append(time.perf_counter() - start - (backend.seconds_in_passes - before))
        cpu.append(time.thread_time() - cpu_start - (backend.cpu_s - cpu_before))
    counts = answer.completion.speculation
    assert counts is not None
    rows = 1 + counts.proposed / counts.passes
    answer.close()
    return {
        "ms": 1000 * float(np.median(taken)),
        "ms_p90": 1000 * float(np.quantile(taken, 0.9)),
        "cpu_ms": 1000 * float(np.median(cpu)),
        "rows": rows,
        "accepted_per_pass": counts.accepted / counts.passes,
    }


def growth(backend: Recorded, engine: Engine, tokenizer: Tokenizer) -> float:
    """Bytes a pass, from the 200th to the 800th."""
    params = SamplingParams(max_tokens=7000, ignore_eos=True)
    answer = answered(engine, tokenizer, backend.cycle.tolist(), params)
    tracemalloc.start()
    held = []
    for i in range(800):
        next(answer)
        if i in (199, 799):
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    answer.close()
    return (held[1] - held[0]) / 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--proposed", type=int, default=7)
    parser.add_argument("--passes", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    tokenizer = load_tokenizer(bundle)
    backend = Recorded(bundle.manifest.config, bundle.manifest.kv)
    engine = engine_of(backend, bundle, tokenizer, options.proposed)
    found = {s: figures(backend, engine, tokenizer, s, options.passes) for s in STYLES}
    for style, line in found.items():
        print(style.ljust(12), "  ".join(f"{k} {v:.2f}" for k, v in line.items()))
    bytes_a_pass = growth(backend, engine, tokenizer)
    print(f"growth {bytes_a_pass:.0f} bytes a pass")
    if options.json:
        print(json.dumps({"styles": found, "growth_bytes_per_pass": bytes_a_pass}))


if __name__ == "__main__":
    main()
