"""A prior in a file: the n-grams of a corpus, compiled once and mapped where it is used.

The layout, in little-endian words as the machines have them that this runs on:

    page    magic, version, sizes, SHA-256 of the tokenizer, CRC-32 of the rest and of itself
    tables  for each of ORDERS `capacity` places, 4 bytes each
    tokens  4 bytes each, SEPARATOR after every document

A lookup touches a page or two of each, and only pages that were touched are resident; the kernel
may drop them again. The capacity holds the whole corpus, so no place is ever of another round.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.closing import Closing
from headrace.errors import BundleError, StorageError, TokenizerMismatchError, UsageError
from headrace.runtime.prior import MULTIPLIER, ORDERS, SEPARATOR, Match, NgramTables

VERSION = 1
"""To be raised with every change to the layout, to ORDERS or to the hash."""

_MAGIC = b"HRprior\n"
_FIELDS = struct.Struct("<8sIIQQQ32sI")
_CHECKSUM = struct.Struct("<I")
_TABLES_AT = 4096
_WORD_BYTES = 4
_MIN_CAPACITY = 1024
_EMPTY = (1 << 32) - 1
_CHUNK_TOKENS = 1 << 18
_CHUNK_BYTES = 1 << 20

_AGAIN = "build it again with `headrace prior build`"


@dataclass(frozen=True)
class PriorFacts:
    """What a prior file holds."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    """Of the whole file."""
    tokenizer_sha256: str


def write_prior(
    path: Path, documents: Iterable[Sequence[int]], tokenizer_sha256: str
) -> PriorFacts:
    """Indexes documents (token ids below SEPARATOR) into `path`, which is replaced when it exists.

    Takes seconds for millions of tokens, and up to 20 bytes of memory for each. Of an n-gram that
    occurs more than once the last place counts. The file is whole or absent.

    Raises:
        UsageError: there is no token in any document, or 2^32 of them.
        StorageError: `path` cannot be written.
    """
    with _whole_or_absent(path) as file:
        tokens, num_documents = _join(documents)
        if not num_documents or len(tokens) >= SEPARATOR:
            raise UsageError(f"got {len(tokens)} tokens for a prior, allowed are 1 to 2^32 - 2")
        capacity = max(_MIN_CAPACITY, 1 << (len(tokens) - 1).bit_length())
        checksum = 0
        file.seek(_TABLES_AT)
        tables = (_table(tokens, order, capacity) for order in ORDERS)
        for part in chain(tables, [tokens]):
            file.write(part.data)
            checksum = zlib.crc32(part.data, checksum)
        id_limit = int(tokens.max(where=tokens != SEPARATOR, initial=0)) + 1
        header = _Header(id_limit, len(tokens), num_documents, capacity, tokenizer_sha256, checksum)
        file.seek(0)
        file.write(header.pack())
    return header.facts


class PriorFile(Closing):
    """An opened prior. Threads may share it. Its file may be replaced, but not written to."""

    def __init__(self, mapped: mmap.mmap, header: _Header) -> None:
        whole = memoryview(mapped)
        words = whole[_TABLES_AT:].cast("I")
        starts = [header.capacity * i for i in range(len(ORDERS))]
        tables = [words[start : start + header.capacity] for start in starts]
        tokens = words[len(ORDERS) * header.capacity :]
        self.facts = header.facts
        self._index: NgramTables | None = NgramTables(
            tokens, tables, header.num_places, header.id_limit
        )

    @classmethod
    def open(cls, path: Path, tokenizer_sha256: str) -> PriorFile:
        """Maps a prior that was made with this tokenizer; a moment, whatever its size.

        Header and size of the file are checked. Tables and tokens are not (`verify_prior` does
        that): if they are damaged, proposals are fewer or worse, but each id is at most the largest
        of the corpus, so the tokenizer has it.

        Raises:
            TokenizerMismatchError: it was made with another tokenizer.
            BundleError: it is missing, no prior, truncated, damaged, or of another version.
        """
        with _opened(path) as file:
            header = _Header.read(file, path)
            if header.tokenizer_sha256 != tokenizer_sha256:
                raise TokenizerMismatchError(
                    f"{path}: made with the tokenizer {header.tokenizer_sha256[:12]}, the model "
                    f"has {tokenizer_sha256[:12]}; {_AGAIN} and this model's bundle"
                )
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Lookups are scattered: what lies beside a page is not worth reading.
        mapped.madvise(mmap.MADV_RANDOM)
        return cls(mapped, header)

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return self.facts.num_tokens

    def candidates(self, context: Sequence[int], most: int, count: int) -> list[Match]:
        """As of NgramTables; none after `close`."""
        index = self._index
        return [] if index is None else index.candidates(context, most, count)

    def close(self) -> None:
        """The file is unmapped when nobody looks anything up any more. May be called again."""
        self._index = None


def verify_prior(path: Path) -> PriorFacts:
    """Reads all of a prior. Raises BundleError if it is not as it was written."""
    with _opened(path) as file:
        header = _Header.read(file, path)
        file.seek(_TABLES_AT)
        checksum = 0
        while part := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(part, checksum)
    if checksum != header.checksum:
        raise BundleError(
            f"{path}: its CRC-32 is {checksum:08x} instead of {header.checksum:08x}, so it was "
            f"damaged or edited; {_AGAIN}"
        )
    return header.facts


@dataclass(frozen=True)
class _Header:
    """The first page."""

    id_limit: int
    """The largest token id, and one."""
    num_places: int
    """Tokens and separators."""
    num_documents: int
    capacity: int
    """Places of a table: a power of two, at least `num_places`."""
    tokenizer_sha256: str
    checksum: int
    """CRC-32 of all that follows the page."""

    @property
    def num_bytes(self) -> int:
        return _TABLES_AT + _WORD_BYTES * (len(ORDERS) * self.capacity + self.num_places)

    @property
    def facts(self) -> PriorFacts:
        num_tokens = self.num_places - self.num_documents
        return PriorFacts(num_tokens, self.num_documents, self.num_bytes, self.tokenizer_sha256)

    def pack(self) -> bytes:
        data = _FIELDS.pack(
            _MAGIC,
            VERSION,
            self.id_limit,
            self.num_places,
            self.num_documents,
            self.capacity,
            bytes.fromhex(self.tokenizer_sha256),
            self.checksum,
        )
        return data + _CHECKSUM.pack(zlib.crc32(data))

    @classmethod
    def read(cls, file: BinaryIO, path: Path) -> _Header:
        """Raises BundleError unless the header is whole and the file as long as it says."""
        data = file.read(_FIELDS.size)
        if not data.startswith(_MAGIC):
            raise BundleError(
                f"{path}: not a prior, it begins with {data[:8]!r} instead of {_MAGIC!r}; "
                "make one with `headrace prior build`"
            )
        sum_bytes = file.read(_CHECKSUM.size)
        if len(sum_bytes) < _CHECKSUM.size:
            raise BundleError(f"{path}: truncated, its header is not whole; {_AGAIN}")
        _, version, id_limit, num_places, num_documents, capacity, tokenizer, checksum = (
            _FIELDS.unpack(data)
        )
        if version != VERSION:
            raise BundleError(
                f"{path}: prior version {version}, this headrace reads {VERSION}; {_AGAIN}"
            )
        header = cls(id_limit, num_places, num_documents, capacity, tokenizer.hex(), checksum)
        if sum_bytes != _CHECKSUM.pack(zlib.crc32(data)) or not header._is_sound():
            raise BundleError(f"{path}: its header was damaged or edited; {_AGAIN}")
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != header.num_bytes:
            raise BundleError(
                f"{path}: {num_bytes} bytes, its header says {header.num_bytes}, so it was "
                f"truncated or edited; copy it again, or {_AGAIN}"
            )
        return header

    def _is_sound(self) -> bool:
        power_of_two = self.capacity and not self.capacity & (self.capacity - 1)
        return bool(power_of_two) and self.num_documents <= self.num_places <= self.capacity


def _join(documents: Iterable[Sequence[int]]) -> tuple[npt.NDArray[np.uint32], int]:
    """All tokens with a separator after each document, and the number of those not empty."""
    tokens, num_documents = array("I"), 0
    for document in documents:
        if len(document):
            assert max(document) < SEPARATOR
            tokens.extend(document)
            tokens.append(SEPARATOR)
            num_documents += 1
    return np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32), num_documents


def _table(tokens: npt.NDArray[np.uint32], order: int, capacity: int) -> npt.NDArray[np.uint32]:
    """At each hash, where its last n-gram ends that another token of its document follows."""
    table = np.full(capacity, _EMPTY, np.uint32)
    for start in range(0, len(tokens) - order, _CHUNK_TOKENS):
        part = tokens[start : start + _CHUNK_TOKENS + order]
        num_separators = np.cumsum(part == SEPARATOR, dtype=np.uint32)
        before = np.concatenate((np.zeros(1, np.uint32), num_separators))
        # of the n-gram and the token after it none may be a separator
        (first,) = np.nonzero(before[order + 1 :] == before[: -order - 1])
        slots = ngram_hashes(part[:-1], order)[first] & np.uint64(capacity - 1)
        # of equal slots the last one stays, as numpy promises
        table[slots] = (start + order - 1 + first).astype(np.uint32)
    return table


def ngram_hashes(tokens: npt.NDArray[np.uint32], order: int) -> npt.NDArray[np.uint64]:
    """The hash of the `order` tokens at each place, [len(tokens) - order + 1]."""
    num_ngrams = max(0, len(tokens) - order + 1)
    keys = np.zeros(num_ngrams, np.uint64)
    for i in reversed(range(order)):  # from the last token backwards
        keys ^= tokens[i : i + num_ngrams]
        keys *= np.uint64(MULTIPLIER)  # modulo 2^64
    return keys >> np.uint64(32)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise BundleError(f"{path}: no such prior; make one with `headrace prior build`") from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _whole_or_absent(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that replaces it, or goes away whatever happens."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        try:
            with draft.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # a rename must not reach the disk before its file
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{path}: the disk is full; make room and build again") from error
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); choose another name"
        ) from error
