"""A board that does not compute what was exported is not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from npu_bundles import with_npu
from npu_double import Double
from tiny_checkpoints import TINY
from tiny_pairs import pair

from headrace.errors import NpuDeviceError, NpuModelError
from headrace.models.manifest import NPU, NPU_EMBEDDINGS, NPU_IO
from headrace.models.npu_io import NpuFiles, NpuIo, NpuProbe
from headrace.npu.backend import RknnBackend
from headrace.npu.staging import Layout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> NpuFiles:
    folder = tmp_path_factory.mktemp("probe")
    source = TINY / "qwen3"  # whose heads are three groups of channels
    bundle = with_npu(pair(folder / "b", source, target=source), source)
    assert bundle.draft is not None
    io = NpuIo.load(bundle.file(NPU_IO))
    return NpuFiles(bundle.file(NPU), bundle.file(NPU_EMBEDDINGS), io, bundle.draft.config)


def opened(files: NpuFiles, double: Double, probe: NpuProbe | None = None) -> RknnBackend:
    probe = probe or files.io.probe
    io = dataclasses.replace(files.io, probe=probe)
    return RknnBackend(dataclasses.replace(files, io=io), double.library(), lanes=2)


def test_the_probe_of_an_export_passes_and_leaves_nothing(files: NpuFiles, double: Double) -> None:
    with_probe = opened(files, double)
    try:
        assert with_probe.counters.runs >= 3, "wide, narrow and whole"
        assert with_probe.arena._lanes[0].table.num_free == files.io.geometry.tail
    finally:
        with_probe.close()


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x[::-1], lambda x: x * 1.2])
def test_other_logits_are_refused_with_their_distance(
    files: NpuFiles, double: Double, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    probe = files.io.probe
    assert probe is not None
    other = tuple(float(x) for x in change(np.array(probe.logits)))
    with pytest.raises(NpuModelError, match=r"\d+\.\d% of their range off, 5% are allowed"):
        opened(files, double, dataclasses.replace(probe, logits=other))


def test_a_small_error_is_not(files: NpuFiles, double: Double) -> None:
    probe = files.io.probe
    assert probe is not None
    spread = max(probe.logits) - min(probe.logits)
    near = tuple(x + 0.04 * spread for x in probe.logits)
    opened(files, double, dataclasses.replace(probe, logits=near)).close()


@pytest.mark.parametrize("name", [b"embeds", b"main.0.key", b"tail", b"cos", b"new", b"logits"])
def test_a_layout_that_was_misunderstood_is_noticed(
    files: NpuFiles, double: Double, name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all channels of a token lay together: nothing else would say that they do not."""
    understood = Layout.of

    def misunderstood(attr: object) -> Layout:
        layout = understood(attr)  # type: ignore[arg-type]
        if layout.name.encode() != name or layout.shape[3] == 1:
            return layout
        n, _, h, group, item = layout.strides
        return dataclasses.replace(layout, strides=(n, group, h, group * layout.shape[1], item))

    monkeypatch.setattr(Layout, "of", misunderstood)
    with pytest.raises((NpuModelError, NpuDeviceError)):
        opened(files, double)


def test_a_bundle_without_a_probe_is_taken_as_it_is(files: NpuFiles, double: Double) -> None:
    io = dataclasses.replace(files.io, probe=None)
    backend = RknnBackend(dataclasses.replace(files, io=io), double.library(), lanes=1)
    assert backend.counters.runs == 0
    backend.close()
