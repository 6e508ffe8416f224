"""One `headrace distill`: texts, the student, its training, the folder; each can be interrupted."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import headrace
from headrace.errors import SourceError, UnsupportedModelError, UsageError
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.card import write_card
from headrace.export.distill.copying import MAX_STEPS, MAX_TEXTS, CopyHeads, teach
from headrace.export.distill.corpus import CorpusFile, apart
from headrace.export.distill.decoder import Decoder
from headrace.export.distill.labels import Shelf, label
from headrace.export.distill.options import (
    DEFAULT_LAYERS,
    DEFAULT_MINUTES,
    EPOCHS,
    WINDOW,
    DistillOptions,
    Plan,
)
from headrace.export.distill.student import (
    Batch,
    Head,
    Target,
    begun_with,
    divergence,
    trained_weights,
)
from headrace.export.distill.texts import (
    READ_SHARE,
    WRITING_COST,
    BuiltInCorpus,
    Library,
    Source,
    UserCorpus,
)
from headrace.export.distill.training import BATCH, Progress, Trainer
from headrace.export.distilled import DistilledDraft, DraftWeights, config_json, write_draft
from headrace.export.distilled_note import identity
from headrace.export.report import Reporter
from headrace.export.text import Text
from headrace.export.vocab_trim import KeptTokens, most_frequent
from headrace.export.whole import whole_or_absent

Made = TypeVar("Made")

PLAN = "plan.json"
_LEAST_POSITIONS = 8
"""Of a target's context: texts that are shorter teach nothing."""
_HELD_OUT = 32
"""One of so many texts is not learned from."""
_LEAST_HELD_OUT, _MOST_HELD_OUT = 2, 24
_COPY_STEPS_SHARE = 4
"""At most so many steps of teaching to copy for one of training: each is a small part of one."""
_COUNTS = 1e4
"""Expected counts of tokens are fractions; this makes whole numbers of them."""


@dataclass(frozen=True, eq=False)
class Distilled:
    """What came of it."""

    layers: tuple[int, ...]
    log: list[Progress]
    head_size: int | None
    """Tokens of its head; None is all."""
    coverage: float
    """Share of what the target expects in the texts that the head can propose."""
    parent: dict[str, Any] | None
    """The draft it goes on from: name, SHA-256, and its own figures without the log."""
    peak_bytes: int


def distill(
    source: str,
    out: Path,
    options: DistillOptions,
    report: Reporter,
    tell: Callable[[Progress, Plan], None] = lambda progress, plan: None,
) -> Distilled:
    """Trains a draft for the target `source` and writes the folder `out`.

    Whatever interrupts it leaves `out` absent and `work_folder(out)` as it is, from which
    `options.resume` goes on to the same weights, bit for bit.

    Raises:
        SourceError: the target cannot be read.
        UsageError: an option is out of range, a corpus cannot be used, or `out` exists.
        StorageError: `out` cannot be written.
    """
    options.check()
    if os.path.lexists(out):
        raise UsageError(f"{out}: exists already; choose another name or remove it")
    work = work_folder(out)
    if os.path.lexists(work) and not (work / PLAN).is_file():
        raise UsageError(f"{work}: not a whole interrupted run, it has no {PLAN}; remove it")
    if options.resume and not work.exists():
        raise UsageError(f"resume: there is no interrupted run of {out}; leave it out to begin one")
    if work.exists() and not options.resume:
        raise UsageError(f"{work}: an interrupted run; go on with --resume, or remove it")
    return _Run(source, out, options, report, tell).run()


def work_folder(out: Path) -> Path:
    """Where an unfinished run lies."""
    return out.with_name(f"{out.name}.unfinished")


