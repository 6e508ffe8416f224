"""Laws of a distilled draft's folder: what is written is read, beside its target and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import CommandLine
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import NAMES, TINY, stored
from tiny_distilled import as_whole_folder, distilled, opened, trained
from tiny_gguf import write_gguf
from tiny_pairs import copy_of, edit_json, with_added_token

from headrace import LLM, SamplingParams
from headrace.errors import HeadraceError, SourceError, TokenizerMismatchError, UsageError
from headrace.errors import UnsupportedModelError as Unsupported
from headrace.export.build import DraftOptions, ExportOptions, export
from headrace.export.calibrate import FloatWeights
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distilled import own_weights, write_draft
from headrace.export.quantize import QuantMatrix, quantize_q8_0
from headrace.export.reduced import reduced_config
from headrace.export.text import Text
from headrace.export.weights import EMBEDDING, HEAD
from headrace.intact import sha256
from headrace.models.config import ModelConfig
from headrace.models.families import FAMILIES, config_from_hf
from headrace.models.families_to_hf import hf_config
from headrace.models.manifest import DRAFT, DRAFT_DATA, Bundle
from headrace.models.plantlog import calibration_text, sample_log
from headrace.models.reference import forward
from headrace.models.rope import linear, plain
from headrace.models.vocab_map import load_vocab_map

SCALED = ("llama_llama3", "llama_yarn", "llama_yarn_factor", "qwen3")
"""Their RoPE cannot be told from its frequencies."""

UNSCALED = [name for name in NAMES if name not in SCALED]

FORMS = [
    ("llama_wide", GGMLQuantizationType.Q8_0),
    ("llama_wide", GGMLQuantizationType.Q4_1),
    ("mistral", GGMLQuantizationType.F16),
    ("gemma3", GGMLQuantizationType.F16),
]


@pytest.mark.parametrize("name", UNSCALED)
def test_a_configuration_survives_a_config_json(name: str) -> None:
    config = open_checkpoint(str(TINY / name)).config
    assert config_from_hf(json.loads(json.dumps(hf_config(config)))) == config


@pytest.mark.parametrize("name", SCALED)
def test_one_with_a_rope_of_another_kind_cannot_be_written(name: str) -> None:
    with pytest.raises(Unsupported, match=r"here: a RoPE.*distil from the Hugging Face folder"):
        hf_config(open_checkpoint(str(TINY / name)).config, "here")


def test_numbers_of_a_rope_are_found_to_the_bit() -> None:
    """GGUF stores them as float32."""
    base = open_checkpoint(str(TINY / "llama")).config
    rng = np.random.default_rng(1)
    for head_dim in (2, 4, 64, 80, 128, 256):
        thetas = [1e4, 1e6, 5e5, *rng.uniform(2, 1e7, 8).astype(np.float32)]
        for theta in map(float, thetas):
            for factor in (1.0, 8.0, float(np.float32(10 / 3))):
                rope = linear(head_dim, theta, factor)
                config = replace(base, head_dim=head_dim, rope=rope, attention_scale=head_dim**-0.5)
                assert config_from_hf(hf_config(config)) == config


def test_what_no_config_json_says_is_refused() -> None:
    config = open_checkpoint(str(TINY / "llama")).config
    for wrong in (
        replace(config, qkv_bias=True),
        replace(config, attention_scale=0.5),
        replace(config, rope=replace(plain(8, 1e4), attention_scaling=1.5)),
    ):
        with pytest.raises(Unsupported, match="Hugging Face folder"):
            hf_config(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_f16_is_read_as_it_was_rounded(name: str, tmp_path: Path) -> None:
    draft = trained(TINY / name)
    write_draft(tmp_path, draft)
    found = opened(tmp_path, draft.target)
    assert found.config == reduced_config(draft.target.config, draft.layers)
    assert found.names() == {*draft.weights, EMBEDDING, *([] if found.config.tied_head else [HEAD])}
    floats, shared = FloatWeights(found), FloatWeights(draft.target)
    for part in found.names():
        here = draft.weights.get(part)
        expected = shared[part] if here is None else here.astype(np.float16)
        assert np.array_equal(floats[part], expected)
    assert found.head_ids is None
    assert found.note.training == {"steps": 3}
    assert found.tokenizer() == draft.target.tokenizer()
    assert set(found.files()) > {tmp_path / "draft.json", tmp_path / "model.safetensors"}


@pytest.mark.parametrize("name", NAMES)
def test_int8_is_read_as_it_was_quantised(name: str, tmp_path: Path) -> None:
    draft = trained(TINY / name)
    write_draft(tmp_path, draft, "int8")
    found = opened(tmp_path, draft.target)
    for part, weight in draft.weights.items():
        read = found.read(part)
        if weight.ndim == 1:
            assert np.array_equal(FloatWeights(found)[part], weight.astype(np.float16))
            continue
        assert isinstance(read, QuantMatrix)
        expected = quantize_q8_0(weight)
        for mine, others in ((read.codes, expected.codes), (read.scales, expected.scales)):
            assert mine.dtype == others.dtype
            assert np.array_equal(mine, others)
        assert (read.bits, read.columns, read.shape) == (8, expected.columns, weight.shape)
        step = np.repeat(read.scales, 32, axis=1)[:, : read.columns]
        # half a step, and what rounding the step takes from the largest
        assert (np.abs(read.dequantize() - weight) <= step * (0.5 + 127 / 2048)).all()


@pytest.mark.parametrize("name", ["llama", "llama_bias", "qwen3", "gemma3"])
@pytest.mark.parametrize("storage", ["f16", "int8"])
def test_the_graph_is_that_of_an_ordinary_folder_in_int8(
    storage: str, name: str, tmp_path: Path
) -> None:
    """Byte for byte, as nothing is quantised twice with a loss."""
    source = TINY / name
    folder = distilled(tmp_path / "draft", source, storage)
    whole = as_whole_folder(name, tmp_path / "whole", opened(folder, open_checkpoint(str(source))))
    for out, draft in (("a", DraftOptions(str(folder))), ("b", DraftOptions(str(whole)))):
        draft = replace(draft, quant=None if out == "a" else "int8")
        options = ExportOptions(quant="f32", kv="f32", draft=draft, force=True)
        export(str(source), tmp_path / out, options)
    ours, other = Bundle.open(tmp_path / "a"), Bundle.open(tmp_path / "b")
    assert ours.draft is not None and other.draft is not None
    assert (ours.draft.source, ours.draft.quant) == ("distilled", "keep")
    for file in (DRAFT, DRAFT_DATA):
        assert sha256(ours.file(file)) == sha256(other.file(file))
    assert ours.draft.agreement == other.draft.agreement
    assert ours.draft.parity == other.draft.parity


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("storage", ["f16", "int8"])
def test_a_gguf_files_draft(name: str, form: Any, storage: str, tmp_path: Path) -> None:
    """Its embeddings are taken as they are stored; norms lose the offset that GGUF adds."""
    write_gguf(TINY / name, tmp_path / "model.gguf", form)
    draft = trained(tmp_path / "model.gguf")
    folder = tmp_path / "draft"
    folder.mkdir()
    write_draft(folder, draft, storage)
    found = opened(folder, draft.target)
    family = FAMILIES[draft.target.config.family]
    config = reduced_config(draft.target.config, draft.layers)
    assert found.config == replace(config, norm_offset=family.norm_offset)
    assert type(found.read(EMBEDDING)) is type(draft.target.read(EMBEDDING))
    ids = stored(name).input_ids
    shared = {n: FloatWeights(found)[n] for n in found.names() - own_weights(config).keys()}
    logits = forward(found.config, FloatWeights(found), ids)
    expected = forward(config, {**draft.weights, **shared}, ids)
    tolerance = {"f16": 0.01, "int8": 0.1}[storage]
    assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()
    options = ExportOptions(quant="f32", draft=DraftOptions(str(folder)), force=True)
    manifest = export(str(tmp_path / "model.gguf"), tmp_path / "bundle", options)
    assert manifest.draft is not None
    assert manifest.draft.parity is not None and manifest.draft.parity.mean_kl < 0.02


def test_a_text_is_the_targets_with_a_distilled_draft(tmp_path: Path, shared_cache: Path) -> None:
    """From draft to answer, with a head that lacks a few tokens."""
    source = TINY / "llama"
    head_ids = np.delete(np.arange(280), [7, 100, 270])
    folder = distilled(tmp_path / "draft", source, "int8", head_ids)
    options = ExportOptions(quant="f32", draft=DraftOptions(str(folder)), force=True)
    export(str(source), tmp_path / "bundle", options)
    bundle = Bundle.open(tmp_path / "bundle")
    draft = bundle.draft
    assert draft is not None and draft.trim is not None
    assert (draft.name, draft.layers, draft.source_layers) == ("draft", (0, 1), 2)
    assert (draft.config.num_logits, draft.vocabulary.proposable) == (277, 277)
    counts = Text.of(open_checkpoint(str(source))).count([sample_log(), calibration_text()])
    assert draft.trim.coverage == counts[head_ids].sum() / counts.sum() < 1
    found = load_vocab_map(bundle)
    assert (found.to_target == head_ids).all()
    assert (found.to_draft == np.arange(283)).all()
    # the same layers as the target's but for the noise
    assert draft.agreement.top1 > 0.5
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(tmp_path / "bundle", cache=shared_cache, speculate="off") as llm:
        plain = llm.generate("pump 3", params)
    params = replace(params, sources="draft")
    with LLM(tmp_path / "bundle", cache=shared_cache, speculate=4) as llm:
        drafted = llm.generate("pump 3", params)
    assert drafted.token_ids == plain.token_ids
    done = drafted.speculation
    assert done is not None and done.accepted > 0


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft that a test may damage."""
    return distilled(tmp_path / "draft", TINY / "llama", "int8", np.arange(260))


