"""Streams for tests: bundles to run them on, ways to feed them, and what they must compute."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from exported import backend
from hypothesis import strategies as st
from tiny_checkpoints import TINY, read_weights

from headrace.export.build import ExportOptions, export
from headrace.models.config import ModelConfig
from headrace.models.manifest import Bundle
from headrace.models.reference import forward
from headrace.runtime.batch import F32, I64
from headrace.runtime.blocks import blocks_for
from headrace.runtime.engine import Engine
from headrace.runtime.ort import OrtBackend
from headrace.runtime.prefix import Root
from headrace.runtime.ring import RingLayout
from headrace.runtime.sequence import Sequence

WRAPS = 5
LANE = 256

layouts = st.builds(
    lambda sinks, units, unit: RingLayout(16 * sinks, 16 * unit * units, 16 * unit),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 2),
)
"""Of at most `LANE` tokens; the windows hold every tiny model's local layers, 16 tokens or less."""

seeds = st.integers(0, 2**32 - 1)


def source(name: str, folder: Path, **changes: object) -> Path:
    """A copy of a tiny checkpoint, trained context `LANE`, with settings changed."""
    copy = shutil.copytree(TINY / name, folder / f"{name}-source")
    config = json.loads((copy / "config.json").read_text())
    changed = {**config, "max_position_embeddings": LANE, **changes}
    (copy / "config.json").write_text(json.dumps(changed))
    return copy


@dataclass(frozen=True, repr=False)
class Tiny:
    """A tiny checkpoint's graph, and what it was made from."""

    runner: OrtBackend
    other: OrtBackend
    """With a lane of its own, for `fresh`."""
    bundle: Bundle
    config: ModelConfig
    weights: Mapping[str, F32]

    def engine(self, num_streams: int = 4) -> Engine:
        """A new one, which knows nothing of what others computed but takes their lanes."""
        return engine_of(self.runner, self.bundle, num_streams * blocks_for(LANE))

    def ids(self, num_tokens: int, seed: int) -> list[int]:
        chance = np.random.default_rng(seed)
        return [int(i) for i in chance.integers(0, self.config.vocab_size, num_tokens)]


def tiny(name: str, quant: str, kv: str, folder: Path, lanes: int = 1) -> Tiny:
    made_from = source(name, folder)
    # --force: random weights quantise badly, which is another matter
    export(str(made_from), folder / "bundle", ExportOptions(quant=quant, kv=kv, force=True))
    bundle = Bundle.open(folder / "bundle")
    config, weights = read_weights(made_from)
    runner, other = (backend(bundle, lanes=n, capacity=LANE) for n in (lanes, 1))
    return Tiny(runner, other, bundle, config, weights)


def engine_of(runner: OrtBackend, bundle: Bundle, num_blocks: int) -> Engine:
    manifest = bundle.manifest
    root = Root(manifest.kv, "exact", bundle.target_identity())
    return Engine(runner, manifest.config, manifest.kv, num_blocks, root)


def long_enough(layout: RingLayout) -> int:
    """Tokens after which the whole ring has been overwritten `WRAPS` times, and a few more."""
    return layout.capacity + WRAPS * layout.window + 5


def assert_wrapped(stream: Sequence) -> None:
    assert stream.layout is not None
    assert stream.state.sink_shift >= WRAPS * stream.layout.window


@dataclass(frozen=True)
class Step:
    """One pass: so many tokens of the stream, and after them proposals that are rejected."""

    num_tokens: int
    rejected: tuple[int, ...] = ()


Plan = Callable[[], Step]


def chunks(size: int) -> Plan:
    return lambda: Step(size)


def random_chunks(seed: int, widest: int = 32) -> Plan:
    chance = random.Random(seed)
    return lambda: Step(chance.choice([1, 2, chance.randint(1, widest)]))


def with_proposals(seed: int, widest: int = 16) -> Plan:
    """Passes of 1 or more rows, of which any number is rejected; now and then all of them."""
    chance = random.Random(seed)

    def step() -> Step:
        wrong = tuple(chance.randrange(200) for _ in range(chance.randint(0, widest)))
        return Step(chance.randint(0 if wrong else 1, widest), wrong)

    return step


def drive(engine: Engine, stream: Sequence, ids: list[int], plan: Plan, *, leave: int = 0) -> F32:
    """Feeds `ids` to a stream by a plan, and computes what is pending but for `leave` tokens.

    Returns the logits [T, V] after each of them.
    """
    stream.append(ids)
    rows = [np.empty((0, engine.facts.vocab_size), np.float32)]
    while len(stream.pending) > leave:
        step = plan()
        num_tokens = min(step.num_tokens, len(stream.pending) - leave)
        rows.append(one_pass(engine, stream, Step(num_tokens, step.rejected)))
    return np.concatenate(rows)


def one_pass(engine: Engine, stream: Sequence, step: Step) -> F32:
    with engine.turn(stream) as lane:
        room = min(stream.state.room, engine.facts.max_wanted)
        ids = stream.pending[: min(room, step.num_tokens)]
        rows = [*ids, *step.rejected][:room]
        wanted = tuple(range(len(ids)))
        # They hold until the turn ends.
        logits = engine.passes.run(stream.lane_rows(lane, rows, wanted)).copy()
        stream.commit(lane, ids)
    return logits


def crowd_out(engine: Engine, stream: Sequence) -> None:
    """Makes others take all lanes, so that `stream` is parked."""
    others = [engine.sequence() for _ in range(engine.facts.lanes)]
    for other in others:
        with engine.request(other, 0), engine.turn(other):
            pass
    assert stream.lane is None, "parked"
    for other in others:
        engine.close_sequence(other)


def fresh(model: Tiny, layout: RingLayout, ids: list[int], plan: Plan | None = None) -> F32:
    """Logits [T, V] of a stream that nothing else was ever computed beside."""
    engine = engine_of(model.other, model.bundle, layout.num_blocks)
    return drive(engine, engine.stream(layout), ids, plan or chunks(32))


def recomputed(model: Tiny, layout: RingLayout, ids: list[int]) -> F32:
    """Logits [T, V] of a stream's tokens by one plain pass, without a cache.

    A token of epoch g, that is after g evictions, sees the sinks as they then are, the tokens that
    are not evicted, and itself. RoPE is relative: sinks moved g * E positions on, which see each
    other alone, are what they were. So each epoch has its own copies of the sinks in the pass.
    """
    sinks, unit = layout.sinks, layout.unit
    index = np.arange(len(ids))
    epoch = np.maximum(0, index - sinks - layout.window) // unit
    num_epochs = int(epoch.max()) + 1
    copies = np.arange(1, num_epochs).repeat(sinks)
    token = np.concatenate([index, np.tile(index[:sinks], num_epochs - 1)])
    epoch = np.concatenate([epoch, copies])
    is_sink = token < sinks
    positions = token + np.where(is_sink, epoch * unit, 0)
    visible = visibility(token, epoch, is_sink, sinks + epoch * unit)
    inputs = np.array(ids)[token]
    whole = forward(model.config, model.weights, inputs, positions=positions, visible=visible)
    return whole[: len(ids)]


def visibility(
    token: I64, epoch: I64, is_sink: npt.NDArray[np.bool_], oldest: I64
) -> npt.NDArray[np.bool_]:
    """[T, T], row i may look at column j. `oldest` is the first token that row i's epoch kept."""
    not_later = token[None, :] <= token[:, None]
    own_sinks = is_sink[None, :] & (epoch[None, :] == epoch[:, None])
    recent = ~is_sink[None, :] & (token[None, :] >= oldest[:, None])
    return np.asarray(not_later & (own_sinks | recent))
