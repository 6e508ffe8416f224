"""Answer: one running request, streamed as deltas and summed up as a Completion."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.closing import Closing
from headrace.errors import UsageError
from headrace.runtime.batch import F32
from headrace.runtime.engine import Engine
from headrace.runtime.propose import Proposal
from headrace.runtime.request import (
    Alternative,
    Completion,
    Delta,
    FinishReason,
    SamplingParams,
    SpeculationCounts,
    Timings,
    TokenLogprob,
    Usage,
)
from headrace.runtime.router import StopRouter
from headrace.runtime.sampling import Choice, Sampler
from headrace.runtime.sequence import Sequence
from headrace.runtime.speculate import Speculator
from headrace.runtime.tokenizer import Tokenizer
from headrace.runtime.trace import span
from headrace.runtime.tree import ROOT, Tree
from headrace.runtime.verify import RULES, Accepted


@dataclass(frozen=True)
class _End:
    finish: FinishReason
    reason: str | int | None = None


class Answer(Closing):
    """An iterator over an answer's pieces; `completion` is the whole, once it has ended.

    Closing it or leaving its `with` block ends the request at once, dropping it at the model's
    next use. What was given out until then stays in `completion`, text that still waited to be
    whole does not. One thread at a time may use it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sequence: Sequence,
        params: SamplingParams,
        *,
        owner: object = None,
    ) -> None:
        """Continues `sequence`, which has something to compute. Raises UsageError for a logit bias
        outside the vocabulary. Nothing is computed before the first piece is asked for.

        Args:
            owner: whose sequence it is, and kept alive as long as this; without one, the sequence
                is closed when the answer ends.
        """
        self._engine, self._sequence, self._owner = engine, sequence, owner
        self._request = _Request(engine, tokenizer, sequence, params.seeded())
        # Neither refers to this object: a cycle would keep the blocks of a dropped answer until
        # the garbage collector comes by. And that may happen while the engine's lock is held, so
        # nothing that takes the lock may stand in a generator's `finally`.
        self._deltas = self._request.deltas()
        self._drop = weakref.finalize(self, engine.abandon, sequence, is_closed=owner is None)
        self._busy = threading.Lock()
        self._has_begun = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        self._occupy()
        try:
            if self.has_ended:
                raise StopIteration
            if not self._has_begun:
                self._has_begun = True
                self._request.begin()
            return next(self._deltas)
        except BaseException:
            self._end()
            raise
        finally:
            self._busy.release()

    def close(self) -> None:
        """Ends the request and frees its blocks, unless they are a session's; the completion holds
        what was generated.
        """
        self._occupy()
        try:
            self._end()
        finally:
            self._busy.release()

    def _end(self) -> None:
        if self._drop.detach() is not None:
            self._request.close()
            self._engine.end_request(self._sequence, is_closed=self._owner is None)

    @property
    def has_ended(self) -> bool:
        return not self._drop.alive

    def _occupy(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise UsageError("another thread uses this answer; one at a time may")

    @property
    def completion(self) -> Completion:
        """The answer so far; its finish_reason is `length` if it was closed before its end."""
        return self._request.completion()

    def result(self) -> Completion:
        """Runs to the end."""
        for _ in self:
            pass
        return self.completion


class _Request:
    """What an answer is made of, and the generator that makes it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sequence: Sequence,
        params: SamplingParams,
    ) -> None:
        self._params = params
        self._engine, self._tokenizer, self._sequence = engine, tokenizer, sequence
        self._prompt_len = sequence.length
        self._sampler = Sampler(
            self._params, sequence.tokens()[-sequence.capacity :], engine.facts.vocab_size
        )
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: _End | None = None
        self._detokenizer = tokenizer.detokenizer()
        self._router = StopRouter(params.stop)
        self._counts = self._sampler.counts()
        self._rule = RULES[params.accept]
        self._speculator: Speculator | None = None
        self._proposal = Proposal()
        self._chosen: list[Choice] = []
        """Tokens of the last pass, and their texts."""
        self._pieces: list[str] = []
        self._prefilled = 0
        self._pass_s_before = self._pass_s_first = sequence.pass_s
        self._started = self._prefilled_at = self._first_at = self._last_at = 0.0

    def completion(self) -> Completion:
        end = self._end or _End("length")
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=end.finish,
            stop_reason=end.reason,
            usage=Usage(self._prompt_len, len(self._token_ids)),
            timings=Timings(
                prefill_tokens=self._prefilled,
                prefill_s=self._prefilled_at - self._started,
                first_token_s=self._first_at - self._started,
                decode_tokens=max(0, len(self._token_ids) - 1),
                decode_s=self._last_at - self._first_at,
                target_s=self._sequence.pass_s - self._pass_s_before,
            ),
            seed=self._params.seed,
            logprobs=tuple(self._logprobs) if self._params.logprobs is not None else None,
            speculation=self._speculation(),
            exactness=self._sequence.exactness,
            accept=self._params.accept,
        )

    def _speculation(self) -> SpeculationCounts | None:
        if self._speculator is None:
            return None
        decode_s, in_passes_s = self._last_at - self._first_at, self._sequence.pass_s
        return self._speculator.counts(decode_s - (in_passes_s - self._pass_s_first))

    def begin(self) -> None:
        # Not when the answer was made: time before the first piece is asked for is the caller's.
        self._started = self._prefilled_at = self._first_at = self._last_at = time.perf_counter()
        self._engine.begin_request(self._sequence, self._params.max_tokens)
        self._pass_s_before = self._pass_s_first = self._sequence.pass_s
        self._speculator = self._engine.speculator(
            self._sequence, self._sampler, self._params.max_tokens
        )

    def close(self) -> None:
        if self._speculator is not None:
            self._speculator.close()

    def deltas(self) -> Iterator[Delta]:
        computed = self._sequence.num_computed
        while self._end is None:
            is_first = not self._token_ids
            with span(self._engine.trace, "host", "propose"):
                self._proposal = self._propose()
            self._pieces, self._chosen = [], []
            self._sequence.verify(self._proposal.tree, self._judge)
            self._last_at = time.perf_counter()
            if is_first:
                self._first_at, self._pass_s_first = self._last_at, self._sequence.pass_s
                self._prefilled = self._sequence.num_computed - computed
            yield self._delta()

    def _propose(self) -> Proposal:
        if self._speculator is None or not self._token_ids:
            return Proposal()
        # The last token that is wanted needs no proposal: it comes with the one before.
        return self._speculator.propose(self._params.max_tokens - len(self._token_ids) - 1)

    def _judge(self, logits: F32, tree: Tree) -> Accepted:
        with span(self._engine.trace, "host", "accept"):
            if not self._token_ids:
                self._prefilled_at = time.perf_counter()
            accepted = self._walk(logits, tree)
            if self._speculator is not None:
                self._speculator.judged(self._proposal, tree, accepted)
                self._speculator.extend(accepted.token_ids)
            return accepted

    def _walk(self, logits: F32, tree: Tree) -> Accepted:
        """Goes down the proposal as far as it is accepted, or until the answer ends. Rows are
        sampled as they are come to.
        """
        position, node, path = self._sequence.length, ROOT, list[int]()
        while True:
            siblings = self._proposal.siblings(node, tree)
            choice, kept = self._rule(
                self._sampler,
                logits[node + 1],
                position + len(self._chosen),
                self._counts,
                siblings,
            )
            self._counts.push(choice.token_id)
            self._chosen.append(choice)
            self._read(choice.token_id, position + len(self._chosen))
            if self._end is not None or kept is None:
                break
            node = kept.node
            path.append(node)
        return Accepted(tuple(choice.token_id for choice in self._chosen), tuple(path))

    def _read(self, token_id: int, length: int) -> None:
        """Makes text of a token, which makes the sequence `length` tokens long."""
        self._end = self._end_by_token(token_id, length)
        text = self._router.push(self._detokenizer.push(token_id))
        if self._end is not None:
            text += self._router.push(self._detokenizer.finish()) + self._router.finish()
        if self._router.stopped is not None:
            self._end = _End("stop", self._router.stopped)
        self._pieces.append(text)

    def _end_by_token(self, token_id: int, length: int) -> _End | None:
        if token_id in self._tokenizer.eos_ids and not self._params.ignore_eos:
            return _End("stop", token_id)
        is_full = not self._sequence.is_stream and length >= self._sequence.capacity
        num_tokens = len(self._token_ids) + len(self._chosen)
        if num_tokens >= self._params.max_tokens or is_full:
            return _End("length")
        return None

    def _delta(self) -> Delta:
        text = "".join(self._pieces)
        self._text.append(text)
        self._token_ids += [choice.token_id for choice in self._chosen]
        logprobs = tuple(self._named(c, c.logprob) for c in self._chosen if c.logprob is not None)
        self._logprobs += logprobs
        finish = self._end.finish if self._end else None
        return Delta(text, tuple(c.token_id for c in self._chosen), logprobs, finish)

    def _named(self, choice: Choice, logprob: float) -> TokenLogprob:
        top = tuple(Alternative(i, self._name(i), p) for i, p in choice.top)
        return TokenLogprob(choice.token_id, self._name(choice.token_id), logprob, top)

    def _name(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_control=False, continuation=True)
