"""LLM: a bundle, loaded. The Python API that the command line is made of."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, overload

from headrace.closing import Closing
from headrace.errors import ContextFullError, UsageError
from headrace.models.manifest import Bundle
from headrace.paths import cache_dir
from headrace.runtime import prepare
from headrace.runtime.answer import Answer
from headrace.runtime.bill import require_memory
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.cores import format_cpu_list
from headrace.runtime.engine import Engine
from headrace.runtime.exactness import Machine, least_rows, require_exact
from headrace.runtime.load import (
    Loader,
    Say,
    load_session,
    load_tokenizer,
    prepare_target,
    verify,
)
from headrace.runtime.ort import OrtBackend
from headrace.runtime.prefix import Root
from headrace.runtime.request import Completion, Exactness, SamplingParams, TokenLogprob
from headrace.runtime.ring import RingLayout
from headrace.runtime.sampling import log_normalizer
from headrace.runtime.session import Session
from headrace.runtime.trace import Trace

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a given text's tokens, each after the tokens before it."""

    tokens: tuple[TokenLogprob, ...]
    """All but the first token, which nothing comes before."""

    @property
    def total_logprob(self) -> float:
        """Nats."""
        return math.fsum(t.logprob for t in self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total_logprob / len(self.tokens))

    def to_json(self) -> dict[str, Any]:
        return {
            "perplexity": self.perplexity,
            "total_logprob": self.total_logprob,
            "num_tokens": len(self.tokens),
            "tokens": [token.to_json() for token in self.tokens],
        }


