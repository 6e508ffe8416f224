"""Rendering chat templates, with what users wrote kept apart from what the template wrote."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
_PRIVATE = "[\U000f0000-\U000ffffd]"


class Shield:
    """Hides strings inside users' texts behind private-use characters, and restores them.

    Hidden are whole occurrences of the strings, and a beginning or an end of one at the edge of a
    text, which a template could complete. Private-use characters that a user wrote are hidden
    like the strings, so they are never taken for the shield's own. One shield serves one request.
    """

    def __init__(self, strings: "ShieldedStrings") -> None:
        self._strings = strings
        self._private_of: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """A copy of text, or of lists and mappings of texts; anything else is returned as it is."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(inner) for inner in value]
        return value

    def restore(self, text: str) -> str:
        hidden_by = {private: hidden for hidden, private in self._private_of.items()}
        return re.sub(_PRIVATE, lambda match: hidden_by.get(match[0], match[0]), text)

    def _hide_text(self, text: str) -> str:
        text = self._strings.whole.sub(lambda match: self._private(match[0]), text)
        # Templates trim: what follows the edge of the trimmed text is what counts.
        body = text.rstrip()
        if tail := self._strings.longest_tail(body):
            cut = len(body) - len(tail)
            text = body[:cut] + self._private(tail) + text[len(body) :]
        body = text.lstrip()
        if head := self._strings.longest_head(body):
            text = text[: len(text) - len(body)] + self._private(head) + body[len(head) :]
        return text

    def _private(self, hidden: str) -> str:
        return self._private_of.setdefault(hidden, chr(0xF0000 + len(self._private_of)))


class ShieldedStrings:
    """The strings a Shield hides, prepared once per tokenizer."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self.whole = re.compile("|".join([*map(re.escape, self._strings), _PRIVATE]))
        self._longest = max(map(len, self._strings), default=0)

    def longest_tail(self, text: str) -> str:
        """The longest end of `text` that one of the strings goes on from."""
        ends = (text[-n:] for n in range(min(self._longest - 1, len(text)), 0, -1))
        return next((end for end in ends if end in self._beginnings), "")

    def longest_head(self, text: str) -> str:
        """The longest beginning of `text` that completes one of the strings."""
        heads = (text[:n] for n in range(min(self._longest - 1, len(text)), 0, -1))
        return next((head for head in heads if head in self._ends), "")

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._strings for n in range(1, len(text)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self._strings for n in range(1, len(text)))


def render(
    template: str, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
) -> str:
    """The text of a chat. Raises UsageError, in one line, when the template or a role is at fault.

    Templates see what Hugging Face's see: messages, tools and documents (None unless given),
    raise_exception, strftime_now and the filter tojson.
    """
    for message in messages:
        if message.get("role") not in ROLES:
            raise UsageError(
                f"a message has the role {message.get('role')!r}; known are {', '.join(ROLES)}"
            )
    given: dict[str, object] = {"tools": None, "documents": None, **variables}
    try:
        return _compile(template).render(given, messages=messages)
    except Exception as error:  # a template is a program: it can raise whatever Python can
        text = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"the chat template failed: {text}") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for answering it is nothing."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # jinja2 only looks names up

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
