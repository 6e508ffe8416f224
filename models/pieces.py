"""The bytes that a token stands for, read off the decoder of a tokenizer.json."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.errors import BundleError

_KNOWN = "ByteFallback, ByteLevel, Fuse, Metaspace, Replace and Strip, alone or in a Sequence"
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True)
class Spelling:
    """How the text of a vocabulary entry spells bytes.

    `drops_first_space`: tokenising put a space before the text, and decoding a whole text takes
    one away from its beginning.
    """

    byte_level: bool = False
    byte_names: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    drops_first_space: bool = False

    def to_bytes(self, entry: str) -> bytes:
        """The bytes of a vocabulary entry that is not an added token."""
        if self.byte_names and (name := _BYTE_NAME.match(entry)):
            return bytes.fromhex(name[1])
        if self.byte_level:
            values = [_byte_of_letter().get(letter) for letter in entry]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                return bytes(known)
        return self.added_to_bytes(entry)

    def added_to_bytes(self, entry: str) -> bytes:
        """The bytes of an added token, which is written as its text, not in letters for bytes."""
        for old, new in self.replacements:
            entry = entry.replace(old, new)
        return entry.encode()


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """The spelling behind the `decoder` entry of a tokenizer.json.

    Raises BundleError for a decoder, or a setting of one, whose effect on bytes is not known.
    """
    byte_level = byte_names = drops_first_space = False
    replacements = []
    for step in _steps(decoder):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_names = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                drops_first_space = drops_first_space or start == 1
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                prepends = step.get("prepend_scheme", "always") != "never"
                drops_first_space = prepends and step.get("add_prefix_space", True)
            case _:
                raise BundleError(
                    f"the tokenizer's decoder is {json.dumps(step)}; known are {_KNOWN}"
                )
    return Spelling(byte_level, byte_names, tuple(replacements), drops_first_space)


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Any]:
    if decoder is not None and decoder.get("type") == "Sequence":
        for inner in decoder.get("decoders", ()):
            yield from _steps(inner)
    else:
        yield decoder


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest for letters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
