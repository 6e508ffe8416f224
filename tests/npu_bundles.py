"""Bundles with a draft for the double of librknnrt: all of an NPU export but the compiler's own file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from headrace.export.checkpoint import open_checkpoint
from headrace.export.npu_draft import write_npu_files
from headrace.intact import sha256
from headrace.models.manifest import MANIFEST, NPU, Bundle, FileRecord
from headrace.models.npu_io import NpuGeometry
from headrace.models.records import NpuRecord

GEOMETRY = NpuGeometry(sinks=32, window=64, unit=32, nodes=32, rows=(1, 4, 8, 32))
TOOLKIT = "2.3.2"


def with_npu(bundle: Bundle, source: Path, geometry: NpuGeometry = GEOMETRY) -> Bundle:
    """Adds the draft of `source` for the NPU to a bundle that has it for the CPU."""
    draft = bundle.draft
    assert draft is not None
    checkpoint = open_checkpoint(str(source))
    assert checkpoint.config == draft.config
    io = write_npu_files(
        checkpoint,
        bundle.path,
        geometry,
        platform="rk3588",
        toolkit=TOOLKIT,
        quant="fp16",
        probe_ids=np.arange(3, 15),
    )
    bundle.file(NPU).write_bytes(b"a compiled model that only its name is read of\n")
    record = NpuRecord(
        platform=io.platform,
        toolkit=io.toolkit,
        quant=io.quant,
        weight_bytes=0,
        build_s=0.0,
        build_peak_bytes=0,
        step_s=0.01,
        largest=1.0,
        largest_at="none",
        variants=(),
        agreement=draft.agreement,
    )
    files = sorted(p for p in bundle.path.rglob("*") if p.is_file() and p.name != MANIFEST)
    manifest = dataclasses.replace(
        bundle.manifest,
        draft=dataclasses.replace(draft, npu=record),
        files={
            p.relative_to(bundle.path).as_posix(): FileRecord(p.stat().st_size, sha256(p))
            for p in files
        },
    )
    (bundle.path / MANIFEST).write_text(json.dumps(manifest.to_json()))
    return Bundle.open(bundle.path)
