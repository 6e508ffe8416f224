"""The variants of a compiled draft, one for each number of rows, with their tensors bound.

A context that changes its shapes loses what is bound to it. So every variant has a context of its
own where it can (`rknn_dup_context`, which shares the weights), and binds once; keys and values are
one allocation that the other contexts know by its file descriptor. Rockchip's guide to dynamic
shapes says that such models cannot be duplicated; where that is so, all variants share one context,
and a pass of another width binds all tensors again. A pass of another lane binds that lane's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import NpuError, NpuModelError
from headrace.models.npu_io import NativeTensor, NpuIo, NpuVariant, is_kv
from headrace.npu.abi import CoreMask, InputRange, Query, TensorAttr, format_name
from headrace.npu.librknnrt import Buffer, Context
from headrace.npu.staging import Layout, Native


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor's buffer, and the view of it."""

    layout: Layout
    attr: TensorAttr
    buffer: Buffer

    @property
    def native(self) -> Native:
        return self.layout.view(self.buffer.bytes)


@dataclass(eq=False)
class Bound:
    """What a context is set to now."""

    context: Context
    variant: Variant | None = None
    lane: int | None = None


@dataclass(eq=False)
class Variant:
    """A number of rows, its own inputs and outputs, and the keys and values of every lane."""

    rows: int
    bound: Bound
    shapes: list[TensorAttr]
    kv_attrs: dict[str, TensorAttr]
    kv_layouts: dict[str, Layout]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    lanes: list[dict[str, Buffer]] = field(default_factory=list)
    """Every lane's keys and values, as this context knows them."""

    @property
    def context(self) -> Context:
        return self.bound.context

    def use(self, lane: int) -> bool:
        """Makes the context one for this variant and lane; whether it was another's. Raises NpuError,
        and all is bound again the next time.
        """
        bound = self.bound
        if (bound.variant, bound.lane) == (self, lane):
            return False
        if bound.variant is not self:
            bound.variant = None
            self.context.set_input_shapes(self.shapes)
            for tensor in (*self.inputs.values(), *self.outputs.values()):
                self.context.bind(tensor.buffer, tensor.attr)
            bound.variant = self
        bound.lane = None
        for name, buffer in self.lanes[lane].items():
            self.context.bind(buffer, self.kv_attrs[name])
        bound.lane = lane
        return True


def contexts(stack: ExitStack, first: Context, count: int) -> list[Context]:
    """As many contexts of the same model, or the first one alone."""
    found = [first]
    with ExitStack() as made:
        try:
            found += [made.enter_context(first.duplicate()) for _ in range(count - 1)]
        except NpuError:
            return [first]
        stack.enter_context(made.pop_all())
    return found


def open_variant(
    stack: ExitStack, bound: Bound, io: NpuIo, variant: NpuVariant, cores: CoreMask
) -> Variant:
    """Checks the runtime's tensors against the model's description, and binds all but the keys and
    values. What it allocates, `stack` closes. Raises NpuError.
    """
    context = bound.context
    counts = context.counts()
    if counts != (len(variant.inputs), len(variant.outputs)):
        raise NpuModelError(
            f"the model has {counts[0]} inputs and {counts[1]} outputs, its description "
            f"{len(variant.inputs)} and {len(variant.outputs)}; export it again"
        )
    shapes = list(_shapes(context, variant))
    context.set_input_shapes(shapes)
    context.set_cores(cores)
    kv: dict[str, TensorAttr] = {}
    kv_layouts: dict[str, Layout] = {}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for query, expected, found in (
        (Query.CURRENT_NATIVE_INPUT_ATTR, variant.inputs, inputs),
        (Query.CURRENT_NATIVE_OUTPUT_ATTR, variant.outputs, outputs),
    ):
        for index, tensor in enumerate(expected):
            attr = context.attribute(query, index)
            layout = _checked(attr, tensor)
            if is_kv(tensor.name):
                kv[tensor.name], kv_layouts[tensor.name] = attr, layout
                continue
            buffer = stack.enter_context(context.allocate(layout.size))
            context.bind(buffer, attr)
            found[tensor.name] = Tensor(layout, attr, buffer)
    made = Variant(variant.rows, bound, shapes, kv, kv_layouts, inputs, outputs)
    bound.variant, bound.lane = made, None
    return made


def _checked(attr: TensorAttr, expected: NativeTensor) -> Layout:
    """The layout that the runtime names, if it can be the described tensor's. What is padded and
    how is the runtime's to say; names, type and sizes are not.
    """
    layout = Layout.of(attr)
    n, c1, h, w, c2 = layout.shape
    en, ec, eh, ew = expected.dims
    if (
        layout.name != expected.name
        or layout.dtype != np.dtype(expected.type)
        or (n, h) != (en, eh)
        or w < ew
        or c1 * c2 < ec
    ):
        raise NpuModelError(
            f"the runtime has {layout.name} [{n}, {c1 * c2}, {h}, {w}] of {layout.dtype} where the "
            f"description has {expected.name} {list(expected.dims)} of {expected.type}; "
            "export the model again"
        )
    return layout.narrowed(ew)


def _shapes(context: Context, variant: NpuVariant) -> Iterator[TensorAttr]:
    """The variant's inputs as the runtime names its shapes, which may be NHWC."""
    for index, tensor in enumerate(variant.inputs):
        found = context.shapes(index)
        attr = context.attribute(Query.INPUT_ATTR, index)
        chosen = next(
            (d for d in _choices(found) if _as_nchw(d, format_name(found.fmt)) == tensor.dims), None
        )
        if chosen is None:
            raise NpuModelError(
                f"the model has no variant with {tensor.name} {list(tensor.dims)}; export it again"
            )
        attr.n_dims, attr.fmt = len(chosen), found.fmt
        attr.dims[: len(chosen)] = chosen
        yield attr


def _choices(found: InputRange) -> Iterator[tuple[int, ...]]:
    for shape in range(found.shape_number):
        yield tuple(found.dyn_range[shape][: found.n_dims])


def _as_nchw(dims: tuple[int, ...], fmt: str) -> tuple[int, ...]:
    if fmt == "NHWC" and len(dims) == 4:
        n, h, w, c = dims
        return n, c, h, w
    return dims


def same_layouts(variants: Sequence[Variant]) -> dict[str, Layout]:
    """Of keys and values. Raises NpuModelError where two variants would have them differently."""
    first = variants[0].kv_layouts
    for variant in variants[1:]:
        for name, layout in variant.kv_layouts.items():
            if layout != first[name]:
                raise NpuModelError(
                    f"{name} lies differently in the variants of {variants[0].rows} and "
                    f"{variant.rows} rows, so they cannot share it; export the model again"
                )
    for layout in (*first.values(), *(v.outputs["new"].layout for v in variants)):
        if (layout.shape[1], layout.shape[4]) != (first["tail"].shape[1], first["tail"].shape[4]):
            raise NpuModelError(
                f"{layout.name} groups its channels as {layout.shape}, the tail as "
                f"{first['tail'].shape}, so rows cannot be moved between them; export again"
            )
    return first
