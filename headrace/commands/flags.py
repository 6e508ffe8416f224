"""Flags made from the records they fill: names, defaults and help are written once, there."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from headrace.errors import UsageError
from headrace.runtime.config import Defer, DraftDevice, NpuCores, RuntimeConfig
from headrace.runtime.request import Accept, Exactness, SamplingParams, Sources

F = TypeVar("F", bound=Callable[..., Any])


_KINDS: dict[str, dict[str, Any]] = {
    "float": {"type": float},
    "int": {"type": int},
    "int | None": {"type": int},
    "str | None": {"type": str, "metavar": "LIST"},
    "bool": {"is_flag": True},
    "Bytes": {"type": str, "metavar": "SIZE"},
    "Bytes | None": {"type": str, "metavar": "SIZE"},
    "tuple[str, ...]": {"multiple": True, "metavar": "TEXT"},
    "Mapping[int, float]": {"multiple": True, "metavar": "ID=B"},
    "Speculate": {"type": str, "metavar": "auto|off|N"},
    "Exactness": {"type": click.Choice(get_args(Exactness))},
    "Accept": {"type": click.Choice(get_args(Accept))},
    "Sources": {"type": click.Choice(get_args(Sources))},
    "Defer": {"type": click.Choice(get_args(Defer))},
    "DraftDevice": {"type": click.Choice(get_args(DraftDevice))},
    "NpuCores": {"type": click.Choice(get_args(NpuCores))},
    "Path | None": {"type": click.Path(path_type=Path), "metavar": "FILE"},
}
"""How a field is asked for, by its annotation."""

PLACEMENT = (
    "target_threads",
    "target_cpus",
    "draft_device",
    "npu_library",
    "npu_cores",
    "draft_threads",
    "draft_cpus",
)
"""Fields of RuntimeConfig about where the models compute."""

_SAMPLING_FLAGS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in RuntimeConfig.__dataclass_fields__
]

_REPEATABLE = " Repeatable."


def sampling_flags(function: F) -> F:
    """One flag for every field of SamplingParams that RuntimeConfig does not have as well."""
    return _from_record(SamplingParams, _SAMPLING_FLAGS)(function)


def runtime_flags(*names: str) -> Callable[[F], F]:
    """Flags for the named fields of RuntimeConfig."""
    return _from_record(RuntimeConfig, names)


def sampling_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """What the user set of SamplingParams, by field; takes it out of `flags`."""
    settings = {name: flags.pop(name) for name in _SAMPLING_FLAGS}
    settings["stop"] = tuple(map(unescape, settings["stop"])) or None
    settings["logit_bias"] = _logit_bias(settings["logit_bias"]) or None
    return {name: value for name, value in settings.items() if value is not None}


def runtime_config(flags: dict[str, Any]) -> RuntimeConfig:
    """A RuntimeConfig from the flags that were set. Raises UsageError."""
    return RuntimeConfig(**{name: value for name, value in flags.items() if value is not None})


def json_value(text: str) -> object:
    """`true`, `3` and `"x"` as JSON has them; what is not JSON is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def key_values(flag: str, texts: Iterable[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """Pairs of a repeatable flag; raises UsageError for one without a `=` or a key."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{flag}: got {text!r}, expected {form}")
        pairs[key.strip()] = value
    return pairs


def unescape(text: str) -> str:
    r"""`\n`, `\r`, `\t` and `\\` become what they stand for; other backslashes stay."""
    pieces = [
        piece.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")
        for piece in text.split(r"\\")
    ]
    return "\\".join(pieces)


def read_text_file(flag: str, path: Path) -> str:
    """The content of a file that a flag names; raises UsageError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error.strerror}") from error


def _logit_bias(texts: Iterable[str]) -> dict[int, float]:
    bias = {}
    for key, value in key_values("--logit-bias", texts, "ID=B").items():
        try:
            bias[int(key)] = float(value)
        except ValueError:
            raise UsageError(
                f"--logit-bias: got '{key}={value}', expected ID=B, a token id and a number"
            ) from None
    return bias


def _from_record(record: type, names: Iterable[str]) -> Callable[[F], F]:
    docs = field_docs(record)
    fields = {field.name: field for field in dataclasses.fields(record)}

    def decorate(function: F) -> F:
        for name in reversed(list(names)):
            function = _option(fields[name], docs.get(name, ""))(function)
        return function

    return decorate


def _option(field: dataclasses.Field[Any], doc: str) -> Callable[[F], F]:
    kind = _KINDS[str(field.type)]
    if kind.get("multiple"):
        doc += _REPEATABLE
    elif field.default is not None and not kind.get("is_flag"):
        doc += f" Default: {field.default}."
    # Unset is None, so that what the model sets can come before our defaults.
    flag = field.name.replace("_", "-")
    if field.default is True:
        kind, flag = {}, f"{flag}/--no-{flag}"
    default = {} if kind.get("multiple") or kind.get("is_flag") else {"default": None}
    return click.option(f"--{flag}", help=doc, **kind, **default)


def field_docs(record: type) -> dict[str, str]:
    """The string under each field of a class, on one line; nothing where there is no source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for node, below in zip(body.body, body.body[1:], strict=False):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
