"""What a student learns from: texts of several kinds, each read or written by the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal, Protocol

import numpy as np

from headrace.export.distill.corpus import WHOLE, CorpusFile, Part, shares
from headrace.export.distill.labels import Labelled, Shelf, label
from headrace.export.distill.student import Target
from headrace.export.distill.systems import questions, request, system_log
from headrace.export.distill.writing import ChatForm, Script, chat, write
from headrace.export.report import Reporter
from headrace.export.text import I64, Text
from headrace.models import plantlog

Kind = Literal["corpus", "chats", "answers", "continuations"]

CHAT_SHARES: dict[Kind, float] = {
    "corpus": 0.35,
    "chats": 0.4,
    "answers": 0.15,
    "continuations": 0.1,
}
"""Of the texts, for a target that answers questions."""
BASE_SHARES: dict[Kind, float] = {"corpus": 0.6, "continuations": 0.4}
"""For one that does not."""

_ROWS: dict[Kind, int] = {"corpus": 32, "chats": 64, "answers": 64, "continuations": 64}
"""Texts a file: what an interruption loses. Writing is faster the more texts are written at once."""
_READ_AT_ONCE = 4
_EXTRACT = 0.5
"""Of a text, what an answer's log or a continuation's beginning may take."""


class Source(Protocol):
    """Where the texts that are read come from."""

    def windows(self, count: int, length: int, seed: int, part: Part = WHOLE) -> I64:
        """[count, length] token ids; the same seed and part give the same."""
        ...


@dataclass(frozen=True)
class UserCorpus:
    """The user's files, from which each gives as many windows as the others if it can."""

    files: Sequence[CorpusFile]
    text: Text

    def windows(self, count: int, length: int, seed: int, part: Part = WHOLE) -> I64:
        parts = [
            file.windows(self.text, share, length, seed + number, part)
            for number, (file, share) in enumerate(
                zip(
                    self.files, shares([f.size for f in self.files], count, 4 * length), strict=True
                )
            )
            if share
        ]
        mixed = np.random.default_rng(seed).permutation(np.concatenate(parts))
        return np.asarray(mixed)


@dataclass(frozen=True)
class BuiltInCorpus:
    """Logs of made-up systems, each window of another one, and of the plant that the benchmarks
    know, by other seeds than theirs.
    """

    text: Text

    def windows(self, count: int, length: int, seed: int, part: Part = WHOLE) -> I64:
        numbers = Random(seed)
        rows = [self._window(numbers.randrange(1000, 10**9), length) for _ in range(count)]
        return np.array(rows, np.int64).reshape(count, length)

    def _window(self, seed: int, length: int) -> list[int]:
        lines = plantlog.lines(seed) if not seed % 4 else system_log(seed)
        ids: list[int] = []
        # not from the first line on, which says that nothing was before it
        for line in islice(lines, seed % 50, None):
            ids += self.text.pieces(f"{line}\n")
            if len(ids) >= length:
                break
        return ids[:length]


@dataclass(frozen=True)
class _Job:
    """A file of texts that are made together."""

    path: Path
    kind: Kind
    rows: int
    part: Part


class Library:
    """Labelled texts in a folder, made a file at a time; what is there is not made again."""

    def __init__(
        self, folder: Path, target: Target, text: Text, source: Source, *, length: int, seed: int
    ) -> None:
        self._folder, self._target, self._text = folder, target, text
        self._source, self._length, self._seed = source, length, seed
        self._form = ChatForm.of(text)

    def fill(self, num_texts: int, report: Reporter) -> Shelf:
        """At least so many texts, of all kinds."""
        self._folder.mkdir(parents=True, exist_ok=True)
        jobs = list(self._jobs(num_texts))
        report.stage("texts: the target reads and writes", sum(job.rows for job in jobs))
        for job in jobs:
            if not job.path.is_file():
                self._make(job, _seed(job.path, self._seed)).save(job.path)
            for _ in range(job.rows):
                report.advance()
        return Shelf([job.path for job in jobs])

    def _jobs(self, num_texts: int) -> Iterator[_Job]:
        kinds = BASE_SHARES if self._form is None else CHAT_SHARES
        for kind, share in kinds.items():
            left, most = max(1, round(num_texts * share)), _ROWS[kind]
            parts = -(-left // most)
            for number in range(parts):
                path = self._folder / f"{kind}-{number:05}.safetensors"
                yield _Job(path, kind, min(left, most), Part(number, parts))
                left -= most

    def _make(self, job: _Job, seed: int) -> Labelled:
        if job.kind == "corpus":
            ids = self._source.windows(job.rows, self._length, seed, job.part)
            parts = [ids[i : i + _READ_AT_ONCE] for i in range(0, job.rows, _READ_AT_ONCE)]
            return Labelled.join([label(self._target.model, self._target.head, p) for p in parts])
        ends = frozenset(self._text.source.eos_ids)
        scripts = self._scripts(job, seed)
        return write(self._target.model, self._target.head, scripts, self._length, ends, seed)

    def _scripts(self, job: _Job, seed: int) -> list[Script]:
        kind, rows = job.kind, job.rows
        random, room = Random(seed), int(self._length * _EXTRACT)
        if kind == "continuations":
            begun = self._source.windows(rows, room, seed, job.part)
            return [Script(ids[: random.randint(1, room)], None) for ids in begun.tolist()]
        assert self._form is not None
        if kind == "answers":
            logs = self._source.windows(rows, room, seed, job.part)
            return [chat(self._form, self._about(ids, random)) for ids in logs.tolist()]
        # every second chat is about something that we name, as the model alone likes some topics
        asked = ([self._text.pieces(request(random))] if i % 2 else [] for i in range(rows))
        return [chat(self._form, questions) for questions in asked]

    def _about(self, log: list[int], random: Random) -> list[list[int]]:
        """Questions about a log, which stands before the first."""
        extract = self._text.inner.decode(log[: random.randint(len(log) // 4, len(log))])
        first, *more = (questions(random) for _ in range(3))
        framed = random.choice(("{log}\n\n{ask}", "Log:\n{log}\n{ask}", "{ask}\n\n{log}"))
        return [self._text.pieces(t) for t in (framed.format(log=extract, ask=first), *more)]


def _seed(path: Path, seed: int) -> int:
    """A file's own: the same whichever files were there before."""
    kind, _, number = path.stem.partition("-")
    kinds: list[str] = list(CHAT_SHARES)
    return seed * 1_000_003 + kinds.index(kind) * 100_003 + int(number)
