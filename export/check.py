"""Parity: the exported graph against the float32 reference of the same checkpoint; and agreement:
a draft's graph against its target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.errors import ExportError
from headrace.export.quantize import F32
from headrace.export.session import cpu_session
from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES, SPARE_SLOTS, kv_names, present_names
from headrace.models.records import Agreement, Parity
from headrace.models.rope import cos_sin

LIMITS = {"f32": 1e-5, "int8": 0.02, "keep": 0.02, "int4": 0.10}
"""Mean KL in nats above which an export fails, by the form of the weights."""

INT8_CACHE_LIMIT = 0.02
"""Added for an int8 cache."""

Role = Literal["target", "draft"]
"""Which of a bundle's models."""

_ROWS = 32


def limit(quant: str, kv: str) -> float:
    return LIMITS[quant] + (INT8_CACHE_LIMIT if kv == "int8" else 0.0)


def run_graph(graph: Path, config: ModelConfig, kv: str, token_ids: npt.NDArray[np.int64]) -> F32:
    """Logits [T, V] of an exported target graph over one text, a few rows at a time."""
    session = cpu_session(graph)
    slots = len(token_ids) + SPARE_SLOTS
    shape = (1, config.num_kv_heads, slots, config.head_dim)
    arena = [
        ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, KV_DTYPES[kv]))
        for _ in range(2 * config.num_layers)
    ]
    return np.concatenate(
        [
            _run_rows(session, config, arena, token_ids[past : past + _ROWS], past)
            for past in range(0, len(token_ids), _ROWS)
        ]
    )


def _run_rows(
    session: ort.InferenceSession,
    config: ModelConfig,
    arena: list[ort.OrtValue],
    ids: npt.NDArray[np.int64],
    past: int,
) -> F32:
    """Logits [T, V] of T tokens after `past` others; their KV is added to the arena in place."""
    num_rows = len(ids)
    declared = max(2, num_rows)  # see docs/exactness.md
    total = past + declared
    padded = np.zeros(declared, np.int64)
    padded[:num_rows] = ids
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "input_ids": padded[None],
        "seqlens_k": np.array([total - 1], np.int32),
        "query_seqlens": np.array([declared], np.int32),
        "total_sequence_length": np.array(total, np.int32),
        "logit_rows": np.arange(declared),
        "attention_bias": np.zeros((1, 1, declared, total), np.float32),
    }
    positions = np.arange(past, total)[None]
    feeds["cos"], feeds["sin"] = cos_sin(config.rope, positions)
    if config.rope_local is not None:
        feeds["cos_local"], feeds["sin_local"] = cos_sin(config.rope_local, positions)
    if config.has_local_layers:
        distance = positions[0][:, None] - np.arange(total)
        far = distance >= (config.sliding_window or 0)
        feeds["attention_bias_local"] = np.where(far, np.float32(-1e9), np.float32(0))[None, None]
    io = session.io_binding()
    for name, array in feeds.items():
        io.bind_cpu_input(name, array)
    names = [kv_names(i) for i in range(config.num_layers)]
    presents = [present_names(i) for i in range(config.num_layers)]
    flat = zip(sum(names, ()), sum(presents, ()), arena, strict=True)
    for past_name, present_name, value in flat:
        io.bind_ortvalue_input(past_name, value)
        io.bind_ortvalue_output(present_name, value)
    io.bind_output("logits")
    session.run_with_iobinding(io)
    logits = next(v for v in io.get_outputs() if v.shape() == [declared, config.num_logits])
    return np.asarray(logits.numpy()[:num_rows], dtype=np.float32).copy()


def compare(logits: F32, reference: F32, columns: npt.NDArray[np.int64], max_kl: float) -> Parity:
    """Figures of a graph's logits [T, V] beside the reference's on the same text.

    `columns` are the text's tokens as columns of the logits: their ids, but with a trimmed head,
    where -1 is a token without one. Perplexity leaves those out.
    """
    kls, agree, surprise = [], [], [[], []]  # type: tuple[list[float], list[bool], list[list[float]]]
    for row in range(len(columns)):
        p, q = _log_softmax(reference[row]), _log_softmax(logits[row])
        kls.append(float(np.sum(np.exp(p) * (p - q))))
        agree.append(bool(p.argmax() == q.argmax()))
        if row + 1 < len(columns) and columns[row + 1] >= 0:
            for which, log_probs in enumerate((q, p)):
                surprise[which].append(-float(log_probs[columns[row + 1]]))
    return Parity(
        tokens=len(columns),
        mean_kl=float(np.mean(kls)),
        max_kl=float(np.max(kls)),
        top1_agreement=float(np.mean(agree)),
        perplexity=float(np.exp(np.mean(surprise[0]))),
        reference_perplexity=float(np.exp(np.mean(surprise[1]))),
        limit=max_kl,
    )


def agreement(target: F32, draft: F32, to_target: npt.NDArray[np.int32]) -> Agreement:
    """Figures of a draft's logits [T, R] beside its target's [T, V] on the same text.

    Columns of the draft that `to_target` [R] gives no target id are never proposed, so they take
    no part.
    """
    columns = np.flatnonzero(to_target >= 0)
    ids = to_target[columns]
    same, overlaps = [], []
    for p_row, q_row in zip(target, draft, strict=True):
        p, q = np.exp(_log_softmax(p_row)), np.exp(_log_softmax(q_row[columns]))
        same.append(bool(p.argmax() == ids[q.argmax()]))
        overlaps.append(float(np.minimum(p[ids], q).sum()))
    return Agreement(len(same), float(np.mean(same)), float(np.mean(overlaps)))


def gate(parity: Parity, force: bool, role: Role = "target") -> None:
    """Raises ExportError for a graph that is too far from its reference."""
    if not parity.mean_kl <= parity.limit and not force:
        label, flag = ("", "--quant") if role == "target" else ("draft: ", "--draft-quant")
        raise ExportError(
            f"{label}parity: mean KL {parity.mean_kl:.4g} is above {parity.limit:g}; "
            f"choose a finer {flag} or --kv, give --calibrate a typical text, or insist with --force"
        )


def _log_softmax(row: F32) -> npt.NDArray[np.float64]:
    x = row.astype(np.float64)
    x -= x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))
