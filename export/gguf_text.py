"""The text side of GGUF metadata: special tokens as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import SourceError
from headrace.export.checkpoint import TokenizerSource
from headrace.models.fields import shown

# SentencePiece models whose files do not say otherwise
_SPM_BOS, _SPM_EOS = 1, 2

# byte-level BPE begins a text with bos only under these pre-tokenizers, unless the file says so
_BOS_PRE = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
    | {"tekken"}
)

# ends of an answer or a turn that files often have without naming them in their metadata
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}
    | {"<|endoftext|>", "<|end_of_text|>"}
)
_CONTROL, _USER_DEFINED = 3, 4


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> TokenizerSource:
    """Raises SourceError where the file has no tokenizer, or one that contradicts itself."""
    from headrace.export.tokenizer import tokenizer_from_gguf

    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(model, str) or not isinstance(tokens, list) or not tokens:
        raise SourceError(f"{where}: no tokenizer (tokenizer.ggml.model and .tokens)")
    spm = model == "llama"
    bos = _id(metadata, "bos", len(tokens), where)
    eos = _id(metadata, "eos", len(tokens), where)
    if spm:
        bos = _SPM_BOS if bos is None else bos
        eos = _SPM_EOS if eos is None else eos
    ends = [eos, *(_id(metadata, kind, len(tokens), where) for kind in ("eot", "eom"))]
    types = metadata.get("tokenizer.ggml.token_type") or []
    ends += [
        i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if text in _END_TEXTS and kind in (_CONTROL, _USER_DEFINED)
    ]
    template = metadata.get("tokenizer.chat_template")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = spm or metadata.get("tokenizer.ggml.pre") in _BOS_PRE
    return TokenizerSource(
        tokenizer_json=tokenizer_from_gguf(metadata),
        chat_template=template if isinstance(template, str) else None,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        add_bos=bool(add_bos) and bos is not None,
    )


def _id(metadata: Mapping[str, Any], kind: str, num_tokens: int, where: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise SourceError(f"{where}: {key} is {shown(value)}, but there are {num_tokens} tokens")
    return value
