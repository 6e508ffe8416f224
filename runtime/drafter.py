"""The drafter: one thread that computes what the draft model proposes, for all requests.

A request asks, waits as long as a proposal is worth, and verifies. With deferral the drafter goes on
meanwhile: it computes what is likely to come after the proposal, and after its likeliest refusals,
so that the next one has a head start ("deferred": the draft is never held up by a verdict). A draft
that is late, fails or hangs costs proposals, and no text.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.runtime.candidate import Candidate, Candidates, Opened
from headrace.runtime.demand import Demand, Reading
from headrace.runtime.draft import DraftLane, frontier
from headrace.runtime.draft_mode import DraftMode, ModeChoice, modes_of
from headrace.runtime.guess import Guess, Guesser
from headrace.runtime.pace import ANY, Acceptance, Origin
from headrace.runtime.request import DraftCounts
from headrace.runtime.trace import Trace

SOURCE = "draft"

HANG_S = 5.0
"""A pass of the draft that takes longer is not waited for any more, nor any other; or that takes
longer than this many of the longest ones should."""
_HANG_PASSES = 20

MAX_FAILURES = 3
"""Errors of the draft in a row after which it is not asked again."""

_CONFIDENCE_STEPS = (0.3, 0.6, 0.8, 0.95)

_SUREST = 0.9
"""Whatever a step costs, it is worth the token behind one that is so sure."""

_SHORT = 64
"""Tokens of a text that a draft reads where the target has to wait for it."""

_LEAST_REACH = 0.03
"""Outcomes less likely are not worth a row, even of a draft that would idle."""

_CHEAP = 1.25
"""Rows of a draft's pass that cost no more than this times one are taken together."""

_FREE = 1.05
"""Rows that cost no more than this times one are taken along by a step of the likeliest path: an
NPU's passes cost the same up to its variants' width."""

_MAX_WIDTH = 8

_STEP_SHARE = 0.1
"""Of the last step in what a step is believed to take."""

_WAIT_MEMORY = 0.7
"""Of earlier waits: so short that one late answer is made up for by a few good ones."""


Outcome = tuple[int, Guess, float]
"""A node, a guess of what comes behind it, and its probability to become text."""


class Pays(NamedTuple):
    """The least probability to become text at which something pays."""

    rows: tuple[float, ...]
    """Of the first, second, … token, for its row in the target's pass: 0 where that is computed in
    any case, as padding."""
    step: float
    """Of a token, for a step of the draft that says what comes after it, beside that one's row."""


class Place:
    """A request's claim to a lane: as long as somebody holds it and it is not given back."""

    is_free = False


@dataclass(eq=False)
class Ask:
    """A request's question, and the answer to it."""

    place: Place
    guesser: Guesser
    tokens: list[int]
    length: int
    new: list[int]
    """Tokens that have become output since the last one that was sent."""
    want: int
    pays: Pays
    mode: DraftMode
    chain: list[tuple[Guess, ...]] = field(default_factory=list)
    """Guesses along the likeliest path."""
    error: Exception | None = None
    has_lane: bool = False
    read_s: float = 0.0
    """Seconds that catching up with the text took, beyond a pass for its last token."""
    done: threading.Event = field(default_factory=threading.Event)


