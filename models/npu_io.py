"""The inputs and outputs of a draft's graph for the NPU, and the `.io.json` that states them.

Every boundary tensor is [n, c, h, w] with what the NPU calls channels in `c` and tokens in `w`, so
that its native layout pads nothing and the compiler adds no layout operators. A token's keys and
values come back as one small tensor; the host puts them into the *tail*, a small input, and moves
the tail into the *main* inputs when it is full: a flush of the CPU's cache takes whole buffers.

Names here are the graph's, the compiled model's, and those of the file beside it, all alike.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import BundleError, UsageError
from headrace.models.config import ModelConfig

FORMAT, VERSION = "headrace-npu-io", 1

ITEM_BYTES = {"float16": 2, "int8": 1}
NATIVE_CHANNELS = {"float16": 8, "int8": 16}
"""C2 of NC1HWC2: channels that lie together."""


_ROW_BYTES = 16
"""What a row of a tensor of one channel is padded to."""


@dataclass(frozen=True)
class NpuGeometry:
    """Sizes of a lane, in tokens; one for all variants of a compiled model."""

    sinks: int
    window: int
    unit: int
    """Tokens that are evicted at once (runtime/ring.py)."""
    nodes: int
    """Drafted tokens that a lane can hold behind its text."""
    rows: tuple[int, ...]
    """Rows of each variant, ascending."""

    @property
    def main(self) -> int:
        """Slots of the main inputs."""
        return self.sinks + self.window

    @property
    def tail(self) -> int:
        """Entries of the tail."""
        return self.unit + self.nodes

    def keys(self, rows: int) -> int:
        """Columns of a mask: main, tail, and the rows of the pass itself."""
        return self.main + self.tail + rows


DEFAULT_ROWS = (1, 4, 8, 32)
INT8_ROWS = (1, 4, 8, 16)
"""Of variants; the compiler leaves an int8 mask of 32 rows and 608 keys to the CPU (docs/npu.md)."""
DEFAULT_CTX = 512
_SINKS = _UNIT = _NODES = 32


def geometry_for(
    config: ModelConfig, ctx: int | None = None, rows: tuple[int, ...] = DEFAULT_ROWS
) -> NpuGeometry:
    """Sizes with `ctx` slots of main inputs, unless set 512 or as many as the model needs or can
    have. Tail and unit are small: the tail is copied by the NPU and flushed by the CPU at every
    step, main once a unit (docs/npu.md). Raises UsageError.
    """
    most = (config.max_position - _UNIT) // _UNIT * _UNIT
    least = _SINKS + -(-max(_UNIT, config.local_window or 0) // _UNIT) * _UNIT
    if most < least:
        raise UsageError(
            f"a draft on the NPU needs a context of at least {least + _UNIT} tokens, this one was "
            f"trained for {config.max_position}; leave --platform out, or choose another draft"
        )
    if ctx is None:
        ctx = min(most, max(least, DEFAULT_CTX))
    if ctx % _UNIT or not least <= ctx <= most:
        raise UsageError(
            f"npu_ctx: got {ctx}, allowed are multiples of {_UNIT} from {least} to {most}"
        )
    return NpuGeometry(_SINKS, ctx - _SINKS, _UNIT, _NODES, rows)


@dataclass(frozen=True)
class NpuTensor:
    """A boundary tensor of one variant as the graph has it."""

    name: str
    dims: tuple[int, int, int, int]
    """[n, c, h, w]."""


def npu_inputs(config: ModelConfig, geometry: NpuGeometry, rows: int) -> list[NpuTensor]:
    """Inputs in graph order, of the variant of `rows` rows."""
    g, ropes = geometry, [""] + ["_local"] * (config.rope_local is not None)
    masks = [""] + ["_local"] * config.has_local_layers
    main = (config.num_kv_heads, config.head_dim, 1, g.main)
    return [
        NpuTensor("embeds", (1, config.hidden_size, 1, rows)),
        *(NpuTensor(f"mask{suffix}", (1, 1, rows, g.keys(rows))) for suffix in masks),
        *(
            NpuTensor(f"{name}{suffix}", (1, config.head_dim, 1, rows))
            for suffix in ropes
            for name in ("cos", "sin")
        ),
        NpuTensor("tail", (kv_planes(config), config.head_dim, 1, g.tail)),
        *(
            NpuTensor(name, main)
            for layer in range(config.num_layers)
            for name in main_names(layer)
        ),
    ]


def npu_outputs(config: ModelConfig, rows: int) -> list[NpuTensor]:
    """Outputs in graph order."""
    return [
        NpuTensor("logits", (1, config.num_logits, 1, rows)),
        NpuTensor("new", (kv_planes(config), config.head_dim, 1, rows)),
    ]


def is_kv(name: str) -> bool:
    """Whether an input is a lane's keys and values, the same in all variants."""
    return name == "tail" or name.startswith("main.")


def main_names(layer: int) -> tuple[str, str]:
    """Of a layer's keys and values."""
    return f"main.{layer}.key", f"main.{layer}.value"


def kv_planes(config: ModelConfig) -> int:
    """`n` of tail and new: plane (2 * layer + is_value) * kv_heads + head."""
    return 2 * config.num_layers * config.num_kv_heads


