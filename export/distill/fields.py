"""A made-up site: its names, and the fields that its log lines are filled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from headrace.export.distill import words

Field = Callable[[], str]
"""The next value; changes nothing but its own state and the site's `random`."""

_ONSETS = words.listed(
    "b, br, c, d, dr, f, g, gr, h, j, k, l, m, n, p, qu, r, s, st, t, tr, v, w, z"
)
_RIMES = words.listed(
    "a, e, i, o, u, ar, en, il, on, us, ex, or, im, al, and, ost, ea, io, et, ulk"
)


def coin(random: Random, num_syllables: int = 2) -> str:
    """A word that nobody has seen, so that it can only be copied."""
    return "".join(random.choice(_ONSETS) + random.choice(_RIMES) for _ in range(num_syllables))


def word(random: Random) -> str:
    return coin(random) if random.random() < 0.35 else random.choice(words.NOUNS)


def digits(random: Random, count: int, alphabet: str = "0123456789") -> str:
    return "".join(random.choice(alphabet) for _ in range(count))


def hexes(random: Random, count: int) -> str:
    return digits(random, count, "0123456789abcdef")


def _camel(random: Random) -> str:
    return word(random).title() + random.choice(("", word(random).title())) + _part(random)


def _part(random: Random) -> str:
    return random.choice(words.PARTS)


def _package(random: Random, domain: str) -> str:
    return ".".join((domain, *(word(random) for _ in range(random.randrange(1, 3)))))


def name(random: Random, style: str, domain: str) -> str:
    """A component's name; `style` is a key of STYLES."""
    return STYLES[style](random, domain)


STYLES: dict[str, Callable[[Random, str], str]] = {
    "camel": lambda random, _: _camel(random),
    "snake": lambda random, _: f"{word(random)}_{word(random)}",
    "kebab": lambda random, _: f"{word(random)}-{word(random)}",
    "dotted": lambda random, domain: f"{domain}.{word(random)}.{word(random)}",
    "java": lambda random, domain: f"{_package(random, 'org.' + domain)}.{_camel(random)}",
    "inner": lambda random, domain: f"{domain}.{_camel(random)}${_camel(random)}",
    "upper": lambda random, _: word(random).upper(),
    "tag": lambda random, _: f"{digits(random, 2, 'ACFGHLPSTVXZ')}-{random.randrange(100, 999)}",
    "daemon": lambda random, _: word(random)[:7] + random.choice(("d", "d", "-agent", "ctl", "")),
    "numbered": lambda random, _: f"{word(random)}{random.randrange(1, 40):02d}",
}


class Site:
    """The names of one system, and the pools its fields draw from."""

    def __init__(self, random: Random, style: str) -> None:
        self.random = random
        self.style = style
        self.has_unicode = random.random() < 0.05
        self.start = datetime(random.randrange(1999, 2031), 1, 1) + timedelta(
            days=random.randrange(365), microseconds=random.randrange(86_400_000_000)
        )
        self.domain = coin(random)
        prefix = random.choice(
            ("", f"{self.domain}-", f"{coin(random, 1)}-", "srv", "node", "ip-10-")
        )
        self.hosts = [
            f"{prefix or word(random)}{random.randrange(1, 400):0{random.randrange(1, 4)}d}"
            for _ in range(random.choice((1, 1, 2, 4, 8)))
        ]
        count = random.randrange(3, 9)
        self.sources = [name(random, style, self.domain) for _ in range(count)]
        self.pids = [random.randrange(100, 40_000) for _ in self.sources]
        self.users = [self._user() for _ in range(random.randrange(2, 6))]
        net = random.choice(("10.{}.{}", "192.168.{}", "172.20.{}", "{}.{}.{}"))
        net = net.format(*(random.randrange(1, 250) for _ in range(3)))
        self.addresses = [
            ".".join((net, *(str(random.randrange(1, 255)) for _ in range(3 - net.count(".")))))
            for _ in range(random.randrange(3, 12))
        ]
        self.tags = [STYLES["tag"](random, "") for _ in range(random.randrange(4, 12))]
        roots = [f"/{word(random)}/{word(random)}" for _ in range(3)]
        self.paths = [
            f"{random.choice(roots)}/{word(random)}{random.choice(('', '.log', '.dat', '/0', '.xml'))}"
            for _ in range(random.randrange(4, 12))
        ]

    def _user(self) -> str:
        return self.random.choice(("", "", self.random.choice("abjkmst") + ".", "svc_")) + coin(
            self.random
        )

    def apart(self, seed: int) -> Site:
        """The same names with a `random` of its own."""
        site = copy(self)
        site.random = Random(seed)
        return site

    def noun(self) -> str:
        """A noun phrase."""
        chance = self.random.random()
        noun = self.random.choice(words.NOUNS)
        if chance < 0.3:
            return f"{self.random.choice(words.ADJECTIVES)} {noun}"
        return f"{word(self.random)} {noun}" if chance < 0.6 else noun


@dataclass
class Gauge:
    """A reading that wanders within its usual range."""

    what: str
    unit: str
    low: float
    high: float
    decimals: int
    value: float

    @classmethod
    def draw(cls, site: Site) -> Gauge:
        what, unit, low, high, decimals = site.random.choice(words.QUANTITIES)
        if site.has_unicode:
            unit = words.UNICODE_UNITS.get(unit, unit)
        return cls(what, unit, low, high, decimals, site.random.uniform(low, high))

    def read(self, random: Random) -> str:
        """The next reading, without its unit; often the same as before."""
        if random.random() < 0.8:
            step = (self.high - self.low) * 0.015
            value = self.value + random.uniform(-step, step)
            self.value = min(max(value, self.low), self.high)
        return f"{self.value:.{self.decimals}f}"


