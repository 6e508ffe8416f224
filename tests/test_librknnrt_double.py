"""The double of librknnrt: computes through a model, notices misuse, plays faults."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from ctypes import byref, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from librknnrt import build as double_build
from librknnrt.driver import (
    CONTEXT_T,
    CTX,
    FAIL,
    FLOAT16,
    FLOAT32,
    FROM_DEVICE,
    INPUT,
    LOST,
    MODEL,
    NC1HWC2,
    NCHW,
    NHWC,
    NO_FLUSH_INPUT,
    NO_FLUSH_OUTPUT,
    OK,
    OUTPUT,
    PARAM,
    TIMEOUT,
    TO_DEVICE,
    Attr,
    Context,
    Double,
    Input,
    Mem,
    Output,
    Range,
    V,
    places,
)
from librknnrt.tiny import (
    F32,
    PAST,
    ROWS,
    VARIANTS,
    expected,
    feeds,
    save_model,
)
from numpy.typing import NDArray
from tiny_checkpoints import TINY

from headrace.export.checkpoint import open_checkpoint
from headrace.export.npu_draft import embeddings, write_npu_files
from headrace.export.npu_text import FP16_MASK, Feeds, NpuText, ort_run, text_logits
from headrace.models.manifest import NPU_GRAPH
from headrace.models.npu_io import (
    NpuGeometry,
)

MISSING = double_build.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return double_build.build(tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def double(library: Path) -> Iterator[Double]:
    """A test that leaves something behind, or a violation that it did not expect, fails."""
    double = Double(library)
    double.lib.double_reset()
    before = double.counts()
    yield double
    assert double.lib.double_violations() == b""
    assert double.counts() == before


def ready(double: Double, model: Path, flags: int = 0, rows: int = 3) -> Context:
    code, context = double.init(model, flags)
    assert code == OK
    assert context.shape(rows) == OK
    context.bind_all()
    return context


def check_run(context: Context, seed: int = 0) -> None:
    fed = feeds(context.rows, seed)
    context.write(fed)
    assert context.run() == OK
    for name, values in context.read().items():
        np.testing.assert_array_equal(values, expected(fed)[name])


# -- Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_computes_what_the_onnx_does(double: Double, model: Path, rows: int) -> None:
    context = ready(double, model, rows=rows)
    check_run(context)
    check_run(context, seed=1)
    context.destroy()


@pytest.mark.parametrize("rows", ROWS)
def test_computes_with_int8_codes(double: Double, tmp_path: Path, rows: int) -> None:
    context = ready(double, save_model(tmp_path, kind="int8"), rows=rows)
    check_run(context)
    context.destroy()


def test_runs_the_draft_of_a_checkpoint(double: Double, tmp_path: Path) -> None:
    """A text through the graph for the NPU, by the double and by ONNX Runtime alone."""
    geometry = NpuGeometry(sinks=4, window=28, unit=4, nodes=4, rows=(1, 8))
    checkpoint = open_checkpoint(str(TINY / "llama"))
    (tmp_path / NPU_GRAPH).parent.mkdir()
    write_npu_files(
        checkpoint, tmp_path, geometry, platform="rk3588", toolkit="2.5.0", quant="fp16"
    )
    table, config = embeddings(tmp_path, checkpoint.config), checkpoint.config
    compiled = (tmp_path / NPU_GRAPH).with_suffix(".rknn")
    compiled.write_bytes(b"compiled")
    contexts = {rows: ready(double, compiled, rows=rows) for rows in geometry.rows}
    alone = ort_run(tmp_path / NPU_GRAPH)

    def run(rows: int, feeds: Feeds) -> dict[str, F32]:
        context = contexts[rows]
        context.write(feeds)
        assert context.run() == OK
        halves = {name: v.astype(np.float16).astype(np.float32) for name, v in feeds.items()}
        for name, values in context.read().items():
            same = alone(rows, halves)[name].astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(values, same)
        return context.read()

    for rows in geometry.rows:
        text = NpuText(config, geometry, table, FP16_MASK)
        assert len(text_logits(run, text, np.arange(20), rows)) == 20
    for context in contexts.values():
        context.destroy()


def test_large_outputs_become_infinite_as_in_float16(double: Double, model: Path) -> None:
    context = ready(double, model)
    fed = feeds(3)
    fed["x"][:] = 40000
    context.write(fed)
    assert context.run() == OK
    assert np.isinf(context.read()["logits"]).all()
    context.destroy()


def test_padding_of_an_output_is_poison(double: Double, model: Path) -> None:
    context = ready(double, model)
    check_run(context)
    for t in context.tensors[3:]:
        rest = np.delete(context.host(t.name), places(t).ravel())
        assert np.isnan(rest).all(), t.name
    context.destroy()


def test_queries_state_the_file(double: Double, model: Path) -> None:
    context = ready(double, model)
    for i, t in enumerate(context.tensors):
        plain, native = (context.attr(q + (i >= 3), i % 3) for q in (14, 16))
        n, c, h, w = t.dims
        assert plain.name.decode() == native.name.decode() == t.name
        assert list(plain.dims)[:5] == [*((n, h, w, c) if i < 3 else t.dims), 0]
        assert (plain.fmt, plain.type) == (NHWC if i < 3 else NCHW, FLOAT16)
        assert (tuple(native.dims)[:5], native.n_dims, native.fmt) == (t.native, 5, NC1HWC2)
        assert (native.w_stride, native.size_with_stride) == (t.w_stride, t.size)
    assert context.versions() == ("2.5.0 (double@2026-01-01)", "0.9.8")
    shapes = Range(index=1)
    assert context.query(13, shapes) == OK
    assert [list(shapes.dyn_range[i][:4]) for i in range(shapes.shape_number)] == [
        [1, rows, PAST + rows, 1] for rows in ROWS
    ]
    context.destroy()


# -- Coherence ------------------------------------------------------------------------------------


def test_without_the_runtimes_flushes_all_of_the_callers_are_needed(
    double: Double, model: Path
) -> None:
    context = ready(double, model, NO_FLUSH_INPUT | NO_FLUSH_OUTPUT)
    for seed in range(3):
        fed = feeds(3, seed)
        context.write(fed)
        context.sync_all(TO_DEVICE)
        assert context.run() == OK
        context.sync_all(FROM_DEVICE)
        for name, values in context.read().items():
            np.testing.assert_array_equal(values, expected(fed)[name])
    sizes = [t.size for t in context.tensors]
    trace = double.trace()
    assert trace["sync_to_device"] == {"flushes": 9, "bytes": 3 * sum(sizes[:3])}
    assert trace["sync_from_device"] == {"flushes": 6, "bytes": 3 * sum(sizes[3:])}
    assert trace["run_to_device"]["flushes"] == trace["run_from_device"]["flushes"] == 0
    assert trace["calls"]["rknn_run"] == 3
    context.destroy()


@pytest.mark.parametrize("forgotten", ["x", "mask", "past"])
def test_an_input_without_flush_is_stale(double: Double, model: Path, forgotten: str) -> None:
    context = ready(double, model, NO_FLUSH_INPUT)
    old, new = feeds(3, 0), feeds(3, 1)
    context.write(old)
    context.sync_all(TO_DEVICE)
    context.write(new)
    for name in {"x", "mask", "past"} - {forgotten}:
        assert context.sync(name, TO_DEVICE) == OK
    assert context.run() == OK
    stale = expected({**new, forgotten: old[forgotten]})
    for name, values in context.read().items():
        np.testing.assert_array_equal(values, stale[name])
    context.destroy()


def test_only_a_flush_reaches_the_device(double: Double, model: Path) -> None:
    context = ready(double, model)
    there = ctypes.create_string_buffer(VARIANTS[3].inputs[0].size)

    def peek() -> bytes:
        assert double.lib.double_peek(context.mems["x"], there, len(there)) == OK
        return there.raw

    fresh = peek()
    context.host("x")[:] = 1
    assert peek() == fresh
    assert context.sync("x", TO_DEVICE) == OK
    assert peek() == context.host("x").tobytes() != fresh
    context.destroy()


def test_an_output_without_flush_is_stale(double: Double, model: Path) -> None:
    context = ready(double, model, NO_FLUSH_OUTPUT)
    context.write(feeds(3))
    assert context.run() == OK
    assert np.isnan(context.read()["new"]).all()
    assert context.sync("new", FROM_DEVICE) == OK
    np.testing.assert_array_equal(context.read()["new"], expected(feeds(3))["new"])
    assert np.isnan(context.read()["logits"]).all()
    context.destroy()


def test_uncached_memory_needs_no_flush(double: Double, model: Path) -> None:
    code, context = double.init(model, NO_FLUSH_INPUT | NO_FLUSH_OUTPUT)
    assert (code, context.shape(3)) == (OK, OK)
    for t in context.tensors:
        assert context.bind(t.name, context.lib.rknn_create_mem2(context.handle, t.size, 2)) == OK
    check_run(context)
    context.destroy()


def test_fresh_memory_is_no_number(double: Double, model: Path) -> None:
    context = ready(double, model)
    assert context.run() == INPUT
    assert double.kinds() == [V.NUMBER]
    context.destroy()


def test_memory_is_shared_by_its_fd(double: Double, model: Path) -> None:
    """Two contexts of different variants, whose `past` is the same memory."""
    one, three = (ready(double, model, NO_FLUSH_INPUT, rows) for rows in ROWS)
    owned = one.mems["past"][0]
    shared = three.lib.rknn_create_mem_from_fd(
        three.handle, owned.fd, c_void_p(owned.virt_addr), owned.size, 0
    )
    assert three.lib.rknn_destroy_mem(three.handle, three.mems["past"]) == OK
    assert three.bind("past", shared) == OK
    fed = feeds(3)
    three.write(fed)
    for name in ("x", "mask"):
        assert three.sync(name, TO_DEVICE) == OK
    assert one.sync("past", TO_DEVICE) == OK  # by the owner, for both
    assert three.run() == OK
    np.testing.assert_array_equal(three.read()["new"], expected(fed)["new"])
    assert double.counts()[3] == 9  # of ten pieces of memory
    one.destroy()
    assert three.run() == OK  # the memory lives as long as anyone refers to it
    three.destroy()


def test_a_part_of_memory_is_shared(double: Double, model: Path) -> None:
    context = ready(double, model)
    size, past = 256, VARIANTS[3].inputs[2]
    mem = context.create(size + past.size)
    address, fd = mem[0].virt_addr, mem[0].fd
    part = context.lib.rknn_create_mem_from_fd(
        context.handle, fd, c_void_p(address + size), past.size, size
    )
    old = context.mems["past"]
    assert context.bind("past", part) == OK
    check_run(context)
    for unused in (mem, old):
        assert context.lib.rknn_destroy_mem(context.handle, unused) == OK
    context.destroy()


# -- Contexts and variants ------------------------------------------------------------------------


def test_a_duplicate_has_its_own_variant(double: Double, model: Path) -> None:
    first = ready(double, model, rows=3)
    handle = CONTEXT_T()
    assert double.lib.rknn_dup_context(byref(first.handle), byref(handle)) == OK
    second = Context(double, handle, tuple(first.variants.values()))
    assert second.shape(1) == OK
    second.bind_all()
    check_run(first)
    check_run(second)
    check_run(first, seed=2)
    first.destroy()
    check_run(second, seed=3)  # the model lives on
    second.destroy()


def test_after_a_switch_memory_is_bound_again(double: Double, model: Path) -> None:
    context = ready(double, model, rows=3)
    check_run(context)
    assert context.shape(3) == OK
    check_run(context)  # no switch
    assert context.shape(1) == OK
    assert context.run() == INPUT
    assert double.kinds() == [V.UNBOUND]
    context.bind_all()
    check_run(context)
    context.destroy()


def test_a_model_of_one_shape_needs_none(double: Double, tmp_path: Path) -> None:
    code, context = double.init(save_model(tmp_path, (3,)))
    assert code == OK
    context.bind_all()
    check_run(context)
    context.destroy()


def test_contexts_run_in_parallel(double: Double, model: Path) -> None:
    contexts = [ready(double, model, rows=rows) for rows in (1, 3, 3)]
    fed = [feeds(context.rows, i) for i, context in enumerate(contexts)]

    def work(i: int) -> None:
        for _ in range(20):
            contexts[i].write(fed[i])
            assert contexts[i].run() == OK
            for name, values in contexts[i].read().items():
                np.testing.assert_array_equal(values, expected(fed[i])[name])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert double.trace()["calls"]["rknn_run"] == 60
    for context in contexts:
        context.destroy()


def test_a_run_that_does_not_block(double: Double, model: Path) -> None:
    context = ready(double, model)
    double.script("hang:+1:300")
    context.write(feeds(3))
    began = time.monotonic()
    assert context.run(non_block=1) == OK
    assert context.wait(timeout_ms=1) == TIMEOUT
    assert context.wait() == OK
    assert time.monotonic() - began >= 0.3
    np.testing.assert_array_equal(context.read()["new"], expected(feeds(3))["new"])
    context.destroy()


def test_copying_calls(double: Double, model: Path) -> None:
    """As RKNNLite does it: NHWC in, float32 out, memory of the runtime's."""
    code, context = double.init(model)
    assert (code, context.shape(3)) == (OK, OK)
    fed = feeds(3)
    nhwc: list[NDArray[Any]] = [
        np.ascontiguousarray(fed[n].transpose(0, 2, 3, 1)) for n in ("x", "mask", "past")
    ]
    nhwc[1] = nhwc[1].astype(np.float16)
    inputs = (Input * 3)()
    for i, array in enumerate(nhwc):
        kind = FLOAT32 if array.dtype == np.float32 else FLOAT16
        inputs[i] = Input(i, array.ctypes.data, array.nbytes, 0, kind, NHWC)
    lib, handle = context.lib, context.handle
    assert lib.rknn_inputs_set(handle, 3, inputs) == OK
    assert context.run() == OK
    outputs = (Output * 2)(Output(want_float=1, index=0), Output(want_float=0, index=1))
    assert lib.rknn_outputs_get(handle, 2, outputs, None) == OK
    for t, out, dtype in zip(context.tensors[3:], outputs, (np.float32, np.float16), strict=True):
        raw: Any = (ctypes.c_char * out.size).from_address(out.buf)
        got: NDArray[Any] = np.frombuffer(raw, dtype).reshape(t.dims)
        np.testing.assert_array_equal(got, expected(fed)[t.name])
    assert double.counts()[4] == 2
    assert lib.rknn_outputs_release(handle, 2, outputs) == OK
    inputs[0].size -= 4
    assert lib.rknn_inputs_set(handle, 3, inputs) == INPUT
    assert double.kinds() == [V.SIZE]
    context.destroy()


