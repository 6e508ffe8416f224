"""What a draft is worth on this machine: a pair is exported, and its costs and speed are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from headrace.commands.bench import read_log
from headrace.commands.terminal import Reporter, print_facts, print_table, say
from headrace.export.options import DraftOptions, ExportOptions

if TYPE_CHECKING:
    from headrace.export.distill.evaluate import Figures
    from headrace.runtime.bench import Figures as Speeds

_ANSWER_TOKENS, _ROUNDS = 96, 1


@dataclass(frozen=True)
class Worth:
    """Of a pair on this machine, with both models on its CPU."""

    pass_s: tuple[float, ...]
    """Of the target with 1, 2, … rows, padding included."""
    draft_s: float
    """A pass of one row of the draft's."""
    speeds: list[Speeds]
    """By workload."""

    @property
    def draft_share(self) -> float:
        return self.draft_s / self.pass_s[0]

    def predicted(self, figures: Figures, length: int) -> float:
        """Speed-up of greedy chains of `length` over one row a pass, if nothing else took time.

        A chain's last token needs no pass of the draft after it, the first one needs one before.
        """
        spent = self.pass_s[length] + length * self.draft_s
        return figures.tokens_per_pass(length) * self.pass_s[0] / spent

    def to_json(self, figures: Sequence[Figures]) -> dict[str, Any]:
        lengths = range(1, len(figures[0].by_depth) + 1)
        return {
            "pass_ms": [1e3 * s for s in self.pass_s],
            "draft_pass_ms": 1e3 * self.draft_s,
            "draft_share": self.draft_share,
            "predicted": {f.name: [self.predicted(f, n) for n in lengths] for f in figures},
            "measured": [each.to_json() for each in self.speeds],
        }


def measure(target: str, draft: Path, logs: Sequence[Path], report: Reporter) -> Worth:
    """Exports the pair into a temporary folder and lets it answer; raises as both do.

    The workloads are those of `headrace bench`, made of `logs` or of the built-in one.
    """
    from headrace.export.build import export
    from headrace.runtime.bench import Bench
    from headrace.runtime.llm import LLM
    from headrace.runtime.workloads import Writer, built_in_logs

    with TemporaryDirectory(prefix="headrace-") as folder:
        bundle = Path(folder) / "pair"
        # the gate is for bundles that are kept
        options = ExportOptions(draft=DraftOptions(str(draft)), force=True)
        export(target, bundle, options, report)
        with LLM(bundle, say=say, cache=Path(folder) / "cache") as llm:
            speculation = llm.engine.speculation
            assert speculation is not None and speculation.drafter is not None
            writer = Writer(llm.tokenizer, llm.capacity, _ANSWER_TOKENS)
            sources = [read_log(path) for path in logs] or built_in_logs()
            bench = Bench(llm, writer.workloads(sources))
            report.stage("answering", bench.num_steps(_ROUNDS))
            speeds = bench.run(_ROUNDS, report.advance)
            pass_s = tuple(speculation.pace.costs().tolist())
            draft_s = speculation.drafter.candidates.opened.costs.of(1)
    return Worth(pass_s, draft_s, speeds)


def print_worth(worth: Worth, figures: Sequence[Figures]) -> None:
    lengths = range(1, len(figures[0].by_depth) + 1)
    names = ("", *map(str, lengths))
    rows = [(f.name, *(f"{worth.predicted(f, n):.2f}" for n in lengths)) for f in figures]
    numbers = frozenset(lengths)
    print_table("Predicted speed-up by length of the chain, greedy", names, rows, numbers=numbers)
    columns = ("", "plain tokens/s", "speed-up", "over look-ups", "tokens per pass")
    measured = [
        (
            each.workload,
            f"{each.plain_tokens_per_s:.1f}",
            f"{each.speedup:.2f}x",
            "" if each.speedup_over_lookups is None else f"{each.speedup_over_lookups:.2f}",
            f"{each.tokens_per_pass:.2f}",
        )
        for each in worth.speeds
    ]
    print_table("Measured, with look-ups", columns, measured, numbers=frozenset(range(1, 5)))
    target_ms, draft_ms = 1e3 * worth.pass_s[0], 1e3 * worth.draft_s
    print_facts(
        "",
        [
            ("a target pass of one row", f"{target_ms:.2f} ms"),
            ("a draft pass of one row", f"{draft_ms:.2f} ms, {worth.draft_share:.0%} of it"),
        ],
    )
