"""Text to token ids and back, for one model."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import tokenizers

from headrace.errors import BundleError, TokenizerMismatchError, UsageError
from headrace.models.chat_template import Shield, ShieldedStrings, render
from headrace.models.pieces import Spelling, read_spelling
from headrace.runtime import memory

_RESERVED_ARGS = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
_NO_ARGS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class _Habits:
    """What the model's files say beside the tokenizer itself."""

    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    vocab_size: int


class Tokenizer:
    """A tokenizer.json and a model's habits. Immutable; threads may share it.

    Control tokens are the json's special added tokens. Text never becomes one unless a caller
    asks for it with `control_tokens=True`.
    """

    def __init__(self, inner: Any, spelling: Spelling, habits: _Habits) -> None:
        self._inner = inner
        self._spelling = spelling
        self._habits = habits
        self._added: Mapping[int, Any] = inner.get_added_tokens_decoder()
        self._control_ids = {
            token.content: token_id for token_id, token in self._added.items() if token.special
        }

    @classmethod
    def from_json(
        cls,
        tokenizer_json: str,
        *,
        chat_template: str | None,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
        vocab_size: int,
    ) -> Self:
        """Build from the text of a tokenizer.json; `vocab_size` is the model's.

        A model may have more rows than the tokenizer has tokens. Raises TokenizerMismatchError
        when a token has no row, BundleError when the json is unreadable or its decoder unknown.
        """
        try:
            inner = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the package raises nothing more precise
            raise BundleError(f"the tokenizer cannot be read: {error}") from error
        # Its parser leaves twice as much behind as the tokenizer is.
        memory.trim()
        _check_added_ids(inner, tokenizer_json)
        spelling = read_spelling(_state(inner.decoder))
        kind = type(inner.model).__name__
        if kind != "BPE":
            # The others find control tokens in plain text by themselves.
            raise BundleError(f"the tokenizer is of kind {kind}, known are BPE ones")
        largest = max(inner.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= vocab_size:
            raise TokenizerMismatchError(
                f"the tokenizer has ids up to {largest}, the model's vocabulary only {vocab_size} "
                "rows; they do not belong together"
            )
        for token_id in (*eos_ids, *(() if bos_id is None else (bos_id,))):
            if not 0 <= token_id < vocab_size:
                raise TokenizerMismatchError(
                    f"the start or end token {token_id} is outside the model's vocabulary of "
                    f"{vocab_size}"
                )
        if add_bos and bos_id is None:
            raise BundleError("the model wants a start token before each text but names none")
        _make_control(inner, {*eos_ids, bos_id})
        # What a json was saved with for training must not cut or fill prompts.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        return cls(inner, spelling, _Habits(chat_template, bos_id, eos_ids, add_bos, vocab_size))

    @property
    def vocab_size(self) -> int:
        """The model's number of rows, at least the tokenizer's number of ids."""
        return self._habits.vocab_size

    @property
    def bos_id(self) -> int | None:
        return self._habits.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._habits.eos_ids

    @property
    def chat_template(self) -> str | None:
        return self._habits.chat_template

    def encode(
        self, text: str, *, control_tokens: bool = False, bos: bool | None = None
    ) -> list[int]:
        """The token ids of `text`.

        Names of control tokens in it stay text unless `control_tokens`. `bos`: whether the start
        token comes first (never twice); None follows the model's habit. Raises UsageError when
        `bos` is wanted of a model without one, or for text that is not Unicode.
        """
        if bos and self.bos_id is None:
            raise UsageError("this model has no start token; leave bos unset or false")
        ids = self._encode_controls(text) if control_tokens else self._encode_plain(text)
        return self._with_bos(ids, self._habits.add_bos if bos is None else bos)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template: str | None = None,
        template_args: Mapping[str, object] = _NO_ARGS,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a chat, by `template` or else the model's own.

        Control tokens come from the template alone: their names in messages or `template_args`
        stay text, tokenised in its place as `encode` would. The start token comes first if the
        model wants one, whether the template writes it or not. Raises UsageError when there is no
        template, when it fails, or when a role is unknown.
        """
        chosen = self.chat_template if template is None else template
        if chosen is None:
            raise UsageError(
                "this model has no chat template; give raw prompts (--raw) or --chat-template FILE"
            )
        for name in _RESERVED_ARGS & template_args.keys():
            raise UsageError(f"template argument {name!r} is set by the chat itself; leave it out")
        shield = Shield(self._shielded)
        hidden = [
            {
                shield.hide(key): value if key == "role" else shield.hide(value)
                for key, value in message.items()
            }
            for message in messages
        ]
        variables: dict[str, object] = {
            **shield.hide(template_args),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._name(self.bos_id),
            "eos_token": self._name(self.eos_ids[0] if self.eos_ids else None),
        }
        text = render(chosen, hidden, variables)
        return self._with_bos(self._encode_controls(text, shield), self._habits.add_bos)

    def decode(
        self, ids: Iterable[int], *, skip_control: bool = True, continuation: bool = False
    ) -> str:
        """The text of `ids`; equal to all pushes of a Detokenizer with the same parameters."""
        detokenizer = Detokenizer(self, skip_control=skip_control, continuation=continuation)
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    def detokenizer(self, *, skip_control: bool = True, continuation: bool = True) -> "Detokenizer":
        """For text that arrives token by token; by default an answer, which continues a prompt."""
        return Detokenizer(self, skip_control=skip_control, continuation=continuation)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; none for control tokens and for rows without a token.

        Raises UsageError for an id outside the vocabulary.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id} is outside 0 to {self.vocab_size - 1}")
        if (added := self._added.get(token_id)) is not None:
            return b"" if added.special else self._spelling.added_to_bytes(added.content)
        entry = self._inner.id_to_token(token_id)
        return b"" if entry is None else self._spelling.to_bytes(entry)

    def is_control(self, token_id: int) -> bool:
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    def ends_segment(self, token_id: int) -> bool:
        """Whether a clause or a line ends with the token."""
        known = self._ends_segment.get(token_id)
        if known is None:
            text = self.token_bytes(token_id).rstrip(b" ")
            known = self._ends_segment[token_id] = text.endswith(_SEGMENT_ENDS)
        return known

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _name(self, token_id: int | None) -> str:
        return "" if token_id is None else self._inner.id_to_token(token_id) or ""

    def _encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        inner = self._inner if at_start else self._inner_after_start
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"text has a lone surrogate at character {error.start}") from error
        ids: list[int] = inner.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_controls(self, text: str, shield: Shield | None = None) -> list[int]:
        """Names of control tokens as tokens, what lies between as plain text."""
        ids: list[int] = []
        start = 0
        for match in [*self._control_names.finditer(text), None]:
            end = len(text) if match is None else match.start()
            if part := text[start:end]:
                plain = part if shield is None else shield.restore(part)
                ids += self._encode_plain(plain, at_start=start == 0)
            if match is not None:
                name = match[0] if match[0] in self._control_ids else match[0].strip()
                ids.append(self._control_ids[name])
                start = match.end()
        return ids

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """What was asked so far; at most the vocabulary."""
        return {}

    @cached_property
    def _ends_segment(self) -> dict[int, bool]:
        """What was asked so far: the same few tokens over and over."""
        return {}

    @cached_property
    def _shielded(self) -> ShieldedStrings:
        return ShieldedStrings(self._control_ids)

    @cached_property
    def _control_names(self) -> re.Pattern[str]:
        """Finds control tokens as the json describes them: the longest, with the space they eat."""
        controls = (token for token in self._added.values() if token.special)
        alternatives = []
        for token in sorted(controls, key=lambda token: len(token.content), reverse=True):
            name = re.escape(token.content)
            if token.single_word:
                name = rf"(?<!\w){name}(?!\w)"
            left, right = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
            alternatives.append(left + name + right)
        return re.compile("|".join(alternatives) or r"(?!)")

    @cached_property
    def _inner_after_start(self) -> Any:
        """For text after a control token: some tokenizers prefix a space only where a text starts.

        It is a second copy, so it is made only when it is needed.
        """
        state = json.dumps(_state(self._inner.pre_tokenizer))
        never = state.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        if never == state:
            return self._inner
        document = json.loads(self._inner.to_str())
        document["pre_tokenizer"] = json.loads(never)
        inner = tokenizers.Tokenizer.from_str(json.dumps(document))
        inner.encode_special_tokens = True
        return inner


_SEGMENT_ENDS = (b"\n", b".", b",", b";", b":", b"!", b"?")


class Detokenizer:
    """Turns tokens into text as they come, never giving out half a character.

    `push` returns the text that became certain, `finish` what is left. Bytes that are not UTF-8
    become U+FFFD as in Python's decoder with errors="replace".

    SentencePiece models put a space before a text when they tokenise it, so the first space of a
    decoded whole is dropped. The first space of a continuation is the model's own, and is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool, continuation: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._drop_space = tokenizer._spelling.drops_first_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if not self._skip_control and self._tokenizer.is_control(token_id):
            data = self._tokenizer._name(token_id).encode()
        if data and self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _check_added_ids(inner: Any, tokenizer_json: str) -> None:
    """The package numbers added tokens itself, whatever ids the json gives them."""
    key = re.search(r'"added_tokens"\s*:\s*', tokenizer_json)
    listed = key and json.JSONDecoder().raw_decode(tokenizer_json, key.end())[0]
    for token in listed if isinstance(listed, list) else []:
        actual = inner.token_to_id(token["content"])
        if actual != token["id"]:
            raise BundleError(
                f"the tokenizer gives {token['content']!r} the id {token['id']}, but with its "
                f"vocabulary that token gets {actual}"
            )


def _make_control(inner: Any, ids: set[int | None]) -> None:
    """Some files list start or end tokens as plain added tokens, which users could type."""
    for token_id, token in inner.get_added_tokens_decoder().items():
        if token_id in ids and not token.special:
            token.special = True
            inner.add_special_tokens([token])


def _state(part: Any) -> Any:
    """The json of one part of a tokenizer, without writing out its vocabulary."""
    return None if part is None else json.loads(part.__getstate__())
