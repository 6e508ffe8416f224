"""A bundle in words and figures, as `export`, `inspect` and `demo` show it."""

from __future__ import annotations

from headrace.commands.terminal import size
from headrace.models.config import ModelConfig
from headrace.models.iospec import KV_DTYPES, KV_POOL_BYTES
from headrace.models.manifest import Manifest, Parity

Facts = list[tuple[str, str]]

_ELEMENT_BYTES = {"float32": 4, "int8": 1}


def kv_bytes_per_token(config: ModelConfig, kv: str) -> dict[str, int]:
    """What one token's keys and values take in the pool and in the arena."""
    values = config.kv_values_per_token
    return {"pool": values * KV_POOL_BYTES[kv], "arena": values * _ELEMENT_BYTES[KV_DTYPES[kv]]}


def manifest_facts(manifest: Manifest) -> Facts:
    kv_bytes = kv_bytes_per_token(manifest.config, manifest.kv)
    clipping = manifest.kv_clipping or {}
    clipped = ", ".join(f"{share:.3%} of {name}" for name, share in clipping.items())
    on_disk = sum(record.size for record in manifest.files.values())
    return [
        ("name", manifest.name),
        *geometry_facts(manifest.config),
        ("weights", f"{manifest.quant}, from {manifest.source}"),
        ("cache", manifest.kv + (f"; clipped {clipped}" if clipped else "")),
        (
            "cache per token",
            f"{kv_bytes['pool']:,} bytes in the pool, {kv_bytes['arena']:,} in the arena",
        ),
        ("size on disk", size(on_disk)),
        ("made by", manifest.created_by),
    ]


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
