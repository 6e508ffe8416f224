"""What runs the NPU, on the board's CPU, with the double in place of Rockchip's library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import Board, board_in
from librknnrt import build as double
from librknnrt.tiny import ROWS, VARIANTS, expected, feeds, save_model
from npu_bundles import with_npu
from tiny_checkpoints import TINY
from tiny_pairs import pair

from headrace.models.manifest import NPU

COMPILER = "aarch64-linux-gnu-gcc"
NO_DOUBLE = double.missing(COMPILER)
needs_double = pytest.mark.skipif(
    NO_DOUBLE is not None, reason=f"{NO_DOUBLE}; on Debian and Ubuntu: gcc-aarch64-linux-gnu"
)

LITE = """
import json, sys
import numpy as np
from rknnlite.api import RKNNLite
model, fed, out = sys.argv[1:]
lite = RKNNLite()
codes = [lite.load_rknn(model), lite.init_runtime()]
inputs = list(np.load(fed).values())
found = lite.inference(inputs=inputs, data_format=["nhwc"] * len(inputs))
np.savez(out, *found)
lite.release()
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return board_in(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def with_library(board: Board) -> Iterator[Board]:
    """The double where RKNNLite looks for the library, as long as these tests run."""
    folder = board.tree / "usr/lib"
    try:
        double.build(folder, COMPILER)
        yield board
    finally:
        for name in ("librknnrt.so", "rknn_compute.py"):
            (folder / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama as its own draft, for the CPU and for the NPU."""
    source = TINY / "llama"
    return with_npu(pair(tmp_path_factory.mktemp("npu") / "bundle", source), source).path


def test_rknnlite_imports(board: Board) -> None:
    done = board("-c", "from rknnlite.api import RKNNLite; print(RKNNLite.NPU_CORE_0_1_2)")
    assert (done.code, done.out) == (0, "7\n"), done.err


@needs_double
@pytest.mark.parametrize("variants", [(1,), (3,), ROWS], ids=str)
def test_rknnlite_computes(with_library: Board, variants: tuple[int, ...], tmp_path: Path) -> None:
    """Of a model with variants RKNNLite gives arrays in the shapes of the widest one, as it asks for
    no others; a narrower one's values stand first in them.
    """
    rows = variants[0]
    fed, model = feeds(rows), save_model(tmp_path, variants)
    inputs = [fed[t.name].astype(np.float16).transpose(0, 2, 3, 1) for t in VARIANTS[rows].inputs]
    np.savez(tmp_path / "fed.npz", *inputs)
    files = (model, tmp_path / "fed.npz", tmp_path / "out.npz")
    # RKNNLite hands over the model's bytes; the double goes by its name.
    done = with_library("-c", LITE, *files, HEADRACE_DOUBLE_MODEL=str(model))
    assert done.json() == [0, 0]
    with np.load(tmp_path / "out.npz") as found:
        tensors = zip(VARIANTS[rows].outputs, VARIANTS[variants[-1]].outputs, strict=True)
        for values, (tensor, widest) in zip(found.values(), tensors, strict=True):
            assert values.shape == widest.dims
            size = int(np.prod(tensor.dims))
            wanted = expected(fed)[tensor.name]
            np.testing.assert_array_equal(values.ravel()[:size].reshape(tensor.dims), wanted)


@needs_double
@pytest.mark.parametrize("transport", ["npu", "npu-lite"])
def test_a_draft_on_the_npu_changes_no_text(
    with_library: Board, bundle: Path, transport: str
) -> None:
    model = str(bundle / NPU)

    def answer(device: str) -> Any:
        flags = ("--raw", "--temperature", "1", "--seed", "4", "--max-tokens", "32", "--ignore-eos")
        more = ("--draft-device", device, "--speculate", "3", "--json")
        command = ("-m", "headrace", "run", bundle, "pump 3", *flags, *more)
        return with_library(*command, HEADRACE_DOUBLE_MODEL=model).json()

    plain, found = answer("none"), answer(transport)
    assert len(plain["token_ids"]) == 32
    assert found["token_ids"] == plain["token_ids"]
    assert found["speculation"]["accepted"] > 0, found
