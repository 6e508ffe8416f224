"""Laws of reading GGUF files, on files that the tests write with the gguf package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from headrace.errors import SourceError, UnsupportedModelError
from headrace.export.checkpoint import open_checkpoint
from headrace.export.gguf import gguf_name, rope_order
from headrace.export.gguf_file import read_gguf
from headrace.export.gguf_text import read_tokenizer
from headrace.export.quantize import QuantMatrix
from headrace.models.families import weights
from headrace.models.families_gguf import GgufTensors, config_from_gguf

EXACT = (Type.Q4_0, Type.Q4_1, Type.Q8_0)
WRITABLE = (Type.F32, Type.F16, Type.BF16, *EXACT, Type.Q5_0, Type.Q5_1, Type.TQ1_0, Type.TQ2_0)
READABLE = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER = 4, 2, 8, 32, 64
GATE, DOWN = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"

Tensors = dict[str, tuple[np.ndarray[Any, Any], Any]]


def metadata(arch: str = "llama", **values: Any) -> dict[str, Any]:
    own = {
        "embedding_length": HIDDEN,
        "feed_forward_length": INTER,
        "block_count": 2,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 256,
        **values,
    }
    return {f"{arch}.{key}": value for key, value in own.items() if value is not None}


def tensors_of(pairs: dict[str, Any], arch: str = "llama", tied: bool = True) -> Tensors:
    """Seeded float32 tensors for metadata, by GGUF name."""
    names = frozenset() if tied else frozenset({"output.weight"})
    config = config_from_gguf({"general.architecture": arch, **pairs}, GgufTensors(names, 12))
    rng = np.random.default_rng(3)
    return {
        gguf_name(name, config): (rng.standard_normal(shape).astype(np.float32), Type.F32)
        for name, shape in weights(config).items()
    }


def write(path: Path, pairs: dict[str, Any], tensors: Tensors, arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in pairs.items():
        kind = gguf.GGUFValueType.get_type(value)
        is_count = kind == gguf.GGUFValueType.INT32
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if is_count else kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(path: Path, changes: Tensors | None = None, **values: Any) -> Path:
    pairs = metadata(**values)
    return write(path, pairs, tensors_of(pairs) | (changes or {}))


def random_blocks(shape: tuple[int, int], kind: Any) -> np.ndarray[Any, Any]:
    """Bytes of a type that the gguf package cannot write; low bytes keep every scale finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(11)
    return rng.integers(0, 0x60, (shape[0], shape[1] // block * size), dtype=np.uint8)


def assert_line(error: Exception, *words: str) -> None:
    """The message is one line that has every word."""
    text = str(error)
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text


def refused(path: Path, *words: str, kind: type[SourceError] = SourceError) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(str(path))
    assert_line(caught.value, str(path), *words)


@pytest.mark.parametrize("kind", [*WRITABLE, *READABLE], ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_gguf_package_reads_it(tmp_path: Path, kind: Any) -> None:
    """Equal bits, but for Q4_1: its offset m + 8 d may round once, far below half a code's step."""
    shape = (INTER, 256)
    if kind in WRITABLE:
        values = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
        data = gguf.quants.quantize(values, kind)
    else:
        data = random_blocks(shape, kind)
    expected = gguf.quants.dequantize(data, kind)
    pairs = metadata("llama", embedding_length=256, **{"attention.key_length": HEAD_DIM})
    path = write(
        tmp_path / "m.gguf", pairs, tensors_of(pairs) | {"blk.0.ffn_gate.weight": (data, kind)}
    )
    got = open_checkpoint(str(path)).read(GATE)
    assert isinstance(got, QuantMatrix) == (kind in EXACT)
    assert got.shape == shape
    array = got.dequantize() if isinstance(got, QuantMatrix) else got
    assert array.dtype == np.float32
    if kind == Type.Q4_1:
        # one ulp of the largest term, |m| + 16 d
        assert isinstance(got, QuantMatrix)
        assert got.offsets is not None
        ulp = np.spacing(np.abs(got.offsets) + 8 * got.scales).max()
        assert np.abs(array - expected).max() <= ulp
    else:
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_block_layout(tmp_path: Path, kind: Any) -> None:
    """Codes in the order of the columns: the low nibbles are a block's first half."""
    ramp = np.arange(HIDDEN, dtype=np.float32) - (16 if kind != Type.Q4_1 else 0)
    data = gguf.quants.quantize(np.tile(ramp, (INTER, 1)), kind)
    path = tiny(tmp_path / "m.gguf", {"blk.0.ffn_gate.weight": (data, kind)})
    got = open_checkpoint(str(path)).read(GATE)
    assert isinstance(got, QuantMatrix)
    assert (got.bits, got.columns) == (8 if kind == Type.Q8_0 else 4, HIDDEN)
    codes = got.codes[0, 0].astype(int)
    scale = float(got.scales[0, 0])
    assert np.all(np.diff(codes) * np.sign(scale) >= 0)
    assert len(set(codes)) >= 15
    np.testing.assert_allclose(got.dequantize()[0], ramp, atol=abs(scale))


def test_rope_order_undoes_the_permutation_of_the_converter() -> None:
    rows = np.arange(HEADS * HEAD_DIM)
    stored = rows.reshape(HEADS, 2, HEAD_DIM // 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(stored[rope_order(HEADS, HEAD_DIM)], rows)
    # rows that the file holds as neighbours turn together: they become halves of a head
    assert list(rope_order(1, 8)) == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_q_and_k_rows_and_biases_are_put_back(tmp_path: Path, kind: Any) -> None:
    rng = np.random.default_rng(9)
    pairs = metadata()
    tensors = tensors_of(pairs)
    expected = {}
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", None)):
        rows = HEAD_DIM * (heads or KV_HEADS)
        order = np.arange(rows)
        if heads:
            order = order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        weight = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
        bias = rng.standard_normal(rows).astype(np.float32)
        data = gguf.quants.quantize(weight, kind)
        expected[f"{part}_proj.weight"] = gguf.quants.dequantize(data, kind)
        expected[f"{part}_proj.bias"] = bias
        for layer in (0, 1):
            tensors[f"blk.{layer}.attn_{part}.weight"] = (data[order], kind)
            tensors[f"blk.{layer}.attn_{part}.bias"] = (bias[order], Type.F32)
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", pairs, tensors)))
    assert checkpoint.config.qkv_bias
    for name, values in expected.items():
        got = checkpoint.read(f"model.layers.1.self_attn.{name}")
        array = got.dequantize() if isinstance(got, QuantMatrix) else got
        np.testing.assert_array_equal(array, values, err_msg=name)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_keep_their_rows(tmp_path: Path, arch: str) -> None:
    pairs = metadata(arch, **{"attention.key_length": HEAD_DIM})
    tensors = tensors_of(pairs, arch, tied=False)
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", pairs, tensors, arch)))
    assert checkpoint.names() == set(weights(checkpoint.config))
    assert not checkpoint.config.tied_head
    for name in checkpoint.names():
        stored = tensors[gguf_name(name, checkpoint.config)][0]
        np.testing.assert_array_equal(checkpoint.read(name), stored, err_msg=name)


def test_gemma3_norms_go_to_their_places() -> None:
    pairs = {"general.architecture": "gemma3", **metadata("gemma3")}
    config = config_from_gguf(pairs, GgufTensors(frozenset(), 12))
    parts = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    names = [gguf_name(f"model.layers.3.{part}_layernorm.weight", config) for part in parts]
    expected = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    assert names == [f"blk.3.{name}.weight" for name in expected]


def test_metadata_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    pairs = {
        **metadata(),
        "general.name": "Tiny ü 小",
        "tokenizer.ggml.tokens": ["a", "", "ü"],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
        "tokenizer.ggml.token_type": [1, 3, 4],
        "tokenizer.ggml.add_bos_token": False,
        "general.sampling.temp": 0.6,
    }
    path = write(tmp_path / "m.gguf", pairs, tensors_of(metadata()))
    reader = gguf.GGUFReader(path)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    file = read_gguf(path)
    assert file.metadata == expected
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(tensor.shape[::-1])
        np.testing.assert_array_equal(file.tensors[tensor.name].dequantize(), tensor.data)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.kind, checkpoint.name) == ("gguf", "Tiny ü 小")
    assert checkpoint.sampling == {"temperature": pytest.approx(0.6)}
    assert checkpoint.files() == {path: path.stat().st_size}


def test_every_truncation_is_found(tmp_path: Path) -> None:
    """Tables are cut at every byte, the data at a few; nothing but SourceError comes out."""
    pairs = {**metadata(), "tokenizer.ggml.tokens": ["a", "b"]}
    path = write(tmp_path / "m.gguf", pairs, tensors_of(metadata()))
    content = path.read_bytes()
    first_data = len(content) - sum(data.nbytes for data, _ in tensors_of(metadata()).values())
    for keep in [*range(first_data), len(content) - 4096, len(content) - 64]:
        path.write_bytes(content[:keep])
        with pytest.raises(SourceError) as caught:
            read_gguf(path)
        assert_line(caught.value, "truncated or damaged" if keep >= 4 else str(path))
    refused(path, "truncated or damaged", "tensor", f"of {len(content) - 64}")


def test_damage_never_comes_out_as_anything_but_a_source_error(tmp_path: Path) -> None:
    pairs = {**metadata(), "tokenizer.ggml.tokens": ["a", "b"]}
    path = write(tmp_path / "m.gguf", pairs, tensors_of(metadata()))
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(1)
    table = len(content) - sum(data.nbytes for data, _ in tensors_of(metadata()).values())
    for _ in range(300):
        damaged = bytearray(content)
        for position in rng.integers(4, table, 3):
            damaged[position] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(str(path))
        except SourceError as error:
            assert_line(error)


def test_files_that_are_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    refused(path, "empty")
    path.write_bytes(b"PK\x03\x04 and more")
    refused(path, "not a GGUF file")
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 4, 0, 0))
    refused(path, "version 4", "2 and 3")
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    refused(path, "version 1")
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    refused(path, "big-endian")
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    refused(path, "token_embd.weight is missing")
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1 << 60))
    refused(path, "truncated or damaged")