class LLM(Closing):
    """A loaded bundle. Use it as a context manager, or close it."""

    def __init__(
        self,
        bundle: str | Path,
        config: RuntimeConfig | None = None,
        *,
        say: Say = lambda message: None,
        trace: Trace | None = None,
        **settings: Any,
    ) -> None:
        """Loads `bundle`, preparing its weights for this machine if that was not done yet.

        Args:
            config: how to load; or its fields by name as keyword arguments.
            say: told in a few words about what takes long.
            trace: gets a span for whatever draft, target and host do.

        Raises:
            BundleError: the bundle is missing, damaged, edited or of another version.
            ExactnessError: the model is not bit-exact here and the config asks for it.
            MemoryLimitError: there is less memory than the settings need.
            UsageError: a setting is out of range.
            StorageError: the cache cannot hold the prepared weights.
        """
        if config is not None and settings:
            raise UsageError(f"got a config and {', '.join(settings)} as well; put all into one")
        self.config = config or runtime_config(settings)
        self._closed = False
        self.bundle = Bundle.open(Path(bundle))
        manifest = self.bundle.manifest
        self.capacity = self.config.capacity(manifest.config)
        if self.config.exactness == "exact":
            require_exact(manifest.config, manifest.quant, manifest.kv, Machine.here())
        self.placement = self.config.target_placement()
        if self.placement.cpus is not None and self.config.target_cpus is None:
            say(
                f"the target computes on CPUs {format_cpu_list(self.placement.cpus)}, the fast ones"
            )
        if self.bundle.draft is None and self.config.asks_of_draft:
            say("the bundle has no draft, so what is set for one changes nothing")
        cache = Path(self.config.cache or cache_dir())
        loader = Loader(self.bundle, cache, self.config, say)
        corpus = loader.corpus()
        self.bill = require_memory(self.bundle, self.config, cache)
        verify(self.bundle, cache, say)
        self.tokenizer = load_tokenizer(self.bundle)
        self.prepared = prepare_target(self.bundle, cache, self.placement.threads, say)
        takes_turns = loader.has_draft and self.config.draft_placement()[1]
        session = load_session(self.prepared.model, self.placement, takes_turns=takes_turns)
        self._locked = prepare.mlock(self.prepared) if self.config.mlock else None
        self.backend = OrtBackend(
            session,
            manifest.config,
            kv=manifest.kv,
            lanes=self.config.lanes,
            capacity=self.capacity,
            least_rows=least_rows(manifest.quant, manifest.kv, Machine.here()),
            cpus=self.placement.cpus,
        )
        root = Root(manifest.kv, self.config.exactness, self.bundle.target_identity())
        num_blocks = self.config.pool_blocks(manifest.config)
        speculation = None
        if self.config.speculate != "off":
            costs = loader.costs(
                self.backend, self.prepared.folder, self.placement, takes_turns=takes_turns
            )
            speculation = loader.speculation(costs, self.tokenizer, corpus, trace)
            # The draft's thread must have ended before the interpreter does.
            weakref.finalize(self, speculation.close)
        self.engine = Engine(
            self.backend,
            manifest.config,
            manifest.kv,
            num_blocks,
            root,
            prefix_cache=self.config.prefix_cache,
            speculation=speculation,
            trace=trace,
        )

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The model's own sampling settings, for `SamplingParams.resolve`."""
        return self.bundle.manifest.sampling

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> Answer: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Completion | Answer:
        """Continues a text (or token ids), without a chat template.

        Control tokens written out in the text stay text. With `stream`, the answer is an
        iterator over `Delta`s.

        Raises:
            UsageError: the prompt is empty, an id is outside the vocabulary, all lanes are busy.
            ContextFullError: the prompt does not fit.
        """
        return self._answer(self.encode(prompt), params, stream)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        template: str | None = None,
        template_args: Mapping[str, object] | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        template: str | None = None,
        template_args: Mapping[str, object] | None = None,
    ) -> Answer: ...

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        template: str | None = None,
        template_args: Mapping[str, object] | None = None,
    ) -> Completion | Answer:
        """Answers a conversation of `{"role": ..., "content": ...}` messages.

        Args:
            template: Jinja source to use instead of the model's own chat template.
            template_args: variables for the template, e.g. Qwen3's `enable_thinking`.

        Raises as `generate` does, and UsageError where the template refuses the messages or the
        model has none.
        """
        if isinstance(messages, str) or not all(isinstance(m, Mapping) for m in messages):
            raise UsageError(
                f"messages: got {messages!r:.80}, allowed are mappings with role and content"
            )
        if not messages:
            raise UsageError("messages: got none, a chat needs at least one")
        ids = self.tokenizer.encode_chat(
            messages, template=template, template_args=template_args or {}
        )
        return self._answer(ids, params, stream)

    def score(self, text: str | Sequence[int]) -> Score:
        """Log-probability of each token of `text` (with the model's start token, if it has one).

        Raises:
            UsageError: fewer than two tokens, or an id outside the vocabulary.
            ContextFullError: the text does not fit.
        """
        self._require_open()
        ids = self.encode(text)
        if len(ids) < 2:
            raise UsageError(f"text: got {len(ids)} tokens, a score needs at least two")
        if len(ids) > self.capacity:
            raise ContextFullError(
                f"the text has {len(ids)} tokens and the context holds {self.capacity}; "
                "score it in parts or raise --ctx"
            )
        tokens = []
        sequence = self.engine.sequence()
        sequence.append(ids[:-1])
        try:
            with self.engine.request(sequence, 0):
                for row, token_id in zip(sequence.rows(), ids[1:], strict=True):
                    logprob = float(row[token_id]) - log_normalizer(row)
                    name = self.tokenizer.decode([token_id], skip_control=False, continuation=True)
                    tokens.append(TokenLogprob(token_id, name, logprob))
        finally:
            self.engine.close_sequence(sequence)
        return Score(tuple(tokens))

    def session(
        self,
        mode: Literal["full", "stream"] = "full",
        *,
        sinks: int | None = None,
        window: int | None = None,
        unit: int | None = None,
        system: str | Sequence[int] = "",
        exactness: Exactness | None = None,
        shares_text: bool | None = None,
    ) -> Session:
        """A context that goes on: fed, forked, generated in.

        Args:
            mode: `full` keeps every token and ends when the context is full; `stream` never ends
                and keeps `sinks` first and at least `window` last tokens (docs/design.md, "Streams").
            sinks: a stream's first tokens that stay; by default those of `system`, at least 64.
            window: a stream's last tokens; by default what the context leaves room for.
            unit: tokens that a stream evicts at once, 64 by default.
            system: a beginning that is fed at once and that a stream never evicts.
            exactness: `SamplingParams.exactness` of all that is computed in it.
            shares_text: whether other sessions' answers may be sped up by what is fed to this one;
                their text stays the same. By default a stream's.

        Raises:
            UsageError: a size is out of range; the message says which rule it breaks.
            PoolFullError: the pool has no room for the stream.
        """
        self._require_open()
        ids = self.encode(system)
        if mode == "stream":
            layout = self._layout(sinks, window, unit, len(ids))
            sequence = self.engine.stream(layout, self._exactness(exactness))
        elif mode == "full":
            for name, size in (("sinks", sinks), ("window", window), ("unit", unit)):
                if size is not None:
                    raise UsageError(f"{name}: only a stream has one; use mode='stream'")
            sequence = self.engine.sequence(self._exactness(exactness))
        else:
            raise UsageError(f"mode: got {mode!r}, allowed are 'full' and 'stream'")
        shares = mode == "stream" if shares_text is None else shares_text
        session = Session(self, sequence, shares_text=shares)
        if ids:
            session.feed(ids)
        return session

    def _layout(
        self, sinks: int | None, window: int | None, unit: int | None, system_len: int
    ) -> RingLayout:
        config = self.bundle.manifest.config
        layout = RingLayout.filling(
            self.capacity, sinks=sinks, window=window, unit=unit, system_prompt_len=system_len
        )
        layout.require_fit(config.max_position, config.local_window, system_len)
        return layout

    def pin(self, text: str | Sequence[int]) -> int:
        """Computes a beginning that prompts share, and keeps it until `unpin`.

        Whole blocks of 16 tokens are kept. Returns the tokens kept; raises ContextFullError,
        PoolFullError.
        """
        self._require_open()
        ids = self.encode(text)
        if not ids:
            raise UsageError("text: got an empty one, there is nothing to pin")
        return self.engine.pin(ids)

    def unpin(self, text: str | Sequence[int]) -> None:
        """Takes `pin` of the same text back. Raises UsageError if it is not pinned."""
        self._require_open()
        self.engine.unpin(self.encode(text))

    def pin_system(
        self,
        system: str | None,
        *,
        template: str | None = None,
        template_args: Mapping[str, object] | None = None,
    ) -> int:
        """Pins what all chats with this system message (or without one) begin with.

        Arguments as `chat` takes them. Returns the tokens kept; raises as `pin` and `chat` do.
        """
        self._require_open()
        before = [] if system is None else [{"role": "system", "content": system}]
        a, b = (
            self.tokenizer.encode_chat(
                [*before, {"role": "user", "content": user}],
                template=template,
                template_args=template_args or {},
            )
            for user in ("a", "0")
        )
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
        return self.pin([token_id for token_id, _ in shared])

    def close(self) -> None:
        """Frees session and arena; using the object afterwards is a UsageError."""
        self._closed = True
        if self._locked is not None:
            self._locked.close()
        self.engine.close()

    def _answer(
        self, ids: Sequence[int], params: SamplingParams | None, stream: bool
    ) -> Completion | Answer:
        self._require_open()
        params = self.checked_params(params)
        if not ids:
            raise UsageError("prompt: got an empty one, it needs at least one token")
        sequence = self.engine.sequence(self._exactness(params.exactness))
        sequence.require_room(len(ids))
        sequence.append(ids)
        answer = Answer(self.engine, self.tokenizer, sequence, params)
        return answer if stream else answer.result()

    def checked_params(self, params: SamplingParams | None) -> SamplingParams:
        """`params` or the defaults; raises UsageError for something else, and for what this model
        cannot do."""
        if not isinstance(params, SamplingParams | None):
            raise UsageError(f"params: got {params!r}, allowed is a SamplingParams")
        params = params or SamplingParams()
        if self.config.speculate == "off" and params.speculate not in (None, "off"):
            raise UsageError(
                f"speculate: got {params.speculate!r}, but the model was loaded with "
                "speculate='off'; load it with auto"
            )
        if params.sources == "draft" and self.bundle.draft is None:
            raise UsageError(
                "sources: got 'draft', but the bundle has none; export it with --draft"
            )
        return params

    def encode(self, prompt: str | Sequence[int], *, is_first: bool = True) -> list[int]:
        """Token ids of a text, or checked ones. Raises UsageError.

        The model's start token, if it wants one, comes before a text that is the first.
        """
        if not isinstance(prompt, str):
            return self._checked(prompt)
        return self.tokenizer.encode(prompt, bos=None if is_first else False) if prompt else []

    def _checked(self, ids: Sequence[int]) -> list[int]:
        vocab = self.bundle.manifest.config.vocab_size
        try:
            if isinstance(ids, bytes | Mapping) or any(isinstance(i, bool) for i in ids):
                raise TypeError
            checked = [operator.index(token_id) for token_id in ids]
        except TypeError as error:
            raise UsageError(f"got {ids!r:.80}, allowed are a text or whole token ids") from error
        for token_id in checked:
            if not 0 <= token_id < vocab:
                raise UsageError(f"token id: got {token_id}, allowed are 0 to {vocab - 1}")
        return checked

    def _exactness(self, wanted: Exactness | None) -> Exactness:
        """That of a new sequence. Raises ExactnessError."""
        exactness = wanted or self.config.exactness
        if exactness == "exact":
            manifest = self.bundle.manifest
            require_exact(manifest.config, manifest.quant, manifest.kv, Machine.here())
        return exactness

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this LLM is closed; load the bundle again")


def runtime_config(settings: Mapping[str, Any]) -> RuntimeConfig:
    """A RuntimeConfig from keyword arguments; an unknown name is a UsageError."""
    known = RuntimeConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise UsageError(f"unknown setting {name!r}; known are {', '.join(known)}")
    return RuntimeConfig(**settings)
