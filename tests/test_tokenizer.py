"""Laws of encoding and decoding, on small tokenizers trained here."""

import codecs
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import tiny_tokenizers as tiny
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from headrace.errors import BundleError, SourceError, TokenizerMismatchError, UsageError
from headrace.errors import UnsupportedModelError as Unsupported
from headrace.export.tokenizer import drop_tokens_without_row, tokenizer_from_gguf
from headrace.runtime.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ODD = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "</s>", "<s>", " ", "a", "é", "😀", "\n", "the"]
    ),
    max_size=12,
).map("".join)
ANY_TEXT = st.one_of(TEXT, ODD)
ALL: list[Callable[[], Tokenizer]] = [
    tiny.byte_level,
    tiny.sentencepiece,
    lambda: tiny.sentencepiece(False),
]
each = pytest.mark.parametrize("make", ALL, ids=["byte_level", "spm", "spm_no_prefix"])


@each
@given(text=ANY_TEXT)
def test_decode_gives_back_what_was_encoded(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@each
@given(text=ANY_TEXT)
def test_user_text_never_becomes_a_control_token(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    assert not any(map(tokenizer.is_control, tokenizer.encode(text)))


@each
@given(data=st.data(), continuation=st.booleans(), skip=st.booleans())
def test_pushes_add_up_to_the_decoded_whole(
    make: Callable[[], Tokenizer], data: st.DataObject, continuation: bool, skip: bool
) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, 420), max_size=30))
    stream = tokenizer.detokenizer(continuation=continuation, skip_control=skip)
    pushed = [*map(stream.push, ids), stream.finish()]
    assert "".join(pushed) == tokenizer.decode(ids, continuation=continuation, skip_control=skip)


@each
@given(data=st.data())
def test_bytes_of_tokens_are_the_bytes_of_the_text(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, 420), max_size=30))
    together = b"".join(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids, continuation=True) == together.decode(errors="replace")


@each
def test_a_stream_never_gives_half_a_character(make: Callable[[], Tokenizer]) -> None:
    text = "👨‍👩‍👧‍👦 温度が高い é ध्वनि"
    tokenizer = make()
    ids = tokenizer.encode(text)
    stream = tokenizer.detokenizer(continuation=False)
    seen = ""
    for token_id in ids:
        seen += stream.push(token_id)
        assert text.startswith(seen), seen
    assert len(ids) > len(text)  # some characters took several tokens
    assert stream.finish() == ""


def test_a_cut_character_becomes_replacement_only_at_the_end() -> None:
    tokenizer = tiny.byte_level()
    stream = tokenizer.detokenizer()
    first = tokenizer.encode("\U0001f680")[0]
    assert (stream.push(first), stream.finish()) == ("", "\ufffd")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    expected = decoder.decode(tokenizer.token_bytes(first)) + decoder.decode(b"a")
    stream = tokenizer.detokenizer()
    assert stream.push(first) + stream.push(tokenizer.encode("a")[0]) == expected


def test_first_space_of_an_answer_is_kept_and_of_a_whole_text_dropped() -> None:
    tokenizer = tiny.sentencepiece()
    ids = tokenizer.encode("the pump")
    assert tokenizer.decode(ids) == "the pump"
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.push, ids)) == " the pump"


@given(text=st.text("aab \u2581the", max_size=30))
def test_merging_by_score_is_greedy_over_neighbours(text: str) -> None:
    metadata = tiny.sentencepiece_metadata(False)
    tokens, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    score_of = dict(zip(tokens, scores, strict=True))
    parts = list(text.replace(" ", tiny.SPACE))
    while True:
        pairs = [(score_of.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(score, i) for score, i in pairs if score is not None]
        if not known:
            break
        i = -max(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    expected = [tokens.index(part) for part in parts]
    assert tiny.sentencepiece(False).encode(text) == expected


def test_control_tokens_are_parsed_on_request_only() -> None:
    tokenizer = tiny.byte_level()
    start = tokenizer.encode("<|im_start|>", control_tokens=True)
    assert len(start) == 1 and tokenizer.is_control(start[0])
    assert tokenizer.token_bytes(start[0]) == b""
    assert tokenizer.decode(start, skip_control=False) == "<|im_start|>"
    assert len(tokenizer.encode("<|im_start|>")) > 1
    assert len(tokenizer.encode("<think>")) == 1
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"


def test_start_token_comes_once() -> None:
    tokenizer = tiny.load(tiny.byte_level_json(), bos_id=400, eos_ids=(400, 402), add_bos=True)
    assert tokenizer.eos_ids == (400, 402)
    plain = tiny.byte_level().encode("hi")
    assert tokenizer.encode("hi") == [400, *plain]
    assert tokenizer.encode("hi", bos=False) == plain
    assert tokenizer.encode("<|endoftext|>hi", control_tokens=True) == [400, *plain]
    with pytest.raises(UsageError, match="no start token"):
        tiny.byte_level().encode("hi", bos=True)


def test_a_named_end_token_is_control_even_if_the_file_lists_it_as_text() -> None:
    think = tiny.byte_level().encode("<think>")[0]
    tokenizer = tiny.load(tiny.byte_level_json(), eos_ids=(think,))
    assert tokenizer.is_control(think)
    assert think not in tokenizer.encode("<think>")


def test_tokenizer_larger_than_model() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"up to 403.* 403 rows"):
        tiny.load(tiny.byte_level_json(), vocab_size=403)
    assert tiny.load(tiny.byte_level_json(), vocab_size=404).vocab_size == 404
    with pytest.raises(TokenizerMismatchError, match="1000"):
        tiny.load(tiny.byte_level_json(), eos_ids=(1000,))


def test_rows_without_a_token_have_no_bytes() -> None:
    tokenizer = tiny.byte_level()
    assert tokenizer.token_bytes(999) == b""
    for outside in (-1, 1000):
        with pytest.raises(UsageError, match="outside 0 to 999"):
            tokenizer.token_bytes(outside)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UsageError, match="character 2"):
        tiny.byte_level().encode("ab\ud800")


