"""Figures of a simulated graph beside its reference, and activations against float16's range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper

from headrace.export.npu_cost import step_cost
from headrace.export.simulator import activations, agreement

F32 = npt.NDArray[np.float32]


def outputs(*rows: list[float], new: float = 1.0) -> dict[str, F32]:
    """Logits [1, V, 1, T] of rows of T logits each, and some other output."""
    logits = np.array(rows, np.float32).T[None, :, None]
    return {"logits": logits, "new": np.full((2, 2), new, np.float32)}


def test_equal_outputs_agree() -> None:
    one = outputs([1, 2, 3], [6, 5, 4])
    found = agreement([(one, one)])
    assert found.max_error == {"logits": 0, "new": 0}
    assert found.cosine == pytest.approx({"logits": 1, "new": 1})
    assert (found.positions, found.same_top1, found.decided, found.decided_same) == (2, 2, 2, 2)


def test_only_decided_positions_must_have_the_same_best_token() -> None:
    # errors of up to 0.5: of the margins 1.0, 0.25 and 0.6 the second decides nothing
    want = outputs([0, 0, 1], [0, 0.25, 0], [0.6, 0, 0])
    got = outputs([0, 0, 1], [0.5, 0.25, 0], [0.15, 0.5, 0])
    found = agreement([(want, got)])
    assert found.max_error["logits"] == pytest.approx(0.5)
    assert (found.positions, found.same_top1) == (3, 1)
    assert (found.decided, found.decided_same) == (2, 1)


def test_the_worst_of_all_feeds_counts() -> None:
    good, bad = outputs([1, 2]), outputs([1, 2], new=-1.0)
    found = agreement([(good, good), (good, bad), (good, good)])
    assert found.max_error["new"] == 2 and found.cosine["new"] == pytest.approx(-1)
    assert found.positions == 3


def test_what_is_not_a_number_is_no_agreement() -> None:
    good, bad = outputs([1, 2]), outputs([1, np.nan])
    found = agreement([(good, bad), (good, good)])
    assert np.isnan(found.max_error["logits"])
    assert np.isnan(found.cosine["logits"])
    assert found.decided == 0


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """y = (x * 300)^2 / 300, with its weight in a file beside it."""
    weight = numpy_helper.from_array(np.full(400, 300, np.float32), "weight")
    dims = [1, 400]
    nodes = [
        helper.make_node("Identity", ["weight"], ["w"]),
        helper.make_node("Mul", ["x", "w"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "scaled"], ["square"]),
        helper.make_node("Shape", ["square"], ["shape"]),
        helper.make_node("Div", ["square", "w"], ["y"]),
    ]
    made = helper.make_graph(
        nodes,
        "square",
        [helper.make_tensor_value_info("x", 1, dims)],
        [helper.make_tensor_value_info("y", 1, dims)],
        [weight],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "graph.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    return path


def feed(value: float) -> dict[str, F32]:
    x = np.zeros((1, 400), np.float32)
    x[0, 7] = value
    return {"x": x}


def test_the_largest_activation_is_named(graph: Path) -> None:
    found = activations(graph, [feed(0.5), feed(-0.8)])
    assert found.largest == pytest.approx(240**2)
    assert found.name == "square"
    assert not found.beyond


def test_activations_beyond_float16_are_named(graph: Path) -> None:
    found = activations(graph, [feed(1.0), feed(0.5)])
    assert found.beyond == {"square": 90000}


def test_inputs_and_outputs_count(graph: Path) -> None:
    found = activations(graph, [feed(-1e30)])
    assert found.largest == np.inf
    assert set(found.beyond) == {"x", "scaled", "square", "y"}


def test_what_is_not_a_number_is_beyond(graph: Path) -> None:
    found = activations(graph, [feed(0.1), feed(np.nan), feed(0.1)])
    assert np.isnan(found.largest)
    assert set(found.beyond) == {"x", "scaled", "square", "y"}


def test_published_figures_lie_on_the_line() -> None:
    """TinyLlama 1.1B and Phi3 3.8B in w8a8: 24.4 and 7.5 tokens a second."""
    for weight_bytes, tokens_s in ((1.034e9, 24.4), (3.72e9, 7.5)):
        assert step_cost(int(weight_bytes), 0).by_bytes_ms == pytest.approx(1e3 / tokens_s, rel=0.1)
    assert step_cost(0, 11_460_000).by_cycles_ms == pytest.approx(11.46)
