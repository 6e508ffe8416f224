"""Streams among others: what the prefix cache may know of them, what is refused, and a real model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import backend, smollm2
from hypothesis import given, settings
from streaming import (
    LANE,
    Plan,
    Tiny,
    assert_wrapped,
    chunks,
    drive,
    engine_of,
    fresh,
    layouts,
    long_enough,
    one_pass,
    seeds,
    source,
    tiny,
    with_proposals,
)

from headrace import LLM
from headrace.errors import UsageError
from headrace.export.build import ExportOptions, export
from headrace.models.plantlog import sample_log
from headrace.runtime.batch import F32
from headrace.runtime.blocks import BLOCK_TOKENS
from headrace.runtime.engine import Engine
from headrace.runtime.load import load_tokenizer
from headrace.runtime.ring import RingLayout
from headrace.runtime.sampling import log_normalizer
from headrace.runtime.sequence import Sequence


@pytest.fixture(scope="module", params=[("llama", "f32", "f16"), ("gemma3", "int4", "int8")])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    name, quant, kv = request.param
    return tiny(name, quant, kv, tmp_path_factory.mktemp(name), lanes=2)


@settings(max_examples=4, deadline=None)
@given(layout=layouts, seed=seeds)
def test_only_blocks_before_the_first_eviction_are_found(
    model: Tiny, layout: RingLayout, seed: int
) -> None:
    """And what is found holds what a context without evictions computes."""
    engine, ids = model.engine(), model.ids(long_enough(layout), seed)
    stream, most = engine.stream(layout), layout.capacity // BLOCK_TOKENS
    plan = with_proposals(seed)
    for start in range(0, len(ids), 16):
        drive(engine, stream, ids[start : start + 16], plan)
        known = min(stream.state.num_tokens // BLOCK_TOKENS, most)
        assert engine.cache.num_known(engine.root("exact"), ids) == engine.cache.num_blocks == known
    engine.close_sequence(stream)
    assert engine.check().cached == most
    plain = engine_of(model.other, model.bundle, LANE // BLOCK_TOKENS)
    context = plain.sequence()
    with plain.request(context, 0):
        context.append(ids[: layout.capacity])
        context.compute()
    found = engine.cache.match(engine.root("exact"), ids)
    assert len(found) == most
    for ours, theirs in zip(found, context.table.block_ids, strict=True):
        assert (engine.arrays.blocks[ours] == plain.arrays.blocks[theirs]).all()


@settings(max_examples=4, deadline=None)
@given(first=layouts, second=layouts, seed=seeds)
def test_a_common_beginning_is_shared_and_changes_no_bit(
    model: Tiny, first: RingLayout, second: RingLayout, seed: int
) -> None:
    """The sinks of both are the same blocks, rotated by each stream for itself."""
    engine, common = model.engine(), min(first.capacity, second.capacity) - 7
    texts = [model.ids(long_enough(layout), seed) for layout in (first, second)]
    texts[1][common:] = model.ids(len(texts[1]) - common, seed + 1)
    streams = [engine.stream(layout) for layout in (first, second)]
    for stream, ids in zip(streams, texts, strict=True):
        stream.append(ids[:common])
        stream.compute(leave=1)
    num_shared = (common - 1) // BLOCK_TOKENS
    assert streams[1].num_computed == common - 1 - num_shared * BLOCK_TOKENS
    tables = [stream.table.block_ids for stream in streams]
    assert tables[0][:num_shared] == tables[1][:num_shared]
    logits: list[list[F32]] = [[], []]
    for part in range(4):  # in turns, so that one moves on while the other still has the blocks
        for stream, ids, rows in zip(streams, texts, logits, strict=True):
            cuts = np.linspace(common, len(ids), 5).astype(int)
            rows.append(drive(engine, stream, ids[cuts[part] : cuts[part + 1]], chunks(11)))
    for layout, ids, rows in zip((first, second), texts, logits, strict=True):
        expected = fresh(model, layout, ids)[common - 1 :]
        assert (np.concatenate(rows) == expected).all()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[LLM]:
    """Trained for 256 tokens, with local layers that see 40, and lanes of 192."""
    folder = tmp_path_factory.mktemp("refusals")
    export(str(source("mistral", folder, sliding_window=40)), folder / "b", ExportOptions("f32"))
    with LLM(folder / "b", cache=shared_cache, ctx=192, lanes=1) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sinks": 20}, "sinks 20 is not a multiple of 16, the tokens of a block; use 16 or 32"),
        ({"sinks": 0}, "sinks 0: a stream needs at least one block, 16 tokens"),
        ({"window": 72}, "window 72 is not a multiple of 16, the tokens of a block; use 64 or 80"),
        ({"window": -64}, "window -64: a stream needs at least one block, 16 tokens"),
        ({"unit": 20}, "unit 20 is not a multiple of 16, the tokens of a block; use 16 or 32"),
        ({"unit": 0}, "unit 0: a stream needs at least one block, 16 tokens"),
        ({"unit": -16}, "unit -16: a stream needs at least one block, 16 tokens"),
        (
            {"window": 48, "unit": 32},
            "window 48 is not a multiple of the eviction unit, 32; use 32 or 64",
        ),
        (
            {"sinks": 16, "window": 32, "unit": 16},
            "window 32 is below the 40 tokens that the model's local layers see; use at least 48",
        ),
        (
            {"sinks": 64, "window": 192, "unit": 64},
            (
                "sinks 64 + window 192 + unit 64 are 320 tokens, beyond the model's trained context "
                "of 256; use a window of at most 128"
            ),
        ),
        (
            {"sinks": 256},
            (
                "sinks 256 + window 64 + unit 64 are 384 tokens, beyond the model's trained context "
                "of 256; use fewer sinks or a smaller unit"
            ),
        ),
        (
            {"sinks": 64, "window": 128, "unit": 64},
            (
                "sinks 64 + window 128 + unit 64 are 256 tokens, beyond the 192 of a lane; use a "
                "smaller window or raise --ctx"
            ),
        ),
        (
            {"sinks": 16, "system": [5] * 17},
            "sinks 16 do not hold the system prompt's 17 tokens; use at least 32",
        ),
        ({"sinks": 64.0}, "sinks: got 64.0, allowed is a whole number of tokens"),
        ({"window": "64"}, "window: got '64', allowed is a whole number of tokens"),
        ({"unit": True}, "unit: got True, allowed is a whole number of tokens"),
    ],
)
def test_a_stream_that_cannot_be_says_why(llm: LLM, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        llm.session("stream", **sizes)
    assert str(caught.value) == message
    assert llm.engine.stats.reserved_blocks == 0


def test_a_stream_by_default_fills_its_lane(llm: LLM) -> None:
    """64 sinks, or what the system prompt needs; the window is what is left."""
    for system, sinks in ((70 * [5], 80), ([], 64)):
        with llm.session("stream", system=system, unit=16) as session:
            layout = session._sequence.layout
            assert layout == RingLayout(sinks, 192 - 16 - sinks, 16)


def test_a_real_model_reads_far_beyond_its_window() -> None:
    """2,000 tokens of a log: the same bits in chunks and with proposals rejected, and what the
    model makes of the text stays as good when the ring has wrapped as it was before.
    """
    bundle, layout = smollm2("keep", "f16"), RingLayout(64, 256, 64)
    ids = load_tokenizer(bundle).encode(sample_log(100))[:2000]
    assert len(ids) == 2000
    runs = []
    for plan in (chunks(32), with_proposals(0, widest=10)):
        engine = engine_of(backend(bundle, capacity=layout.capacity), bundle, layout.num_blocks)
        stream = engine.stream(layout)
        runs.append(read(engine, stream, ids, plan))
        assert_wrapped(stream)
    whole, stepped = runs
    different = [i for i, same in enumerate(map(eq, whole, stepped)) if not same]
    assert not different, f"{len(different)} rows differ, from token {different[0]} on"
    nats = np.array([row.nats for row in whole[:-1]])
    before, *after = (float(part.mean()) for part in np.array_split(nats, 5))
    assert max(after) < before, f"{before:.2f} nats a token, then {after}"


@dataclass(frozen=True)
class Row:
    """What is kept of a token's logits."""

    digest: bytes
    nats: float
    """Of the token that follows."""


def read(engine: Engine, stream: Sequence, ids: list[int], plan: Plan) -> list[Row]:
    rows: list[Row] = []
    stream.append(ids)
    while stream.pending:
        for logits in one_pass(engine, stream, plan()):
            follower = ids[(len(rows) + 1) % len(ids)]
            nats = log_normalizer(logits) - float(logits[follower])
            rows.append(Row(hashlib.sha256(logits.tobytes()).digest(), nats))
    return rows
