"""Made-up systems: one log per seed, of many forms, in which ids come back and times go on."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations, islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.export.distill import systems
from headrace.export.distill.formats import MAX_LINE_LEN, Event
from headrace.export.distill.records import RECORDS
from headrace.export.distill.systems import FAMILIES, System, questions, request, system_log

SEEDS = range(100)
STAMPS = (
    re.compile(r"\W?(\d{4}[-/.]\d\d[-/.]\d\d[ T-]\d\d[:.]\d\d[:.]\d\d([.,]\d+)?)"),
    re.compile(r"((\d{6}|\d{8})[ T-]\d{6}(\.\d+)?) "),
    re.compile(r"(\[ *\d+\.\d{6}\])"),
    re.compile(r"(?:\w+=|<\d+>1 |\- )(\d{4}[-/.]\d\d[-/.]\d\d[ T-]\d\d[:.]\d\d[:.]\d\d([.,]\d+)?)"),
)


@cache
def log(seed: int, num_lines: int = 120) -> tuple[str, ...]:
    return tuple(islice(system_log(seed), num_lines))


@cache
def events(seed: int) -> tuple[Event, ...]:
    return tuple(islice(System(seed).events(), 200))


@cache
def family(seed: int) -> str:
    return System(seed).family


@cache
def templates(seed: int) -> frozenset[str]:
    """A log's lines, without each word that has a digit."""
    return frozenset(re.sub(r"\S*\d\S*", "#", line) for line in log(seed))


def stamps(seed: int) -> list[str]:
    """What the lines begin with, where that can be sorted as text."""
    for form in STAMPS:
        found = [match[1] for match in map(form.match, log(seed)) if match]
        if len(found) > 30:
            return found
    return []


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**63))
def test_any_seed_gives_one_log_of_printable_lines(seed: int) -> None:
    lines = list(islice(system_log(seed), 120))
    assert lines == list(islice(system_log(seed), 120))
    assert all(line.isprintable() and 0 < len(line) <= MAX_LINE_LEN for line in lines)
    others = Counter(char for line in lines for char in line if not char.isascii())
    assert set(others) <= set("°³µ")


def test_logs_stay_the_same_between_machines() -> None:
    used = {
        name.id
        for module in ("systems", "formats", "records", "fields", "asks")
        for name in ast.walk(
            ast.parse(Path(systems.__file__).with_name(f"{module}.py").read_text())
        )
        if isinstance(name, ast.Name)
    }
    assert not used & {"hash", "id", "set", "frozenset"}


def test_a_hundred_seeds_show_the_families_and_most_are_ascii() -> None:
    shown = Counter(family(seed) for seed in SEEDS)
    assert len(shown) >= 12 and set(shown) <= set(FAMILIES)
    assert max(shown.values()) < 20
    assert sum("".join(log(seed)).isascii() for seed in SEEDS) > 85


def test_two_systems_seldom_share_a_template() -> None:
    shares = [
        len(templates(a) & templates(b)) / min(len(templates(a)), len(templates(b)))
        for a, b in combinations(SEEDS, 2)
    ]
    assert sum(shares) / len(shares) < 0.05


@pytest.mark.parametrize("seed", range(0, 100, 5))
def test_a_system_repeats_its_templates_but_not_its_lines(seed: int) -> None:
    said = events(seed)
    assert len({event.head for event in said}) <= 40
    assert len({event.text for event in said}) > 20


@pytest.mark.parametrize("seed", range(30))
def test_ids_come_back(seed: int) -> None:
    texts = [event.text for event in events(seed)]
    words = Counter(word for text in texts for word in set(re.findall(r"[\w-]{4,}", text)))
    ids = [word for word, count in words.items() if re.search(r"\d", word) and 3 <= count <= 60]
    assert len(ids) >= 5
    if family(seed) not in RECORDS:
        assert any(sum(word in line for line in log(seed)) >= 3 for word in ids)


def test_times_never_go_back() -> None:
    found = [stamps(seed) for seed in SEEDS]
    assert sum(map(bool, found)) > 30
    for times in found:
        assert times == sorted(times)
    for seed in SEEDS[:50]:
        times_of = [event.time for event in events(seed)]
        assert times_of == sorted(times_of) and times_of[0] < times_of[-1]


def test_errors_are_rare_and_have_consequences() -> None:
    levels = Counter(event.level for seed in SEEDS[:50] for event in events(seed))
    assert 0.002 < levels[3] / levels.total() < 0.1
    blocks = [event.block for seed in SEEDS[:50] for event in events(seed) if event.block]
    assert len(blocks) > 25
    for seed in range(20):
        said = events(seed)
        failed = next((i for i, event in enumerate(said) if event.level == 3), None)
        assert failed is None or failed + 20 > 200 or any(e.level == 2 for e in said[failed:])


def test_json_lines_are_json() -> None:
    seeds = [seed for seed in SEEDS if family(seed) == "json"]
    assert seeds
    for seed in seeds:
        assert all(isinstance(json.loads(line), dict) for line in log(seed))


@pytest.mark.parametrize("ask", [questions, request])
def test_what_is_asked_seldom_comes_twice(ask: Callable[[Random], str]) -> None:
    random = Random(3)
    asked = [ask(random) for _ in range(1000)]
    assert len(set(asked)) > 900
    assert [ask(Random(5)) for _ in range(3)] == [ask(Random(5))] * 3
    assert all(text.isprintable() and 10 < len(text) < 300 for text in asked)
