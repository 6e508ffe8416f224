"""Laws of reading a Hugging Face folder, on folders that the tests write."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.errors import HeadraceError, SourceError, UnsupportedModelError
from headrace.export.checkpoint import open_checkpoint
from headrace.models.families import config_from_hf, weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"<s>": 1, "</s>": 2, "a": 3}, "merges": []},
    "added_tokens": [{"id": 4, "content": "<|end|>", "special": True}],
    "post_processor": None,
}
BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
}
Q = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(dtype: Any = np.float32) -> Arrays:
    rng = np.random.default_rng(7)
    table = weights(config_from_hf(CONFIG))
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in table.items()}


def folder_of(path: Path, tensors: Arrays | None = None, **files: Any) -> Path:
    """A folder with tensors in one file, config and tokenizer; `files` by name without suffix."""
    path.mkdir(exist_ok=True)
    for name, value in {"config": CONFIG, "tokenizer": TOKENIZER, **files}.items():
        if value is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    save_file(arrays() if tensors is None else tensors, path / "model.safetensors")
    return path


def shard(path: Path) -> dict[str, str]:
    """Splits a folder's file in two with an index; returns the index's weight_map."""
    tensors = arrays()
    (path / "model.safetensors").unlink()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, path / file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def assert_line(error: HeadraceError, *words: str) -> None:
    """The message is one line that has every word."""
    text = str(error)
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text


def refused(path: Path | str, *words: str, kind: type[HeadraceError] = SourceError) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(str(path))
    assert_line(caught.value, *words)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_is_read_exactly(tmp_path: Path, dtype: Any) -> None:
    tensors = arrays(dtype)
    checkpoint = open_checkpoint(str(folder_of(tmp_path / "tiny", tensors)))
    assert (checkpoint.kind, checkpoint.name) == ("huggingface", "tiny")
    assert checkpoint.names() == set(weights(checkpoint.config))
    for name, values in tensors.items():
        got = checkpoint.read(name)
        assert isinstance(got, np.ndarray)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, values.astype(np.float32), err_msg=name)


def test_sharded_equals_single(tmp_path: Path) -> None:
    folder_of(tmp_path)
    single = {
        n: w for c in [open_checkpoint(str(tmp_path))] for n in c.names() for w in [c.read(n)]
    }
    shard(tmp_path)
    sharded = open_checkpoint(str(tmp_path))
    assert sharded.names() == single.keys()
    for name, values in single.items():
        np.testing.assert_array_equal(sharded.read(name), values, err_msg=name)
    assert {path.suffix for path in sharded.files()} == {".json", ".safetensors"}
    assert len(sharded.files()) == 5
    assert all(size == path.stat().st_size for path, size in sharded.files().items())


def test_harmless_weights_are_left_out(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    checkpoint = open_checkpoint(str(folder_of(tmp_path, arrays() | extra)))
    assert checkpoint.names() == arrays().keys()


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path, equal: bool) -> None:
    """If it is not, the head was trained on its own and config.json is wrong."""
    tensors = arrays()
    if equal:
        tensors[HEAD] = tensors[EMBEDDING]
    folder_of(tmp_path, tensors, config={**CONFIG, "tie_word_embeddings": True})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.tied_head is equal
    assert (HEAD in checkpoint.names()) is not equal


def test_text_weights_of_a_multimodal_model(tmp_path: Path) -> None:
    sizes = {k: v for k, v in CONFIG.items() if k != "architectures"}
    text = {**sizes, "head_dim": 4, "sliding_window": 8}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    table = weights(config_from_hf(config))
    tensors: Arrays = {
        f"language_model.{name}": np.ones(shape, np.float32) for name, shape in table.items()
    }
    folder_of(tmp_path / "text", tensors, config=config)
    assert open_checkpoint(str(tmp_path / "text")).names() == table.keys()
    tensors["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    folder_of(tmp_path / "both", tensors, config=config)
    with pytest.raises(SourceError):
        open_checkpoint(str(tmp_path / "both"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_found_when_read(tmp_path: Path, value: float) -> None:
    tensors = arrays()
    tensors[Q][3, 5] = value
    checkpoint = open_checkpoint(str(folder_of(tmp_path, tensors)))
    with pytest.raises(SourceError) as caught:
        checkpoint.read(Q)
    assert_line(caught.value, Q, "1 of 256 values", "NaN or infinite")


def test_tables_that_disagree_name_the_weight(tmp_path: Path) -> None:
    tensors = arrays()
    folder_of(tmp_path / "missing", {n: a for n, a in tensors.items() if n != Q})
    refused(tmp_path / "missing", Q, "missing")
    folder_of(tmp_path / "shape", tensors | {Q: tensors[Q][:8].copy()})
    refused(tmp_path / "shape", Q, "[8, 16]", "[16, 16]")
    folder_of(tmp_path / "extra", tensors | {"model.adapter": np.ones(2, np.float32)})
    known = "model.layers.N.self_attn.q_proj.weight"
    refused(tmp_path / "extra", "model.adapter", known, kind=UnsupportedModelError)
    folder_of(tmp_path / "dtype", tensors | {Q: tensors[Q].astype(np.int8)})
    refused(tmp_path / "dtype", Q, "I8", "BF16", kind=UnsupportedModelError)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    file = folder_of(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, str(file), "truncated or damaged")


def test_bad_shards(tmp_path: Path) -> None:
    weight_map = shard(folder_of(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    second = tmp_path / weight_map[sorted(weight_map)[1]]
    content = second.read_bytes()
    second.unlink()
    refused(tmp_path, second.name, "missing")
    second.write_bytes(content[:-4])
    refused(tmp_path, second.name, "truncated or damaged")
    index.write_text(json.dumps({"weight_map": {Q: "../model.safetensors"}}))
    refused(tmp_path, "../model.safetensors", "not a file name")
    index.write_text('{"weight_map":')
    refused(tmp_path, index.name, "not JSON")
    index.write_text("{}")
    refused(tmp_path, index.name, "no weight_map")


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")
    file = folder_of(tmp_path) / "model.safetensors"
    file.unlink()
    refused(tmp_path, "model.safetensors", "index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pytorch_model.bin", "convert")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "not a JSON object")
    (tmp_path / "config.json").write_bytes(b"\xff")
    refused(tmp_path, "config.json", "not UTF-8")


@pytest.mark.parametrize("source", ["nowhere", "no/such/folder", "./org/name", "missing.gguf", ""])
def test_neither_path_nor_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if source:
        refused(source, source, "no such file or folder", "org/name")
    else:
        # pathlib reads it as the current folder
        refused(source, "no config.json")


# everything is imported first: the interpreter's own folder may be closed to others
UNPRIVILEGED = """
import mmap, os, sys
import headrace.export.gguf, headrace.export.huggingface
from headrace.errors import StorageError
from headrace.export.checkpoint import open_checkpoint
if os.geteuid() == 0:
    os.setuid(65534)