@dataclass(frozen=True)
class NativeTensor:
    """How the compiled model wants a tensor in memory."""

    name: str
    dims: tuple[int, int, int, int]
    type: str
    """A key of ITEM_BYTES."""
    native: tuple[int, int, int, int, int]
    """NC1HWC2: element (n, c, h, w) is at [n, c // C2, h, w, c % C2]."""
    w_stride: int
    """Positions from one h to the next; at least W."""
    size: int
    """Bytes, padding included."""
    scale: float = 1.0
    """int8: value = (code - zero) * scale."""
    zero: int = 0

    @classmethod
    def expected(cls, tensor: NpuTensor, kind: str = "float16", *, is_output: bool) -> NativeTensor:
        """By the rules that compiled models show (docs/npu.md); what a runtime's queries answer is
        what counts.
        """
        (n, c, h, w), item = tensor.dims, ITEM_BYTES[kind]
        if c == 1:
            c1, c2, stride = 1, 1, _padded(w, _ROW_BYTES // item)
        else:
            c2 = NATIVE_CHANNELS[kind]
            c1 = -(-c // c2)
            if is_output and tensor.name == "logits":
                c1 = _padded(c1, 2)
            stride = w if h * w == 1 else _padded(w, 4)
        size = n * c1 * h * stride * c2 * item
        return cls(tensor.name, tensor.dims, kind, (n, c1, h, w, c2), stride, size)


def _padded(number: int, to: int) -> int:
    return -(-number // to) * to


@dataclass(frozen=True)
class NpuVariant:
    rows: int
    inputs: tuple[NativeTensor, ...]
    outputs: tuple[NativeTensor, ...]


@dataclass(frozen=True)
class NpuProbe:
    """A short text and what comes of it: whether a board computes what was exported shows at once."""

    token_ids: tuple[int, ...]
    """The draft's."""
    columns: tuple[int, ...]
    """Some of its logits behind the last token."""
    logits: tuple[float, ...]
    """Their values, computed in float32."""
    tolerance: float
    """Largest error, as a share of what lies between the largest and the smallest of them."""


@dataclass(frozen=True)
class NpuIo:
    """Content of a compiled draft's `.io.json`."""

    platform: str
    toolkit: str
    """Version that compiled it; a runtime must be at least as new."""
    quant: str
    """fp16 or w8a8."""
    mask: float
    """What a mask adds to a score that must not count; 0 to one that does."""
    geometry: NpuGeometry
    variants: tuple[NpuVariant, ...]
    probe: NpuProbe | None = None

    @classmethod
    def expected(
        cls,
        config: ModelConfig,
        geometry: NpuGeometry,
        *,
        platform: str,
        toolkit: str,
        quant: str,
        mask: float,
    ) -> NpuIo:
        variants = tuple(
            NpuVariant(
                rows,
                tuple(
                    NativeTensor.expected(t, is_output=False)
                    for t in npu_inputs(config, geometry, rows)
                ),
                tuple(NativeTensor.expected(t, is_output=True) for t in npu_outputs(config, rows)),
            )
            for rows in geometry.rows
        )
        return cls(platform, toolkit, quant, mask, geometry, variants)

    def compiled(self, toolkit: str, types: Mapping[str, str]) -> NpuIo:
        """With what the compiler chose: its version, and types of tensors by name."""

        def typed(
            tensors: tuple[NativeTensor, ...], *, is_output: bool
        ) -> tuple[NativeTensor, ...]:
            return tuple(
                NativeTensor.expected(
                    NpuTensor(t.name, t.dims), types.get(t.name, t.type), is_output=is_output
                )
                for t in tensors
            )

        variants = tuple(
            NpuVariant(v.rows, typed(v.inputs, is_output=False), typed(v.outputs, is_output=True))
            for v in self.variants
        )
        return dataclasses.replace(self, toolkit=toolkit, variants=variants)

    @property
    def lane_bytes(self) -> int:
        """Of one lane's keys and values."""
        return sum(t.size for t in self.variants[0].inputs if is_kv(t.name))

    def save(self, path: Path) -> None:
        data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> NpuIo:
        """Raises BundleError."""
        try:
            data = json.loads(path.read_bytes())
            if (data.pop("format"), data.pop("version")) != (FORMAT, VERSION):
                raise BundleError(f"{path}: of another version; export the model again")
            return cls._from_json(data)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
            raise BundleError(f"{path}: cannot be read: {error}; export the model again") from error

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> NpuIo:
        geometry = dict(data["geometry"])
        geometry["rows"] = tuple(geometry["rows"])
        variants = tuple(
            NpuVariant(v["rows"], _tensors(v["inputs"]), _tensors(v["outputs"]))
            for v in data["variants"]
        )
        rest: dict[str, Any] = {"geometry": NpuGeometry(**geometry), "variants": variants}
        if (probe := data["probe"]) is not None:
            lists = {name: tuple(probe[name]) for name in ("token_ids", "columns", "logits")}
            rest["probe"] = NpuProbe(**{**probe, **lists})
        return cls(**{**data, **rest})


@dataclass(frozen=True)
class NpuFiles:
    """The files of a compiled draft, and what is known of it."""

    rknn: Path
    embeddings: Path
    """[vocab_size, hidden_size] float16, as the graph takes them."""
    io: NpuIo
    config: ModelConfig


def _tensors(data: list[dict[str, Any]]) -> tuple[NativeTensor, ...]:
    return tuple(
        NativeTensor(**{**t, "dims": tuple(t["dims"]), "native": tuple(t["native"])}) for t in data
    )
