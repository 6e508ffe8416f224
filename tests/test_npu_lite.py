"""RKNNLite's own errors: it may raise anything, and ends the program where it knows no way out."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from npu_double import tiny_draft
from tiny_checkpoints import TINY

from headrace.errors import NpuDeviceError, NpuMissingError, NpuModelError
from headrace.npu.lite import open_backend
from headrace.runtime.batch import LaneRows


def fake(monkeypatch: pytest.MonkeyPatch, **does: Any) -> list[str]:
    """Installs an RKNNLite that does so; what was released."""
    released: list[str] = []

    class RKNNLite:
        def __getattr__(self, name: str) -> Any:
            def call(*args: object, **kwargs: object) -> Any:
                result = does.get(name, 0)
                if isinstance(result, BaseException):
                    raise result
                return result

            return call

        def release(self) -> None:
            released.append("all")

    module = types.ModuleType("rknnlite.api")
    vars(module)["RKNNLite"] = RKNNLite
    monkeypatch.setitem(sys.modules, "rknnlite", types.ModuleType("rknnlite"))
    monkeypatch.setitem(sys.modules, "rknnlite.api", module)
    return released


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        ({"load_rknn": -1}, NpuModelError, "does not load it"),
        ({"init_runtime": -1}, NpuDeviceError, "cannot open the NPU"),
        ({"init_runtime": SystemExit(-1)}, NpuDeviceError, "failed to open the NPU: -1"),
        ({"load_rknn": ValueError("bad")}, NpuDeviceError, "failed to open the NPU: bad"),
        ({"inference": SystemExit(-1)}, NpuDeviceError, "failed in a pass: -1"),
        ({"inference": None}, NpuDeviceError, "does not say why"),
    ],
)
def test_whatever_it_does_is_an_error_of_the_npu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    does: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    draft = tiny_draft(tmp_path, TINY / "llama")
    released = fake(monkeypatch, **does)
    with pytest.raises(kind, match=message):
        backend = open_backend(draft.files, library=None, lanes=1, cores="0")
        try:
            one = np.array([3], np.int64)
            backend.forward([LaneRows(0, one, one * 0, 0, (0,), exact=False)])
        finally:
            backend.close()
    assert released == ["all"]


def test_a_library_of_ones_own_is_not_for_it(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path, TINY / "llama")
    with pytest.raises(NpuMissingError, match="leave --npu-library out"):
        open_backend(draft.files, library=tmp_path / "own.so", lanes=1, cores="auto")
