"""Logs of made-up systems, and questions about them: text from which a draft learns regularity.

What real logs share is not their words but their habits: few templates that come again with other
fields, ids that are opened, used and closed, counters and clocks that go on, bursts, blocks, and
rare errors with what follows from them. A seed makes up all the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from random import Random

from headrace.export.distill import words
from headrace.export.distill.asks import questions, request
from headrace.export.distill.fields import (
    KINDS,
    STYLES,
    Field,
    Gauge,
    Site,
    coin,
    hexes,
    identifier,
    word,
)
from headrace.export.distill.formats import MAX_LINE_LEN, TEXTS, Event
from headrace.export.distill.records import RECORDS

__all__ = ["FAMILIES", "System", "questions", "request", "system_log"]

FAMILIES = {**TEXTS, **RECORDS}

Process = Iterator[float]
"""Says things as it goes; each value is how many paces it waits."""


@dataclass(frozen=True)
class Key:
    """A field by its name, before a template gives it its place."""

    name: str
    field: Field


@dataclass(frozen=True)
class Slot:
    """A field within a template, and the text on both sides of it."""

    name: str
    before: str
    field: Field
    after: str = ""


@dataclass(frozen=True)
class Template:
    source: int
    level: int
    head: str
    slots: tuple[Slot, ...]
    weight: float

    def fill(self, given: Mapping[str, str]) -> dict[str, str]:
        """A value for each slot by name, those of `given` where it has one."""
        return {slot.name: given.get(slot.name) or slot.field() for slot in self.slots}

    def text(self, values: Mapping[str, str]) -> str:
        parts = (f"{slot.before}{values[slot.name]}{slot.after}" for slot in self.slots)
        return self.head + "".join(parts)


def system_log(seed: int) -> Iterator[str]:
    """Lines, without end and without newlines, of a system that `seed` makes up.

    The same seed gives the same lines on every machine; a line has at most MAX_LINE_LEN characters.
    """
    system = System(seed)
    form = FAMILIES[system.family].make(system.site.apart(system.form_seed))
    for event in system.events():
        for line in form(event):
            yield line[:MAX_LINE_LEN].rstrip()


class System:
    """What happens in one system; its events have no form yet."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.family = random.choice(list(FAMILIES))
        self.site = Site(random, random.choice(FAMILIES[self.family].styles))
        self.form_seed = random.getrandbits(64)
        self.pace_s = random.choice((0.0004, 0.01, 0.2, 1.0, 1.0, 5.0, 30.0))
        self.manner = _Manner.draw(random)
        self.now_paces = 0.0
        self._said: list[Event] = []
        self._agenda: list[tuple[float, int, Process]] = []
        self._order = count()

    def events(self) -> Iterator[Event]:
        """Events in the order of their times, without end."""
        random = self.random
        self.spawn(_chatter(self, [self.compose() for _ in range(random.randrange(2, 6))]))
        for _ in range(random.randrange(3)):
            self.spawn(_periodic(self, self.compose()))
        for _ in range(random.randrange(1, 3)):
            self.spawn(_sessions(self))
        if random.random() < 0.8:
            self.spawn(_bursts(self, self.compose(level=random.choice((0, 1, 2)))))
        if random.random() < 0.3:
            self.spawn(_reports(self, self.compose()))
        for _ in range(random.randrange(1, 3)):
            self.spawn(_incidents(self))
        while True:
            due, _, process = heapq.heappop(self._agenda)
            self.now_paces = max(self.now_paces, due)
            wait = next(process, None)
            if wait is not None:
                self.spawn(process, wait)
            yield from self._said
            self._said.clear()

    def spawn(self, process: Process, wait_paces: float = 0.0) -> None:
        entry = (self.now_paces + wait_paces, next(self._order), process)
        heapq.heappush(self._agenda, entry)

    def say(
        self, template: Template, given: Mapping[str, str], block: tuple[str, ...] = ()
    ) -> dict[str, str]:
        """Fills the template and says it; returns what its slots hold."""
        if self.random.random() < 0.5:
            self.now_paces += self.random.uniform(0, 0.05)
        values = template.fill(given)
        site, source = self.site, template.source
        event = Event(
            time=site.start + timedelta(microseconds=int(self.now_paces * self.pace_s * 1e6)),
            level=template.level,
            host=self.random.choice(site.hosts),
            source=site.sources[source],
            pid=site.pids[source],
            head=template.head.rstrip(" :=-"),
            text=template.text(values) + self.manner.end,
            pairs=tuple(values.items()),
            block=block,
        )
        self._said.append(event)
        return values

    def compose(self, level: int | None = None, key: Key | None = None) -> Template:
        """A template from phrase parts; `key` is its first field if given."""
        random = self.random
        if level is None:
            level = random.choices((0, 1, 2), (2, 8, 1))[0]
        slots = [self.manner.dressed(random, key)] if key else []
        for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4))):
            slot = self.manner.slot(self.site)
            if all(slot.name != other.name for other in slots):
                slots.append(slot)
        head = self.manner.cased(_failure(self.site) if level == 3 else _event(self.site))
        words_of_head = head.split()
        if slots and len(words_of_head) > 2 and random.random() < 0.4:
            cut = random.randrange(1, len(words_of_head))
            head, rest = " ".join(words_of_head[:cut]), " ".join(words_of_head[cut:])
            slots[0] = replace(slots[0], before=" ", after=f" {rest}")
        source = random.randrange(len(self.site.sources))
        return Template(source, level, head, tuple(slots), random.uniform(0.1, 1) ** 2)


