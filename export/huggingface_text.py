"""The text side of a Hugging Face folder: tokenizer, chat template, special tokens, sampling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import SourceError
from headrace.export.checkpoint import TokenizerSource
from headrace.models.fields import shown

# tokenizer classes that build their post-processor from add_bos_token, which they default to true
_BOS_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def read_text(path: Path) -> str:
    """A file's text; raises SourceError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 text: byte {error.start} is wrong") from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A file's JSON object, {} if it may be absent and is; raises SourceError on anything else."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON, perhaps truncated: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: not a JSON object")
    return value


def read_sampling(folder: Path) -> dict[str, float]:
    """generation_config.json's settings by our names; greedy where it says do_sample: false."""
    path = folder / "generation_config.json"
    values = read_json(path, optional=True)
    sampling: dict[str, float] = {}
    for key, name in _SAMPLING.items():
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise SourceError(f"{path}: {key} is {shown(value)}, expected a number of at least 0")
        sampling[name] = value
    if values.get("do_sample") is False:
        sampling = {k: v for k, v in sampling.items() if k == "repeat_penalty"}
        sampling["temperature"] = 0.0
    return sampling


def read_tokenizer(folder: Path) -> TokenizerSource:
    """Raises SourceError where the folder has no tokenizer.json, or one that cannot be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise SourceError(
                f"{folder}: has tokenizer.model but no tokenizer.json; make one with "
                'transformers: AutoTokenizer.from_pretrained("…").save_pretrained("…")'
            )
        raise SourceError(f"{folder}: no tokenizer.json")
    text = read_text(path)
    tokenizer = read_json(path)
    ids = _token_ids(tokenizer, path)
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    special = {**read_json(folder / "special_tokens_map.json", optional=True), **settings}
    config = read_json(folder / "config.json", optional=True)
    generation = read_json(folder / "generation_config.json", optional=True)

    bos = _special_id(special, "bos_token", ids, path)
    if bos is None and "bos_token" not in special:
        bos = next(iter(_ids(config, "bos_token_id", folder / "config.json")), None)
    eos = _special_id(special, "eos_token", ids, path)
    eos_ids = [
        *_ids(generation, "eos_token_id", folder / "generation_config.json"),
        *([] if eos is None else [eos]),
        *_ids(config, "eos_token_id", folder / "config.json"),
    ]
    return TokenizerSource(
        tokenizer_json=text,
        chat_template=_chat_template(folder, settings),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        add_bos=bos is not None and _adds_bos(settings, tokenizer, bos, ids),
    )


def _token_ids(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Text -> id of every token."""
    try:
        vocab = tokenizer["model"]["vocab"]
        # a unigram model's vocabulary is a list of [text, score]
        pairs: Iterable[tuple[str, int]] = (
            vocab.items()
            if isinstance(vocab, dict)
            else ((entry[0], i) for i, entry in enumerate(vocab))
        )
        ids = dict(pairs)
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError) as error:
        raise SourceError(f"{path}: not a tokenizer of the tokenizers library") from error
    return ids


def _special_id(
    special: Mapping[str, Any], key: str, ids: Mapping[str, int], path: Path
) -> int | None:
    value = special.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or value not in ids:
        raise SourceError(f"{path}: {key} {shown(value)} is not in the vocabulary")
    return ids[value]


def _ids(values: Mapping[str, Any], key: str, path: Path) -> list[int]:
    """One id, a list of ids, or nothing."""
    value = values.get(key)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    for item in listed:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise SourceError(f"{path}: {key} is {shown(value)}, expected one token id or a list")
    return list(listed)


def _adds_bos(
    settings: Mapping[str, Any], tokenizer: Mapping[str, Any], bos: int, ids: Mapping[str, int]
) -> bool:
    """Whether transformers' tokenizer would begin a text with `bos`."""
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if name in _BOS_CLASSES:
        return settings.get("add_bos_token", True) is not False
    steps = [tokenizer.get("post_processor") or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0].get("processors") or []
    for step in steps:
        single = step.get("single") or [{}]
        if step.get("type") == "TemplateProcessing" and "SpecialToken" in single[0]:
            return ids.get(single[0]["SpecialToken"].get("id")) == bos
    return False


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    path = folder / "chat_template.json"
    value = read_json(path, optional=True).get("chat_template")
    if value is None:
        path, value = folder / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        if "default" not in named:
            raise SourceError(
                f"{path}: chat_template has no template named default; it has: "
                f"{', '.join(shown(name) for name in named)}"
            )
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{path}: chat_template is neither text nor a list of named templates")
    return value