def _edited(**parts: Any) -> str:
    return json.dumps({**json.loads(tiny.byte_level_json()), **parts})


def test_unreadable_tokenizers() -> None:
    for text in ("", "{}", tiny.byte_level_json()[:-20]):
        with pytest.raises(BundleError, match="cannot be read"):
            tiny.load(text)
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        with pytest.raises(BundleError, match="known are ByteFallback, ByteLevel"):
            tiny.load(_edited(decoder=decoder))
    added = json.loads(tiny.byte_level_json())["added_tokens"]
    with pytest.raises(BundleError, match="id 500"):
        tiny.load(_edited(added_tokens=[{**added[0], "id": 500}]))


def test_settings_for_training_do_not_cut_prompts() -> None:
    inner = tokenizers.Tokenizer.from_str(tiny.byte_level_json())
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    assert tiny.load(inner.to_str()).encode("the pump ok") == tiny.byte_level().encode(
        "the pump ok"
    )


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace(scheme: str) -> None:
    document = json.loads(tokenizer_from_gguf(tiny.sentencepiece_metadata(True)))
    metaspace = {"type": "Metaspace", "replacement": tiny.SPACE, "prepend_scheme": scheme}
    document |= {"normalizer": None, "pre_tokenizer": {**metaspace, "split": False}}
    inner = [metaspace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    document["decoder"] = {"type": "Sequence", "decoders": inner}
    tokenizer = tiny.load(json.dumps(document))
    assert tokenizer.decode(tokenizer.encode("the é 😀")) == "the é 😀"
    spaced = tokenizer.encode("the</s>the", control_tokens=True)
    expected = {"first": " the", "always": " the the", "never": "the"}[scheme]
    if scheme != "always":
        expected += "the"
    assert tokenizer.decode(spaced, continuation=True) == expected


def test_tokens_without_a_row_can_be_dropped() -> None:
    text, dropped = drop_tokens_without_row(_edited(added_tokens=_added()[:3]), 402)
    assert dropped == ("<|im_end|>",)
    assert len(tiny.load(text, vocab_size=402).encode("<|im_end|>", control_tokens=True)) > 1
    assert drop_tokens_without_row(text, 402) == (text, ())


def _added() -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = json.loads(tiny.byte_level_json())["added_tokens"]
    return added


def _byte_level_metadata(**changes: Any) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*letters, "th", "the", "<|a|>", "<b>"],
        "merges": ["t h", "th e"],
        "token_type": [1] * 258 + [3, 4],
        **changes,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return {key: value for key, value in named.items() if value is not None}


def test_types_of_gguf_tokens() -> None:
    tokenizer = tiny.load(tokenizer_from_gguf(_byte_level_metadata()))
    assert tokenizer.encode("the") == [257]
    assert tokenizer.encode("<|a|>", control_tokens=True) == [258]
    assert [tokenizer.is_control(i) for i in (257, 258, 259)] == [False, True, False]
    assert tokenizer.encode("x<b>")[-1] == 259
    named = tiny.load(tokenizer_from_gguf(_byte_level_metadata(eos_token_id=259)))
    assert named.is_control(259)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "bert"}, Unsupported, "'bert'; known are gpt2, llama"),
        ({"model": None}, Unsupported, "None; known are"),
        ({"pre": "klingon"}, Unsupported, "'klingon'; known are .*llama-bpe.*smollm"),
        ({"tokens": None}, SourceError, "tokens is missing"),
        ({"tokens": "abc"}, SourceError, "tokens is not a list of str"),
        ({"tokens": []}, SourceError, "empty"),
        ({"tokens": ["a", "a"], "token_type": None}, SourceError, "'a' at 0 and 1"),
        ({"merges": None}, SourceError, "merges is missing"),
        ({"merges": ["t h", "th"]}, SourceError, r"merges\[1\] is 'th'"),
        ({"merges": ["t q"]}, SourceError, r"merges\[0\] needs 'tq'"),
        ({"token_type": [1, 1]}, SourceError, "token_type has 2 values, tokens 260"),
        ({"token_type": [9] * 260}, SourceError, r"token_type has \[9\]"),
        ({"eos_token_id": 260}, SourceError, "eos_token_id is 260; ids are 0 to 259"),
        ({"model": "llama"}, SourceError, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, SourceError, "scores has 1 values, tokens 260"),
    ],
)
def test_contradictions_in_gguf(changes: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        tokenizer_from_gguf(_byte_level_metadata(**changes))


def test_an_unknown_kind_of_model_is_no_reason_to_guess_bytes() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(BundleError, match="null"):
        tiny.load(inner.to_str())


def test_a_model_that_finds_control_tokens_by_itself_is_refused() -> None:
    """Unigram looks pieces up in its vocabulary, where `</s>` stands like any other."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    with pytest.raises(BundleError, match="of kind Unigram, known are BPE ones"):
        tiny.load(inner.to_str())