Q = "model.layers.0.self_attn.q_proj.weight"


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def renamed(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors.pop(Q)


def nan(tensors: dict[str, Any]) -> None:
    tensors[Q + ".scales"] = np.full_like(tensors[Q + ".scales"], np.nan)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(Q), f"weight {Q} is missing"),
        (lambda t: t.pop(Q + ".scales"), f"weight {Q}.scales is missing"),
        (lambda t: t.update({Q: t[Q][:, :8]}), f"weight {Q} has shape [40, 8]"),
        (lambda t: t.update({Q + ".scales": t[Q + ".scales"][:, :1]}), "scales has shape [40, 1]"),
        (lambda t: t.update({EMBEDDING: t[Q]}), f"weight {EMBEDDING} is unknown"),
        (lambda t: t.update({Q: t[Q].astype(np.float32)}), "scales is unknown"),
        (
            lambda t: t.update({Q + ".scales": t[Q + ".scales"].astype(np.float32)}),
            "scales is F32; known: F16",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(40, np.int8)}),
            "weight model.norm.weight is I8; known: F16",
        ),
        (nan, f"weight {Q} has 80 of 80 block scales that are NaN"),
    ],
)
def test_weights_that_are_not_the_drafts(
    edit: Callable[[dict[str, Any]], object], words: str, draft: Path
) -> None:
    change(draft, edit)
    refused(draft, words, SourceError)


