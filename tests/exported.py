"""Bundles that several test files share, exported once per state of the exporter's code."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import headrace.export
import headrace.models
from headrace.export import demo_model
from headrace.export.build import DraftOptions, ExportOptions, export
from headrace.models.manifest import TARGET, Bundle
from headrace.paths import cache_dir
from headrace.runtime.batch import F32, chain
from headrace.runtime.cores import Placement
from headrace.runtime.exactness import Machine, least_rows
from headrace.runtime.ort import OrtBackend
from headrace.runtime.prepare import session_options


def smollm2(quant: str, kv: str) -> Bundle:
    """SmolLM2-135M-Instruct from the GGUF in the cache folder."""
    return _smollm2(f"smollm2-{quant}-{kv}", ExportOptions(quant=quant, kv=kv))


def smollm2_pair(
    layers: tuple[int, ...] | None = None, *, quant: str = "keep", kv: str = "f16"
) -> Bundle:
    """SmolLM2 with itself as its draft, which is perfect, or with some of its own layers.

    The first four make a poor one.
    """
    name = "all" if layers is None else "_".join(map(str, layers))
    draft = DraftOptions(str(demo_model.obtain()), layers, quant)
    options = ExportOptions(quant=quant, kv=kv, draft=draft)
    return _smollm2(f"smollm2-{quant}-{kv}-draft-{name}", options)


def smollm2_distilled() -> Bundle:
    """SmolLM2 with the draft that travels along: the demo's pair."""
    options = ExportOptions(draft=DraftOptions(str(demo_model.draft())))
    return _smollm2("smollm2-keep-f16-distilled", options)


def _smollm2(name: str, options: ExportOptions) -> Bundle:
    out = cache_dir() / "test-bundles" / _code_hash() / name
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        export(str(demo_model.obtain()), out, options)
    return Bundle.open(out)


def _code_hash() -> str:
    """Bundles of an older exporter must not be tested as if they were this one's."""
    digest = hashlib.sha256()
    for package in (headrace.export, headrace.models):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def backend(bundle: Bundle, *, lanes: int = 1, capacity: int = 700, threads: int = 2) -> OrtBackend:
    """The bundle's graph as it is, without prepared weights."""
    session = ort.InferenceSession(
        str(bundle.file(TARGET)),
        session_options(Placement(threads=threads)),
        providers=["CPUExecutionProvider"],
    )
    manifest = bundle.manifest
    return OrtBackend(
        session,
        manifest.config,
        kv=manifest.kv,
        lanes=lanes,
        capacity=capacity,
        least_rows=least_rows(manifest.quant, manifest.kv, Machine.here()),
    )


def logits_of(
    runner: OrtBackend, ids: npt.NDArray[np.int64], widths: list[int], lane: int = 0
) -> F32:
    """Logits [T, V] of all of `ids`, added to the lane in passes of the given widths in turn."""
    rows, past, turn = [], 0, 0
    while past < len(ids):
        chunk = ids[past : past + widths[turn % len(widths)]]
        wanted = tuple(range(len(chunk)))
        rows.append(runner.forward([chain(lane, chunk, past, wanted)]).copy())
        past, turn = past + len(chunk), turn + 1
    return np.concatenate(rows)