# -- Violations -----------------------------------------------------------------------------------


def test_contexts_that_are_not(double: Double, model: Path) -> None:
    context = ready(double, model)
    context.destroy()
    assert double.lib.rknn_destroy(context.handle) == CTX
    assert double.lib.rknn_run(c_uint64(7), None) == CTX
    assert not double.lib.rknn_create_mem(context.handle, 64)
    assert double.kinds() == [V.CONTEXT] * 3


def test_memory_that_is_not(double: Double, model: Path) -> None:
    context, other = ready(double, model), ready(double, model)
    mem = context.create(64)
    assert context.lib.rknn_destroy_mem(context.handle, mem) == OK
    assert mem[0].virt_addr is None
    assert context.lib.rknn_destroy_mem(context.handle, mem) == PARAM
    assert context.lib.rknn_mem_sync(context.handle, mem, TO_DEVICE) == PARAM
    assert context.lib.rknn_mem_sync(context.handle, byref(Mem()), TO_DEVICE) == PARAM
    assert context.bind("x", other.mems["x"]) == PARAM
    assert double.kinds() == [V.MEM] * 4
    for one in (context, other):
        one.destroy()


def test_memory_outlives_its_context(double: Double, model: Path) -> None:
    code, context = double.init(model)
    assert code == OK
    mem = context.create(64)
    assert context.lib.rknn_destroy(context.handle) == OK
    assert context.lib.rknn_destroy_mem(context.handle, mem) == CTX
    assert double.counts() == [0, 1, 64, 1, 0]
    assert double.kinds() == [V.LEAK, V.CONTEXT]  # and the test's reset frees it


