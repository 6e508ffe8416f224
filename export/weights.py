"""What every checkpoint must pass, in any format: the table of weights, and finite numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from headrace.errors import SourceError, UnsupportedModelError
from headrace.export.quantize import QuantMatrix
from headrace.models.fields import shown

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

F32 = npt.NDArray[np.float32]
Weight = F32 | QuantMatrix
Shape = tuple[int, ...]


def check_table(expected: Mapping[str, Shape], found: Mapping[str, Shape], where: str) -> None:
    """Holds a checkpoint's weights against the table, both by the checkpoint's own names.

    Raises:
        SourceError: a weight is missing or has another shape.
        UnsupportedModelError: a weight is left over; the known ones are listed.
    """
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            raise SourceError(
                f"{where}: weight {name} has shape {list(found[name])}, "
                f"the configuration asks for {list(expected[name])}"
            )
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise SourceError(f"{where}: weight {missing[0]} is missing{_more(missing)}")
    left_over = sorted(found.keys() - expected.keys())
    if left_over:
        known = sorted({re.sub(r"\.\d+\.", ".N.", name) for name in expected})
        raise UnsupportedModelError(
            f"{where}: weight {shown(left_over[0])} is unknown{_more(left_over)}; "
            f"known: {', '.join(known)}"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def check_finite(weight: Weight, name: str, where: str) -> None:
    """Raises SourceError if a weight holds NaN or infinity."""
    if isinstance(weight, QuantMatrix):
        parts = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    else:
        parts = [weight]
    for part in parts:
        count = part.size - int(np.count_nonzero(np.isfinite(part)))
        if count:
            what = "block scales" if isinstance(weight, QuantMatrix) else "values"
            raise SourceError(
                f"{where}: weight {name} has {count} of {part.size} {what} that are NaN or infinite"
            )