def test_parts_of_a_split_model_are_refused(tmp_path: Path) -> None:
    pairs = {**metadata(), "split.count": 3}
    path = write(tmp_path / "m.gguf", pairs, tensors_of(metadata()))
    refused(path, "one of 3 parts", "--merge", kind=UnsupportedModelError)


def test_tables_that_disagree_name_the_tensor(tmp_path: Path) -> None:
    path, pairs = tmp_path / "m.gguf", metadata()
    tensors = tensors_of(pairs)
    one = {"blk.1.ffn_up.weight": (np.ones((INTER, HIDDEN // 2), np.float32), Type.F32)}
    refused(write(path, pairs, tensors | one), "blk.1.ffn_up.weight", "[64, 16]", "[64, 32]")
    fewer = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}
    refused(write(path, pairs, fewer), "blk.1.ffn_up.weight", "missing")
    more = {"blk.0.ffn_gate_inp.weight": (np.ones((2, 2), np.float32), Type.F32)}
    write(path, pairs, tensors | more)
    refused(path, "ffn_gate_inp", "blk.N.ffn_gate.weight", kind=UnsupportedModelError)


@pytest.mark.parametrize("kind", [Type.Q8_1, Type.I32], ids=lambda kind: kind.name)
def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path, kind: Any) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data: np.ndarray[Any, Any] = np.zeros((INTER, HIDDEN // block * size), np.uint8)
    data = data.view(np.int32) if kind == Type.I32 else data
    path = tiny(tmp_path / "m.gguf", {"blk.0.ffn_gate.weight": (data, kind)})
    refused(path, "blk.0.ffn_gate.weight", kind.name, kind=UnsupportedModelError)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_0, Type.Q4_1, Type.Q6_K], ids=lambda k: k.name)
def test_values_that_are_not_finite_are_found_when_read(tmp_path: Path, kind: Any) -> None:
    shape = (256, 256)
    if kind == Type.F32:
        data = np.full(shape, np.nan, np.float32)
    else:
        data = random_blocks(shape, kind)
        scale = 208 if kind == Type.Q6_K else 0
        data[7, scale : scale + 2] = np.array([np.inf], np.float16).view(np.uint8)
    pairs = metadata(
        "llama", embedding_length=256, feed_forward_length=256, **{"attention.key_length": HEAD_DIM}
    )
    tensors = tensors_of(pairs) | {"blk.0.ffn_down.weight": (data, kind)}
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", pairs, tensors)))
    with pytest.raises(SourceError) as caught:
        checkpoint.read(DOWN)
    assert_line(caught.value, "blk.0.ffn_down.weight", "NaN or infinite")


def test_rope_freqs_scale_the_frequencies(tmp_path: Path) -> None:
    factors = np.array([1, 1, 4, 8], np.float32)
    path = tiny(tmp_path / "m.gguf", {"rope_freqs.weight": (factors, Type.F32)})
    checkpoint = open_checkpoint(str(path))
    base = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(checkpoint.config.rope.inv_freq, base / factors, rtol=1e-12)
    assert checkpoint.names() == set(weights(checkpoint.config))


def text(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Any:
    """The tokenizer source of metadata under `tokenizer.ggml`."""
    monkeypatch.setattr("headrace.export.tokenizer.tokenizer_from_gguf", lambda metadata: "{}")
    own = {"model": "gpt2", "tokens": ["a", "b", "<|im_end|>", "<|endoftext|>"], **values}
    return read_tokenizer({f"tokenizer.ggml.{k}": v for k, v in own.items()}, "m.gguf")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": "llama"}, True),
        ({"model": "llama", "add_bos_token": False}, False),
        ({"bos_token_id": 0}, False),
        ({"bos_token_id": 0, "add_bos_token": True}, True),
        ({"bos_token_id": 0, "pre": "llama-bpe"}, True),
        ({"bos_token_id": 0, "pre": "qwen2"}, False),
        ({"bos_token_id": 0, "pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "llama-bpe"}, False),
    ],
)
def test_bos_goes_first_where_llama_cpp_puts_it(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], expected: bool
) -> None:
    assert text(monkeypatch, **values).add_bos is expected


def test_every_end_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text(monkeypatch).eos_ids == ()
    found = text(monkeypatch, eos_token_id=1, eot_token_id=0, token_type=[1, 1, 3, 1])
    assert found.eos_ids == (1, 0, 2)
    sentencepiece = text(monkeypatch, model="llama")
    assert (sentencepiece.bos_id, sentencepiece.eos_ids) == (1, (2,))
    with pytest.raises(SourceError, match=r"eos_token_id is 9, but there are 4 tokens"):
        text(monkeypatch, eos_token_id=9)
    with pytest.raises(SourceError, match="no tokenizer"):
        read_tokenizer({}, "m.gguf")