def test_wrong_bindings(double: Double, model: Path) -> None:
    code, context = double.init(model)
    assert (code, context.shape(3)) == (OK, OK)
    t = VARIANTS[3].inputs[0]
    mem = context.create(t.size)
    wrong: dict[int, list[dict[str, Any]]] = {
        V.INDEX: [{"name": b"y"}, {"index": 1}],
        V.FORMAT: [{"fmt": NHWC}, {"type": FLOAT32}, {"pass_through": 0}],
        V.DIMS: [{"w_stride": t.w_stride + 1}, {"size_with_stride": t.size - 2}, {"n_dims": 4}],
    }
    for kind, changes in wrong.items():
        for change in changes:
            attr = context.native_attr("x")
            for field, value in change.items():
                setattr(attr, field, value)
            assert context.bind("x", mem, attr) == PARAM
            assert double.kinds() == [kind], change
    small = context.create(t.size - 2)
    assert context.bind("x", small) == PARAM
    assert double.kinds() == [V.SIZE]
    wide = context.create(t.size + 32)
    odd = context.lib.rknn_create_mem_from_fd(context.handle, wide[0].fd, None, t.size, 32)
    assert context.bind("x", odd) == PARAM
    assert double.kinds() == [V.ALIGN]
    for unbound in (mem, small, wide, odd):
        assert context.lib.rknn_destroy_mem(context.handle, unbound) == OK
    context.destroy()


