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

QUANT_BLOCK = 32
"""Columns of a weight matrix that have one scale. Arm's 4-bit products compute the last of a pass's
rows otherwise where a matrix has several blocks and ends within one."""

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


def is_exact(config: ModelConfig, quant: str, kv: str, machine: Machine) -> bool:
    return _why_not(config, quant, kv, machine) is None


def require_exact(config: ModelConfig, quant: str, kv: str, machine: Machine) -> None:
    """Raises ExactnessError where `is_exact` says no."""
    why = _why_not(config, quant, kv, machine)
    if why is not None:
        raise ExactnessError(
            f"{why}, or run with --exactness tree, which promises the distribution but not the bits"
        )


def _why_not(config: ModelConfig, quant: str, kv: str, machine: Machine) -> str | None:
    """What keeps rows from being exact, and what to do instead."""
    if machine.row_multiple == 1:
        if kv == "int8" or config.head_dim <= MAX_EXACT_HEAD_DIM:
            return None
        return (
            f"a {kv} cache with head_dim {config.head_dim} is not bit-exact on {machine.arch} "
            f"(at most {MAX_EXACT_HEAD_DIM} is); export with --kv int8"
        )
    columns = {config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim}
    odd = sorted(n for n in columns if n > QUANT_BLOCK and n % QUANT_BLOCK)
    if quant != "int4" or not odd:
        return None
    return (
        f"4-bit weights of {odd[0]} columns are not bit-exact on {machine.arch} (multiples of "
        f"{QUANT_BLOCK} are); export with --quant int8"
    )
