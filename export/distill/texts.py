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

READ_SHARE = 0.25
"""Of the texts, those that the target reads; it writes the others. Look-ups foretell a log as well;
what the target says of its own they do not."""

Kind = Literal["chats", "answers", "continuations"]

CHAT_SHARES: dict[Kind, float] = {"chats": 0.65, "answers": 0.2, "continuations": 0.15}
"""Of the texts that are written, by a target that answers questions."""
BASE_SHARES: dict[Kind, float] = {"continuations": 1.0}
"""By one that does not."""

WRITING_COST = 2.0
"""Of a token that the target writes, in those that it reads; measured with SmolLM2 on two cores."""

_READ_ROWS, _WRITTEN_ROWS = 32, 128
"""Texts a file: what an interruption loses. A text is written the faster, the more are at once."""
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
    is_read: bool
    rows: int
    part: Part
    seed: int


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
                (self._read if job.is_read else self._write)(job).save(job.path)
            for _ in range(job.rows):
                report.advance()
        return Shelf([job.path for job in jobs])

    def _jobs(self, num_texts: int) -> Iterator[_Job]:
        num_read = max(1, round(num_texts * READ_SHARE))
        for is_read, left, most in (
            (True, num_read, _READ_ROWS),
            (False, num_texts - num_read, _WRITTEN_ROWS),
        ):
            parts = -(-left // most)
            for number in range(parts):
                name = f"{'read' if is_read else 'written'}-{number:05}.safetensors"
                # a file's own seed: it is the same whichever files were there before
                seed = self._seed * 1_000_003 + number + (0 if is_read else 500_000)
                rows = min(left, most)
                yield _Job(self._folder / name, is_read, rows, Part(number, parts), seed)
                left -= rows

    def _read(self, job: _Job) -> Labelled:
        ids = self._source.windows(job.rows, self._length, job.seed, job.part)
        parts = [ids[i : i + _READ_AT_ONCE] for i in range(0, job.rows, _READ_AT_ONCE)]
        return Labelled.join([label(self._target.model, self._target.head, p) for p in parts])

    def _write(self, job: _Job) -> Labelled:
        ends = frozenset(self._text.source.eos_ids)
        scripts = self._scripts(job)
        return write(self._target.model, self._target.head, scripts, self._length, ends, job.seed)

    def _scripts(self, job: _Job) -> list[Script]:
        random, room = Random(job.seed), int(self._length * _EXTRACT)
        shares = BASE_SHARES if self._form is None else CHAT_SHARES
        kinds = random.choices(list(shares), list(shares.values()), k=job.rows)
        stretches = self._source.windows(job.rows, room, job.seed, job.part).tolist()
        return [
            self._script(kind, stretch, random)
            for kind, stretch in zip(kinds, stretches, strict=True)
        ]

    def _script(self, kind: Kind, stretch: list[int], random: Random) -> Script:
        """`stretch` is of the corpus."""
        if self._form is None or kind == "continuations":
            return Script(stretch[: random.randint(1, len(stretch))], None)
        if kind == "answers":
            return chat(self._form, self._about(stretch, random))
        # every second chat is about something that we name, as the model alone likes some topics
        asked = [self._text.pieces(request(random))] if random.random() < 0.5 else []
        return chat(self._form, asked)

    def _about(self, log: list[int], random: Random) -> list[list[int]]:
        """Questions about a log, which stands before the first."""
        extract = self._text.inner.decode(log[: random.randint(len(log) // 4, len(log))])
        first, *more = (questions(random) for _ in range(3))
        framed = random.choice(("{log}\n\n{ask}", "Log:\n{log}\n{ask}", "{ask}\n\n{log}"))
        return [self._text.pieces(t) for t in (framed.format(log=extract, ask=first), *more)]