# Phrases.


def _past(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeou":
        return f"{verb[:-1]}ied"
    return verb + ("d" if verb.endswith("e") else "ed")


def _going(verb: str) -> str:
    return f"{verb.removesuffix('e')}ing"


def _event(site: Site) -> str:
    random, noun, verb = site.random, site.noun(), site.random.choice(words.VERBS)
    other, adverb = site.noun(), random.choice(words.ADVERBS)
    return random.choice(
        (
            f"{_past(verb)} {noun}", f"{_going(verb)} {noun}", f"{noun} {_past(verb)}",
            f"{noun} is {random.choice(words.ADJECTIVES)}", f"{noun} {_past(verb)} {adverb}",
            f"{_going(verb)} {noun} {random.choice(words.PREPOSITIONS)} {other}",
            f"{word(random).title()}.{verb}{noun.split()[-1].title()}()", f"{noun}: {other} {_past(verb)}",
            f"{verb} {noun}", f"{noun} ready to {verb} {other}", f"{noun} will be {_past(verb)} {adverb}",
            f"{random.choice(site.tags)} {noun}", f"{coin(random)}: {verb} {noun}", f"got {noun} to {verb}",
            f"{noun} {random.choice(random.choice(words.STATES))}", f"{word(random).upper()} {noun}",
        )
    )  # fmt: skip


def _failure(site: Site) -> str:
    random, noun, verb = site.random, site.noun(), site.random.choice(words.VERBS)
    reason = random.choice(words.REASONS)
    return random.choice(
        (
            f"failed to {verb} {noun}: {reason}", f"cannot {verb} {noun}", f"{noun} not {_past(verb)}: {reason}",
            f"{reason} while {_going(verb)} {noun}", f"{verb} of {noun} failed", f"{noun} lost, {reason}",
            f"unable to {verb} {noun} ({reason})", f"{noun} {reason}", f"{word(random).title()}Error: {reason}",
        )
    )  # fmt: skip


@dataclass(frozen=True)
class _Manner:
    """How the programmers of one system write: case, punctuation, and the look of fields."""

    cased: Callable[[str], str]
    joint: str
    gap: str
    end: str
    looks: tuple[str, ...]

    @classmethod
    def draw(cls, random: Random) -> _Manner:
        cases: tuple[Callable[[str], str], ...] = (
            str, str, lambda text: text[0].upper() + text[1:], lambda text: text[0].upper() + text[1:],
            str.upper,
        )  # fmt: skip
        every = ("pair", "pair", "phrase", "paren", "bracket", "bare", "quoted", "named")
        return cls(
            cased=random.choice(cases),
            joint=random.choice(("=", "=", ": ", ":", " = ", " ")),
            gap=random.choice((" ", " ", ", ", "; ", " - ")),
            end=random.choice(("", "", "", ".", " ")).rstrip(" "),
            looks=tuple(random.choice(every) for _ in range(3)),
        )

    def slot(self, site: Site) -> Slot:
        """Any field, with any of its names."""
        names, make = site.random.choice(KINDS)
        return self.dressed(site.random, Key(site.random.choice(names), make(site)))

    def dressed(self, random: Random, key: Key) -> Slot:
        name = key.name
        before, after = {
            "pair": (f"{self.gap}{name}{self.joint}", ""),
            "phrase": (f" {random.choice(words.PREPOSITIONS)} ", ""),
            "paren": (" (", ")"),
            "bracket": (f" [{name}{self.joint}", "]"),
            "bare": (" ", ""),
            "quoted": (" '", "'"),
            "named": (f" {random.choice(words.PREPOSITIONS)} {name} ", ""),
        }[random.choice(self.looks)]
        return Slot(name, before, key.field, after)


# Dynamics.


def _gap(random: Random, mean: float) -> float:
    """Mostly short, sometimes long."""
    return 3 * mean * random.random() ** 2


def _chatter(system: System, templates: list[Template]) -> Process:
    weights = [template.weight for template in templates]
    while True:
        yield _gap(system.random, 1.0)
        system.say(system.random.choices(templates, weights)[0], {})


def _periodic(system: System, template: Template) -> Process:
    period = system.random.uniform(4, 20)
    while True:
        yield period
        system.say(template, {})


def _sessions(system: System) -> Process:
    """Things with an id that is opened, used and closed, several at a time."""
    random, make_id = system.random, identifier(system.random)
    names = ("id", "session", "job", "blk", "conn", "req", "order", coin(random))
    key = Key(random.choice(names), make_id)
    peer_names, make_peer = random.choice(KINDS[5:12])
    opening = system.compose(1, key)
    peer = Key(
        f"{random.choice(peer_names)}{random.choice(('Name', '_name', '0'))}",
        make_peer(system.site),
    )
    slots = (*opening.slots, system.manner.dressed(random, peer))
    opening = replace(opening, slots=slots)
    uses = [system.compose(random.choice((0, 1, 1)), key) for _ in range(random.randrange(1, 4))]
    closing, failing = system.compose(1, key), system.compose(2, key)
    pause, length = random.choice((2.0, 6.0, 12.0)), random.randrange(1, 6)

    def run() -> Process:
        held = system.say(opening, {})
        for _ in range(random.randrange(1, length + 2)):
            yield _gap(random, pause / 2)
            system.say(random.choice(uses), held)
        yield _gap(random, pause / 2)
        system.say(failing if random.random() < 0.06 else closing, held)

    while True:
        system.spawn(run())
        yield _gap(random, pause)


def _bursts(system: System, template: Template) -> Process:
    """The same line again and again, with at most one field that changes."""
    random = system.random
    while True:
        yield _gap(random, 25.0)
        held = system.say(template, {})
        if held:
            del held[random.choice(list(held))]
        for _ in range(random.randrange(1, 20)):
            yield random.choice((0.0, 0.0, 0.02, 0.1))
            system.say(template, held)


def _reports(system: System, template: Template) -> Process:
    """A block of readings, of which most stay as they were."""
    random = system.random
    gauges = [Gauge.draw(system.site) for _ in range(random.randrange(3, 8))]
    names = [random.choice((gauge.what, f"{word(random)} {gauge.what}")) for gauge in gauges]
    indent, joint = " " * random.choice((2, 4, 8)), random.choice((": ", " = ", " "))
    while True:
        yield random.uniform(30, 60)
        rows = zip(names, gauges, strict=True)
        system.say(
            template,
            {},
            tuple(f"{indent}{name:<18}{joint}{g.read(random)} {g.unit}" for name, g in rows),
        )


def _incidents(system: System) -> Process:
    """An error, perhaps with its trace, then what follows from it, then recovery."""
    random, site, make_id = system.random, system.site, identifier(system.random)
    key = Key(random.choice(("ref", "incident", "case", "event")), make_id)
    error, recovery = system.compose(3, key), system.compose(1, key)
    trace = _trace(site) if random.random() < 0.6 else ()
    effects = []
    for _ in range(random.randrange(1, 4)):
        effect = system.compose(2, key)
        head = system.manner.cased(f"{random.choice(words.CONSEQUENCES)} {site.noun()}")
        effects.append(replace(effect, head=head))
    while True:
        yield random.uniform(20, 120)
        held = system.say(error, {}, trace)
        for effect in effects:
            yield _gap(random, 0.7)
            system.say(effect, held)
        yield random.uniform(1, 6)
        system.say(recovery, held)


def _trace(site: Site) -> tuple[str, ...]:
    """The same frames at each incident, as a fault in one place of a program gives."""
    random, kind, frames = site.random, site.random.randrange(5), site.random.randrange(2, 8)
    if kind == 4:
        rows = (
            f"{16 * row:04x}  {' '.join(hexes(random, 2) for _ in range(16))}"
            for row in range(frames)
        )
        return tuple(rows)
    lines = ["Traceback (most recent call last):"] if kind == 1 else []
    for frame in range(frames):
        call, verb = STYLES["camel"](random, ""), random.choice(words.VERBS)
        place, at = f"{word(random)}_{verb}", random.randrange(10, 900)
        lines += (
            (f"    at {site.domain}.{word(random)}.{call}.{verb}({call}.java:{at})",),
            (f'  File "/opt/{site.domain}/{word(random)}.py", line {at}, in {place}', f"    self.{verb}()"),
            (f"#{frame}  0x{hexes(random, 12)} in {place} (ctx=0x{hexes(random, 8)}) at {place}.c:{at}",),
            (f" R{frame}: {hexes(random, 8)}  R{frame + 8}: {hexes(random, 8)}",),
        )[kind]  # fmt: skip
    return tuple(lines)
