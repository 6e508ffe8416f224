"""Range-checked reading of a checkpoint's configuration; a complaint names place, key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import SourceError, UnsupportedModelError


class Fields:
    """A configuration by Hugging Face's key names.

    A key that is absent or null takes the reader's default; without one it is missing. `keys` maps
    those names to the source's own where they differ (GGUF), so that messages speak the source's.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, keys: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self._keys = keys or {}

    def key(self, key: str) -> str:
        """`key` as the source spells it."""
        return self._keys.get(key, key)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, high: int, *, low: int = 1, default: int | None = None) -> int:
        """An integer from low to high; raises SourceError otherwise."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number between low and high, both included; raises SourceError otherwise."""
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (math.isfinite(value) and low <= value <= high)
        ):
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, table: Mapping[str, Any], default: str | None = None) -> Any:
        """The table's entry for a name; an unknown name raises UnsupportedModelError."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in table:
            known = ", ".join(sorted(table))
            raise UnsupportedModelError(
                f"{self.where}: {self.key(key)} is {shown(value)}; known: {known}"
            )
        return table[value]

    def mapping(self, key: str) -> Fields | None:
        """The fields of a nested object, or None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where}: {self.key(key)}")

    def error(self, key: str, wanted: str) -> SourceError:
        """The complaint that `key` is not what was wanted."""
        value = shown(self.values.get(key))
        return SourceError(f"{self.where}: {self.key(key)} is {value}, expected {wanted}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise SourceError(f"{self.where}: {self.key(key)} is missing")
        return value


def shown(value: Any) -> str:
    """A value of a checkpoint as a message may show it: one short line, nothing unprintable."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