def test_runs_need_all_memory(double: Double, model: Path) -> None:
    context = ready(double, model)
    context.write(feeds(3))
    for name, code in (("past", INPUT), ("new", OUTPUT)):
        assert context.lib.rknn_destroy_mem(context.handle, context.mems.pop(name)) == OK
        assert context.run() == code
        assert double.kinds() == [V.UNBOUND]
        context.bind_all()
        context.write(feeds(3))
    check_run(context)
    context.destroy()


def test_a_dynamic_model_has_no_shape_by_itself(double: Double, model: Path) -> None:
    code, context = double.init(model)
    assert code == OK
    assert context.query(16, Attr()) == PARAM
    assert context.run() == INPUT
    attrs = (Attr * 3)()
    for i in range(3):
        attrs[i] = Attr(index=i, n_dims=4, dims=(1, 1, 1, 1), fmt=NHWC)
    assert context.lib.rknn_set_input_shapes(context.handle, 3, attrs) == PARAM
    assert double.kinds() == [V.SHAPES] * 3
    attrs[0].fmt = NCHW
    assert context.lib.rknn_set_input_shapes(context.handle, 3, attrs) == PARAM
    assert context.lib.rknn_set_input_shapes(context.handle, 2, attrs) == PARAM
    assert double.kinds() == [V.FORMAT, V.ARGUMENT]
    assert context.attr(8, 0).dims[3] == 3  # but the largest may be asked for
    context.destroy()


