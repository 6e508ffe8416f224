"""What a draft step writes and flushes for its keys and values on the NPU, scheme by scheme.

    python benchmarks/npu_bytes.py [--tails 32 64 128] [--layers 30] [--tokens 512] [--json]

Geometry of SmolLM2-135M with 512 slots of main inputs, head whole (49,152) or trimmed (16,384), one
row a pass. A flush takes whole buffers, so where a new row is put decides what a step costs:

a  ours: new rows go to a small tail, flushed each step; main is flushed when the tail moves there
b  each row goes into its place in main, and all of main is flushed each step
c  buffers that the CPU does not cache: nothing is flushed, but the CPU reads and writes them slowly
d  ours, but the runtime flushes all inputs and outputs of a run, as it does unless told otherwise
e  RKNNLite: every input is copied by rknn_inputs_set, results come back as float32

Scheme a is measured: RknnBackend on the double of librknnrt, a text token by token through a ring
that has wrapped, and its counters, beside the formula; the MLP is 64 wide there and weights are
random, since no byte that crosses depends on them. The others and all milliseconds are by formula:

- memcpy, and what the CPU writes: 8.6 to 10.1 GB/s, one A76 (whisper.cpp, issue 89).
- rknn_inputs_set: 83 MB/s (rknn_model_zoo, issue 167).
- A flush: not established. The range shown is 10 GB/s (no slower than memory) to 1 GB/s (64 ns a
  cache line).
- Memory that is not cached: not established. Assumed are 2 to 8 GB/s to write and 0.1 to 0.6 GB/s to
  read.

The NPU's own copies are not in it: it concatenates main and tail in every step, whatever the scheme.
The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from librknnrt import build as double_build  # a folder of the tests
from synthetic import GEOMETRIES

from headrace.export.npu_graph import build_npu
from headrace.export.npu_text import FP16_MASK
from headrace.models.config import ModelConfig
from headrace.models.families import config_from_hf, weights
from headrace.models.npu_io import NpuFiles, NpuGeometry, NpuIo, is_kv, kv_planes
from headrace.models.vocab_map import VocabMap
from headrace.npu.backend import RknnBackend
from headrace.npu.librknnrt import Library
from headrace.runtime.draft import DraftLane, DraftModel
from headrace.runtime.guess import Guesser
from headrace.runtime.request import SamplingParams
from headrace.runtime.ring import RingLayout
from headrace.runtime.sampling import Sampler

MAIN = 512
VOCABULARIES = (49_152, 16_384)

Span = tuple[float, float]
"""Best and worst."""

COPY: Span = (10.1e9, 8.6e9)
FLUSH: Span = (10e9, 1e9)
INPUTS_SET: Span = (83e6, 83e6)
UNCACHED_WRITE: Span = (8e9, 2e9)
UNCACHED_READ: Span = (0.6e9, 0.1e9)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a step's buffers, padding included."""

    main: int
    tail: int
    others: int
    """Embedding, mask, cosines and sines."""
    outputs: int
    row: int
    """Keys and values of a token, without padding."""
    results: int
    """Logits and new row, without padding."""


def config_of(num_layers: int, vocab_size: int) -> ModelConfig:
    hf = {**GEOMETRIES["135m"], "num_hidden_layers": num_layers, "intermediate_size": 64}
    return config_from_hf({**hf, "vocab_size": vocab_size})


def geometry_of(tail: int) -> NpuGeometry:
    """Half of the tail is the unit that is evicted at once, half is for drafted tokens."""
    unit = tail // 2
    sinks = max(32, unit)
    # Single rows are what is counted, wide ones fill the ring before.
    return NpuGeometry(sinks, MAIN - sinks, unit, tail - unit, (1, 32))


def io_of(config: ModelConfig, geometry: NpuGeometry) -> NpuIo:
    return NpuIo.expected(
        config, geometry, platform="rk3588", toolkit="2.5.0", quant="fp16", mask=FP16_MASK
    )


def sizes_of(config: ModelConfig, tail: int) -> Sizes:
    variant = io_of(config, geometry_of(tail)).variants[0]
    by_name = {t.name: t.size for t in variant.inputs}
    row = 2 * kv_planes(config) * config.head_dim
    return Sizes(
        main=sum(size for name, size in by_name.items() if name.startswith("main.")),
        tail=by_name["tail"],
        others=sum(size for name, size in by_name.items() if not is_kv(name)),
        outputs=sum(t.size for t in variant.outputs),
        row=row,
        results=2 * config.num_logits + row,
    )


# -- Schemes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Of one token, on average."""

    scheme: str
    tail: int
    """0 where there is none."""
    written: float
    flushed: float
    copied: float = 0.0
    """By rknn_inputs_set."""
    ms: Span = (0.0, 0.0)

    @property
    def total(self) -> float:
        return self.written + self.flushed + self.copied


def timed(step: Step, sizes: Sizes, *, is_cached: bool = True) -> Step:
    """With its milliseconds, the results' way back to the host included."""
    spans = []
    for best_or_worst in (0, 1):
        write = (COPY if is_cached else UNCACHED_WRITE)[best_or_worst]
        read = (COPY if is_cached else UNCACHED_READ)[best_or_worst]
        seconds = (
            step.written / write
            + sizes.results / read
            + step.flushed / FLUSH[best_or_worst]
            + step.copied / INPUTS_SET[best_or_worst]
        )
        spans.append(1e3 * seconds)
    return dataclasses.replace(step, ms=(spans[0], spans[1]))


