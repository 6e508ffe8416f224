"""A draft for the NPU: its graph, its embeddings, and what a board's runtime must know of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.export.calibrate import FloatWeights
from headrace.export.checkpoint import Checkpoint
from headrace.export.npu_graph import build_npu
from headrace.export.npu_text import FP16_MASK, INT8_MASK, TextPasses
from headrace.export.quantize import F32
from headrace.export.text import I64
from headrace.models.config import ModelConfig
from headrace.models.manifest import NPU_EMBEDDINGS, NPU_GRAPH, NPU_IO
from headrace.models.npu_io import NpuGeometry, NpuIo, NpuProbe

_TABLE_ROWS = 4096
_PROBE_COLUMNS = 8

_TOLERANCES = {"fp16": 0.05, "w8a8": 0.5}
"""A wrong layout gives logits that have nothing to do with the right ones."""


def write_npu_files(
    checkpoint: Checkpoint,
    folder: Path,
    geometry: NpuGeometry,
    *,
    platform: str,
    toolkit: str,
    quant: str,
    residual_scale: float = 1.0,
    probe_ids: I64 | None = None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> NpuIo:
    """Writes all of an NPU draft but the compiled model itself, into a bundle's folder."""
    config, weights = checkpoint.config, FloatWeights(checkpoint)
    build_npu(
        folder / NPU_GRAPH,
        config,
        geometry,
        weights.__getitem__,
        residual_scale=residual_scale,
        on_layer=on_layer,
    )
    with (folder / NPU_EMBEDDINGS).open("wb") as file:
        table = weights["model.embed_tokens.weight"]
        for start in range(0, len(table), _TABLE_ROWS):
            rows = table[start : start + _TABLE_ROWS] * np.float32(
                config.embed_scale * residual_scale
            )
            file.write(rows.astype(np.float16).tobytes())
    mask = FP16_MASK if quant == "fp16" else INT8_MASK
    io = NpuIo.expected(
        config, geometry, platform=platform, toolkit=toolkit, quant=quant, mask=mask
    )
    if probe_ids is not None:
        table = embeddings(folder, config)
        text = TextPasses(config, io, table, folder / NPU_GRAPH, probe_ids)
        io = dataclasses.replace(io, probe=_probe(text, quant))
    io.save(folder / NPU_IO)
    return io


def _probe(text: TextPasses, quant: str) -> NpuProbe:
    """Of the likeliest columns, and of some that stand for the others."""
    last = text.logits(text.run)[-1]
    others = np.linspace(0, len(last) - 1, _PROBE_COLUMNS).astype(np.int64)
    columns = np.union1d(np.argsort(last)[-_PROBE_COLUMNS:], others)
    ids = tuple(int(i) for i in text.ids)
    return NpuProbe(
        ids,
        tuple(int(c) for c in columns),
        tuple(float(x) for x in last[columns]),
        _TOLERANCES[quant],
    )


def embeddings(folder: Path, config: ModelConfig) -> F32:
    """[vocab_size, hidden_size] as `write_npu_files` wrote them."""
    shape = (config.vocab_size, config.hidden_size)
    table = np.memmap(folder / NPU_EMBEDDINGS, np.float16, "r", shape=shape)
    return table.astype(np.float32)
