"""When rows come out as the same bits: the rules of docs/exactness.md as functions."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from headrace.errors import ExactnessError
from headrace.models.config import ModelConfig

MIN_DECLARED_ROWS = 2
"""A lane that declares one row gets another attention kernel, and other last bits: `least_rows`."""

QUERY_BLOCK = 16
"""The attention operator takes a lane's rows in blocks of `2 * head_dim`, fewer on a small L2 cache,
but always a multiple of this; a last block of one row gets another kernel, like a single row."""

MAX_EXACT_HEAD_DIM = 128
"""Above it, x86 kernels of a float cache depend on the width of the pass."""


@dataclass(frozen=True)
class Machine:
    """The facts about a CPU that decide what is exact on it."""

    arch: str
    row_multiple: int
    """Slots in use after a pass must be a multiple of this."""

    @classmethod
    def here(cls) -> Machine:
        arch = platform.machine()
        return cls(arch, 4 if arch in ("aarch64", "arm64") else 1)


def least_rows(quant: str, kv: str, machine: Machine) -> int:
    """Rows of a pass from which on none depends on how many there are.

    On x86, one where weights and cache are both of 8 bits: neither the products nor attention have
    a kernel of their own for single rows then.
    """
    is_arm = machine.row_multiple > 1
    return 1 if (quant, kv) == ("int8", "int8") and not is_arm else MIN_DECLARED_ROWS


def declared_rows(
    past: int, num_rows: int, machine: Machine, least: int = MIN_DECLARED_ROWS
) -> int:
    """Rows to declare to the attention operator for `num_rows` real ones, padding included.

    `least` is what `least_rows` says.
    """
    return padded_rows(past, num_rows, machine.row_multiple, least)


def padded_rows(past: int, num_rows: int, row_multiple: int, least: int) -> int:
    """`declared_rows` by the facts of a backend."""
    declared = max(num_rows, least)
    declared += -(past + declared) % row_multiple
    if declared % QUERY_BLOCK == 1 and least > 1:
        declared += row_multiple
    return declared


def most_padding(row_multiple: int) -> int:
    """Rows that `declared_rows` may add: up to a multiple, and one multiple more."""
    return 2 * row_multiple - 1


def is_exact(config: ModelConfig, kv: str, machine: Machine) -> bool:
    float_cache = kv != "int8"
    is_arm = machine.row_multiple > 1
    return is_arm or not float_cache or config.head_dim <= MAX_EXACT_HEAD_DIM


def require_exact(config: ModelConfig, kv: str, machine: Machine) -> None:
    """Raises ExactnessError where `is_exact` says no."""
    if not is_exact(config, kv, machine):
        raise ExactnessError(
            f"a {kv} cache with head_dim {config.head_dim} is not bit-exact on {machine.arch} "
            f"(at most {MAX_EXACT_HEAD_DIM} is); export with --kv int8, or run with "
            "--exactness tree, which promises the distribution but not the bits"
        )