def test_arguments_that_mean_nothing(double: Double, model: Path) -> None:
    context = ready(double, model)
    lib, handle = context.lib, context.handle
    assert lib.rknn_query(handle, 8, byref(Attr()), 375) == PARAM
    assert lib.rknn_mem_sync(handle, context.mems["x"], 4) == PARAM
    assert not context.create(0)
    assert lib.rknn_set_core_mask(handle, 9) == PARAM
    assert lib.rknn_set_core_mask(handle, 7) == OK
    assert double.init(model, 1 << 30)[0] == PARAM
    assert lib.rknn_init(byref(CONTEXT_T()), b"model", 5, 0, None) == PARAM
    assert double.kinds() == [V.ARGUMENT] * 6
    assert context.query(9, Attr(index=2)) == PARAM
    assert not lib.rknn_create_mem_from_fd(handle, 0, None, 64, 0)
    assert double.kinds() == [V.INDEX, V.FD]
    context.destroy()


def test_writes_behind_memory(double: Double, model: Path) -> None:
    context = ready(double, model)
    mem = context.mems["x"][0]
    ctypes.memset(mem.virt_addr + mem.size, 0, 1)
    assert context.sync("x", TO_DEVICE) == OK
    assert double.kinds() == [V.EDGE]
    double.script("bounds")
    ctypes.memset(mem.virt_addr + mem.size + 9, 0, 1)
    assert context.query(8, Attr()) == OK  # any call
    assert double.kinds() == [V.EDGE]
    context.destroy()


def test_memory_in_use(double: Double, model: Path) -> None:
    context = ready(double, model)
    context.write(feeds(3))
    double.script("hang:+1:400")
    assert context.run(non_block=1) == OK
    assert context.sync("x", FROM_DEVICE) == OK  # the device only reads it
    assert context.sync("x", TO_DEVICE) == FAIL
    assert context.sync("new", FROM_DEVICE) == FAIL
    assert context.lib.rknn_destroy_mem(context.handle, context.mems["new"]) == FAIL
    assert context.run() == FAIL
    assert double.lib.double_violations().decode().count("\n") == 4
    assert context.wait() == OK
    assert context.wait() == FAIL
    assert double.kinds() == [V.RACE] * 5
    context.destroy()


