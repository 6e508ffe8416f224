"""A bundle in words and figures, as `export`, `inspect` and `demo` show it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.commands.terminal import size
from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES, KV_POOL_BYTES
from headrace.models.manifest import Manifest
from headrace.models.records import Agreement, DraftRecord, ModelRecord, NpuRecord, Parity

Facts = list[tuple[str, str]]

_ELEMENT_BYTES = {"float32": 4, "int8": 1}


def kv_bytes_per_token(config: ModelConfig, kv: str) -> dict[str, int]:
    """What one token's keys and values take in the pool and in the arena."""
    values = config.kv_values_per_token
    return {"pool": values * KV_POOL_BYTES[kv], "arena": values * _ELEMENT_BYTES[KV_DTYPES[kv]]}


def manifest_facts(manifest: Manifest) -> Facts:
    """Of the bundle and its target."""
    on_disk = sum(record.size for record in manifest.files.values())
    return [
        ("name", manifest.name),
        *geometry_facts(manifest.config),
        *_storage_facts(manifest.target, manifest.source),
        ("size on disk", size(on_disk)),
        ("made by", manifest.created_by),
    ]


def draft_facts(draft: DraftRecord) -> Facts:
    kept, whole = draft.config.num_logits, draft.config.vocab_size
    fit = draft.vocabulary
    facts = [
        ("name", draft.name),
        ("layers kept", f"{span(draft.layers)} of {draft.source_layers}"),
        *_storage_facts(draft, draft.source),
        ("vocabulary", f"reads {whole:,} tokens, proposes {fit.proposable:,}"),
    ]
    if draft.trim is not None:
        saved = f"{size(draft.trim.bytes_saved)} of weights saved"
        covered = f"{draft.trim.coverage:.2%} of the corpus"
        facts.append(("head", f"{kept:,} of {whole:,} rows, {covered}; {saved}"))
    if fit.unreadable or fit.unmatched_share:
        unknown = f"{fit.unreadable:,} of the target's tokens"
        facts.append(("without partner", f"{unknown}, {fit.unmatched_share:.2%} of the draft's"))
    return [*facts, *parity_facts(draft.parity), *_agreement_facts(draft.agreement)]


def npu_facts(npu: NpuRecord) -> Facts:
    facts = [
        ("platform", f"{npu.platform}, {npu.quant}, by toolkit {npu.toolkit}"),
        ("compiled in", f"{npu.build_s:.0f} s, {size(npu.build_peak_bytes)}"),
        ("weights on the NPU", size(npu.weight_bytes)),
        ("step, modelled", f"{npu.step_s * 1e3:.1f} ms"),
        ("largest activation", f"{npu.largest:,.0f} of 65,504, at {npu.largest_at}"),
    ]
    for v in npu.variants:
        words = [
            f"{v.operators} operators, none on the CPU",
            f"{size(v.internal_bytes)} between them",
            f"{v.cycles / 1e6:.2f} M cycles",
            f"simulated: cosine {v.cosine:.6f}, error {v.max_error:.3g}",
            f"first choice {v.top1_same} of {v.top1_clear} clear ones",
        ]
        facts.append((f"{v.rows} row{'s' * (v.rows > 1)}", "; ".join(words)))
    return [*facts, *_agreement_facts(npu.agreement)]


def _agreement_facts(agreement: Agreement) -> Facts:
    return [
        ("target's first choice", f"{agreement.top1:.1%} of {agreement.tokens} tokens"),
        ("overlap with target", f"{agreement.overlap:.1%}, what sampling would accept"),
    ]


def _storage_facts(model: ModelRecord, source: str) -> Facts:
    kv_bytes = kv_bytes_per_token(model.config, model.kv)
    clipping = model.kv_clipping or {}
    clipped = ", ".join(f"{share:.3%} of {name}" for name, share in clipping.items())
    return [
        ("weights", f"{model.quant}, from {source}"),
        ("cache", model.kv + (f"; clipped {clipped}" if clipped else "")),
        (
            "cache per token",
            f"{kv_bytes['pool']:,} bytes in the pool, {kv_bytes['arena']:,} in the arena",
        ),
    ]


def span(numbers: Sequence[int]) -> str:
    """`0-3,5` for the numbers 0 1 2 3 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def geometry_facts(config: ModelConfig) -> Facts:
    facts = [
        ("family", config.family),
        ("layers", str(config.num_layers)),
        ("heads", f"{config.num_heads}, keys and values {config.num_kv_heads}"),
        ("head size", str(config.head_dim)),
        ("hidden size", f"{config.hidden_size}, in the MLP {config.intermediate_size}"),
        ("vocabulary", f"{config.vocab_size:,}, {'tied' if config.tied_head else 'untied'} head"),
        ("trained context", f"{config.max_position:,} tokens"),
        ("RoPE", _rope(config)),
    ]
    if config.has_local_layers:
        local = config.layer_types.count("sliding")
        window = f"{config.sliding_window:,} tokens" if config.sliding_window else "none"
        facts.append(("sliding layers", f"{local} of {config.num_layers}, window {window}"))
    return facts


def _rope(config: ModelConfig) -> str:
    ropes = [("", config.rope)]
    if config.rope_local is not None:
        ropes.append(("; sliding layers: ", config.rope_local))
    words = ""
    for label, rope in ropes:
        words += f"{label}angles per token {rope.inv_freq[0]:.4g} to {rope.inv_freq[-1]:.4g}"
        if rope.attention_scaling != 1.0:
            words += f", scaled by {rope.attention_scaling:.4g}"
    return words


def parity_facts(parity: Parity | None) -> Facts:
    if parity is None:
        return [("parity", "not measured")]
    return [
        ("parity measured on", f"{parity.tokens} tokens, against the float model"),
        ("mean KL", f"{parity.mean_kl:.3g} (limit {parity.limit:g})"),
        ("max KL", f"{parity.max_kl:.3g}"),
        ("same first choice", f"{parity.top1_agreement:.1%}"),
        ("perplexity", f"{parity.perplexity:.4f}, float model {parity.reference_perplexity:.4f}"),
    ]
