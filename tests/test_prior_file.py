"""Laws of prior files: they propose what an index in memory does, and damage never does harm."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from commandline import CommandLine
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.commands import prior as command_module
from headrace.errors import BundleError, StorageError, TokenizerMismatchError, UsageError
from headrace.models.manifest import TOKENIZER, Bundle
from headrace.runtime import prior, prior_file
from headrace.runtime.load import load_tokenizer
from headrace.runtime.prior import ORDERS, SEPARATOR, NgramIndex
from headrace.runtime.prior_file import PriorFile, ngram_hashes, verify_prior, write_prior

TOKENIZER_SHA = "0123456789abcdef" * 4
HEADER_BYTES = 80
TABLES_AT = 4096
CAPACITY = 1024
"""Of the file of a small corpus."""

corpora = st.lists(st.lists(st.integers(0, 3), max_size=80), max_size=5).filter(any)
contexts = st.lists(st.lists(st.integers(0, 4), max_size=40), min_size=1, max_size=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("priors")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.bin"
    write_prior(path, [list(range(50)), list(range(30, 90))], TOKENIZER_SHA)
    return path


def in_memory(documents: list[list[int]], capacity: int) -> NgramIndex:
    index = NgramIndex(capacity)
    for document in documents:
        index.extend(document)
        index.separate()
    return index


@given(st.lists(st.integers(0, SEPARATOR), min_size=1, max_size=60), st.sampled_from(ORDERS))
@settings(max_examples=100, deadline=None)
def test_many_hashes_at_once_are_the_hash(ids: list[int], order: int) -> None:
    found = ngram_hashes(np.array(ids, np.uint32), order).tolist()
    ngrams = [ids[i : i + order] for i in range(len(ids) - order + 1)]
    expected = [prior._hashes(ngram[::-1])[0] for ngram in ngrams]
    assert found == expected


@given(corpora, contexts, st.integers(1, 20), st.integers(1, 4), st.sampled_from((1, 7, 1 << 18)))
@settings(max_examples=40, deadline=None)
def test_a_file_proposes_what_an_index_in_memory_does(
    folder: Path,
    documents: list[list[int]],
    asked: list[list[int]],
    most: int,
    count: int,
    chunk: int,
) -> None:
    path = folder / "prior.bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prior_file, "_CHUNK_TOKENS", chunk)
        facts = write_prior(path, documents, TOKENIZER_SHA)
    index = in_memory(documents, CAPACITY)
    with PriorFile.open(path, TOKENIZER_SHA) as mapped:
        assert mapped.facts == facts == verify_prior(path)
        assert mapped.num_tokens == sum(map(len, documents))
        assert facts.num_documents == len([*filter(None, documents)])
        assert facts.num_bytes == path.stat().st_size
        for context in [*asked, *documents]:
            found = mapped.candidates(context, most, count)
            assert found == index.candidates(context, most, count)
            assert all(max(match.continuation) <= 3 for match in found), "no separator"


def test_a_corpus_as_large_as_the_tables_is_whole(folder: Path) -> None:
    """At the capacity itself the last place is the ring's last."""
    text = np.random.default_rng(0).integers(0, 5, CAPACITY - 1).tolist()
    facts = write_prior(folder / "full.bin", [text], TOKENIZER_SHA)
    assert facts.num_bytes == TABLES_AT + 4 * CAPACITY * (len(ORDERS) + 1)
    index = in_memory([text], CAPACITY)
    with PriorFile.open(folder / "full.bin", TOKENIZER_SHA) as mapped:
        for end in range(3, len(text)):
            found = mapped.candidates(text[:end], 40, 3)
            assert found == index.candidates(text[:end], 40, 3)