def test_a_run_flushes_into_another(double: Double, model: Path) -> None:
    """Unless it is told not to, a run flushes inputs that another one reads."""
    one, three = (ready(double, model, rows=rows) for rows in ROWS)
    owned = one.mems["past"][0]
    old = three.mems["past"]
    size = c_uint32(owned.size)
    shared = three.lib.rknn_create_mem_from_fd(three.handle, owned.fd, None, size, 0)
    assert three.bind("past", shared) == OK
    assert three.lib.rknn_destroy_mem(three.handle, old) == OK
    one.write(feeds(1))
    fed = feeds(3)
    for name in ("x", "mask"):
        three.write_one(name, fed[name])
    double.script("hang:+1:400")
    assert one.run(non_block=1) == OK
    assert three.run() == OK  # what is flushed is there already
    one.host("past")[0] += 1
    assert three.run() == FAIL
    assert double.kinds() == [V.RACE]
    assert one.wait() == OK
    three.destroy()
    one.destroy()


# -- Faults ---------------------------------------------------------------------------------------


def test_refused_inits(double: Double, model: Path, tmp_path: Path) -> None:
    double.script("init:-13:2")
    assert [double.init(model)[0] for _ in range(2)] == [-13, -13]
    code, context = double.init(model)
    assert code == OK
    context.destroy()
    assert double.init(tmp_path / "npu.rknn")[0] == MODEL


def test_other_versions(double: Double, model: Path) -> None:
    double.script("version:1.4.0 driver:0.8.2")
    context = ready(double, model)
    assert context.versions() == ("1.4.0 (double@2026-01-01)", "0.8.2")
    context.destroy()


def test_out_of_memory_at_the_nth(double: Double, model: Path) -> None:
    double.script("create_mem:+3:2")
    code, context = double.init(model)
    made = [context.create(64) for _ in range(6)]
    assert (code, [bool(mem) for mem in made]) == (OK, [True, True, False, False, True, True])
    for mem in filter(bool, made):
        assert context.lib.rknn_destroy_mem(context.handle, mem) == OK
    context.destroy()


def test_failing_runs(double: Double, model: Path) -> None:
    context = ready(double, model)
    double.script("run:+2:-2;run:+3:-1")
    check_run(context)
    began = time.monotonic()
    assert context.run(timeout_ms=60) == TIMEOUT
    assert time.monotonic() - began >= 0.06
    assert context.run() == FAIL
    check_run(context)
    context.destroy()


def test_runs_that_take_long(double: Double, model: Path) -> None:
    context = ready(double, model)
    double.script("slow:30 hang:+2:60")
    began = time.monotonic()
    check_run(context)
    assert time.monotonic() - began >= 0.03
    assert context.run(timeout_ms=1) == OK
    assert time.monotonic() - began >= 0.12
    took = c_int64()
    assert double.lib.rknn_query(context.handle, 4, byref(took), 8) == OK
    assert took.value >= 90_000
    context.destroy()


def test_logits_that_are_no_numbers(double: Double, model: Path) -> None:
    context = ready(double, model)
    double.script("nan:+1")
    context.write(feeds(3))
    assert context.run() == OK
    assert np.isnan(context.read()["logits"]).all()
    assert np.isfinite(context.read()["new"]).all()
    check_run(context)
    context.destroy()


def test_a_lost_device_comes_back_for_new_contexts(double: Double, model: Path) -> None:
    first, second = ready(double, model), ready(double, model)
    double.script("lost:+2:1")
    check_run(first)
    assert first.run() == LOST
    assert second.run() == LOST
    assert second.sync("x", TO_DEVICE) == LOST
    assert not second.create(64)
    first.destroy()
    assert double.init(model)[0] == LOST  # the second is still there
    second.destroy()
    assert double.init(model)[0] == LOST  # once, as the script says
    third = ready(double, model)
    check_run(third)
    third.destroy()