for source in sys.argv[1:]:
    try:
        open_checkpoint(source)
    except StorageError as error:
        print(error)
"""


def test_no_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        weights_file = folder_of(root / "weights") / "model.safetensors"
        config_file = folder_of(root / "config") / "config.json"
        gguf_file = root / "model.gguf"
        gguf_file.write_bytes(b"GGUF")
        closed = folder_of(root / "closed")
        for path in (weights_file, config_file, gguf_file, closed):
            path.chmod(0)
        sources = [root / "weights", root / "config", gguf_file, closed]
        command = [sys.executable, "-c", UNPRIVILEGED, *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 4, done
        for line, source in zip(lines, sources, strict=True):
            assert str(source) in line
            assert "no permission to read it" in line


def text_of(path: Path, **files: Any) -> Any:
    return open_checkpoint(str(folder_of(path, **files))).tokenizer()


def test_special_tokens_are_united(tmp_path: Path) -> None:
    plain = text_of(tmp_path)
    assert (plain.bos_id, plain.eos_ids, plain.add_bos) == (1, (2,), False)
    assert json.loads(plain.tokenizer_json) == TOKENIZER
    settings = {"bos_token": None, "eos_token": {"content": "<|end|>"}}
    generation = {"eos_token_id": [4, 3]}
    text = text_of(tmp_path, tokenizer_config=settings, generation_config=generation)
    assert (text.bos_id, text.eos_ids) == (None, (4, 3, 2))


@pytest.mark.parametrize(
    ("settings", "processor", "expected"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, None, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, BOS_FIRST, False),
        ({"tokenizer_class": "GemmaTokenizer"}, None, True),
        ({"tokenizer_class": "GemmaTokenizer", "bos_token": None}, None, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, BOS_FIRST, True),
        ({}, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, BOS_FIRST]}, True),
        ({}, {"type": "ByteLevel"}, False),
        ({}, {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}, False),
    ],
)
def test_bos_goes_first_where_transformers_puts_it(
    tmp_path: Path, settings: dict[str, Any], processor: Any, expected: bool
) -> None:
    tokenizer = {**TOKENIZER, "post_processor": processor}
    text = text_of(tmp_path, tokenizer=tokenizer, tokenizer_config=settings)
    assert text.add_bos is expected


def test_chat_templates(tmp_path: Path) -> None:
    assert text_of(tmp_path).chat_template is None
    settings: dict[str, Any] = {"chat_template": "one"}
    assert text_of(tmp_path, tokenizer_config=settings).chat_template == "one"
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert text_of(tmp_path, tokenizer_config={"chat_template": named}).chat_template == "d"
    with pytest.raises(SourceError, match="no template named default; it has: tool"):
        text_of(tmp_path, tokenizer_config={"chat_template": named[:1]})
    assert text_of(tmp_path, chat_template={"chat_template": "own"}).chat_template == "own"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert text_of(tmp_path).chat_template == "jinja"


def test_tokenizers_that_cannot_be_read(tmp_path: Path) -> None:
    folder_of(tmp_path, tokenizer=None)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SourceError, match=r"no tokenizer\.json$"):
        checkpoint.tokenizer()
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"tokenizer\.model but no tokenizer\.json; make one"):
        checkpoint.tokenizer()
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(SourceError, match="not JSON"):
        checkpoint.tokenizer()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="not a tokenizer"):
        checkpoint.tokenizer()
    folder_of(tmp_path, tokenizer_config={"eos_token": "<gone>"})
    with pytest.raises(SourceError, match="eos_token <gone> is not in the vocabulary"):
        checkpoint.tokenizer()
    folder_of(tmp_path, tokenizer_config={}, generation_config={"eos_token_id": "two"})
    with pytest.raises(SourceError, match="eos_token_id is two"):
        checkpoint.tokenizer()


def test_sampling_by_our_names(tmp_path: Path) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    checkpoint = open_checkpoint(str(folder_of(tmp_path, generation_config=values)))
    assert checkpoint.sampling == {"temperature": 0.6, "top_k": 20, "repeat_penalty": 1.1}
    greedy = folder_of(tmp_path, generation_config={**values, "do_sample": False})
    assert open_checkpoint(str(greedy)).sampling == {"temperature": 0.0, "repeat_penalty": 1.1}
    folder_of(tmp_path, generation_config={"top_p": "high"})
    refused(tmp_path, "generation_config.json", "top_p", "high")
