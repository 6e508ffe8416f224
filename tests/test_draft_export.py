"""Laws of a bundle with a draft: what it is made of, and what cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commandline import CommandLine
from exported import smollm2_pair
from tiny_checkpoints import NAMES, TINY, reference_logits, stored
from tiny_pairs import (
    TOLERANCE,
    VOCAB_SIZE,
    draft_logits,
    pair,
    refused,
    tokenizer_model,
    with_layers,
)

from headrace.errors import ExportError, HeadraceError, UsageError
from headrace.export.build import DraftOptions, ExportOptions, export
from headrace.export.check import agreement, compare
from headrace.export.options import parse_layers
from headrace.intact import sha256
from headrace.models.manifest import (
    DRAFT,
    MANIFEST,
    VOCAB_MAP,
    Bundle,
    Manifest,
)
from headrace.models.vocab_map import load_vocab_map


def test_a_model_is_its_own_perfect_draft(twin_bundle: Path) -> None:
    bundle = Bundle.open(twin_bundle)
    bundle.verify(lambda path, record: sha256(path) == record.sha256)
    draft = bundle.draft
    assert draft is not None
    assert (draft.config, draft.layers, draft.source_layers) == (bundle.manifest.config, (0, 1), 2)
    assert draft.parity is not None and draft.parity.mean_kl <= draft.parity.limit
    assert draft.agreement.top1 == 1.0
    assert draft.agreement.overlap == pytest.approx(1.0, abs=1e-9)
    assert bundle.draft_identity() == bundle.target_identity()
    found = load_vocab_map(bundle)
    identity = np.arange(VOCAB_SIZE)
    assert (found.to_target == identity).all() and (found.to_draft == identity).all()


def test_the_manifest_survives_json(twin_bundle: Path) -> None:
    manifest = Bundle.open(twin_bundle).manifest
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json())), twin_bundle) == manifest


@pytest.mark.parametrize("name", NAMES)
def test_every_family_can_be_a_draft(name: str, tmp_path: Path) -> None:
    """Its last layer alone, beside the whole: in gemma3 it is a local one."""
    last = len(stored_layers(name)) - 1
    bundle = pair(tmp_path / "b", TINY / name, (last,), target=TINY / name)
    ids = stored(name).input_ids
    expected = reference_logits(with_layers(name, tmp_path / "part", (last,)), ids)
    assert np.abs(draft_logits(bundle, ids) - expected).max() < TOLERANCE


def stored_layers(name: str) -> range:
    return range(json.loads((TINY / name / "config.json").read_text())["num_hidden_layers"])


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", (1, 0)), ("gemma3", (5, 0)), ("gemma3", (5,)), ("mistral", (2, 0))],
)
def test_kept_layers_are_those_and_in_their_order(
    name: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    bundle = pair(tmp_path / "b", TINY / name, layers, target=TINY / name)
    assert bundle.draft is not None
    assert bundle.draft.layers == layers
    ids = stored(name).input_ids
    expected = reference_logits(with_layers(name, tmp_path / "part", layers), ids)
    assert np.abs(draft_logits(bundle, ids) - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_trimmed_head_is_rows_of_the_whole_one(name: str, tmp_path: Path, corpus: Path) -> None:
    """Tied or not: embeddings stay whole, and what is fed keeps its id."""
    source = TINY / name
    whole = pair(tmp_path / "whole", source, target=source)
    part = pair(tmp_path / "part", source, target=source, keep=265, corpus=[corpus])
    assert part.draft is not None and part.draft.trim is not None
    assert part.draft.config.num_logits == 265
    assert part.draft.config.vocab_size == VOCAB_SIZE
    assert not part.draft.config.tied_head
    assert part.draft.trim.bytes_saved == (VOCAB_SIZE - 265) * part.draft.config.hidden_size * 4
    found = load_vocab_map(part)
    ids = stored(name).input_ids
    logits = draft_logits(part, ids)
    assert logits.shape == (len(ids), 265)
    assert np.abs(logits - draft_logits(whole, ids)[:, found.to_target]).max() < TOLERANCE
    assert (found.to_draft[:280] == np.arange(280)).all()


def test_what_is_kept(tmp_path: Path, corpus: Path) -> None:
    """Control tokens and single bytes, then by frequency, then by id."""
    draft = TINY / "llama"
    vocab = tokenizer_model("llama")["vocab"]
    always = {i for text, i in vocab.items() if len(text) == 1} | {0, 1, 2}
    assert len(always) == 259
    found = load_vocab_map(pair(tmp_path / "a", draft, keep=262, corpus=[corpus]))
    more = sorted(set(found.to_target.tolist()) - always)
    # like "bar" and others, 50 times each; "re" and "mp" come only as parts of these
    assert more == sorted(vocab[text] for text in ("ure", "\u01203", "pump"))
    everything = load_vocab_map(pair(tmp_path / "b", draft, keep=280, corpus=[corpus]))
    assert (everything.to_target == np.arange(280)).all()
    least = pair(tmp_path / "c", draft, keep=259, corpus=[corpus, corpus])
    assert set(load_vocab_map(least).to_target.tolist()) == always
    assert least.draft is not None and least.draft.trim is not None
    assert 0.4 < least.draft.trim.coverage < 0.45


def test_rare_tokens_fill_up_by_id(tmp_path: Path) -> None:
    text = tmp_path / "one"
    text.write_text("valve")
    found = load_vocab_map(pair(tmp_path / "a", TINY / "llama", keep=264, corpus=[text]))
    multiple = [i for i in found.to_target.tolist() if i >= 259]
    vocab = tokenizer_model("llama")["vocab"]
    assert multiple == [259, 260, 261, 262, vocab["ve"]]


def test_agreement_on_four_tokens() -> None:
    target = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    draft = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    found = agreement(target, draft, np.array([1, 0, -1], np.int32))
    # without the third: 1/3 for token 1 and 2/3 for token 0
    assert (found.tokens, found.top1) == (1, 1.0)
    assert found.overlap == pytest.approx(0.25 + 0.5)


def test_perplexity_leaves_out_what_the_head_has_not() -> None:
    logits = np.log(np.array([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]], np.float32))
    assert compare(logits, logits, np.array([0, -1, 1]), 0.0).perplexity == pytest.approx(4 / 3)


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_the_cache_is_the_targets(kv: str, tmp_path: Path) -> None:
    draft = DraftOptions(str(TINY / "llama"), (0,), "f32")
    options = ExportOptions(quant="f32", kv=kv, draft=draft, force=True)
    found = export(str(TINY / "llama"), tmp_path / "b", options).draft
    assert found is not None
    assert found.kv == kv
    assert (found.kv_clipping is not None) == (kv == "int8")


def test_layers_that_cannot_be_had(tmp_path: Path) -> None:
    out, source = tmp_path / "b", TINY / "llama"
    refused(UsageError, out, source, "got 2", "0 to 1", layers=(0, 2))
    refused(UsageError, out, source, "layer 1 is named 2 times", layers=(1, 0, 1))
    refused(UsageError, out, source, "got none", layers=())


def test_lists_of_layers() -> None:
    assert parse_layers("0,1,2,3") == parse_layers("0-3") == (0, 1, 2, 3)
    assert parse_layers("5, 0-1") == (5, 0, 1)
    for text in ("", "a", "1,", "3-1", "-1", "1-", "0-3-5", "99999", "1.5"):
        with pytest.raises(UsageError, match="0-3"):
            parse_layers(text)


def test_sizes_and_corpora_that_cannot_be_had(tmp_path: Path, corpus: Path) -> None:
    out, source = tmp_path / "b", TINY / "llama"
    for keep in (281, 258, 0, -5):
        words = (f"got {keep}", "259 to 280")
        refused(UsageError, out, source, *words, keep=keep, corpus=[corpus])
    refused(UsageError, out, source, "both or neither", keep=265)
    refused(UsageError, out, source, "both or neither", corpus=[corpus])
    for name, content in (("empty", b" \n"), ("latin", b"50 \xb0C"), ("none", None), ("", None)):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        refused(UsageError, out, source, str(path), keep=265, corpus=[corpus, path])


def test_a_draft_that_is_too_far_from_its_own_reference(tmp_path: Path) -> None:
    """A tiny model with random weights does not survive 4 bits."""
    draft = DraftOptions(str(TINY / "llama"), quant="int4")
    with pytest.raises(ExportError, match=r"draft: parity.*--draft-quant"):
        export(str(TINY / "llama"), tmp_path / "b", ExportOptions(quant="f32", draft=draft))
    assert not list(tmp_path.iterdir())


def test_a_draft_that_is_none(tmp_path: Path) -> None:
    refused(HeadraceError, tmp_path / "b", tmp_path / "nowhere", "no such file or folder")


def test_bundles_without_a_draft_are_what_they_were(tiny_bundle: Path) -> None:
    """Version 1 of 0.1.0: the same fields, and those read as before."""
    data = json.loads((tiny_bundle / MANIFEST).read_text())
    assert data["version"] == 1
    assert list(data) == [
        *("format", "version", "name", "created_by", "source", "target"),
        *("tokenizer", "sampling", "files", "sha256"),
    ]
    assert list(data["target"]) == ["config", "quant", "kv", "kv_clipping", "parity"]
    assert "head_size" not in data["target"]["config"]
    assert Bundle.open(tiny_bundle).draft is None


def test_the_command_line(command: CommandLine, tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "b"
    draft = ("--draft", TINY / "llama", "--draft-layers", "1", "--draft-quant", "f32")
    trim = ("--vocab-keep", "262", "--vocab-corpus", corpus, "--vocab-corpus", corpus)
    done = command("export", TINY / "llama", "-o", out, "--quant", "f32", *draft, *trim)
    assert done.code == 0, done.err
    shown = command("inspect", out)
    assert shown.code == 0, shown.err
    for words in ("Draft", "1 of 2", "262 of 283 rows", "of the corpus", "overlap with target"):
        assert words in done.out, words
        assert words in shown.out, words
    assert VOCAB_MAP in shown.out
    value = json.loads(command("inspect", out, "--json").out)["draft"]
    assert value["layers"] == [1]
    assert value["outputs"][0] == {
        "name": "logits",
        "dtype": "float32",
        "shape": ["logit_rows", 262],
    }
    assert value["kv_bytes_per_token"] == {"pool": 2 * 5 * 8 * 2, "arena": 2 * 5 * 8 * 4}
    assert 0 <= value["agreement"]["top1"] <= 1
    assert value["vocabulary"]["proposable"] == 262
    graph = json.loads(command("inspect", out / DRAFT, "--json").out)
    assert (graph["inputs"], graph["outputs"]) == (value["inputs"], value["outputs"])


def test_the_command_lines_mistakes(command: CommandLine, tmp_path: Path, corpus: Path) -> None:
    base = ("export", TINY / "llama", "-o", tmp_path / "b", "--quant", "f32")
    draft = ("--draft", str(TINY / "llama"))
    for arguments, words in (
        (("--draft-layers", "0"), "need --draft SOURCE"),
        (("--vocab-corpus", str(corpus)), "need --draft SOURCE"),
        ((*draft, "--draft-layers", "0..3"), "0-3"),
        ((*draft, "--draft-layers", "7"), "0 to 1"),
        ((*draft, "--vocab-keep", "262"), "both or neither"),
        ((*draft, "--draft-quant", "int3"), "'int3' is not one of"),
    ):
        result = command(*base, *arguments)
        assert result.code == 2, result.err
        assert words in result.complaint
        assert not (tmp_path / "b").exists()


def test_a_bundle_without_draft_shows_none(command: CommandLine, tiny_bundle: Path) -> None:
    assert json.loads(command("inspect", tiny_bundle, "--json").out)["draft"] is None
    assert "Draft" not in command("inspect", tiny_bundle).out


def test_smollm2_is_its_own_perfect_draft() -> None:
    bundle = smollm2_pair()
    draft = bundle.draft
    assert draft is not None
    assert (draft.agreement.tokens, draft.agreement.top1) == (512, 1.0)
    assert draft.agreement.overlap == pytest.approx(1.0, abs=1e-9)
    assert bundle.draft_identity() == bundle.target_identity()


def test_smollm2s_first_layers_are_a_poor_draft() -> None:
    bundle = smollm2_pair((0, 1, 2, 3))
    draft = bundle.draft
    assert draft is not None
    assert (draft.config.num_layers, draft.source_layers) == (4, 30)
    assert draft.parity is not None and draft.parity.mean_kl < 0.02
    assert 0.0 < draft.agreement.overlap < 0.2
    size = bundle.file(DRAFT).with_suffix(".data").stat().st_size
    assert size < 80e6
    found = load_vocab_map(bundle)
    assert (found.to_target == np.arange(49152)).all()