class Drafter:
    """Owns the draft, in whatever place it runs, and the thread that computes it."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        acceptance: Acceptance,
        is_boundary: Callable[[int], bool],
        *,
        defer: str = "auto",
        trace: Trace | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """The first of `candidates` that is open drafts; one at least must be. Whatever becomes of
        them is told to `log`, a line each time, from any thread.
        """
        self._tell = log
        self.candidates = Candidates(candidates, self._log)
        self.counts, self._defer = DraftCounts(), defer
        self.broken: str | None = None
        """Why the draft is not asked any more."""
        self.demand = Demand()
        self.passes_unasked = 0
        """Passes of requests since it was asked last."""
        self.tries = 0
        """Passes to come before which it is asked though it did not pay of late."""
        self._failures_in_a_row = 0
        self._acceptance, self._is_boundary = acceptance, is_boundary
        self.trace = trace
        self.head = self.candidates.opened.model.head
        self._use(self.candidates.opened)
        self._queue: queue.SimpleQueue[Ask | Candidate | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-draft", daemon=True)
        self._starting = threading.Lock()

    def _log(self, line: str) -> None:
        """A listener that fails, such as a closed pipe, fails nobody else."""
        with suppress(Exception):
            self._tell(line)

    def _use(self, opened: Opened) -> None:
        """It drafts from now on, and knows no text."""
        self.model, costs = opened.model, opened.costs
        self.takes_turns = opened.takes_turns
        window = self.model.layout.window
        self.window = min(window, _SHORT) if self.takes_turns else window
        """Tokens of a text that it is given."""
        modes = modes_of(self._defer, takes_turns=opened.takes_turns)
        self.modes = ModeChoice(modes)
        asked = [mode for mode in modes if mode is not DraftMode.UNASKED]
        self.asked_modes = ModeChoice(asked)
        """For requests that want the draft to be asked in any case."""
        self._waits = dict.fromkeys(asked, (0.0, 0.0))
        """Seconds waited and tokens gained in a mode; decaying sums."""
        self.step_s = costs.of(1)
        """Seconds of a pass that says what comes after a token; learned from each."""
        self.reading = Reading(costs)
        self._width, self._free_width = (
            max(r for r in range(1, _MAX_WIDTH + 1) if costs.of(r) <= most * self.step_s)
            for most in (_CHEAP, _FREE)
        )
        lanes = self.model.backend.facts.lanes
        self._lanes = [DraftLane(self.model, i) for i in range(lanes)]
        self._owners: list[weakref.ref[Place] | None] = [None] * lanes
        self._open: list[DraftLane] = []
        """Lanes to go on with while their proposals are verified."""
        self._owed: set[DraftLane] = set()
        """Those of them whose verdict is due."""
        self._failures_in_a_row = 0

    # the requests' side

    def submit(self, ask: Ask) -> None:
        with self._starting:
            if self._thread.ident is None and self.broken is None:
                self._thread.start()
        self._queue.put(ask)

    @property
    def wait_s(self) -> float:
        """Seconds that a request waits for a token, in the mode where it waits least."""
        return min((s + self.step_s) / (tokens + 1) for s, tokens in self._waits.values())

    def note_wait(self, seconds: float, num_tokens: int, mode: DraftMode) -> None:
        """What a request waited for, and what it got; nothing if the draft was late."""
        waits = self._waits
        if mode in waits:  # else of a request to a draft that another has taken the place of
            before_s, before = waits[mode]
            waits[mode] = _WAIT_MEMORY * before_s + seconds, _WAIT_MEMORY * before + num_tokens

    def notice_hang(self) -> None:
        """Gives up a draft whose pass does not end."""
        began = self.model.pass_began
        if began is None:
            return
        longest_s = self.reading.of(self.model.backend.facts.max_rows)
        limit_s = max(HANG_S, _HANG_PASSES * longest_s)
        if time.perf_counter() - began > limit_s:
            self._give_up(f"a pass took longer than {limit_s:.1f} s")

    def _give_up(self, why: str) -> None:
        with self._starting:
            is_first, self.broken = self.broken is None, self.broken or why
        if is_first:
            self._log(f"the draft is not asked any more: {why}")

    def close(self) -> None:
        """Ends the thread, which closes the candidates. One that hangs is left alone, with the
        memory that it may write to. May be called again, and by a finalizer in any thread.
        """
        with self._starting:
            is_running = self._thread.ident is not None
            self.broken = self.broken or "the model is closed"
        self.candidates.stop(HANG_S)
        if not is_running:
            self.candidates.close()
            return
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=HANG_S)

    # the thread's side

    def _run(self) -> None:
        while True:
            asked = self._next()
            if asked is None:
                break
            if isinstance(asked, Candidate):
                self.candidates.take_back(asked)
                self._use(self.candidates.opened)
                self.counts.returns += 1
                continue
            start = time.perf_counter()
            try:
                self._attempt(asked)
            finally:
                self.counts.busy_s += time.perf_counter() - start
                asked.done.set()
            del asked  # its request may be dropped while the thread waits
        self.candidates.close()

    def _attempt(self, ask: Ask) -> None:
        """Answers by the candidate that drafts, or by the one that takes its place."""
        unread, is_open = ask.new, True
        while is_open:
            try:
                ask.guesser.follow(unread)
                unread = []
                self._answer(ask)
                self._failures_in_a_row, ask.error = 0, None
                return
            except Exception as error:  # noqa: BLE001  whatever a backend raises, the text goes on
                ask.error = error
                self._drop_lane_of(ask.place)
                is_open = self._note_failure(error)

    def _note_failure(self, error: Exception) -> bool:
        """Whether another candidate has taken over."""
        self.counts.failures += 1
        self._failures_in_a_row += 1
        patience = self.candidates.current.patience
        if self._failures_in_a_row < patience:
            return False
        if not self.candidates.fall_back(error):
            self._give_up(f"{patience} errors in a row, the last: {error}")
            return False
        self._use(self.candidates.opened)
        self.counts.switches += 1
        return True

    def _next(self) -> Ask | Candidate | None:
        """The next question; until there is one, goes on behind what is being verified."""
        # First: where questions never end, there may be something to go on with for ever.
        self.candidates.reopen_what_is_due(self._queue.put)
        if self.modes.mode is DraftMode.UNASKED:
            # What nobody will ask for would only slow down what it is to be held against.
            self._open.clear()
            self._owed.clear()
        while self._open:
            with suppress(queue.Empty):
                return self._queue.get_nowait()
            start = time.perf_counter()
            lane = self._open.pop(0)
            try:
                if self._go_on(lane):
                    self._open.append(lane)
            except Exception as error:  # noqa: BLE001  as above
                lane.restart()
                self._note_failure(error)
            self.counts.busy_s += time.perf_counter() - start
        start = time.perf_counter()
        asked = self._queue.get()
        self.counts.idle_s += time.perf_counter() - start
        return asked

    def _answer(self, ask: Ask) -> None:
        lane = self._lane_of(ask)
        if lane is None:
            return
        ask.has_lane = True
        was_open = lane in self._owed
        self._owed.discard(lane)
        if lane in self._open:
            self._open.remove(lane)
        true_before = lane.num_true
        began = time.perf_counter()
        num_rows = self._timed(lambda: lane.follow(ask.tokens, ask.length), "read")
        ask.read_s = self.reading.noted(num_rows, time.perf_counter() - began)
        self.counts.rows_text += num_rows
        self.counts.rows_true += lane.num_true - true_before
        if was_open:
            self.counts.head_starts += 1
            self.counts.head_start_hits += not num_rows
        ask.chain = self._grow(lane, ask)
        if ask.mode is DraftMode.DEFERRED:
            self._open.append(lane)
            self._owed.add(lane)

    def _grow(self, lane: DraftLane, ask: Ask) -> list[tuple[Guess, ...]]:
        """The likeliest path from the root, computed as far as it is asked for."""
        chain: list[tuple[Guess, ...]] = []
        node = 0
        while len(chain) < ask.want and lane.nodes[node].guesses:
            guesses = lane.nodes[node].guesses
            reach = lane.nodes[node].reach * self._rates(lane, node)[0]
            if reach < ask.pays.rows[len(chain)]:
                break
            chain.append(guesses)
            if len(chain) == ask.want:
                break
            child = lane.child(node, guesses[0].token_id)
            if child is None:
                price = min(_SUREST, ask.pays.step + ask.pays.rows[len(chain)])
                if reach < price or not lane.num_free:
                    break
                child = len(lane.nodes)
                wanted = [(node, guesses[0], reach)]
                # The rest of the path comes first: what stands beside it must leave it room.
                left = lane.num_free - (ask.want - len(chain))
                beside = self._outcomes(lane, min(self._free_width, left) - 1, but=wanted[0])
                self._compute(lane, wanted + beside)
            node = child
        return chain

    def _go_on(self, lane: DraftLane) -> bool:
        """One pass for the likeliest outcomes that were not computed; whether there were any."""
        if _is_free(self._owners[lane.lane]):
            return False
        outcomes = self._outcomes(lane, min(self._width, lane.num_free))
        if outcomes:
            self._compute(lane, outcomes)
        return bool(outcomes)

    def _outcomes(self, lane: DraftLane, most: int, but: Outcome | None = None) -> list[Outcome]:
        """The likeliest outcomes that were not computed."""
        if most <= 0:
            return []
        found: list[Outcome] = []
        for node, guess, rank in frontier(lane):
            reach = lane.nodes[node].reach * self._rates(lane, node)[rank]
            is_taken = but is not None and (node, guess.token_id) == (but[0], but[1].token_id)
            if reach >= _LEAST_REACH and not is_taken:
                found.append((node, guess, reach))
        return sorted(found, key=lambda outcome: -outcome[2])[:most]

    def _rates(self, lane: DraftLane, node: int) -> list[float]:
        """Probability that each guess behind a node is what comes, if the node came."""
        rates: list[float] = []
        depth = lane.nodes[node].depth + 1
        for origin in origins(
            lane.nodes[node].guesses, lane.nodes[node].token_id, self._is_boundary
        ):
            rates.append((1 - sum(rates)) * self._acceptance.rate(origin, depth))
        return rates

    def _compute(self, lane: DraftLane, wanted: list[Outcome]) -> None:
        start = time.perf_counter()
        self._timed(lambda: lane.compute(wanted), "draft")
        self.step_s += _STEP_SHARE * (time.perf_counter() - start - self.step_s)
        self.counts.rows += len(wanted)

    def _timed(self, work: Callable[[], int | None], name: str) -> int:
        start = time.perf_counter()
        try:
            return work() or 0
        finally:
            if self.trace is not None:
                self.trace.add("draft", name, start, time.perf_counter())

    def _lane_of(self, ask: Ask) -> DraftLane | None:
        """The request's lane; for a new one that which knows its text best, else a free one."""
        owned = self._owned_by(ask.place)
        if owned is not None:
            return owned
        free = [i for i, owner in enumerate(self._owners) if _is_free(owner)]
        if not free:
            return None
        knowing = [i for i in free if self._lanes[i].agrees(ask.tokens, ask.length)]
        chosen = max(knowing or free, key=lambda i: self._lanes[i].length if knowing else -i)
        lane = self._lanes[chosen]
        if not knowing:
            lane.restart()
        lane.begin(ask.guesser)
        self._owners[chosen] = weakref.ref(ask.place)
        self._owed.discard(lane)
        return lane

    def _owned_by(self, place: Place) -> DraftLane | None:
        for lane, owner in zip(self._lanes, self._owners, strict=True):
            if owner is not None and owner() is place:
                return lane
        return None

    def _drop_lane_of(self, place: Place) -> None:
        lane = self._owned_by(place)
        if lane is not None:
            lane.restart()
            self._owners[lane.lane] = None


def _is_free(owner: weakref.ref[Place] | None) -> bool:
    place = None if owner is None else owner()
    return place is None or place.is_free


def origins(
    guesses: Sequence[Guess], before: int, is_boundary: Callable[[int], bool]
) -> list[Origin]:
    """What guesses behind a token are, to the pace."""
    return [
        Origin(SOURCE, rank, _sureness(guess), is_boundary(before))
        for rank, guess in enumerate(guesses)
    ]


def _sureness(guess: Guess) -> int:
    # What was drawn may not go by its own probability: `verify.rejection`.
    if guess.drawn_from is not None:
        return ANY
    return sum(guess.probability >= step for step in _CONFIDENCE_STEPS)
