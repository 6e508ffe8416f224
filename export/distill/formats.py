"""Line formats: families of the look of real logs, each with parameters drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count
from random import Random

from headrace.export.distill import words
from headrace.export.distill.fields import (
    Site,
    coin,
    hexes,
    identifier,
    pooled,
    word,
)

MAX_LINE_LEN = 300
MONTHS = words.listed("Jan, Feb, Mar, Apr, May, Jun, Jul, Aug, Sep, Oct, Nov, Dec")
DAYS = words.listed("Mon, Tue, Wed, Thu, Fri, Sat, Sun")


@dataclass(frozen=True)
class Event:
    """What a system says at one time, before it is given a form."""

    time: datetime
    level: int
    """0 debug, 1 info, 2 warning, 3 error."""
    host: str
    source: str
    pid: int
    head: str
    """The text without its fields."""
    text: str
    pairs: tuple[tuple[str, str], ...]
    block: tuple[str, ...] = ()
    """Lines that belong to this one, indented."""


Format = Callable[[Event], Iterator[str]]


@dataclass(frozen=True)
class Family:
    make: Callable[[Site], Format]
    styles: tuple[str, ...]
    """How such systems name their components: keys of `fields.STYLES`."""


_LEVELS = (
    ("DEBUG", "INFO", "WARN", "ERROR"), ("debug", "info", "warning", "error"),
    ("TRACE", "NOTICE", "WARNING", "FATAL"), ("DBG", "INF", "WRN", "ERR"),
    ("D", "I", "W", "E"), ("Debug", "Info", "Warning", "Error"),
)  # fmt: skip


def level_words(random: Random, width: int = 0) -> tuple[str, ...]:
    return tuple(level.ljust(width) for level in random.choice(_LEVELS))


def _plain(site: Site, line: Callable[[Event], str]) -> Format:
    """A form of one line; blocks follow bare, or each of their lines with the stamp."""
    is_bare = site.random.random() < 0.6

    def lines(event: Event) -> Iterator[str]:
        yield line(event)
        for more in event.block:
            yield more if is_bare else line(replace(event, text=more))

    return lines


def stamp_form(random: Random) -> Callable[[datetime], str]:
    """A sortable stamp: ISO 8601 and its relatives."""
    day = random.choice(("%Y-%m-%d", "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d"))
    between = random.choice((" ", " ", "T", "T", "-"))
    clock = random.choice(("%H:%M:%S", "%H:%M:%S", "%H.%M.%S"))
    mark, places = random.choice(((".", 3), (",", 3), (".", 6), ("", 0)))
    zone = random.choice(("", "", "Z", "+00:00", "+0200", " UTC"))
    form = f"{day}{between}{clock}"

    def stamp(time: datetime) -> str:
        part = f"{time.microsecond:06d}"[:places]
        return f"{time.strftime(form)}{mark}{part}{zone}"

    return stamp


def _bsd(time: datetime) -> str:
    return f"{MONTHS[time.month - 1]} {time.day:>2} {time:%H:%M:%S}"


def _syslog(site: Site) -> Format:
    has_pri, has_pid = site.random.random() < 0.2, site.random.random() < 0.8
    facility = 8 * site.random.randrange(1, 24)

    def line(event: Event) -> str:
        pri = f"<{facility + (7, 6, 4, 3)[event.level]}>" if has_pri else ""
        pid = f"[{event.pid}]" if has_pid else ""
        return f"{pri}{_bsd(event.time)} {event.host} {event.source}{pid}: {event.text}"

    return _plain(site, line)


def _rfc5424(site: Site) -> Format:
    random, enterprise = site.random, site.random.randrange(1000, 60_000)
    facility, has_data = 8 * random.randrange(1, 24), random.random() < 0.6
    kinds = [word(random).upper()[:6] for _ in range(4)]

    def line(event: Event) -> str:
        data, kind = "-", kinds[len(event.head) % 4]
        if has_data and event.pairs:
            inner = " ".join(f'{key}="{value.strip(chr(34))}"' for key, value in event.pairs[:3])
            data = f"[{site.domain}@{enterprise} {inner}]"
        text = event.head if has_data and event.pairs else event.text
        pri = facility + (7, 6, 4, 3)[event.level]
        stamp = f"{event.time:%Y-%m-%dT%H:%M:%S}.{event.time.microsecond // 1000:03d}Z"
        return f"<{pri}>1 {stamp} {event.host} {event.source} {event.pid} {kind} {data} {text}"

    return _plain(site, line)


def _iso(site: Site) -> Format:
    random, stamp = site.random, stamp_form(site.random)
    level, request = level_words(random, random.choice((0, 5, 7))), identifier(random)()
    form = random.choice(
        (
            "{time} {level} {source} {text}", "{time} [{level}] {source}: {text}",
            "[{time}] {level} [{source}] {text}", "{time} {host} {level} {source} {text}",
            "{time} {pid} {level} {source} [req-{request} - -] {text}", "{time} {source}: {text}",
            "{time} | {level} | {source:<16} | {text}", "{level} {time} {source}[{pid}] {text}",
            "{time} <{level}> {source}({pid}) {text}", "{time} {source:<14} {level} {text}",
        )
    )  # fmt: skip

    def line(event: Event) -> str:
        nonlocal request
        if random.random() < 0.15:
            request = hexes(random, len(request))
        return form.format(
            time=stamp(event.time), level=level[event.level], request=request,
            source=event.source, host=event.host, pid=event.pid, text=event.text,
        )  # fmt: skip

    return _plain(site, line)


def _log4j(site: Site) -> Format:
    random, level = site.random, level_words(site.random, 5)
    threads = [
        random.choice(("main", f"{coin(random).title()}-worker-{random.randrange(9)}"))
        if random.random() < 0.4
        else f"{word(random).title()}Thread[id={random.randrange(9)}]:/{random.choice(site.addresses)}"
        for _ in range(4)
    ]
    form = random.choice(
        ("{} - {} [{}:{}@{}] - {}", "{} {} [{}] {}:{} - {}", "{} {} [{}] {} ({}): {}")
    )

    def line(event: Event) -> str:
        stamp = f"{event.time:%Y-%m-%d %H:%M:%S},{event.time.microsecond // 1000:03d}"
        place = 40 + 17 * len(event.head) % 900
        thread = threads[len(event.head) % 4]
        return form.format(stamp, level[event.level], thread, event.source, place, event.text)

    return _plain(site, line)


def _compact(site: Site) -> Format:
    has_ms, level = site.random.random() < 0.3, level_words(site.random)
    form = site.random.choice(("%y%m%d %H%M%S", "%y%m%d %H%M%S", "%Y%m%d-%H%M%S", "%d%H%M%S"))
    form = form.replace("%d%H", "%m%d.%H") if form.startswith("%d") else form

    def line(event: Event) -> str:
        ms = f".{event.time.microsecond // 1000:03d}" if has_ms else ""
        stamp = f"{event.time.strftime(form)}{ms}"
        return f"{stamp} {event.pid} {level[event.level]} {event.source}: {event.text}"

    return _plain(site, line)


def _ras(site: Site) -> Format:
    random = site.random
    code = random.choice(
        ("R{:02d}-M{}-N{:X}-C:J{:02d}-U{:02d}", "c{}-{}c{}s{}n{}", "rack{}/u{}/b{}")
    )
    places = [
        code.format(*(random.randrange(16) for _ in range(5)))
        for _ in range(random.randrange(4, 20))
    ]
    node, flag = pooled(random, places), [word(random).upper()[:6] for _ in range(2)]
    parts = words.listed("KERNEL, APP, LINK, MONITOR, DISCOVERY, HARDWARE, MMCS, FABRIC")
    has_second, group = random.random() < 0.7, random.choice(("RAS", "NULL", "EVT"))
    level = random.choice((("INFO", "INFO", "WARNING", "FATAL"), ("0", "1", "4", "7")))

    def line(event: Event) -> str:
        place, time = node(), event.time
        epoch = int((time - datetime(1970, 1, 1)).total_seconds())
        mark = flag[event.level % 2] if event.level > 1 else "-"
        second = f"{time:%Y-%m-%d-%H.%M.%S}.{time.microsecond:06d} {place} " if has_second else ""
        unit = parts[len(event.source) % len(parts)]
        start = f"{mark} {epoch} {time:%Y.%m.%d} {place} {second}{group}"
        return f"{start} {unit} {level[event.level]} {event.text}"

    return _plain(site, line)


def _servicing(site: Site) -> Format:
    name_width, level = site.random.choice((6, 7, 10)), ("Debug", "Info", "Warning", "Error")
    level_width = site.random.choice((8, 12, 22))

    def line(event: Event) -> str:
        start = f"{event.time:%Y-%m-%d %H:%M:%S}, {level[event.level]:<{level_width}}"
        return f"{start}{event.source:<{name_width}} {event.text}"

    return _plain(site, line)


def _kernel(site: Site) -> Format:
    boot = site.start - timedelta(
        seconds=site.random.choice((0, 9, 4000, 900_000)) * site.random.random()
    )
    bus = site.random.choice(("", "{} 0000:{:02x}:00.0", "{} {}-1"))
    slot = site.random.randrange(1, 9)

    def line(event: Event) -> str:
        since = event.time - boot
        seconds = since.days * 86_400 + since.seconds
        device = bus.format(event.source, slot) or event.source
        return f"[{seconds:>5}.{since.microseconds:06d}] {device}: {event.text}"

    return _plain(site, line)


def _delimited(site: Site) -> Format:
    random, stamp = site.random, stamp_form(site.random)
    mark, level = random.choice(("|", "|", ";", " | ", "~", "::")), level_words(random)
    wanted = random.choice(
        ("time level host source text", "time source pid text", "source time text level")
    )

    def lines(event: Event) -> Iterator[str]:
        known = {"time": stamp(event.time), "level": level[event.level], "pid": str(event.pid)}
        known |= {"host": event.host, "source": event.source, "text": event.text}
        yield mark.join(known[part] for part in wanted.split())

    return lines


def _httpd(site: Site) -> Format:
    level, has_client = ("debug", "notice", "warn", "error"), site.random.random() < 0.5
    client = pooled(site.random, site.addresses)

    def line(event: Event) -> str:
        time = event.time
        stamp = f"{DAYS[time.weekday()]} {_bsd(time)} {time.year}"
        who = f" [client {client()}]" if has_client and event.level > 1 else ""
        return f"[{stamp}] [{level[event.level]}]{who} {event.source}: {event.text}"

    return _plain(site, line)


def _glog(site: Site) -> Format:
    def line(event: Event) -> str:
        time, place = event.time, f"{event.source}.cc:{20 + 13 * len(event.head) % 700}"
        stamp = f"{'DIWE'[event.level]}{time:%m%d %H:%M:%S}.{time.microsecond:06d}"
        return f"{stamp} {event.pid:>7} {place}] {event.text}"

    return _plain(site, line)


def _handset(site: Site) -> Format:
    def line(event: Event) -> str:
        stamp = f"{event.time:%m-%d %H:%M:%S}.{event.time.microsecond // 1000:03d}"
        thread = event.pid + len(event.head) % 30
        return (
            f"{stamp} {event.pid:>5} {thread:>5} {'DIWE'[event.level]} {event.source}: {event.text}"
        )

    return _plain(site, line)


def _unstamped(site: Site) -> Format:
    level, form = (
        level_words(site.random),
        site.random.choice(("{}:{}:{}", "[{}] {}: {}", "{} {} - {}")),
    )
    return _plain(site, lambda event: form.format(level[event.level], event.source, event.text))


def _nodes(site: Site) -> Format:
    """Columns of number, node, subject, state and epoch, as batch systems write."""
    random, numbers = site.random, count(site.random.randrange(10**5, 10**7))
    subjects = [f"{word(random)}.{word(random)}" for _ in range(5)]

    def line(event: Event) -> str:
        subject, epoch = subjects[len(event.head) % 5], (event.time - datetime(1970, 1, 1))
        start = f"{next(numbers)} {event.host} {event.source} {subject}"
        return f"{start} {epoch.total_seconds():.0f} {event.level} {event.text}"

    return _plain(site, line)


TEXTS = {
    "syslog": Family(_syslog, ("daemon", "kebab", "snake")),
    "rfc5424": Family(_rfc5424, ("daemon", "kebab", "camel")),
    "iso": Family(_iso, ("kebab", "snake", "dotted", "numbered", "camel")),
    "log4j": Family(_log4j, ("camel", "java", "inner")),
    "compact": Family(_compact, ("inner", "java", "snake")),
    "ras": Family(_ras, ("upper", "snake")),
    "servicing": Family(_servicing, ("upper", "camel")),
    "kernel": Family(_kernel, ("daemon", "numbered", "snake")),
    "delimited": Family(_delimited, ("camel", "upper", "numbered")),
    "httpd": Family(_httpd, ("snake", "daemon")),
    "glog": Family(_glog, ("snake", "kebab")),
    "handset": Family(_handset, ("camel", "dotted")),
    "unstamped": Family(_unstamped, ("dotted", "snake", "upper")),
    "nodes": Family(_nodes, ("kebab", "numbered")),
}
