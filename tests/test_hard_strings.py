"""Token ids equal llama.cpp's on 200 strings; tests/make_hard_strings.py made the fixtures."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers as tiny
import vocab_files

from headrace.export.gguf_file import read_gguf
from headrace.export.tokenizer import tokenizer_from_gguf
from headrace.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
STRINGS: list[str] = json.loads((DATA / "hard_strings.json").read_text(encoding="utf-8"))
with np.load(DATA / "hard_strings_vocabularies.npz") as arrays:
    VOCABULARIES = {
        name.removesuffix(".ids"): np.split(
            arrays[name], np.cumsum(arrays[name.replace(".ids", ".lengths")])[:-1]
        )
        for name in arrays.files
        if name.endswith(".ids")
    }


def _load(path: Path) -> Tokenizer:
    metadata = read_gguf(path).metadata
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    return tiny.load(tokenizer_from_gguf(metadata), vocab_size=num_tokens)


def _different(tokenizer: Tokenizer, expected: list[list[int]]) -> list[tuple[str, object, object]]:
    rows = zip(STRINGS, map(tokenizer.encode, STRINGS), expected, strict=True)
    return [(text, ours, theirs) for text, ours, theirs in rows if ours != theirs]


def test_smollm2(smollm2_gguf: Path) -> None:
    tokenizer = _load(smollm2_gguf)
    expected = json.loads((DATA / "hard_strings_smollm2.json").read_text())
    assert len(STRINGS) == 200
    assert _different(tokenizer, expected) == []
    assert [text for text in STRINGS if tokenizer.decode(tokenizer.encode(text)) != text] == []


@pytest.fixture(scope="module")
def vocab_folder() -> Path:
    try:
        return vocab_files.obtain()
    except vocab_files.VocabFilesError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted(VOCABULARIES))
def test_vocabulary(name: str, vocab_folder: Path) -> None:
    tokenizer = _load(vocab_folder / f"ggml-vocab-{name}.gguf")
    assert _different(tokenizer, [row.tolist() for row in VOCABULARIES[name]]) == []
    assert not any(tokenizer.is_control(i) for text in STRINGS for i in tokenizer.encode(text))
