"""A text through a draft's NPU graph, by whatever runs it: ONNX Runtime, or the compiler's simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from headrace.export.quantize import F32
from headrace.export.session import cpu_session
from headrace.export.text import I64
from headrace.models.config import ModelConfig
from headrace.models.npu_io import NpuGeometry, NpuIo, is_kv, main_names, npu_inputs
from headrace.models.rope import cos_sin

Feeds = dict[str, F32]
Run = Callable[[int, Feeds], Mapping[str, F32]]
"""Outputs of the variant with so many rows."""

FP16_MASK, INT8_MASK = -1e4, -30.0
"""An int8 tensor of scores and masks has one scale: a large constant would leave the scores none."""


class NpuText:
    """Feeds of one text, a pass at a time; keys and values go straight to the main inputs."""

    def __init__(
        self, config: ModelConfig, geometry: NpuGeometry, embeddings: F32, mask: float
    ) -> None:
        """`embeddings` [V, D] as the graph takes them."""
        self._config, self._geometry = config, geometry
        self._embeddings, self._mask = embeddings, np.float32(mask)
        tensors = npu_inputs(config, geometry, 1)
        self._kv = {t.name: np.zeros(t.dims, np.float32) for t in tensors if is_kv(t.name)}
        self.length = 0

    @property
    def room(self) -> int:
        """Tokens that it can still take."""
        return self._geometry.main - self.length

    def feeds(self, token_ids: I64, rows: int) -> Feeds:
        """Of the next tokens in a variant of `rows`; rows beyond them see themselves alone."""
        config, past, num = self._config, self.length, len(token_ids)
        assert num <= min(rows, self.room)
        embeds = self._embeddings[np.resize(token_ids, rows)]
        positions = past + np.arange(rows)
        feeds = {**self._kv, "embeds": embeds.T[None, :, None]}
        ropes = {"": config.rope, "_local": config.rope_local}
        for suffix, rope in ropes.items():
            if rope is not None:
                for name, half in zip(("cos", "sin"), cos_sin(rope, positions), strict=True):
                    feeds[f"{name}{suffix}"] = np.concatenate([half, half], 1).T[None, :, None]
        first = self._geometry.main + self._geometry.tail
        mask = np.full((rows, first + rows), self._mask)
        mask[:, :past] = 0
        mask[:, first:][np.tril(np.ones((rows, rows), bool))] = 0
        feeds["mask"] = mask[None, None]
        if config.has_local_layers:
            keys = np.concatenate([np.arange(first), positions])
            far = positions[:, None] - keys[None] >= (config.sliding_window or 0)
            feeds["mask_local"] = np.where(far, self._mask, mask)[None, None]
        return feeds

    def commit(self, new: F32, num_rows: int) -> None:
        """Takes the keys and values of a pass's first rows."""
        heads = self._config.num_kv_heads
        names = [n for layer in range(self._config.num_layers) for n in main_names(layer)]
        for plane, name in enumerate(names):
            columns = self._kv[name][..., self.length : self.length + num_rows]
            columns[...] = new[plane * heads : (plane + 1) * heads, ..., :num_rows]
        self.length += num_rows


def passes(
    run: Run, text: NpuText, token_ids: I64, rows: int
) -> Iterator[tuple[Feeds, Mapping[str, F32], int]]:
    """(feeds, outputs, real rows) of each pass over a text that fits the main inputs."""
    for start in range(0, len(token_ids), rows):
        chunk = token_ids[start : start + rows]
        feeds = text.feeds(chunk, rows)
        outputs = run(rows, feeds)
        text.commit(outputs["new"], len(chunk))
        yield feeds, outputs, len(chunk)


def text_logits(run: Run, text: NpuText, token_ids: I64, rows: int) -> F32:
    """Logits [T, num_logits] of a text, `rows` tokens a pass."""
    found = [
        np.asarray(outputs["logits"])[0, :, 0, :num].T
        for _, outputs, num in passes(run, text, token_ids, rows)
    ]
    return np.concatenate(found)


class TextPasses:
    """A text, as far as the main inputs hold it, in passes of any width."""

    def __init__(
        self, config: ModelConfig, io: NpuIo, table: F32, graph: Path, token_ids: I64
    ) -> None:
        """`table` [V, D] are the embeddings, `token_ids` the draft's."""
        self._config, self._io, self._table = config, io, table
        self.graph, self.ids = graph, token_ids[: io.geometry.main]
        self.run = ort_run(graph)
        self.most_rows = max(io.geometry.rows)

    def _new(self) -> NpuText:
        return NpuText(self._config, self._io.geometry, self._table, self._io.mask)

    def logits(self, run: Run) -> F32:
        """[T, num_logits] of the text by whatever runs the graph."""
        return text_logits(run, self._new(), self.ids, self.most_rows)

    def feeds(self, rows: int, count: int) -> list[Feeds]:
        """Of `count` passes, spread over the text: the first, where activations are largest, too."""
        starts = np.linspace(0, len(self.ids) - rows, count).astype(np.int64)
        text, found = self._new(), []
        for start in np.unique(np.maximum(starts, 0)):
            # What lies between two of them goes in as wide as it can.
            for _ in passes(self.run, text, self.ids[text.length : start], self.most_rows):
                pass
            feeds = text.feeds(self.ids[start : start + rows], rows)
            found.append({name: array.copy() for name, array in feeds.items()})
        return found


def ort_run(graph: Path) -> Run:
    """The graph by ONNX Runtime."""
    session = cpu_session(graph)
    names = [output.name for output in session.get_outputs()]

    def run(rows: int, feeds: Feeds) -> dict[str, F32]:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run
