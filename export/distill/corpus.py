"""The user's texts, read in windows of tokens: a file may be far larger than memory."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from headrace.errors import UsageError
from headrace.export.text import I64, Text

_CHUNK = 1 << 22
_BYTES_PER_TOKEN = 8
"""More than texts have, so that one reading is mostly enough for a window."""
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Part:
    """Which of several draws of windows it is: they take places between each other's."""

    number: int
    of: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class CorpusFile:
    """A readable UTF-8 text."""

    path: Path
    size: int
    sha256: str

    @classmethod
    def check(cls, path: Path) -> CorpusFile:
        """Reads all of it once, a part at a time; raises UsageError.

        A pipe or a device is none: windows are read from it anew, at places.
        """
        digest, decoder, size = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
        has_text = False
        try:
            if path.exists() and not path.is_file() and not path.is_dir():
                raise UsageError(f"corpus: {path} is no file but a pipe or device; give a file")
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    has_text = bool(decoder.decode(chunk).strip()) or has_text
                    size += len(chunk)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            kept = len(error.object) - len(chunk)  # of the chunk before
            place = size - kept + error.start
            raise UsageError(
                f"corpus: {path} is not UTF-8 text (byte {place:,}); convert it, e.g. with "
                "iconv -f latin1 -t utf8"
            ) from error
        except OSError as error:
            raise UsageError(f"corpus: {path} cannot be read: {error.strerror}") from error
        if not has_text:
            raise UsageError(f"corpus: {path} is empty; give a text like those in service")
        return cls(path, size, digest.hexdigest())

    def windows(self, text: Text, count: int, length: int, seed: int, part: Part) -> I64:
        """[count, length] token ids from places spread evenly over the file, each from a line's
        start where it can be. A file that is shorter than a window is read again from its start.
        """
        within = np.random.default_rng(seed).random(count)
        span = min(self.size, length * _BYTES_PER_TOKEN)
        strata = np.arange(count) + (part.number + within) / part.of
        offsets = strata / max(1, count) * (self.size - span)
        with self.path.open("rb") as file:
            rows = [self._window(file, text, int(offset), length) for offset in offsets]
        return np.array(rows, np.int64).reshape(count, length)

    def _window(self, file: BinaryIO, text: Text, offset: int, length: int) -> list[int]:
        ids: list[int] = []
        start = _line_start(file, offset)
        while len(ids) < length:
            file.seek(start)
            piece = file.read(length * _BYTES_PER_TOKEN)
            start += len(piece)
            if not piece:
                if not start:
                    raise UsageError(f"corpus: {self.path} has become empty while it was read")
                start = 0
                continue
            found = text.pieces(piece.decode("utf-8", errors="ignore"))
            # a piece's end may be in the middle of a token: what follows is read elsewhere
            ids += found if start >= self.size or len(found) < 2 else found[:-1]
        return ids[:length]


def apart(paths: Sequence[Path]) -> list[str]:
    """Names of files; whole paths of those that have one name."""
    names = [path.name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def _line_start(file: BinaryIO, offset: int) -> int:
    """The first line that begins at or behind a place; the place itself in an endless line."""
    if not offset:
        return 0
    file.seek(offset - 1)
    rest = file.readline(_LONGEST_LINE)
    return offset - 1 + len(rest) if rest.endswith(b"\n") else offset


def shares(sizes: Sequence[int], count: int, window_bytes: int) -> list[int]:
    """How many of `count` windows each file gives: as many as others, but none beyond its size.

    What small files cannot give goes to the large ones; if all are too small, windows overlap.
    """
    limits = [max(1, size // window_bytes) for size in sizes]
    given = [0] * len(sizes)
    left = count
    while left and any(g < limit for g, limit in zip(given, limits, strict=True)):
        open_files = [i for i, limit in enumerate(limits) if given[i] < limit]
        for i in open_files[:left]:
            part = min(limits[i] - given[i], max(1, left // len(open_files)))
            given[i] += min(part, left)
            left -= min(part, left)
    for i in range(left):
        given[i % len(given)] += 1
    return given