def schemes(config: ModelConfig, tail: int) -> list[Step]:
    """Once a row is written to the tail, and once to main when it is moved there; so are the sinks,
    which are rotated at every eviction.
    """
    s, geometry = sizes_of(config, tail), geometry_of(tail)
    unit, every = geometry.unit, s.others + s.outputs
    sinks = geometry.sinks * s.row / unit
    ours = s.others + 2 * s.row + sinks
    return [
        timed(Step("a", tail, ours, every + s.tail + s.main / unit), s),
        timed(Step("b", 0, s.others + s.row + sinks, every + s.main), s),
        timed(Step("c", 0, s.others + s.row + sinks, 0), s, is_cached=False),
        timed(Step("d", tail, ours, every + s.tail + s.main), s),
        timed(Step("e", 0, s.others + s.row, 0, s.others + s.main + 2 * s.results), s),
    ]


# -- Measured -------------------------------------------------------------------------------------


def files_of(folder: Path, config: ModelConfig, geometry: NpuGeometry) -> NpuFiles:
    """A draft of random weights that the double can run."""
    rng, shapes = np.random.default_rng(0), weights(config)

    def weight(name: str) -> np.ndarray:
        if len(shapes[name]) == 1:
            return np.ones(shapes[name], np.float32)
        return rng.standard_normal(shapes[name], np.float32) * np.float32(0.02)

    build_npu(folder / "npu.onnx", config, geometry, weight)
    table = rng.standard_normal((config.vocab_size, config.hidden_size), np.float32)
    (folder / "npu.embeddings").write_bytes(table.astype(np.float16).tobytes())
    io = io_of(config, geometry)
    io.save(folder / "npu.io.json")
    (folder / "npu.rknn").write_bytes(b"the double reads only its name\n")
    return NpuFiles(folder / "npu.rknn", folder / "npu.embeddings", io, config)


def measured(config: ModelConfig, tail: int, num_tokens: int) -> Step:
    """A text token by token, after the ring has wrapped; whole evictions only."""
    geometry = geometry_of(tail)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, library = files_of(folder, config, geometry), double_build.build(folder)
        backend = RknnBackend(files, Library(str(library)), lanes=1, timeout_ms=60_000)
        try:
            return _followed(backend, config, geometry, num_tokens)
        finally:
            backend.close()


def _followed(
    backend: RknnBackend, config: ModelConfig, geometry: NpuGeometry, num_tokens: int
) -> Step:
    ids = np.arange(config.vocab_size, dtype=np.int32)
    layout = RingLayout(geometry.sinks, geometry.window, geometry.unit)
    model = DraftModel(backend, config, "f16", VocabMap(ids, ids), layout)
    lane = DraftLane(model, 0)
    lane.begin(Guesser(Sampler(SamplingParams(), [], config.vocab_size), "coupled", model.head))
    length = geometry.window
    text = [1] * (geometry.window + 1)
    lane.follow(text[:length], length)
    while lane.state.num_evictions < 2 or lane.state.num_slots != layout.tail_start:
        length += 1
        lane.follow(text, length)
    before = dataclasses.replace(backend.counters)
    num_tokens = -(-num_tokens // geometry.unit) * geometry.unit
    for _ in range(num_tokens):
        length += 1
        lane.follow(text, length)
    after = backend.counters
    assert after.runs - before.runs == num_tokens
    return Step(
        "a",
        geometry.tail,
        (after.bytes_written - before.bytes_written) / num_tokens,
        (after.bytes_flushed - before.bytes_flushed) / num_tokens,
    )


# -- Showing --------------------------------------------------------------------------------------

NAMES = {
    "a": "tail, main when it moves there",
    "b": "each row into main, all flushed",
    "c": "not cached",
    "d": "the runtime flushes all",
    "e": "RKNNLite copies all",
}


def line(step: Step, note: str = "") -> str:
    megabytes = [f"{x / 1e6:10.3f}" for x in (step.written, step.flushed, step.copied)]
    ms = f"{step.ms[0]:8.2f} -{step.ms[1]:8.2f}" if step.ms[1] else ""
    tail = str(step.tail) if step.tail else ""
    return f"{step.scheme}  {NAMES[step.scheme]:32}{tail:>5} {''.join(megabytes)}   {ms} {note}"


def show(lines: Iterable[str]) -> None:
    for text in lines:
        print(text.rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tails", type=int, nargs="*", default=[32, 64, 128], help="measured")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=128, help="measured for each size of tail")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    missing = double_build.missing()
    head = f"   {'':32} tail  MB written   flushed    copied   ms, best - worst case"
    result: dict[str, object] = {"main": MAIN, "layers": given.layers}
    for vocab_size in VOCABULARIES:
        config = config_of(given.layers, vocab_size)
        rows = schemes(config, 64)
        sweep = [schemes(config, tail)[0] for tail in (16, 32, 64, 128, 256)]
        show([f"\nhead of {vocab_size:,}, bytes a token\n", head, *map(line, rows), ""])
        show(line(step) for step in sweep)
        result[str(vocab_size)] = {
            "schemes": [dataclasses.asdict(s) for s in rows],
            "tails": [dataclasses.asdict(s) for s in sweep],
        }
    found = []
    for tail in given.tails if missing is None else ():
        config = config_of(given.layers, VOCABULARIES[0])
        step, formula = measured(config, tail, given.tokens), schemes(config, tail)[0]
        off = [step.written / formula.written - 1, step.flushed / formula.flushed - 1]
        print(f"{'' if found else chr(10)}measured on the double, head of {VOCABULARIES[0]:,}:")
        show([line(step, f"written {off[0]:+.1%}, flushed {off[1]:+.1%} of the formula")])
        found.append({**dataclasses.asdict(step), "off_written": off[0], "off_flushed": off[1]})
    result["measured"] = found
    if missing is not None:
        print(f"not measured: {missing}", file=sys.stderr)
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
