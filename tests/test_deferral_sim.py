"""Laws of benchmarks/deferral_sim.py: what is known in closed form, and what must add up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TOKENS = 8000
"""Whose rate has a standard deviation below 1 %."""


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("deferral_sim")


def rate(simulation: Any, num_tokens: int = TOKENS) -> float:
    """Tokens a millisecond."""
    run = simulation.run(num_tokens)
    return float(run.counts.committed / run.machine.now)


def test_costs_agree_with_the_published_speeds(sim: Any) -> None:
    """Tokens a second of RKLLM, and the table of rows at and between its entries."""
    npu_draft, npu_target = sim.placements(4)[0].draft, sim.placements(4)[1].target
    assert 1e3 / npu_draft(1) == pytest.approx(41.6, rel=0.02)
    assert 1e3 / npu_target(1) == pytest.approx(16.7, rel=0.05)
    assert [sim.relative_cost(rows) for rows in (1, 5, 8)] == pytest.approx([1.0, 1.85, 2.3])
    assert npu_target(8) / npu_target(1) == pytest.approx(1.01, abs=0.01)
    assert npu_target(128) == pytest.approx(378)


def test_acceptance_zero_commits_one_token_a_cycle(sim: Any) -> None:
    for placement in sim.placements(4):
        for k in (0, 1, 4):
            expected = 1 / (k * placement.draft(1) + placement.target(k + 1))
            done = rate(sim.Simulation(placement, 0.0, sim.Mode(k, deferred=False)))
            assert done == pytest.approx(expected, rel=1e-9), (placement.name, k)


@pytest.mark.parametrize("acceptance", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_in_line_rate_is_the_closed_form(sim: Any, acceptance: float, k: int) -> None:
    for placement in sim.placements(4):
        tokens = (1 - acceptance ** (k + 1)) / (1 - acceptance)
        expected = tokens / (k * placement.draft(1) + placement.target(k + 1))
        run = sim.Simulation(placement, acceptance, sim.Mode(k, deferred=False))
        assert rate(run, 20_000) == pytest.approx(expected, rel=0.02), placement.name


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_deferral_without_contention_costs_nothing(sim: Any, acceptance: float, k: int) -> None:
    for placement in sim.placements(4):
        inline = sim.inline_rate(placement, acceptance, k)
        done = rate(sim.Simulation(placement, acceptance, sim.Mode(k, True, inline)))
        assert done >= 0.98 * inline, (placement.name, done / inline)


def test_deferral_pays_where_the_draft_is_good(sim: Any) -> None:
    for placement in sim.placements(4):
        mode = sim.best_deferred(placement, 0.8, 1.0, sim.RUNNER_UP)
        done = rate(sim.Simulation(placement, 0.8, mode))
        assert done > 1.1 * sim.best_inline(placement, 0.8).rate, placement.name


@pytest.mark.parametrize("contention", [1.0, 1.3])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_device_is_busy_or_idle_all_the_time(sim: Any, deferred: bool, contention: float) -> None:
    for placement in sim.placements(4):
        mode = sim.Mode(2, deferred, sim.inline_rate(placement, 0.9, 2))
        machine = sim.Simulation(placement, 0.9, mode, contention).run(2000).machine
        both = sum(machine.busy.values()) - machine.now
        assert deferred == (both > 0.1 * machine.now), "whether the devices overlap"
        for device in (sim.DRAFT, sim.TARGET):
            total = machine.busy[device] + machine.idle[device]
            assert total == pytest.approx(machine.now, rel=1e-9)


def test_contention_stretches_what_overlaps(sim: Any) -> None:
    machine = sim.Machine(1.5)
    machine.start(sim.TARGET, 10.0)
    machine.start(sim.DRAFT, 4.0)
    assert machine.next() == sim.DRAFT and machine.now == pytest.approx(6.0)
    assert machine.next() == sim.TARGET and machine.now == pytest.approx(12.0)


def test_every_drafted_token_is_used_or_wasted(sim: Any) -> None:
    """A perfect draft wastes nothing, and every pass after the first finds a head start."""
    placement = sim.placements(1)[0]
    mode = sim.Mode(3, True, sim.inline_rate(placement, 1.0, 3))
    figures = sim.Simulation(placement, 1.0, mode).run(TOKENS).to_json()
    assert figures["wasted"] < 0.001
    assert figures["head_start_hits"] > 0.99


def test_a_seed_repeats_a_run(sim: Any) -> None:
    placement = sim.placements(4)[0]
    mode = sim.Mode(2, True, sim.inline_rate(placement, 0.7, 2))

    def figures(seed: int) -> Any:
        return sim.Simulation(placement, 0.7, mode, 1.15, seed=seed).run(2000).to_json()

    assert figures(1) == figures(1) != figures(2)


def test_the_last_line_of_json_is_one_object(
    sim: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokens", "500", "--acceptance", "0.9", "--contention", "1.15"]
    monkeypatch.setattr("sys.argv", ["deferral_sim.py", *arguments, "--json"])
    sim.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [p["placement"] for p in result["points"]] == list(result["plain_tokens_per_s"])
    monkeypatch.setattr("sys.argv", ["deferral_sim.py", *arguments])
    sim.main()
    assert "deferred 1.15" in capsys.readouterr().out


def test_a_distilled_draft_costs_less_than_a_sibling(sim: Any) -> None:
    """Four layers of the 1.5B read less than all of the 0.5B; the target is the same."""
    (distilled,), sibling = sim.placements(4, is_distilled=True), sim.placements(4)[0]
    assert sim.NPU_FIXED_MS < distilled.draft(1) < 0.7 * sibling.draft(1)
    assert distilled.target(5) == sibling.target(5)
