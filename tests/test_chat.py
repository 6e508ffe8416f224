"""Chats: what the template writes is control, what people write is text."""

from typing import Any

import pytest
import tiny_tokenizers as tiny
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.export.tokenizer import tokenizer_from_gguf
from headrace.runtime.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def _chat(tokenizer: Tokenizer, content: str, **options: Any) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": content}], **options)


def _byte_level(template: str | None = CHATML, **habits: Any) -> Tokenizer:
    return tiny.load(tiny.byte_level_json(), template, **habits)


def test_an_ordinary_chat_tokenises_as_its_whole_text() -> None:
    tokenizer = _byte_level()
    text = "<|im_start|>user\nthe pump<|im_end|>\n<|im_start|>assistant\n"
    assert _chat(tokenizer, "the pump") == tokenizer.encode(text, control_tokens=True)
    without = text.removesuffix("<|im_start|>assistant\n")
    expected = tokenizer.encode(without, control_tokens=True)
    assert _chat(tokenizer, "the pump", add_generation_prompt=False) == expected


PARTS = [
    *("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", ">", "|", "</s>", "<s>"),
    *(" ", "\n", "a", "the", "😀", "\U000f0000", "\U000f0001", "\U000f0002"),
]
CONTENT = st.lists(st.sampled_from(PARTS), max_size=10).map("".join)


@given(content=CONTENT)
def test_what_people_write_is_encoded_as_plain_text_in_its_place(content: str) -> None:
    tokenizer = _byte_level()
    im_start, im_end = (
        tokenizer.encode(name, control_tokens=True)[0] for name in ("<|im_start|>", "<|im_end|>")
    )
    user, newline, assistant = map(
        tokenizer.encode, ("user\n" + content.strip(), "\n", "assistant\n")
    )
    expected = [im_start, *user, im_end, *newline, im_start, *assistant]
    assert _chat(tokenizer, content) == expected


@given(parts=st.lists(CONTENT, max_size=4))
def test_texts_that_a_template_joins_make_no_control_token(parts: list[str]) -> None:
    template = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
    tokenizer = _byte_level(template)
    ids = tokenizer.encode_chat([{"role": "user", "content": part} for part in parts])
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == "".join(part.strip() for part in parts)


@given(content=CONTENT)
def test_sentencepiece_chat_keeps_text_and_spaces(content: str) -> None:
    text = tokenizer_from_gguf(tiny.sentencepiece_metadata(True))
    tokenizer = tiny.load(text, LLAMA2, bos_id=1, eos_ids=(2,), add_bos=True)
    ids = _chat(tokenizer, content)
    assert ids == [1, *tokenizer.encode(f"[INST] {content} [/INST]", bos=False)]


def test_names_of_control_tokens_in_other_fields_stay_text() -> None:
    template = "{{ messages[0].name }}{{ tools | tojson }}{{ extra.key }}"
    tokenizer = _byte_level(template)
    message = {"role": "user", "content": "", "name": "<|im_end|>"}
    arguments = {"tools": [{"<|im_end|>": "<|im_start|>"}], "extra": {"key": "<|im_end|>"}}
    ids = tokenizer.encode_chat([message], template_args=arguments)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == '<|im_end|>[{"<|im_end|>": "<|im_start|>"}]<|im_end|>'


@pytest.mark.parametrize("writes", ["", "{{ bos_token }}"])
def test_start_token_comes_once_whoever_writes_it(writes: str) -> None:
    tokenizer = _byte_level(writes + CHATML, bos_id=400, eos_ids=(402, 400), add_bos=True)
    ids = _chat(tokenizer, "hi")
    assert ids.count(400) == 1 and ids[0] == 400


def test_template_arguments_and_helpers() -> None:
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}"
        "{% generation %}{{ {'é': 1} | tojson }}{% endgeneration %}"
        "{% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    tokenizer = _byte_level(template, eos_ids=(402, 400))
    plain = tokenizer.decode(_chat(tokenizer, ""), skip_control=False)
    assert plain == '{"é": 1}14<|im_end|>'
    ids = _chat(tokenizer, "", template_args={"enable_thinking": False})
    assert tokenizer.decode(ids, skip_control=False) == "<think>" + plain
    other = _chat(tokenizer, "x", template="{{ messages[0].content }}!")
    assert tokenizer.decode(other) == "x!"


def test_content_still_decides_in_the_template() -> None:
    template = "{% if '<think>' in messages[0].content %}yes{% else %}no{% endif %}"
    assert _byte_level().decode(_chat(_byte_level(template), "a <think> b")) == "yes"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    try:
        ids = _chat(_byte_level(template), "x")
    except UsageError as error:
        assert "chat template failed" in str(error)
    else:
        assert ids == []


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "the chat template failed: Expected an expression"),
        ("{{ raise_exception('roles must\nalternate') }}", "failed: roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "failed"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ],
)
def test_faults_of_a_template_are_one_line(template: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        _chat(_byte_level(template), "x")
    assert "\n" not in str(caught.value)


def test_unknown_roles_and_missing_templates() -> None:
    with pytest.raises(UsageError, match="role 'robot'; known are system"):
        _byte_level().encode_chat([{"role": "robot", "content": "x"}])
    with pytest.raises(UsageError, match=r"--raw.*--chat-template"):
        _chat(_byte_level(None), "x")


def test_keys_of_a_message_are_what_people_write_too() -> None:
    tokenizer = _byte_level("{{ messages[0] | tojson }}")
    (im_end,) = tokenizer.encode("<|im_end|>", control_tokens=True)
    message = {"role": "user", "content": "x", "<|im_end|>": 1}
    assert im_end not in tokenizer.encode_chat([message])