def pooled(random: Random, values: Sequence[str]) -> Field:
    """One of `values`, often the one before."""
    last = random.choice(values)

    def read() -> str:
        nonlocal last
        if random.random() < 0.5:
            last = random.choice(values)
        return last

    return read


def identifier(random: Random) -> Field:
    """Ids in a form of their own: hex, decimal, uuid, prefixed, or counted on."""
    prefix = random.choice(
        ("", "", "", "0x", "#", f"{word(random)}_", f"{word(random)[:4]}-", "id:")
    )
    length = random.choice((4, 5, 6, 8, 8, 12, 16))
    number = random.randrange(10**4, 10**6)

    def counted() -> str:
        nonlocal number
        number += random.choice((1, 1, 1, 2, 7))
        return f"{prefix}{number:0{length}d}"

    forms: tuple[Field, ...] = (
        counted,
        lambda: prefix + hexes(random, length),
        lambda: prefix + hexes(random, length).upper(),
        lambda: prefix + random.choice("123456789") + digits(random, length + 2),
        lambda: "-".join(hexes(random, count) for count in (8, 4, 4, 4, 12)),
        lambda: prefix + digits(random, length, "ABCDEFGHJKLMNPQRSTUVWXYZ") + digits(random, 4),
    )
    return random.choice(forms)


def _counter(site: Site) -> Field:
    count, steps = site.random.randrange(10 ** site.random.randrange(1, 8)), (1, 1, 1, 1, 2)
    stride = site.random.choice((1, 1, 1, 8, 64, 100, 4096))

    def read() -> str:
        nonlocal count
        count += stride * site.random.choice(steps)
        return str(count)

    return read


def _reading(site: Site) -> Field:
    gauge, gap = Gauge.draw(site), site.random.choice(("", " "))
    return lambda: f"{gauge.read(site.random)}{gap}{gauge.unit}".rstrip()


def _duration(site: Site) -> Field:
    random = site.random
    usual, unit = (
        random.choice((3, 40, 250, 1800)),
        random.choice(("ms", " ms", "s", " s", "us", "")),
    )
    return lambda: f"{random.randrange(usual, usual * 2)}{unit}"


def _size(site: Site) -> Field:
    random, unit = site.random, site.random.choice(("", "", " bytes", "B", " KB", "M", " MiB"))
    usual = [random.randrange(1, 10 ** random.randrange(2, 8)) for _ in range(4)] + [65536, 512]
    return pooled(random, [f"{size}{unit}" for size in usual])


def _code(site: Site) -> Field:
    random, kind = site.random, site.random.randrange(4)
    one: tuple[Field, ...] = (
        lambda: f"0x8{hexes(random, 7)}",
        lambda: f"-{random.randrange(1, 130)}",
        lambda: f"E{random.choice(words.NOUNS)[:6].upper()}",
        lambda: f"{random.choice('EFWX')}{random.randrange(1000, 9999)}",
    )
    return pooled(random, [one[kind]() for _ in range(4)])


def _mac(random: Random) -> str:
    return ":".join(hexes(random, 2) for _ in range(6))


def _version(random: Random) -> str:
    return ".".join(str(random.randrange(20)) for _ in range(random.randrange(2, 5)))


def _date(site: Site) -> Field:
    ages = [timedelta(hours=site.random.randrange(9999)) for _ in range(3)]
    return pooled(site.random, [f"{site.start - age:%Y-%m-%d %H:%M}" for age in ages])


KINDS: tuple[tuple[tuple[str, ...], Callable[[Site], Field]], ...] = (
    (
        words.listed("seq, count, offset, index, epoch, cycle, n, zxid, gen, total, serial"),
        _counter,
    ),
    (words.listed("value, actual, reading, pv, avg, measured"), _reading),
    (words.listed("took, elapsed, time, duration, wait, age, ttl, delay"), _duration),
    (words.listed("size, bytes, len, length, used, free, written"), _size),
    (words.listed("rc, code, status, err, result, hr"), _code),
    (words.listed("id, ref, handle, key, ptr, tid, xid"), lambda site: identifier(site.random)),
    (words.listed("src, peer, addr, client, ip, remote"), lambda s: pooled(s.random, s.addresses)),
    (
        words.listed("dest, endpoint, server, listen, target"),
        lambda s: pooled(s.random, [f"{a}:{s.random.randrange(80, 60_000)}" for a in s.addresses]),
    ),
    (
        words.listed("mac, hw, station, bssid"),
        lambda s: pooled(s.random, [_mac(s.random) for _ in range(4)]),
    ),
    (words.listed("path, file, dir, url, volume"), lambda s: pooled(s.random, s.paths)),
    (words.listed("user, owner, operator, uid, by"), lambda s: pooled(s.random, s.users)),
    (words.listed("pid, child, proc, thread"), lambda s: pooled(s.random, [*map(str, s.pids)])),
    (words.listed("pct, usage, progress, fill"), lambda s: lambda: f"{s.random.randrange(101)}%"),
    (
        words.listed("version, rev, build, fw"),
        lambda s: pooled(s.random, [_version(s.random) for _ in range(3)]),
    ),
    (
        words.listed("state, mode, phase, from_state, health"),
        lambda s: pooled(s.random, s.random.choice(words.STATES)),
    ),
    (
        words.listed("name, reason, label, comment"),
        lambda s: pooled(s.random, [f'"{s.noun()}"' for _ in range(4)]),
    ),
    (words.listed("tag, unit, point, loop"), lambda s: pooled(s.random, s.tags)),
    (words.listed("since, until, last, expires"), _date),
    (
        words.listed("attempt, retries, level, lane"),
        lambda s: lambda: str(s.random.randrange(1, 6)),
    ),
)
"""The names a field may have in a line, and what makes it."""
