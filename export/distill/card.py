"""What a draft's folder says about itself to a person."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.export.distill.corpus import apart
from headrace.export.distill.options import Plan
from headrace.export.distill.training import BATCH
from headrace.sizes import show_size

if TYPE_CHECKING:
    from headrace.export.distill.run import Distilled

CARD, CURVE = "README.md", "training.png"


def write_card(folder: Path, target: str, plan: Plan, done: Distilled) -> None:
    """README.md, and where matplotlib is installed the curve of the training."""
    last = done.log[-1]
    corpus = ", ".join(apart([Path(path) for path in plan.corpus])) or "generated logs and requests"
    rows = {
        "made by": f"`{_command(target, plan)}`, torch {plan.torch}",
        "target": f"{target} (embedding {plan.target['embedding_sha256'][:12]})",
        "begun as its layers": ", ".join(map(str, done.layers)),
        **({} if done.parent is None else {"goes on from": _parent(done.parent)}),
        "head": "whole"
        if done.head_size is None
        else f"{done.head_size:,} tokens, "
        f"{done.coverage:.1%} of what the target expects in the texts",
        "texts": f"{plan.num_texts:,} of {plan.length} tokens, read or written by the target; "
        f"corpus: {corpus}",
        "learned from": f"{last.tokens:,} tokens in {plan.steps:,} steps, seed {plan.seed}",
        "time": f"{last.seconds / 60:.0f} minutes of training on {plan.threads} threads; "
        "the target's reading and writing comes on top",
        "peak memory": show_size(done.peak_bytes),
        "stored as": f"{plan.storage}, without embeddings and head, which stay the target's",
        "on texts held out": f"overlap with the target {last.overlap:.3f}, same first choice "
        f"{last.top1:.3f}, divergence on those learned from {last.loss:.3f} nats",
    }
    lines = [
        f"# A draft for {target}",
        "",
        f"Distilled by `headrace distill` from {target}, to which it proposes tokens.",
        "",
        "|  |  |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(folder / CURVE, target, done)
        lines += [f"![The training]({CURVE})", ""]
    (folder / CARD).write_text("\n".join(lines), encoding="utf-8", errors="replace")


def _parent(parent: dict[str, Any]) -> str:
    """And so on, to the first."""
    tokens, before = parent.get("trained_tokens"), parent.get("parent")
    learned = f", which had learned from {tokens:,} tokens" if isinstance(tokens, int) else ""
    further = f", and went on from {_parent(before)}" if isinstance(before, dict) else ""
    return f"{parent['name']} ({parent['sha256'][:12]}){learned}{further}"


def _command(target: str, plan: Plan) -> str:
    """That gives the same weights again."""
    options = {
        "--layers": plan.layers if plan.parent is None else None,
        "--from": None if plan.parent is None else Path(plan.parent["path"]).name,
        "--vocab-keep": plan.vocab_keep,
        "--tokens": plan.steps * BATCH * plan.length,
        "--seed": plan.seed,
        "--storage": plan.storage,
    }
    given = " ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    corpus = "".join(f" --corpus {Path(path).name}" for path in plan.corpus)
    return f"headrace distill {target} -o DRAFT_DIR{corpus} {given}"


def _draw(path: Path, target: str, done: Distilled) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    tokens = [line.tokens / 1e6 for line in done.log]
    left.plot(tokens, [line.loss for line in done.log], color="#888888")
    left.set_xlabel("million tokens learned from")
    left.set_ylabel("divergence, nats", color="#888888")
    right = left.twinx()
    right.plot(tokens, [line.overlap for line in done.log], color="#0b6e8f", label="overlap")
    right.plot(tokens, [line.top1 for line in done.log], color="#c8502d", label="same first choice")
    right.set_ylim(0, 1)
    right.set_ylabel("on texts held out")
    right.legend(fontsize=8, frameon=False)
    left.set_title(f"A draft for {target}", fontsize=10, parse_math=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
