"""Small tokenizers that the tests train themselves."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.export.tokenizer import tokenizer_from_gguf
from headrace.runtime.tokenizer import Tokenizer

SPACE = "\u2581"
CORPUS = [
    "the pump of line 3 reports 71.5 °C and 4.02 bar",
    "valve V-101 stuck, retry 3/5; valve V-102 ok",
    "the quick brown fox jumps over the lazy dog 1234567890",
    "user assistant system im_start im_end <|im_start|> you'll they're it's",
    "日本語のテキスト 温度が高い 😀😃 héllo naïve",
] * 3


@cache
def byte_level_json() -> str:
    """Byte-level BPE with ChatML's control tokens and <think> as a token that is not special."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        ]
    )
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    text: str = inner.to_str()
    return text


@cache
def sentencepiece_metadata(space_prefix: bool) -> Mapping[str, Any]:
    """GGUF metadata of a SentencePiece-style BPE with byte fallback, trained on CORPUS."""
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.Replace(" ", SPACE)
    inner.train_from_iterator(CORPUS, trainer)
    model = json.loads(inner.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = [text for text in model["vocab"] if len(text) == 1]
    pieces = [*dict.fromkeys(merged), *letters]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*head, *pieces],
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def load(text: str, template: str | None = None, **habits: Any) -> Tokenizer:
    defaults = {"bos_id": None, "eos_ids": (), "add_bos": False, "vocab_size": 1000}
    return Tokenizer.from_json(text, chat_template=template, **{**defaults, **habits})


@cache
def byte_level() -> Tokenizer:
    return load(byte_level_json())


@cache
def sentencepiece(space_prefix: bool = True) -> Tokenizer:
    return load(tokenizer_from_gguf(sentencepiece_metadata(space_prefix)), bos_id=1, eos_ids=(2,))