def test_the_format_is_the_versions(small: Path) -> None:
    """What is written may change with another VERSION only, or old files would be misread."""
    assert prior_file.VERSION == 1
    assert zlib.crc32(small.read_bytes()) == 2745918904


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not a prior, it begins with b''"),
        (lambda data: b"PK\x03\x04" + data[4:], "not a prior, it begins with"),
        (lambda data: data[:40], "truncated, its header is not whole"),
        (lambda data: data[:-4], r"\d+ bytes, its header says \d+"),
        (lambda data: data + b"more", r"\d+ bytes, its header says \d+"),
        (lambda data: data[:8] + struct.pack("<I", 7) + data[12:], "version 7, .* reads 1"),
        (lambda data: data[:16] + b"\xff" + data[17:], "header was damaged"),
    ],
)
def test_a_damaged_file_is_a_line(
    small: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    small.write_bytes(damage(small.read_bytes()))
    for read in (lambda: PriorFile.open(small, TOKENIZER_SHA), lambda: verify_prior(small)):
        with pytest.raises(BundleError, match=message) as caught:
            read()
        assert str(caught.value).startswith(str(small))
        assert "headrace prior build" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_is_no_file_is_a_line(tmp_path: Path, small: Path) -> None:
    with pytest.raises(BundleError, match="no such prior; make one"):
        PriorFile.open(tmp_path / "none.bin", TOKENIZER_SHA)
    with pytest.raises(BundleError, match="cannot be read: Is a directory"):
        PriorFile.open(tmp_path, TOKENIZER_SHA)
    with pytest.raises(TokenizerMismatchError, match="tokenizer 0123456789ab, the model has ffff"):
        PriorFile.open(small, "f" * 64)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_no_byte_of_the_header_goes_unseen(folder: Path, at: int, change: int) -> None:
    path = folder / "header.bin"
    write_prior(path, [[1, 2, 3, 4]], TOKENIZER_SHA)
    data = bytearray(path.read_bytes())
    data[at] ^= change
    path.write_bytes(data)
    with pytest.raises(BundleError):
        PriorFile.open(path, TOKENIZER_SHA)


@given(st.binary(min_size=64, max_size=64), contexts)
@settings(max_examples=50, deadline=None)
def test_damaged_content_gives_ids_of_the_corpus(
    folder: Path, noise: bytes, asked: list[list[int]]
) -> None:
    path = folder / "content.bin"
    facts = write_prior(path, [[0, 1, 2, 3] * 20], TOKENIZER_SHA)
    content = np.frombuffer(path.read_bytes()[TABLES_AT:], np.uint32)
    # half of it noise, of which half small enough to be places or tokens
    words = np.resize(np.frombuffer(noise, np.uint32), len(content)).copy()
    words[::2] %= 90
    words[len(words) // 3 :: 3] = content[len(words) // 3 :: 3]
    path.write_bytes(path.read_bytes()[:TABLES_AT] + words.tobytes())
    with PriorFile.open(path, TOKENIZER_SHA) as mapped:
        assert mapped.facts == facts
        for context in asked:
            for match in mapped.candidates(context, 16, 3):
                assert set(match.continuation) <= {0, 1, 2, 3}
    with pytest.raises(BundleError, match=r"CRC-32 is .* so it was damaged or edited"):
        verify_prior(path)


def test_an_interrupted_build_leaves_what_was_there(small: Path) -> None:
    before = small.read_bytes()

    def documents() -> Iterator[list[int]]:
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prior(small, documents(), TOKENIZER_SHA)
    assert small.read_bytes() == before
    assert [*small.parent.iterdir()] == [small]


def test_an_opened_prior_outlives_its_replacement(small: Path) -> None:
    context = [60, 61, 62]
    with PriorFile.open(small, TOKENIZER_SHA) as mapped:
        before = mapped.candidates(context, 4, 3)
        write_prior(small, [[60, 61, 62, 99]], TOKENIZER_SHA)
        assert mapped.candidates(context, 4, 3) == before != []
        mapped.close()


def test_what_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got 0 tokens"):
        write_prior(tmp_path / "prior.bin", [[], []], TOKENIZER_SHA)
    with pytest.raises(StorageError, match="cannot be written"):
        write_prior(tmp_path / "none" / "prior.bin", [[1]], TOKENIZER_SHA)
    assert not [*tmp_path.iterdir()]


def resident_bytes(path: Path) -> int:
    """Of the mapping of a file."""
    parts = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(part.split("Rss:")[1].split()[0]) * 1024 for part in parts)


def test_only_touched_pages_are_resident(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    text = (
        np.random.default_rng(0).integers(0, 50_000, 2_400_000).tolist()
    )  # pages may come by 2 MiB
    facts = write_prior(path, [text], TOKENIZER_SHA)
    with PriorFile.open(path, TOKENIZER_SHA) as mapped:
        opened = resident_bytes(path)
        assert mapped.candidates(text[1000:1030], 16, 3)
        touched = resident_bytes(path)
    assert opened < touched < facts.num_bytes // 4, (opened, touched)


def test_threads_share_a_file(small: Path) -> None:
    texts = [list(range(50)), list(range(30, 90))]
    index = in_memory(texts, CAPACITY)
    wrong: list[object] = []

    def ask() -> None:
        for start in range(80):
            context = list(range(start, start + 12))
            found = mapped.candidates(context, 8, 3)
            if found != index.candidates(context, 8, 3):
                wrong.append((context, found))

    with PriorFile.open(small, TOKENIZER_SHA) as mapped:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


def test_build_and_inspect(
    command: CommandLine, tiny_bundle: Path, corpus: Path, tmp_path: Path
) -> None:
    other, output = tmp_path / "other.log", tmp_path / "prior.bin"
    other.write_bytes(b"fan 7 on\r\nfan \xff off\r\n")
    build = ("prior", "build", corpus, other, "-o", output, "--bundle", tiny_bundle)
    built = command(*build)
    assert built.code == 0, built.err
    assert built.err.splitlines() == ["reading the texts", "indexing"]
    bundle = Bundle.open(tiny_bundle)
    tokenizer = load_tokenizer(bundle)
    texts = [corpus.read_text(), "fan 7 on\r\nfan \N{REPLACEMENT CHARACTER} off\r\n"]
    tokens = [tokenizer.encode(text, bos=False) for text in texts]
    for figure in (f"{sum(map(len, tokens)):,}", f"{output.stat().st_size:,} bytes", " s"):
        assert figure in built.out
    with PriorFile.open(output, bundle.manifest.files[TOKENIZER].sha256) as mapped:
        for ids in tokens:
            (match,) = mapped.candidates(ids[:12], 4, 1)
            assert match.length == 12
            found = [*ids[:12], *match.continuation]
            assert any(found == ids[i : i + 16] for i in range(len(ids)))
    again = command(*build)
    assert again.code == 2
    assert "exists already; choose another name or give --force" in again.complaint
    assert command(*build, "--force").code == 0
    shown = command("prior", "inspect", output)
    assert shown.code == 0
    assert shown.out.splitlines() == built.out.splitlines()[:-1]
    output.write_bytes(output.read_bytes()[:-1] + b"\0")
    damaged = command("prior", "inspect", output)
    assert damaged.code == 1
    assert "damaged or edited" in damaged.complaint


def test_files_that_are_no_texts_are_a_line(
    command: CommandLine, tiny_bundle: Path, corpus: Path, tmp_path: Path
) -> None:
    empty, output = tmp_path / "empty.log", tmp_path / "prior.bin"
    empty.touch()
    for path, words in (
        (empty, "is empty"),
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        result = command("prior", "build", corpus, path, "-o", output, "--bundle", tiny_bundle)
        assert result.code == 2
        assert result.complaint.startswith(f"{path} {words}")
    result = command("prior", "build", corpus, "-o", output, "--bundle", tmp_path / "none")
    assert (result.code, result.out) == (1, "")
    assert "no such bundle" in result.complaint
    assert command("prior", "build", "-o", output, "--bundle", tiny_bundle).code == 2
    assert not output.exists()
    assert command("prior").complaint == "Missing command; see `headrace prior --help`"


@given(st.text("ab\r\n\u00e9\u20ac", max_size=60))
@settings(max_examples=50, deadline=None)
def test_pieces_are_the_text(folder: Path, text: str) -> None:
    path = folder / "text"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_module, "_PIECE_CHARS", 5)
        patch.setattr(command_module, "_LINE_CHARS", 4)
        pieces = [*command_module._pieces(path)]
    assert "".join(pieces) == text
    assert all(len(piece) <= 9 for piece in pieces)
    for piece in pieces[:-1]:
        assert len(piece) == 9 or piece.endswith(("\n", "\r")), "cut at the end of a line"
