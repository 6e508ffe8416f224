"""Laws of a pair: which tokens of a draft are which of its target, and which pairs are refused, at
export and at load.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import CommandLine
from gguf import GGMLQuantizationType
from tiny_checkpoints import I64, TINY, stored
from tiny_gguf import write_gguf
from tiny_pairs import (
    NUM_TOKENS,
    TOLERANCE,
    VOCAB_SIZE,
    copy_of,
    draft_logits,
    edit_json,
    pair,
    permuted,
    refused,
    tokenizer_model,
    with_added_token,
    with_tokenizer,
)

from headrace.errors import BundleError, TokenizerMismatchError
from headrace.export.build import DraftOptions, ExportOptions, export
from headrace.export.pair import match
from headrace.export.text import Token
from headrace.intact import sha256
from headrace.models.manifest import (
    MANIFEST,
    TOKENIZER,
    VOCAB_MAP,
    Bundle,
    FileRecord,
    Manifest,
)
from headrace.models.vocab_map import VocabMap, load_vocab_map

BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}


@pytest.fixture
def bundle(twin_bundle: Path, tmp_path: Path) -> Path:
    """A pair that a test may damage."""
    return shutil.copytree(twin_bundle, tmp_path / "bundle")


def test_other_ids_are_mapped_by_bytes(tmp_path: Path) -> None:
    """The same model under other ids drafts as well as itself."""
    new_ids = np.random.default_rng(5).permutation(VOCAB_SIZE)
    source = permuted("llama", tmp_path / "source", new_ids)
    bundle = pair(tmp_path / "b", source)
    draft = bundle.draft
    assert draft is not None
    found = load_vocab_map(bundle)
    has_token = np.arange(VOCAB_SIZE) < 280
    assert (found.to_draft == np.where(has_token, new_ids, -1)).all()
    assert (found.to_target[new_ids] == np.where(has_token, np.arange(VOCAB_SIZE), -1)).all()
    assert (draft.vocabulary.proposable, draft.vocabulary.unreadable) == (280, 3)
    assert draft.agreement.top1 > 0.95
    assert draft.agreement.overlap > 0.95
    ids = stored("llama").input_ids
    mapped = found.to_draft[ids].astype(np.int64)
    drafted = draft_logits(bundle, mapped)[:, found.to_draft[:280]]
    assert np.abs(drafted - stored("llama").logits[:, :280]).max() < TOLERANCE


def test_other_ids_and_a_trimmed_head(tmp_path: Path, corpus: Path) -> None:
    new_ids = np.random.default_rng(6).permutation(VOCAB_SIZE)
    source = permuted("llama", tmp_path / "source", new_ids)
    bundle = pair(tmp_path / "b", source, keep=266, corpus=[corpus])
    found = load_vocab_map(bundle)
    same = load_vocab_map(pair(tmp_path / "c", TINY / "llama", keep=266, corpus=[corpus]))
    assert set(found.to_target.tolist()) == set(same.to_target.tolist())
    ids = stored("llama").input_ids
    logits = draft_logits(bundle, found.to_draft[ids].astype(np.int64))
    expected = stored("llama").logits[:, found.to_target]
    assert np.abs(logits - expected).max() < TOLERANCE


def test_another_family_from_another_kind_of_file(tmp_path: Path) -> None:
    """A GGUF file names the rows that a folder has no token for; those have no partners."""
    write_gguf(TINY / "llama_wide", tmp_path / "draft.gguf", GGMLQuantizationType.Q8_0)
    draft = DraftOptions(str(tmp_path / "draft.gguf"))
    options = ExportOptions(quant="f32", draft=draft)
    found = export(str(TINY / "qwen3"), tmp_path / "b", options).draft
    assert found is not None
    assert (found.config.family, found.quant, found.source) == ("llama", "keep", "gguf")
    tokens = np.where(np.arange(VOCAB_SIZE) < NUM_TOKENS, np.arange(VOCAB_SIZE), -1)
    mapped = load_vocab_map(Bundle.open(tmp_path / "b"))
    assert (mapped.to_target == tokens).all() and (mapped.to_draft == tokens).all()


def test_matching_goes_by_bytes_and_kind() -> None:
    def plain(data: bytes, entry: str = "") -> Token:
        return Token(False, data, entry or data.decode())

    end = Token(True, b"<end>", "<end>")
    letter, byte = plain(b"A"), plain(b"A", "<0x41>")
    target = [byte, letter, end, plain(b"x"), None, plain(b"two"), plain(b"two", "2")]
    draft = [letter, plain(b"<end>"), byte, None, end, plain(b"y"), plain(b"two")]
    found = match(draft, target)
    assert found.to_target.tolist() == [1, -1, 0, -1, 2, -1, 5]
    assert found.to_draft.tolist() == [2, 0, 4, -1, -1, 6, 6]
    assert match(target, [*target, None]).to_draft.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"model": {"merges": tokenizer_model("llama")["merges"][:4]}},
            "where the target has 've'",
        ),
        ({"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}}, "e.g. ' ' + 'T'"),
        ({"decoder": {"type": "Fuse"}}, "e.g. 'Ġ'"),
    ],
    ids=["merges", "pre-tokenizer", "bytes"],
)
def test_tokenizers_that_cut_otherwise_are_refused(
    tmp_path: Path, parts: dict[str, Any], words: str
) -> None:
    """With how often, and an example."""
    source = with_tokenizer("llama", tmp_path / "source", **parts)
    found = ("cuts text differently", "test strings", words)
    refused(TokenizerMismatchError, tmp_path / "b", source, *found)


def test_tokens_that_the_target_lacks_are_refused_by_their_share(tmp_path: Path) -> None:
    source = with_added_token("llama", tmp_path / "source", "zzyzx")
    bundle = pair(tmp_path / "rare", source)
    assert bundle.draft is not None
    assert bundle.draft.vocabulary.unmatched_share == 0.0
    assert load_vocab_map(bundle).to_target[280] == -1
    text = tmp_path / "text"
    text.write_text("zzyzx " * 20)
    more = {"keep": 270, "corpus": [text]}
    out = tmp_path / "often"
    refused(TokenizerMismatchError, out, source, "50%", "'zzyzx'", "10%", **more)


def rewritten(bundle: Path, manifest: Manifest) -> None:
    """With every hash as it should be."""
    files = {
        name: FileRecord(path.stat().st_size, sha256(path))
        for name in manifest.files
        for path in [bundle / name]
    }
    (bundle / MANIFEST).write_text(json.dumps(replace(manifest, files=files).to_json()))


def test_a_draft_of_another_target_is_refused_at_load(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    (bundle / TOKENIZER).write_text((bundle / TOKENIZER).read_text() + "\n")
    rewritten(bundle, manifest)
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    ("to_target", "to_draft", "words"),
    [
        (np.arange(282, dtype=np.int32), None, "to_target is int32 [282]"),
        (np.arange(283), None, "to_target is int64"),
        (np.full(283, -1, np.int32), None, "no token of the draft"),
        (np.zeros(283, np.int32), None, "two tokens"),
        (np.arange(1, 284, dtype=np.int32), None, "ids from 1 to 283"),
        (np.arange(-2, 281, dtype=np.int32), None, "ids from -2"),
        (None, np.arange(1, 284, dtype=np.int32), "to_draft has ids from 1 to 283"),
        (None, np.full(283, -1, np.int32), "could not read"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_at_load(
    bundle: Path, to_target: I64 | None, to_draft: I64 | None, words: str
) -> None:
    """Even when its hash is right."""
    opened = Bundle.open(bundle)
    same = np.arange(VOCAB_SIZE, dtype=np.int32)
    forged = VocabMap(
        same if to_target is None else to_target,  # type: ignore[arg-type]
        same if to_draft is None else to_draft,  # type: ignore[arg-type]
    )
    forged.save(bundle / VOCAB_MAP)
    rewritten(bundle, opened.manifest)
    with pytest.raises(BundleError) as caught:
        load_vocab_map(Bundle.open(bundle))
    assert words in str(caught.value)


def test_damage_is_found(command: CommandLine, bundle: Path) -> None:
    path = bundle / VOCAB_MAP
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="SHA-256"):
        Bundle.open(bundle).verify(lambda path, record: sha256(path) == record.sha256)
    assert VOCAB_MAP in command("inspect", bundle).complaint
    path.write_bytes(b"PK")
    with pytest.raises(BundleError, match="cannot be read"):
        load_vocab_map(Bundle.open(bundle))
    manifest = Bundle.open(bundle).manifest
    files = {name: record for name, record in manifest.files.items() if name != VOCAB_MAP}
    (bundle / MANIFEST).write_text(json.dumps(replace(manifest, files=files).to_json()))
    with pytest.raises(BundleError, match="lists no draft/vocab_map"):
        Bundle.open(bundle)


def test_added_tokens_with_other_ids_are_refused(tmp_path: Path) -> None:
    """The tokenizers package numbers them itself, so the draft would read another token."""
    source = copy_of("llama", tmp_path / "source")
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    stray = {**added[0], "id": 282, "content": "<new>"}
    edit_json(source / "tokenizer.json", added_tokens=[*added, stray])
    refused(TokenizerMismatchError, tmp_path / "b", source, "'<new>'", "282", "280")
