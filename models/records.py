"""What a bundle says of its models: a record for each graph, with the figures of its export."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from headrace.models.config import ModelConfig


@dataclass(frozen=True)
class Parity:
    """The exported graph against the float32 reference of the same checkpoint, on one text."""

    tokens: int
    mean_kl: float
    """Mean Kullback-Leibler divergence of the graph's distribution from the reference's, nats."""
    max_kl: float
    top1_agreement: float
    """Share of tokens at which both put the same token first."""
    perplexity: float
    """Like the next, over those of the text's tokens that the head has a row for."""
    reference_perplexity: float
    limit: float
    """The export fails above this mean_kl."""


@dataclass(frozen=True)
class ModelRecord:
    """One exported graph."""

    config: ModelConfig
    quant: str
    """The form of its weights, of `headrace export --quant`."""
    kv: str
    """Cache type, a key of `iospec.KV_DTYPES`."""
    kv_clipping: dict[str, float] | None
    """int8 cache: share of the parity text's keys and values that the calibrated steps clip."""
    parity: Parity | None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_json`; raises KeyError, TypeError or AssertionError."""
        return cls(**cls._fields(data))

    @classmethod
    def _fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "config": ModelConfig.from_json(data["config"]),
            "quant": data["quant"],
            "kv": data["kv"],
            "kv_clipping": data["kv_clipping"],
            "parity": Parity(**data["parity"]) if data["parity"] else None,
        }


@dataclass(frozen=True)
class Agreement:
    """How near a draft is to its target, graph beside graph, on the target's parity text."""

    tokens: int
    top1: float
    """Share of tokens at which both put the same token first."""
    overlap: float
    """Mean of the sum of min(p, q): the share of drafted tokens that sampling at temperature 1
    accepts."""


@dataclass(frozen=True)
class Vocabulary:
    """How a draft's vocabulary fits the target's; the map itself is a file."""

    tokenizer_sha256: str
    """Of the `tokenizer.json` that the map was made for."""
    target_size: int
    """The target's vocab_size."""
    proposable: int
    """Rows of the draft's head whose token the target has too; the others are never proposed."""
    unreadable: int
    """Target ids that no token of the draft stands for."""
    unmatched_share: float
    """Of the draft's tokens in a text: those that the target does not have."""


@dataclass(frozen=True)
class Trim:
    """A head that keeps the most frequent tokens of a corpus."""

    coverage: float
    """Share of the corpus' tokens that are kept."""
    bytes_saved: int
    """Of weights on disk, beside a head of all tokens."""


@dataclass(frozen=True)
class NpuVariantRecord:
    """One variant of a compiled draft: what the compiler said of it, and what its simulator gave."""

    rows: int
    operators: int
    internal_bytes: int
    """Of memory for what lies between operators."""
    cycles: int
    """The compiler's own estimate, a lower bound."""
    cosine: float
    """Of its logits in the simulator with ONNX Runtime's on the same inputs, the least of any row."""
    max_error: float
    """Of those logits."""
    top1_clear: int
    """Rows whose two best logits differ by more than that error."""
    top1_same: int
    """Of these, the rows that both give the same best token."""


@dataclass(frozen=True)
class NpuRecord:
    """A draft compiled for an NPU."""

    platform: str
    toolkit: str
    """Version of the compiler; a board's runtime library must be at least as new."""
    quant: str
    """`fp16` or `w8a8`."""
    weight_bytes: int
    build_s: float
    build_peak_bytes: int
    """Of the compiler's memory."""
    step_s: float
    """Modelled seconds of a step of one row (docs/npu.md)."""
    largest: float
    """Magnitude of the largest activation on the parity text; float16 ends at 65,504."""
    largest_at: str
    """The tensor that has it."""
    variants: tuple[NpuVariantRecord, ...]
    agreement: Agreement
    """Of the simulated draft with the target, on the target's parity text."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        variants = tuple(NpuVariantRecord(**v) for v in data["variants"])
        return cls(**{**data, "variants": variants, "agreement": Agreement(**data["agreement"])})


@dataclass(frozen=True)
class DraftRecord(ModelRecord):
    """The draft's graph, and what makes it this target's draft."""

    name: str
    source: str
    """Kind of its checkpoint, `gguf`, `huggingface` or `distilled`."""
    layers: tuple[int, ...]
    """Which of the checkpoint's layers it has, in its own order."""
    source_layers: int
    """How many layers the checkpoint has."""
    agreement: Agreement
    vocabulary: Vocabulary
    trim: Trim | None
    npu: NpuRecord | None = None
    """The same draft for an NPU."""

    def to_json(self) -> dict[str, Any]:
        data = super().to_json()
        if self.npu is None:
            del data["npu"]  # 0.1.0 would not know it, and reads all that do without
        return data

    @classmethod
    def _fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {
            **super()._fields(data),
            "name": data["name"],
            "source": data["source"],
            "layers": tuple(data["layers"]),
            "source_layers": data["source_layers"],
            "agreement": Agreement(**data["agreement"]),
            "vocabulary": Vocabulary(**data["vocabulary"]),
            "trim": Trim(**data["trim"]) if data["trim"] else None,
            "npu": NpuRecord.from_json(data["npu"]) if data.get("npu") else None,
        }
