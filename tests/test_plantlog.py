"""The built-in log: the same for a seed, different between seeds, and with a story in it."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from itertools import islice

import pytest

from headrace.models.plantlog import QUESTIONS, calibration_text, lines, sample_log

SEEDS = (0, 1, 2, 99, 2**40)
LINE = re.compile(r"(\S+Z) (DEBUG|INFO |WARN |ERROR) ([a-z0-9-]+) +(\S.*\S|\S)")


def matches(seed: int, num_lines: int) -> list[re.Match[str]]:
    found = [LINE.fullmatch(line) for line in islice(lines(seed), num_lines)]
    assert None not in found
    return [match for match in found if match]


def test_a_seed_gives_one_log_and_another_seed_another() -> None:
    assert sample_log(300, 5) == sample_log(300, 5)
    assert len({sample_log(50, seed) for seed in range(20)}) == 20
    assert sample_log(300).startswith(sample_log(200))
    assert sample_log().splitlines() == list(islice(lines(), 200))


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_are_well_formed_and_times_never_go_back(seed: int) -> None:
    found = matches(seed, 3000)
    times = [datetime.fromisoformat(match[1]) for match in found]
    assert times == sorted(times)
    assert all(match[0].isascii() and len(match[0]) <= 160 for match in found)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_hundred_lines_hold_a_fault_and_its_recovery(seed: int) -> None:
    alarms = re.findall(r"ALM-(\d+) (RAISED|ACKNOWLEDGED|CLEARED)", sample_log(200, seed))
    first = [event for alarm, event in alarms if alarm == alarms[0][0]]
    assert first == ["RAISED", "ACKNOWLEDGED", "CLEARED"]
    assert "recovered" in sample_log(200, seed)


def test_every_subsystem_speaks_and_most_lines_are_routine() -> None:
    found = matches(0, 2000)
    sources = Counter(match[3] for match in found)
    assert len(sources) >= 12 and max(sources.values()) < 0.35 * len(found)
    levels = Counter(match[2].strip() for match in found)
    assert set(levels) == {"DEBUG", "INFO", "WARN", "ERROR"}
    assert 0.01 < (levels["WARN"] + levels["ERROR"]) / len(found) < 0.2


def test_the_log_repeats_its_templates_but_not_its_lines() -> None:
    texts = [match[3] + match[4] for match in matches(0, 2000)]
    templates = {re.sub(r"\d+", "0", text) for text in texts}
    assert len(templates) < 150 < len(set(texts))


def test_readings_are_beyond_the_limits_that_their_warnings_name() -> None:
    log = sample_log(20_000, 3)
    below = re.findall(r"([\d.]+) \S+ below ([\d.]+)", log)
    above = re.findall(r"([\d.]+) \S+ above (?:limit )?([\d.]+)", log)
    assert len(below) > 10 and len(above) > 10
    assert all(float(value) < float(limit) for value, limit in below)
    assert all(float(value) > float(limit) for value, limit in above)


def test_a_lost_link_and_clock_are_not_reported_as_good() -> None:
    log = sample_log(20_000, 3)
    lost = re.findall(r"not responding.*?reconnected", log, re.DOTALL)
    assert lost and not any("poll ok" in part or " 0 bad" in part for part in lost)
    drift = re.findall(r"reach 0,.*?reachable,", log, re.DOTALL)
    assert drift and not any("stratum 2" in part for part in drift)


def test_calibration_text_is_constant_and_mixed() -> None:
    text = calibration_text()
    assert text == calibration_text()
    assert 5_000 < len(text) < 9_000
    for part in ("ERROR", "WARN", "INFO", "Question:", "Assistant:", '{"time"', "def ", "°C"):
        assert part in text
    assert all(question.strip() == question for question in QUESTIONS)
