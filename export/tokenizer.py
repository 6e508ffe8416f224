"""tokenizer.json from the tokenizer that a GGUF file carries in its metadata."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.errors import SourceError, UnsupportedModelError
from headrace.export.pretokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_TYPES = frozenset((_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE))
_ROLES = ("bos", "eos", "eot", "eom")
_MARKER = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_SPACE = "\u2581"


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> str:
    """The text of a tokenizer.json that tokenises as the GGUF file's own tokenizer does.

    `metadata` maps GGUF keys to plain Python values. Control and unknown tokens become special
    added tokens, user-defined ones added tokens that are not special. No post-processor is
    written: start tokens are the caller's affair. One difference is wanted: merging never yields
    a control token, so text that spells one stays text.

    Raises UnsupportedModelError for an unknown model or pre-tokenizer name, SourceError for
    fields that are missing or contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r}; known are {', '.join(sorted(builders))}"
        )
    tokens = _field(metadata, "tokens", str)
    if not tokens:
        raise SourceError("tokenizer.ggml.tokens is empty")
    types = _token_types(metadata, tokens)
    built = builders[model](metadata, tokens, types)
    for kinds, special in (((_UNKNOWN, _CONTROL), True), ((_USER_DEFINED,), False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds and token
        ]
        if special:
            built.add_special_tokens(added)
        else:
            built.add_tokens(added)
    text: str = built.to_str()
    return text


def drop_tokens_without_row(tokenizer_json: str, vocab_size: int) -> tuple[str, tuple[str, ...]]:
    """The json without the special tokens that a model of `vocab_size` rows cannot take.

    Also returns their names. Gemma 3's small models, for example, share a tokenizer with larger
    ones that have an image token more. Other tokens are kept: one without a row is an error that
    loading reports.
    """
    document = json.loads(tokenizer_json)
    kept: list[Any] = []
    dropped: list[Any] = []
    for token in document.get("added_tokens") or []:
        without_row = token["special"] and token["id"] >= vocab_size
        (dropped if without_row else kept).append(token)
    if not dropped:
        return tokenizer_json, ()
    document["added_tokens"] = kept
    names = tuple(token["content"] for token in dropped)
    vocab = document["model"]["vocab"]
    for name in names:
        if isinstance(vocab, dict):
            vocab.pop(name, None)
    return json.dumps(document, ensure_ascii=False), names


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    pre = PRE_TOKENIZERS[name]
    vocab = _vocab(tokens)
    merges = _read_merges(_field(metadata, "merges", str), vocab)
    built = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.whole_words))
    steps = [pre_tokenizers.Split(Regex(step), "isolated") for step in pre.steps]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    built.decoder = decoders.ByteLevel()
    return built


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = _field(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise SourceError(f"tokenizer.ggml.scores has {len(scores)} values, tokens {len(tokens)}")
    vocab = _vocab(tokens)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    _check_id("unknown", unknown_id, len(tokens))
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(vocab, scores, types),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_visible, to_space = normalizers.Replace(" ", _SPACE), decoders.Replace(_SPACE, " ")
    restore = [to_space, decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_visible])
        restore.append(decoders.Strip(" ", 1, 0))
    else:
        built.normalizer = to_visible
    built.decoder = decoders.Sequence(restore)
    return built


def _merges_by_score(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, best score first.

    SentencePiece joins whichever neighbours give the best-scored token, so all splits of a token
    get neighbouring ranks. Of one token's splits the longer left part goes first: runs are joined
    from the left, which leaves the shorter remainder on the right.
    """
    ranked = []
    for token, token_id in vocab.items():
        # Text must not grow into a control token or into the name of a byte.
        if types[token_id] not in (_NORMAL, _USER_DEFINED, _UNUSED):
            continue
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocab and token[cut:] in vocab:
                ranked.append((-scores[token_id], token_id, -cut, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _read_merges(lines: Sequence[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(lines):
        # The left part is never empty, so a line may begin with the space that it merges.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not right:
            raise SourceError(f"tokenizer.ggml.merges[{number}] is {line!r}, not two tokens")
        for token in (left, right, left + right):
            if token not in vocab:
                raise SourceError(
                    f"tokenizer.ggml.merges[{number}] needs {token!r}, which is not a token"
                )
        merges.append((left, right))
    return merges


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        # Some converters leave holes of the vocabulary empty; no text reaches those ids.
        name = token or f"[EMPTY_{token_id}]"
        if name in vocab:
            raise SourceError(f"tokenizer.ggml.tokens has {name!r} at {vocab[name]} and {token_id}")
        vocab[name] = token_id
    return vocab


def _token_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Sequence[int]:
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = list(_field(metadata, "token_type", int))
    if len(types) != len(tokens):
        raise SourceError(
            f"tokenizer.ggml.token_type has {len(types)} values, tokens {len(tokens)}"
        )
    if unknown := set(types) - _TYPES:
        raise SourceError(
            f"tokenizer.ggml.token_type has {sorted(unknown)}; known are {sorted(_TYPES)}"
        )
    for role in _ROLES:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is None:
            continue
        _check_id(role, token_id, len(tokens))
        # Some converters mark a start or end token as text; it must not be one that users can type.
        user_defined = types[token_id] == _USER_DEFINED
        if user_defined or (types[token_id] == _NORMAL and _MARKER.fullmatch(tokens[token_id])):
            types[token_id] = _CONTROL
    return types


def _check_id(role: str, token_id: Any, num_tokens: int) -> None:
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise SourceError(
            f"tokenizer.ggml.{role}_token_id is {token_id!r}; ids are 0 to {num_tokens - 1}"
        )


def _field(metadata: Mapping[str, Any], name: str, kind: type) -> Sequence[Any]:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise SourceError(f"{key} is missing")
    values = metadata[key]
    if not isinstance(values, list | tuple) or not all(isinstance(value, kind) for value in values):
        raise SourceError(f"{key} is not a list of {kind.__name__}")
    return values