def refused(
    folder: Path, words: str, kind: type[HeadraceError], target: Path = TINY / "llama"
) -> None:
    """By an export, which leaves nothing behind."""
    out = folder.parent / "bundle"
    options = ExportOptions(quant="f32", draft=DraftOptions(str(folder)), force=True)
    with pytest.raises(kind) as caught:
        export(str(target), out, options)
    text = str(caught.value)
    assert "\n" not in text
    assert words in text, text
    assert not out.exists()


def test_files_that_are_damaged_or_missing(draft: Path) -> None:
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(draft, "model.safetensors: truncated or damaged", SourceError)
    weights.unlink()
    refused(draft, "not a whole distilled draft, it has no model.safetensors", SourceError)
    (draft / "draft.json").write_text('{"version": 1')
    refused(draft, "it has no model.safetensors", SourceError)
    weights.write_bytes(b"")
    refused(draft, "draft.json: not JSON, perhaps truncated", SourceError)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"version": 2}, "version 2, this headrace reads 1; update headrace"),
        ({"version": None}, "version is missing"),
        ({"head_ids": [1, 2, 283]}, "head_ids has 283, of a vocabulary of 283"),
        ({"head_ids": [1, 3, 2]}, "head_ids must be ascending"),
        ({"head_ids": [1, 1]}, "head_ids must be ascending"),
        ({"head_ids": []}, "at least one"),
        ({"head_ids": [-1, 2]}, "head_ids is [-1, 2], expected a list of integers from 0"),
        ({"head_ids": 5}, "head_ids is 5, expected a list"),
        ({"layers": [0]}, "layers has 1 numbers, config.json 2 layers"),
        ({"layers": None}, "layers is None, expected a list"),
        ({"target": {}}, "target: name is None, expected a text"),
        ({"target": None}, "target is None, expected an object"),
        ({"target": {"name": "x", "embedding_sha256": "12"}}, "expected a SHA-256"),
        ({"training": 3}, "training is 3, expected an object"),
    ],
)
def test_notes_that_cannot_be_read(values: dict[str, Any], words: str, draft: Path) -> None:
    edit_json(draft / "draft.json", **values)
    refused(draft, words, SourceError)


def test_configurations_of_another_model(draft: Path) -> None:
    edit_json(draft / "config.json", tie_word_embeddings=True)
    refused(draft, "tied_head is True, the target llama has False", SourceError)
    edit_json(draft / "config.json", tie_word_embeddings=False, vocab_size=280)
    refused(draft, "vocab_size is 280, the target llama has 283", SourceError)
    edit_json(draft / "config.json", architectures=["Fish"])
    refused(draft, "architecture Fish is not known", SourceError)


