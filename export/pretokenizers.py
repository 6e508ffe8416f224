"""How byte-level BPE vocabularies cut text before merging, by the name that GGUF gives it.

A step is a regular expression: the text is cut so that its matches and what lies between them
are pieces of their own, and the next step cuts those pieces.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ONE_DIGIT = _WORDS.replace("DIGITS", r"\p{N}")
_THREE_DIGITS = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`whole_words`: a piece that is a token as it stands is that token, whatever the merges say."""

    steps: tuple[str, ...]
    whole_words: bool = False


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_THREE_DIGITS,), whole_words=True)
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_QWEN2 = PreTokenizer((_ONE_DIGIT,))

PRE_TOKENIZERS = {
    "command-r": _DIGITS_THEN_GPT2,
    "dbrx": PreTokenizer((_THREE_DIGITS,)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-r1-qwen": _QWEN2,
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon3": _LLAMA3,
    "gpt-2": _PLAIN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "megrez": _QWEN2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "qwen2": _QWEN2,
    "refact": _DIGITS_THEN_GPT2,
    "smaug-bpe": PreTokenizer((_THREE_DIGITS,)),
    "smollm": _DIGITS_THEN_GPT2,
    "stablelm2": _QWEN2,
    "starcoder": _DIGITS_THEN_GPT2,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True),
}