def test_a_result_of_another_size(double: Double, model: Path) -> None:
    double.script("short:0")
    code, context = double.init(model)
    assert (code, context.shape(3)) == (OK, OK)
    t = VARIANTS[3].outputs[0]
    attr = context.native_attr("logits")
    assert attr.size_with_stride == t.size // 2
    mem = context.create(attr.size_with_stride)
    assert context.bind("logits", mem) == PARAM
    assert double.kinds() == [V.SIZE]
    assert context.lib.rknn_destroy_mem(context.handle, mem) == OK
    context.destroy()


def test_dynamic_models_that_cannot_be_duplicated(double: Double, model: Path) -> None:
    context = ready(double, model)
    double.script("nodup")
    assert double.lib.rknn_dup_context(byref(context.handle), byref(CONTEXT_T())) == FAIL
    context.destroy()


def test_a_script_with_a_mistake(double: Double, capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("lots:1", "run:1", "run:x:-1", "bounds:1"):
        assert double.lib.double_script(text.encode()) == -1
        said = capfd.readouterr().err
        assert text in said
        assert "lost:N[:TIMES]" in said


# -- In a process of its own ----------------------------------------------------------------------

START = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.rknn_create_mem.restype = ctypes.POINTER(ctypes.c_uint64)
context = ctypes.c_uint64()
def init(): return lib.rknn_init(ctypes.byref(context), sys.argv[2].encode(), 0, 0, None)
"""


def own_process(
    library: Path, model: Path, program: str, folder: Path, **environ: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A program that knows nothing of the double, and the double's report."""
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", START + program, str(library), str(model)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HEADRACE_DOUBLE_REPORT": str(report), **environ},
    )
    told = json.loads(report.read_text()) if report.exists() else {}
    return done, told


def test_script_and_report_by_the_environment(library: Path, model: Path, tmp_path: Path) -> None:
    program = "print(init(), init()); lib.rknn_create_mem(context, 64)"
    done, report = own_process(
        library, model, program, tmp_path, HEADRACE_DOUBLE_SCRIPT="init:-13:1"
    )
    assert (done.returncode, done.stdout) == (0, "-13 0\n"), done.stderr
    counts = {name: report[name] for name in ("contexts", "mems", "bytes", "fds", "violations")}
    assert counts == {"contexts": 1, "mems": 1, "bytes": 64, "fds": 1, "violations": []}
    assert report["trace"]["calls"]["rknn_init"] == 2


def test_a_wrong_script_ends_the_process(library: Path, model: Path, tmp_path: Path) -> None:
    done, _ = own_process(library, model, "init()", tmp_path, HEADRACE_DOUBLE_SCRIPT="lots:1")
    assert done.returncode == 2
    assert "lots:1 is none of" in done.stderr


def test_a_model_in_memory_is_found_by_the_environment(
    library: Path, model: Path, tmp_path: Path
) -> None:
    program = "print(lib.rknn_init(ctypes.byref(context), b'model', 5, 0, None))"
    done, _ = own_process(library, model, program, tmp_path, HEADRACE_DOUBLE_MODEL=str(model))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.parametrize(
    ("touch", "told"),
    [
        ("lib.rknn_destroy_mem(context, mem); ctypes.memset(at + 5, 0, 1)", "destroyed memory of"),
        ("ctypes.memset(at - 1, 0, 1)", "a guard page of memory of"),
        ("ctypes.memset(at + 5000, 0, 1)", "a guard page of memory of"),
    ],
    ids=["freed", "before", "behind"],
)
def test_touching_what_must_not_be_touched(
    library: Path, model: Path, tmp_path: Path, touch: str, told: str
) -> None:
    program = f"init(); mem = lib.rknn_create_mem(context, 64); at = mem[0]; {touch}"
    done, report = own_process(library, model, program, tmp_path)
    assert done.returncode == -11
    assert [v["kind"] for v in report["violations"]] == [V.FREED]
    assert report["violations"][0]["text"].startswith(f"the caller's code: {told}")


def test_what_builds_it(tmp_path: Path) -> None:
    reason = double_build.missing("no-such-compiler")
    assert reason is not None
    assert "no-such-compiler" in reason
    cross = "aarch64-linux-gnu-gcc"
    if double_build.missing(cross):
        pytest.skip(f"no {cross}")
    assert double_build.build(tmp_path, cross).exists()
