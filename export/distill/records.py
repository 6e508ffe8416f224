"""Lines that are records and not sentences: key and value, JSON, tables, requests, telegrams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import count

from headrace.export.distill import words
from headrace.export.distill.fields import Gauge, Site, coin, pooled, word
from headrace.export.distill.formats import (
    MAX_LINE_LEN,
    MONTHS,
    Event,
    Family,
    Format,
    level_words,
    stamp_form,
)


def _bare(value: str) -> str:
    return value.strip('"')


def _logfmt(site: Site) -> Format:
    random, stamp, level = site.random, stamp_form(site.random), level_words(site.random)
    keys = random.choice(
        ("ts level component msg", "time lvl logger msg", "t level caller message")
    )
    time, severity, source, message = keys.split()

    def lines(event: Event) -> Iterator[str]:
        pairs = [(time, stamp(event.time)), (severity, level[event.level]), (source, event.source)]
        pairs += [(message, event.head), *(p for p in event.pairs if p[0] not in keys.split())]
        yield " ".join(
            f'{key}="{_bare(value)}"' if " " in value else f"{key}={_bare(value)}"
            for key, value in pairs
        )

    return lines


def _fitting(entry: dict[str, object], length: int, gap: str = " ") -> str:
    """The entry as JSON, without its last keys if it would be too long."""
    while True:
        shown = json.dumps(entry, separators=("," + gap, ":" + gap), ensure_ascii=False)
        if len(shown) <= length:
            return shown
        entry.popitem()


def _json(site: Site) -> Format:
    random, stamp, level = site.random, stamp_form(site.random), level_words(site.random)
    keys = random.choice(("ts level logger msg", "@timestamp severity source message", "t l c m"))
    time, severity, source, message = keys.split()
    gap, is_nested = random.choice(("", " ")), random.random() < 0.3
    has_epoch = random.random() < 0.3

    def lines(event: Event) -> Iterator[str]:
        epoch = (event.time - datetime(1970, 1, 1)) // timedelta(milliseconds=1)
        entry: dict[str, object] = {time: epoch if has_epoch else stamp(event.time)}
        entry |= {severity: level[event.level], source: event.source, message: event.head}
        values = {
            key: json.loads(value) if re.fullmatch(r"[1-9]\d{0,14}", value) else _bare(value)
            for key, value in event.pairs
            if key not in entry
        }
        entry |= {"data": values} if is_nested and values else values
        if event.block:
            entry["stack"] = event.block[0].strip()
        yield _fitting(entry, MAX_LINE_LEN, gap)

    return lines


def _csv(site: Site) -> Format:
    random = site.random
    mark = random.choice((",", ",", ";", "  "))
    stamp, gauges = stamp_form(random), [Gauge.draw(site) for _ in range(random.randrange(3, 9))]
    names = [random.choice((f"{site.tags[i % 4]}", gauges[i].what)) for i in range(len(gauges))]
    header = mark.join(
        ("time", *(f"{name} [{g.unit}]" for name, g in zip(names, gauges, strict=True)), "state")
    )
    states, every, rows = random.choice(words.STATES), random.randrange(30, 200), count()
    has_comma = mark == ";" and random.random() < 0.6

    def lines(event: Event) -> Iterator[str]:
        if next(rows) % every == 0:
            yield header
        values = [gauge.read(random) for gauge in gauges]
        state = states[0 if event.level < 2 else len(states) - 1]
        row = [value.replace(".", ",") if has_comma else value for value in values]
        yield mark.join((stamp(event.time), *row, state))
        if event.level == 3:
            yield f"# {event.text}"

    return lines


def _access(site: Site) -> Format:
    random = site.random
    agents = [
        f"{coin(random).title()}/{random.randrange(1, 99)}.{random.randrange(9)} ({word(random)})"
        for _ in range(3)
    ]
    pages = [path.lstrip("/") for path in site.paths]
    client, page, agent = (pooled(random, pool) for pool in (site.addresses, pages, agents))
    sizes, is_long = [random.randrange(90, 90_000) for _ in pages], random.random() < 0.6
    has_ms, methods = random.random() < 0.4, ("GET", "GET", "GET", "POST", "PUT", "DELETE")
    zone = random.choice(("+0000", "+0100", "-0500"))

    def lines(event: Event) -> Iterator[str]:
        path, time = page(), event.time
        size, key = sizes[pages.index(path)], event.pairs[0][1] if event.pairs else ""
        key = f"/{key}" if re.fullmatch(r"[\w-]{4,}", key) else ""
        status = random.choice(
            ((200, 200, 304), (200, 201, 204), (404, 403), (500, 503))[event.level]
        )
        stamp = f"{time.day:02d}/{MONTHS[time.month - 1]}/{time:%Y:%H:%M:%S} {zone}"
        request = f"{random.choice(methods)} /{path}{key} HTTP/1.1"
        tail = f' "-" "{agent()}"' if is_long else ""
        took = f" {random.randrange(1, 400)}" if has_ms else ""
        yield f'{client()} - - [{stamp}] "{request}" {status} {size}{tail}{took}'

    return lines


def _alarms(site: Site) -> Format:
    random, mark = site.random, site.random.choice((" ; ", "; ", " | ", "   "))
    texts = [site.noun() for _ in range(4)]
    points = [
        (tag, f"{random.choice(texts)} {random.choice(('HH', 'LL', 'high', 'fault'))}")
        for tag in site.tags
    ]
    verbs = random.choice(
        (("RAISED", "ACK", "CLEARED"), ("+", "*", "-"), ("ACT/UNACK", "ACT/ACK", "RTN"))
    )
    active: list[tuple[int, int, int]] = []
    numbers, has_ms = count(random.randrange(100, 90_000)), random.random() < 0.5

    def lines(event: Event) -> Iterator[str]:
        time = event.time
        ms = f".{time.microsecond // 1000:03d}" if has_ms else ""
        if not active or (len(active) < 4 and random.random() < 0.4):
            number, point, phase = next(numbers), random.randrange(len(points)), 0
        else:
            number, point, phase = active.pop(0 if random.random() < 0.6 else -1)
        if phase < 2:
            active.append((number, point, phase + 1))
        (tag, text), who = points[point], random.choice(site.users) if phase == 1 else "SYSTEM"
        start = f"{time:%d.%m.%Y %H:%M:%S}{ms}"
        yield mark.join((start, f"{number}", f"{tag:<7}", f"{text:<24}", f"{verbs[phase]:<9}", who))
        if event.level == 3 or random.random() < 0.1:
            yield mark.join((start, "-", f"{event.source:<7}", event.text))

    return lines


def _mqtt(site: Site) -> Format:
    random = site.random
    base, has_time = f"{site.domain}/{word(random)}", random.random() < 0.7
    points = [
        (f"{base}/{random.choice(site.hosts)}/{word(random)}", Gauge.draw(site)) for _ in range(9)
    ]
    form, turn = random.choice(("json", "bare", "quoted")), count()

    def lines(event: Event) -> Iterator[str]:
        start = f"{(event.time - datetime(1970, 1, 1)).total_seconds():.0f} " if has_time else ""
        if event.level > 1 or (event.pairs and random.random() < 0.4):
            said: dict[str, object] = {"msg": event.head, **dict(event.pairs)}
            yield f"{start}{base}/{event.source}/event {_fitting(said, 200)}"
            return
        topic, gauge = points[next(turn) % len(points)]
        value = gauge.read(random)
        forms = {"bare": value, "quoted": f"'{value} {gauge.unit}'"}
        forms["json"] = f'{{"{gauge.what}": {value}, "unit": "{gauge.unit}", "q": {event.level}}}'
        yield f"{start}{topic}/{gauge.what} {forms[form]}"

    return lines


def _crc(data: bytes) -> bytes:
    value = 0xFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xA001 if value & 1 else 0)
    return value.to_bytes(2, "little")


def _telegram(site: Site) -> Format:
    random = site.random
    arrows = random.choice(
        (("TX", "RX"), ("-->", "<--"), (">>", "<<"), ("send", "recv"), ("M->S", "S->M"))
    )
    gap, is_upper = random.choice((" ", " ", "", ":")), random.random() < 0.6
    polls = [
        (random.randrange(1, 32), 3, random.randrange(500), random.randrange(1, 7))
        for _ in range(5)
    ]
    registers = {poll: [random.randrange(4096) for _ in range(poll[3])] for poll in polls}
    port = random.choice(("", "COM3 ", "ttyS1 ", "ch0 "))
    turn, is_ordered = count(), random.random() < 0.6

    def show(time: datetime, arrow: str, data: bytes) -> str:
        whole = data + _crc(data)
        shown = whole.hex(gap) if gap else whole.hex()
        stamp = f"{time:%H:%M:%S}.{time.microsecond // 1000:03d}"
        return f"{stamp} {port}{arrow} {shown.upper() if is_upper else shown}"

    def lines(event: Event) -> Iterator[str]:
        poll = polls[next(turn) % 5] if is_ordered else random.choice(polls)
        unit, function, first, length = poll
        ask = bytes((unit, function, *first.to_bytes(2, "big"), *length.to_bytes(2, "big")))
        yield show(event.time, arrows[0], ask)
        if event.level == 3:
            yield f"{event.time:%H:%M:%S} {port}{event.text}"
            return
        values = registers[poll]
        values[random.randrange(length)] += random.randrange(3)
        data = b"".join((value % 65536).to_bytes(2, "big") for value in values)
        yield show(event.time, arrows[1], bytes((unit, function, len(data))) + data)

    return lines


RECORDS = {
    "logfmt": Family(_logfmt, ("kebab", "snake", "dotted")),
    "json": Family(_json, ("kebab", "dotted", "camel")),
    "csv": Family(_csv, ("tag", "snake")),
    "access": Family(_access, ("kebab",)),
    "alarms": Family(_alarms, ("tag", "upper")),
    "mqtt": Family(_mqtt, ("snake", "numbered")),
    "telegram": Family(_telegram, ("upper",)),
}
