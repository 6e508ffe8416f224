"""What `headrace distill` is asked for, and what a run of it then holds to."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

DEFAULT_LAYERS = 4
DEFAULT_MINUTES = 60.0
WINDOW = 512
"""Tokens of a text, if the target was trained on as many."""
EPOCHS = 3
"""How often the student reads each text: the target's word on it costs more than a reading."""
STORAGES = ("f16", "int8")
_MAX_TOKENS, _MAX_SEED = 10**10, (1 << 32) - 1


@dataclass(frozen=True)
class DistillOptions:
    """None is the default, or what an interrupted run was asked for."""

    corpus: tuple[Path, ...] = ()
    """Texts like those in service; none are generated plant logs."""
    layers: int | None = None
    parent: Path | None = None
    """A draft of the same target to go on from, instead of the target's layers."""
    vocab_keep: int | None = None
    """Rows of the student's head; None is all, or the parent's."""
    tokens: int | None = None
    """That the student reads."""
    minutes: float | None = None
    """About how long it may take; not beside `tokens`."""
    seed: int | None = None
    storage: str | None = None
    """One of STORAGES."""
    resume: bool = False

    def files(self) -> list[Path]:
        """The corpus with whole paths, each file once; raises UsageError."""
        try:
            return list(dict.fromkeys(path.resolve() for path in self.corpus))
        except (OSError, RuntimeError) as error:  # a link that leads to itself
            raise UsageError(f"corpus: {error}") from error

    def check(self) -> None:
        """Raises UsageError for what no target allows."""
        if self.tokens is not None and self.minutes is not None:
            raise UsageError("tokens and time: each says how much to train; give one of them")
        if self.layers is not None and self.parent is not None:
            raise UsageError("layers and from: a draft to go on from has its layers; leave one out")
        if self.layers is not None and self.layers < 1:
            raise UsageError(f"layers: got {self.layers}, at least 1 is needed")
        for name, value, least, most in (
            ("tokens", self.tokens, 1, _MAX_TOKENS),
            ("seed", self.seed, 0, _MAX_SEED),
        ):
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name}: got {value}, allowed are {least} to {most}")
        if self.minutes is not None and not 0 < self.minutes < 60 * 24 * 365:
            raise UsageError(
                f"time: got {self.minutes} minutes, allowed is more than 0, up to a year"
            )
        if self.storage not in (None, *STORAGES):
            raise UsageError(f"storage: got {self.storage!r}, allowed are {', '.join(STORAGES)}")


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run's result. Kept with an interrupted run."""

    target: dict[str, str]
    """Its name, and the SHA-256 of embedding and tokenizer."""
    corpus: dict[str, str]
    """SHA-256 by path."""
    layers: int
    parent: dict[str, str] | None
    """Path and SHA-256 of the draft to go on from."""
    vocab_keep: int | None
    length: int
    """Tokens a text."""
    num_texts: int
    num_held_out: int
    steps: int
    seed: int
    storage: str
    threads: int
    """Sums come out differently in the last bits if another number of threads shares them."""
    torch: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises UsageError for what another version has left."""
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            plan = cls(**values)
            for field in dataclasses.fields(cls):
                value = getattr(plan, field.name)
                if field.type == "int" and not (isinstance(value, int) and value >= 0):
                    raise ValueError(f"{field.name} is {value!r}")
            return plan
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path}: not an interrupted run of this version ({error}); remove its folder"
            ) from error

    def check_resumed(self, options: DistillOptions, target: dict[str, str], torch: str) -> None:
        """Raises UsageError if something else is asked for than the run began with."""
        if self.target != target:
            raise UsageError(
                f"resume: the interrupted run learns from {self.target['name']}, not from this "
                f"{target['name']}: their weights or tokenizers differ"
            )
        if self.torch != torch:
            raise UsageError(
                f"resume: the interrupted run began with torch {self.torch}, and {torch} computes "
                "other last bits; install that one, or remove the interrupted run"
            )
        for name in ("layers", "vocab_keep", "seed", "storage"):
            wanted = getattr(options, name)
            if wanted not in (None, getattr(self, name)):
                raise UsageError(
                    f"resume: {name} is {getattr(self, name)} in the interrupted run, got {wanted}; "
                    "leave it out, or remove the interrupted run"
                )
        if options.tokens is not None or options.minutes is not None:
            raise UsageError(
                "resume: how long to train is settled already; leave out tokens and time"
            )
        parent = None if options.parent is None else str(options.parent.resolve())
        if parent is not None and parent != (self.parent or {}).get("path"):
            raise UsageError(
                f"resume: the interrupted run goes on from {(self.parent or {}).get('path', 'no draft')}"
                f", got {parent}; leave it out, or remove the interrupted run"
            )
        if options.corpus and [str(path) for path in options.files()] != list(self.corpus):
            raise UsageError(
                f"resume: the interrupted run reads {', '.join(self.corpus) or 'the built-in corpus'};"
                " leave the corpus out, or give the same files"
            )