def test_another_target(draft: Path, tmp_path: Path) -> None:
    note = json.loads((draft / "draft.json").read_text())["target"]
    start = note["embedding_sha256"][:8]
    words = f"distilled from the embeddings of llama (sha256 {start}…), llama_bias has others"
    refused(draft, words, UsageError, TINY / "llama_bias")
    other = copy_of("llama", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[HEAD] = tensors[HEAD] + np.float32(1e-3)
    save_file(tensors, other / "model.safetensors")
    refused(draft, "distilled from the head weights of llama (sha256 ", UsageError, other)
    tensors[HEAD] = tensors[EMBEDDING]
    save_file(tensors, other / "model.safetensors")
    edit_json(other / "config.json", tie_word_embeddings=True)
    refused(draft, "the head weights of llama", UsageError, other)
    other = with_added_token("llama", tmp_path / "added", "pump 3")
    refused(draft, "distilled with the tokenizer entries of llama", TokenizerMismatchError, other)


def test_a_draft_alone_is_no_checkpoint(draft: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"{draft}: a distilled draft.*--draft {draft}"):
        open_checkpoint(str(draft))
    with pytest.raises(SourceError, match="a distilled draft"):
        export(str(draft), tmp_path / "bundle")


def test_weights_that_half_precision_cannot_hold(tmp_path: Path) -> None:
    draft = trained(TINY / "llama_bias")
    for value, storages in ((1e5, ("f16",)), (1e7, ("f16", "int8")), (np.nan, ("f16", "int8"))):
        weights = dict(draft.weights)
        weights[Q] = np.full_like(weights[Q], value)
        for storage in storages:
            with pytest.raises(SourceError, match=f"weight {Q} has .* NaN or infinite"):
                write_draft(tmp_path, replace(draft, weights=weights), storage)
    with pytest.raises(UsageError, match="got 'int4', allowed are f16, int8"):
        write_draft(tmp_path, draft, "int4")


@pytest.mark.parametrize("storage", ["f16", "int8"])
def test_arrays_may_lie_in_any_order(storage: str, tmp_path: Path) -> None:
    draft = trained(TINY / "llama_bias")
    others = {name: np.asfortranarray(weight) for name, weight in draft.weights.items()}
    files = []
    for number, weights in enumerate((draft.weights, others)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_draft(folder, replace(draft, weights=weights), storage)
        files.append((folder / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_layers_of_one_kind_leave_the_other_out(tmp_path: Path) -> None:
    """gemma3's full layer alone, and local ones alone."""
    whole = trained(TINY / "gemma3")
    for layers in ((5,), (0, 6)):
        folder = tmp_path / str(len(layers))
        folder.mkdir()
        config: ModelConfig = reduced_config(whole.target.config, layers)
        weights = {n: np.ones(s, np.float32) for n, s in own_weights(config).items()}
        write_draft(folder, replace(whole, layers=layers, weights=weights))
        assert opened(folder, whole.target).config == config


def test_windows_above_a_layer_are_listed(tmp_path: Path) -> None:
    """A Qwen's config.json says from which layer on; a draft's, which layers."""
    source = copy_of("qwen2", tmp_path / "source")
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    edit_json(source / "config.json", layer_types=None, **windows)
    draft = trained(source)
    assert draft.target.config.layer_types == ("full", "sliding")
    for layers in ((0, 1), (1, 0), (0,), (1,)):
        folder = tmp_path / "".join(map(str, layers))
        folder.mkdir()
        config = reduced_config(draft.target.config, layers)
        weights = {n: np.ones(s, np.float32) for n, s in own_weights(config).items()}
        write_draft(folder, replace(draft, layers=layers, weights=weights))
        assert opened(folder, draft.target).config == config


def test_the_command_line(command: CommandLine, draft: Path, tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "bundle"
    base = ("export", TINY / "llama", "-o", out, "--quant", "f32", "--draft", draft)
    for arguments, words in (
        (("--draft-layers", "0"), "draft_layers: "),
        (("--vocab-keep", "262", "--vocab-corpus", corpus), "vocab_keep: "),
        (("--vocab-corpus", corpus), "vocab_corpus: "),
    ):
        result = command(*base, *arguments)
        assert result.code == 2
        assert words in result.complaint and "is a distilled draft and has its" in result.complaint
        assert not out.exists()
    done = command(*base)
    assert done.code == 0, done.err
    for words in ("260 of 283 rows", "keep", "distilled"):
        assert words in done.out, words
    assert (
        json.loads(command("inspect", out, "--json").out)["draft"]["vocabulary"]["proposable"]
        == 260
    )
    result = command("export", draft, "-o", tmp_path / "other")
    assert (result.code, "a distilled draft" in result.complaint) == (1, True)