class _Run:
    def __init__(
        self,
        source: str,
        out: Path,
        options: DistillOptions,
        report: Reporter,
        tell: Callable[[Progress, Plan], None],
    ) -> None:
        self.options, self.out, self.work = options, out, work_folder(out)
        self.report, self.tell = report, tell
        report.stage(f"reading {source}")
        checkpoint = open_checkpoint(source)
        self.text = Text.of(checkpoint)
        self.files = [CorpusFile.check(path) for path in options.files()]
        self.target = Target.load(checkpoint)
        self.identity = identity(checkpoint, self.text)
        self.parent = None if options.parent is None else self.opened(options.parent)

    def opened(self, draft: Path) -> DistilledDraft:
        return DistilledDraft.open(draft, self.target.checkpoint, self.text)

    def run(self) -> Distilled:
        plan = self.resumed() if self.options.resume else self.begun()
        with _alone(self.work):
            return self.worked(plan)

    def worked(self, plan: Plan) -> Distilled:
        torch.set_num_threads(plan.threads)
        library = Library(
            self.work / "texts",
            self.target,
            self.text,
            self.source(),
            length=plan.length,
            seed=plan.seed,
        )
        shelf = library.fill(plan.num_texts + plan.num_held_out, self.report)
        learned, held_out = _split(len(shelf), plan.num_held_out)
        batches = [Batch.of(shelf.take([number])) for number in held_out]
        kept = self.kept(plan, shelf, learned)
        head = Head.of(self.target.head, None if kept is None else kept.ids)
        student = self.student(plan)
        copying = self.copying(student)
        trainer = Trainer(
            student, head, shelf, learned, batches, copying, steps=plan.steps, seed=plan.seed
        )
        path = self.work / "training.pt"
        if path.is_file():
            try:
                trainer.resume(path)
            except Exception as error:  # what a damaged file makes of torch's reader is open
                raise SourceError(f"{path}: damaged ({error}); remove it to train anew") from error
        elif copying is not None and not self.copies():
            self.teach_copying(copying, trainer, plan, shelf, learned)
            trainer.save(path)
        self.report.stage("training", plan.steps)
        for _ in range(trainer.step):
            self.report.advance()
        trainer.run(path, lambda progress: self.tell(progress, plan), self.report.advance)
        done = Distilled(
            self.layers(plan.layers),
            trainer.log,
            None if kept is None else len(kept.ids),
            1.0 if kept is None else kept.coverage,
            self.lineage(plan),
            _peak_bytes(),
        )
        self.write(trainer, plan, kept, done)
        return done

    def layers(self, count: int) -> tuple[int, ...]:
        """The target's layers that the student has begun as."""
        if self.parent is not None:
            return self.parent.note.layers
        return begun_with(self.target.checkpoint.config.num_layers, count)

    def student(self, plan: Plan) -> Decoder:
        if self.parent is None:
            return self.target.student(self.layers(plan.layers))
        return self.target.beside(self.parent)

    def copying(self, student: Decoder) -> CopyHeads | None:
        """Heads to teach; none for a student of all layers, which copies as its target does."""
        if student.config.num_layers == self.target.checkpoint.config.num_layers:
            return None
        return CopyHeads.of(student.config)

    def copies(self) -> bool:
        """Whether the student has been taught to copy already."""
        return self.parent is not None and bool(self.parent.note.training.get("copying"))

    def lineage(self, plan: Plan) -> dict[str, Any] | None:
        if self.parent is None or plan.parent is None:
            return None
        figures = {k: v for k, v in self.parent.note.training.items() if k != "log"}
        return {"name": self.parent.name, "sha256": plan.parent["sha256"], **figures}

    def teach_copying(
        self, copying: CopyHeads, trainer: Trainer, plan: Plan, shelf: Shelf, learned: list[int]
    ) -> None:
        some = np.random.default_rng((plan.seed, 2)).permutation(learned)[:MAX_TEXTS].tolist()
        steps = min(MAX_STEPS, _COPY_STEPS_SHARE * plan.steps)
        self.report.stage("teaching it to copy", steps)
        teach(
            trainer.student,
            copying,
            trainer.head,
            self.target.head,
            [Batch.of(shelf.take([number])) for number in some],
            steps=steps,
            seed=plan.seed,
            on_step=self.report.advance,
        )

    def source(self) -> Source:
        return UserCorpus(self.files, self.text) if self.files else BuiltInCorpus(self.text)

    def resumed(self) -> Plan:
        plan = Plan.load(self.work / PLAN)
        plan.check_resumed(self.options, self.identity, str(torch.__version__))
        self.files = [CorpusFile.check(Path(path)) for path in plan.corpus]
        for file in self.files:
            if file.sha256 != plan.corpus[str(file.path)]:
                raise UsageError(f"resume: {file.path} has changed since the run began")
        if plan.parent is not None:
            self.parent = self.opened(Path(plan.parent["path"]))
            if self.parent.sha256() != plan.parent["sha256"]:
                raise UsageError(f"resume: {plan.parent['path']} has changed since the run began")
        return plan

    def begun(self) -> Plan:
        options, config = self.options, self.target.checkpoint.config
        length = min(WINDOW, config.max_position)
        if length < _LEAST_POSITIONS:
            raise UnsupportedModelError(
                f"{self.text.name}: its context has {length} positions, to distil from it takes "
                f"{_LEAST_POSITIONS}"
            )
        begun = self.layers(options.layers or min(DEFAULT_LAYERS, config.num_layers))
        config_json(self.target.checkpoint, begun)  # what cannot be written is not trained
        if options.vocab_keep is not None:
            most_frequent(self.text, np.zeros(config.vocab_size, np.int64), options.vocab_keep)
        threads = torch.get_num_threads()
        tokens = options.tokens
        if tokens is None:
            tokens = self.affordable(60 * (options.minutes or DEFAULT_MINUTES), begun, length)
        steps = max(1, round(tokens / (BATCH * length)))
        num_texts = -(-steps * BATCH // EPOCHS)
        plan = Plan(
            target=self.identity,
            corpus={str(file.path): file.sha256 for file in self.files},
            layers=len(begun),
            parent=None
            if self.parent is None
            else {
                "path": str(self.parent.folder.resolve()),
                "sha256": self.parent.sha256(),
            },
            vocab_keep=options.vocab_keep,
            length=length,
            num_texts=num_texts,
            num_held_out=min(_MOST_HELD_OUT, max(_LEAST_HELD_OUT, num_texts // _HELD_OUT)),
            steps=steps,
            seed=options.seed or 0,
            storage=options.storage or "f16",
            threads=threads,
            torch=torch.__version__,
        )
        with whole_or_absent(self.work) as folder:
            plan.save(folder / PLAN)
        return plan

    def affordable(self, seconds: float, layers: tuple[int, ...], length: int) -> int:
        """Tokens to train on in this time, by the speed of this machine now."""
        self.report.stage("measuring this machine's speed")
        ids = self.source().windows(BATCH, length, seed=0)
        label_s, texts = _timed(lambda: label(self.target.model, self.target.head, ids))
        batch = Batch.of(texts)
        kept = None if self.options.vocab_keep is None else np.arange(self.options.vocab_keep)
        head = Head.of(self.target.head, kept)
        student = self.target.student(layers)  # as large as any other of so many layers
        step_s, _ = _timed(
            lambda: divergence(student(batch.ids).flatten(0, 1), head, batch).backward()
        )
        text_s = label_s * (READ_SHARE + WRITING_COST * (1 - READ_SHARE))
        return int(seconds / (step_s + text_s / EPOCHS) * ids.size)

    def kept(self, plan: Plan, shelf: Shelf, learned: list[int]) -> KeptTokens | None:
        """The tokens that the target expects most in the texts, or those of the parent."""
        inherited = None if self.parent is None else self.parent.head_ids
        if plan.vocab_keep is None and inherited is None:
            return None
        counts = np.zeros(len(self.target.head))
        for number in learned:
            texts = shelf.take([number])
            expected = np.exp(texts.top_log_probs.astype(np.float64))
            np.add.at(counts, texts.top_ids.reshape(-1), expected.reshape(-1))
        whole = (counts * _COUNTS).astype(np.int64)
        if plan.vocab_keep is not None:
            return most_frequent(self.text, whole, plan.vocab_keep)
        assert inherited is not None
        return KeptTokens.of(inherited, whole)

    def write(self, trainer: Trainer, plan: Plan, kept: KeptTokens | None, done: Distilled) -> None:
        self.report.stage(f"writing {self.out}")
        paths = [Path(path) for path in plan.corpus]
        copying = self.copying(trainer.student)
        training = {
            "created_by": f"headrace {headrace.__version__}",
            "torch": plan.torch,
            "texts": plan.num_texts,
            "tokens": plan.num_texts * plan.length,
            "steps": plan.steps,
            "trained_tokens": plan.steps * BATCH * plan.length,
            "corpus": dict(zip(apart(paths), plan.corpus.values(), strict=True)),
            "coverage": done.coverage,
            "copying": copying and asdict(copying),
            "parent": done.parent,
            "peak_bytes": done.peak_bytes,
            "seed": plan.seed,
            "log": [asdict(line) for line in done.log],
        }
        weights = DraftWeights(
            self.target.checkpoint,
            self.text,
            done.layers,
            trained_weights(trainer.student),
            None if kept is None else kept.ids,
            training,
        )
        with whole_or_absent(self.out) as folder:
            write_draft(folder, weights, plan.storage)
            write_card(folder, self.target.checkpoint.name, plan, done)
        shutil.rmtree(self.work)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Raises UsageError while another process works on the same run."""
    fd = os.open(work / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{work}: another process is at it; wait, or end that one") from error
        yield
    finally:
        os.close(fd)


def _split(num_texts: int, num_held_out: int) -> tuple[list[int], list[int]]:
    """Which texts are learned from, and which are not: the latter evenly among all."""
    held_out = [int(place) for place in np.linspace(0, num_texts - 1, num_held_out)]
    return sorted(set(range(num_texts)) - set(held_out)), held_out


def _timed(work: Callable[[], Made]) -> tuple[float, Made]:
    """Seconds and result of the second of two times: the first one finds the memory."""
    work()
    began = time.perf_counter()
    made = work()
    return time.perf_counter() - began, made


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
