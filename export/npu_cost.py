"""What a step of a compiled draft would take on an RK3588, by two models that know different things.

By bytes: Rockchip's own figures for language models on the RK3588 (benchmark.md of rknn-llm 1.3.0:
w8a8, three cores, clocks locked at their maximum, decoding after 128 tokens) lie within about a
tenth of a line over the weights that a token reads: 8.1 ms + 32.2 ms per GB, from 135M to 3.8B
parameters. That is 31 GB/s behind a constant share. Those models ran in RKLLM, another compiler,
and read no external keys and values: a graph of ours may be slower than the line, hardly faster.

By cycles: the compiler's log counts cycles of convolutions and matrix products, for each the larger
of its memory's and its arithmetic's. At 1 GHz, the NPU's highest clock, their sum is a lower bound:
other operators count nothing, and neither does the start of each.

Neither is a measurement. What a plan should go by is the board's own (`headrace prepare`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.export.rknn_log import VariantLog

BASE_MS = 8.1
MS_PER_GB = 32.2
"""GB are 10^9 bytes."""
CLOCK_HZ = 1e9


@dataclass(frozen=True)
class StepCost:
    """Modelled milliseconds of one step."""

    by_bytes_ms: float
    by_cycles_ms: float
    """A lower bound."""


def step_cost(weight_bytes: int, cycles: int) -> StepCost:
    return StepCost(BASE_MS + MS_PER_GB * weight_bytes / 1e9, 1e3 * cycles / CLOCK_HZ)


def variant_cost(variant: VariantLog) -> StepCost:
    """Of a pass of a compiled variant, which reads all its weights."""
    return step_cost(variant.weight_bytes, variant.cycles)
