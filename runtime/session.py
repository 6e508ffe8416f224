"""Session: one conversation or stream that goes on, and can be forked while it does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, overload

from headrace.closing import Closing
from headrace.errors import UsageError
from headrace.runtime.answer import Answer
from headrace.runtime.request import Completion, SamplingParams
from headrace.runtime.sequence import Sequence

if TYPE_CHECKING:
    from headrace.runtime.llm import LLM

Prompt = str | Ids[int]


class Session(Closing):
    """A context that texts are fed to and answers are generated in; both become part of it.

    `LLM.session` makes one. Use it as a context manager, or close it; one that is dropped is closed
    at the model's next use. One thread at a time may feed it or generate; forks may be made by any.
    """

    def __init__(self, llm: LLM, sequence: Sequence, *, shares_text: bool = False) -> None:
        self._llm, self._shares_text = llm, shares_text
        self._sequence = sequence
        self._busy = threading.Lock()
        self._answer: Callable[[], Answer | None] = lambda: None
        """The last answer, if anybody still has it."""
        self._drop = weakref.finalize(self, llm.engine.abandon, sequence, is_closed=True)

    @property
    def mode(self) -> Literal["full", "stream"]:
        return "stream" if self._sequence.is_stream else "full"

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those that a stream has evicted among them."""
        return self._sequence.length

    @property
    def num_blocks(self) -> int:
        """Blocks it holds now, shared ones among them."""
        return self._sequence.table.num_blocks

    def feed(self, text: Prompt) -> None:
        """Appends a text (or token ids) and computes it, but for the last token.

        Control tokens written out in a text stay text. Raises ContextFullError when a full session's
        context cannot hold it, PoolFullError when the pool cannot, and UsageError; then nothing was
        changed. After another error the text is fed, and computed when the session goes on.
        """
        with self._alone():
            ids = self._append(text)
            if self._shares_text:
                self._llm.engine.share(ids)
            with self._llm.engine.request(self._sequence, 0):
                self._sequence.compute(leave=1)

    @overload
    def generate(
        self,
        prompt: Prompt = "",
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompt = "",
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> Answer: ...

    def generate(
        self,
        prompt: Prompt = "",
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Completion | Answer:
        """Appends `prompt` and continues; every token that is given out becomes context.

        An answer that is closed early leaves the session with what it gave out; one that an
        interrupt ends may leave it with a pass more. Raises as `feed` does, and UsageError when
        there is nothing to continue.
        """
        with self._alone():
            params = self._llm.checked_params(params)
            exactness = self._sequence.exactness
            if params.exactness not in (None, exactness):
                raise UsageError(
                    f"exactness: got {params.exactness!r}, but this session was begun as "
                    f"{exactness}; begin another with session(exactness={params.exactness!r})"
                )
            self._append(prompt, params.max_tokens)
            answer = Answer(
                self._llm.engine, self._llm.tokenizer, self._sequence, params, owner=self
            )
            if not stream:
                return answer.result()
            self._answer = weakref.ref(answer)
            return answer

    def fork(self) -> Session:
        """A session that is what this one is now. Blocks are shared until one of them changes.

        May be called while this one computes, from any thread: it waits for the pass in progress.
        Raises PoolFullError for a fork of a stream that the pool has no room for.
        """
        fork = self._llm.engine.fork(self._sequence)
        return Session(self._llm, fork, shares_text=self._shares_text)

    def close(self) -> None:
        """Gives its blocks back; may be called again. Its answers can go on no longer."""
        self._drop.detach()
        self._llm.engine.close_sequence(self._sequence)

    def _append(self, prompt: Prompt, num_new: int = 0) -> list[int]:
        ids = self._llm.encode(prompt, is_first=not self.num_tokens)
        if not ids and not (num_new and self.num_tokens):
            raise UsageError("prompt: got an empty one, it needs at least one token")
        self._sequence.require_room(len(ids))
        self._llm.engine.require_fit(self._sequence, len(ids) + num_new)
        self._sequence.append(ids)
        return ids

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError("another thread uses this session; give each thread a fork of its own")
        try:
            answer = self._answer()
            if answer is not None and not answer.has_ended and not self._sequence.closed:
                raise UsageError("this session is answering; finish or close that answer first")
            yield
        finally:
            self._busy.release()
