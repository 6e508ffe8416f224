"""A plant that writes its own log: seeded, endless, and repetitive in the way real logs are.

A small discrete-event simulation of a pump house, a boiler and a conveyor with their PLC, gateway,
historian and network. Readings drift; every few minutes a fault takes its course from cause to
recovery over several subsystems. `headrace.models.plantlog` is the way in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random

Process = Iterator[float]
"""Writes lines as it goes; each value is how many seconds it waits."""

SHIFT_S = 8 * 3600


@dataclass
class Gauge:
    """A reading that wanders around `target`; faults move the target."""

    tag: str
    unit_name: str
    what: str
    unit: str
    target: float
    noise: float
    decimals: int = 1
    value: float = 0.0

    def read(self, random: Random) -> str:
        """The next reading, with its unit; changes `value`."""
        pull = 0.35 * (self.target - self.value)
        self.value += pull + random.uniform(-self.noise, self.noise)
        return f"{max(self.value, 0.0):.{self.decimals}f} {self.unit}"


def _gauges() -> dict[str, Gauge]:
    gauges = [
        Gauge("FT-103", "pump-p101", "feed flow", "m3/h", 48.0, 0.6),
        Gauge("PT-104", "pump-p101", "suction pressure", "bar", 1.42, 0.02, 2),
        Gauge("VT-105", "pump-p101", "vibration", "mm/s", 2.1, 0.15, 2),
        Gauge("TT-106", "pump-p101", "bearing temperature", "degC", 61.0, 0.4),
        Gauge("ZT-203", "valve-fv203", "position", "%", 57.0, 0.8),
        Gauge("LT-301", "boiler-b1", "drum level", "%", 62.0, 0.5),
        Gauge("PT-302", "boiler-b1", "steam pressure", "bar", 11.8, 0.08, 2),
        Gauge("TT-303", "boiler-b1", "flue gas", "degC", 184.0, 1.5),
        Gauge("AT-304", "boiler-b1", "excess oxygen", "%", 3.4, 0.1, 2),
        Gauge("ST-401", "conveyor-c4", "belt speed", "m/s", 1.25, 0.01, 2),
        Gauge("IT-402", "conveyor-c4", "drive current", "A", 22.5, 0.7),
        Gauge("LT-501", "tank-tk2", "level", "%", 71.0, 0.4),
    ]
    for gauge in gauges:
        gauge.value = gauge.target
    return {gauge.tag: gauge for gauge in gauges}


OPERATORS = ("m.keller", "j.okafor", "s.lindqvist", "r.santos")


class Plant:
    """Time, gauges and the lines not yet fetched."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = SHIFT_S - 2 * 3600 - self.random.uniform(100, 160)  # a shift begins at 06:00
        self.day = datetime(2026, 1, 5, tzinfo=UTC) + timedelta(days=self.random.randrange(300))
        self.gauges = _gauges()
        self.operator = self.random.choice(OPERATORS)
        self.bad_items = 0
        self.clock_lost = False
        self.written: list[str] = []
        self._alarm_ids = count(self.random.randrange(1000, 4000))

    def run(self) -> Iterator[str]:
        order = count()
        processes = [*(make(self) for make in _ROUTINE), _faults(self)]
        processes += [_gauge_readings(self, gauge) for gauge in self.gauges.values()]
        agenda = [(self.now_s, next(order), process) for process in processes]
        while agenda:
            due_s, _, process = heapq.heappop(agenda)
            self.now_s = max(self.now_s, due_s)
            wait_s = next(process)
            heapq.heappush(agenda, (self.now_s + wait_s, next(order), process))
            yield from self.written
            self.written.clear()

    def log(self, level: str, source: str, text: str) -> None:
        self.now_s += self.random.uniform(0.001, 0.03)
        stamp = f"{self.day + timedelta(seconds=self.now_s):%Y-%m-%dT%H:%M:%SZ}"
        self.written.append(f"{stamp} {level:<5} {source:<12} {text}")

    def raise_alarm(self, priority: str, text: str) -> int:
        alarm_id = next(self._alarm_ids)
        level = "ERROR" if priority == "P1" else "WARN"
        self.log(level, "alarm-server", f"ALM-{alarm_id} RAISED {priority} {text}")
        return alarm_id

    def acknowledge(self, alarm_id: int) -> None:
        text = f"ALM-{alarm_id} ACKNOWLEDGED by {self.operator}"
        self.log("INFO", "alarm-server", text)

    def clear(self, alarm_id: int, since_s: float) -> None:
        text = f"ALM-{alarm_id} CLEARED after {self.now_s - since_s:.0f} s"
        self.log("INFO", "alarm-server", text)

    def read(self, tag: str) -> str:
        return self.gauges[tag].read(self.random)

    def disturb(self, tag: str, value: float, target: float) -> None:
        """The reading is about `value` now and on its way to `target`."""
        self.gauges[tag].value, self.gauges[tag].target = value, target

    def reading(self, tag: str, level: str, note: str) -> None:
        gauge = self.gauges[tag]
        text = f"{tag} {gauge.what} {self.read(tag)} {note}"
        self.log(level, gauge.unit_name, text)


# Routine.


def _gauge_readings(plant: Plant, gauge: Gauge) -> Process:
    yield plant.random.uniform(0, 20)
    while True:
        reading = gauge.read(plant.random)
        plant.log("INFO", gauge.unit_name, f"{gauge.tag} {gauge.what} {reading}")
        yield plant.random.uniform(14, 26)


def _plc(plant: Plant) -> Process:
    for cycle in count(plant.random.randrange(10**5, 10**6), 600):
        scan, peak = plant.random.uniform(7.6, 8.4), plant.random.uniform(8.8, 11.9)
        plant.log("INFO", "plc-01", f"scan avg {scan:.1f} ms max {peak:.1f} ms cycle {cycle}")
        yield plant.random.uniform(9, 11)
        took_ms = plant.random.randrange(9, 19)
        if not plant.bad_items:
            polled = f"modbus unit 3 poll ok: 24 registers at 40101 in {took_ms} ms"
            plant.log("DEBUG", "plc-01", polled)
        yield plant.random.uniform(9, 11)


def _opcua(plant: Plant) -> Process:
    session = plant.random.randrange(16**6)
    while True:
        yield 30 + plant.random.uniform(-1, 1)
        items = plant.random.randrange(310, 319)
        bad = plant.bad_items
        text = f"session {session:06x} keep-alive ok, {items} monitored items, {bad} bad"
        plant.log("INFO", "opcua-gw", text)


def _historian(plant: Plant) -> Process:
    while True:
        yield 20 + plant.random.uniform(0, 2)
        samples, took_ms = plant.random.randrange(880, 960), plant.random.randrange(21, 58)
        plant.log("INFO", "historian", f"flushed {samples} samples in {took_ms} ms, queue 0")


def _network(plant: Plant) -> Process:
    while True:
        yield 45 + plant.random.uniform(-5, 5)
        port, load = plant.random.randrange(1, 13), plant.random.uniform(1.1, 6.4)
        text = f"Gi1/0/{port} in {load:.1f} Mbit/s out {load / 3:.1f} Mbit/s, 0 errors"
        plant.log("INFO", "sw-core-1", text)


def _clock(plant: Plant) -> Process:
    while True:
        yield 64
        offset = plant.random.uniform(-0.4, 0.4)
        if not plant.clock_lost:
            text = f"peer 10.20.0.1 stratum 2 offset {offset:+.3f} ms jitter 0.06 ms"
            plant.log("INFO", "ntpd", text)


def _shifts(plant: Plant) -> Process:
    names = {6: "early", 14: "late", 22: "night"}
    while True:
        yield (6 * 3600 - plant.now_s) % SHIFT_S or SHIFT_S
        hour = int(plant.now_s // 3600) % 24
        leaving, others = plant.operator, [name for name in OPERATORS if name != plant.operator]
        plant.operator = plant.random.choice(others)
        plant.log("INFO", "hmi-02", f"shift handover: {leaving} to {plant.operator}")
        plant.log("INFO", "hmi-02", f"{names[hour]} shift begins, operator {plant.operator}")
        level = plant.read("LT-501")
        plant.log("INFO", "hmi-02", f'handover note: "TK-2 at {level}, boiler on automatic"')
        yield 1.0


def _operator(plant: Plant) -> Process:
    while True:
        yield plant.random.uniform(70, 200)
        tag, usual = plant.random.choice((("PT-302", 11.8), ("AT-304", 3.4)))
        gauge = plant.gauges[tag]
        before = gauge.target
        steps = [step for step in range(-3, 4) if usual * (1 + step / 100) != before]
        gauge.target = usual * (1 + plant.random.choice(steps) / 100)
        change = f"{before:.{gauge.decimals}f} -> {gauge.target:.{gauge.decimals}f} {gauge.unit}"
        plant.log("INFO", "hmi-02", f"{plant.operator} changed setpoint of {tag}: {change}")


_ROUTINE: tuple[Callable[[Plant], Process], ...] = (
    _plc, _opcua, _historian, _network, _clock, _shifts, _operator,
)  # fmt: skip


# Faults, from cause to recovery.


def _faults(plant: Plant) -> Process:
    yield plant.random.uniform(15, 35)
    while True:
        kinds = [_cavitation, _link_loss, _stuck_valve, _conveyor_jam, _clock_drift]
        plant.random.shuffle(kinds)
        for fault in kinds:
            yield from fault(plant)
            yield plant.random.uniform(60, 240)


def _cavitation(plant: Plant) -> Process:
    begin, gauges = plant.now_s, plant.gauges
    plant.disturb("PT-104", 1.08, 0.71)
    plant.disturb("VT-105", 4.4, 8.2)
    for _ in range(plant.random.randrange(2, 4)):
        plant.reading("PT-104", "WARN", "below 1.10 bar, strainer S-101 may be blocked")
        yield plant.random.uniform(3, 6)
    gauges["VT-105"].value = max(gauges["VT-105"].value, 4.8)
    plant.reading("VT-105", "WARN", "above limit 4.50 mm/s")
    alarm = plant.raise_alarm("P2", "P-101 cavitation suspected")
    yield plant.random.uniform(3, 6)
    plant.disturb("FT-103", 41.0, 28.8)
    plant.reading("FT-103", "WARN", "low, boiler B-1 feed at risk")
    yield plant.random.uniform(2, 4)
    plant.log("ERROR", "pump-p101", f"tripped on vibration {plant.read('VT-105')}, interlock I-14")
    plant.log("INFO", "plc-01", "automatic changeover: start P-102, close XV-101")
    yield plant.random.uniform(4, 7)
    plant.disturb("FT-103", 44.0, 48.0)
    plant.disturb("PT-104", 1.31, 1.42)
    plant.disturb("VT-105", 2.6, 2.1)
    plant.log("INFO", "pump-p102", "running, ramp to 2940 rpm done")
    plant.acknowledge(alarm)
    yield plant.random.uniform(12, 25)
    plant.log("INFO", "hmi-02", f"{plant.operator} reset P-101 after cleaning strainer S-101")
    plant.reading("FT-103", "INFO", "recovered")
    plant.clear(alarm, begin)


def _link_loss(plant: Plant) -> Process:
    begin, port = plant.now_s, plant.random.randrange(5, 9)
    bad = plant.bad_items = plant.random.randrange(22, 27)
    plant.log("WARN", "sw-core-1", f"%LINK-3-UPDOWN: Interface Gi1/0/{port}, changed state to down")
    for attempt in range(1, 4):
        plant.log("WARN", "plc-01", f"modbus unit 3 timeout after 500 ms, retry {attempt} of 3")
        yield 1.5
    plant.log("ERROR", "plc-01", "modbus unit 3 (10.20.3.13:502) not responding, outputs held")
    alarm = plant.raise_alarm("P1", "communication lost: remote I/O rack 3")
    plant.log("WARN", "opcua-gw", f"{bad} items changed to Bad_NoCommunication (ns=2;s=Rack3)")
    yield plant.random.uniform(4, 9)
    plant.acknowledge(alarm)
    plant.log("WARN", "historian", f"gap opened for {bad} tags, last good value held")
    yield plant.random.uniform(15, 35)
    plant.log("INFO", "sw-core-1", f"%LINK-3-UPDOWN: Interface Gi1/0/{port}, changed state to up")
    yield 2.0
    plant.bad_items = 0
    plant.log("INFO", "plc-01", "modbus unit 3 reconnected, recovered after 1 attempt")
    plant.log("INFO", "opcua-gw", f"{bad} items changed to Good (ns=2;s=Rack3)")
    missing_s = plant.now_s - begin
    plant.log("INFO", "historian", f"gap closed for {bad} tags, {missing_s:.0f} s missing")
    plant.clear(alarm, begin)


def _stuck_valve(plant: Plant) -> Process:
    begin = plant.now_s
    plant.disturb("ZT-203", 36.0, 31.0)
    for demand in (57, 64, 71):
        position = plant.read("ZT-203")
        plant.log("WARN", "valve-fv203", f"demand {demand} % position {position}, deviation")
        yield plant.random.uniform(3, 5)
    alarm = plant.raise_alarm("P2", "FV-203 does not follow its demand")
    yield plant.random.uniform(4, 8)
    plant.disturb("LT-301", 55.0, 50.0)
    plant.reading("LT-301", "WARN", "below 55.0 %, feed water short")
    plant.acknowledge(alarm)
    yield plant.random.uniform(5, 9)
    plant.disturb("LT-301", 49.5, 45.0)
    plant.reading("LT-301", "ERROR", "below 50.0 %, burner load limited to 60 %")
    low = plant.raise_alarm("P1", "B-1 drum level low")
    plant.log("INFO", "hmi-02", f"{plant.operator} opened bypass HV-204 and stroked FV-203")
    plant.disturb("ZT-203", 44.0, 57.0)
    plant.disturb("LT-301", 52.0, 62.0)
    yield plant.random.uniform(15, 25)
    plant.log("INFO", "valve-fv203", f"follows again, position {plant.read('ZT-203')}")
    plant.reading("LT-301", "INFO", "recovered, burner load released")
    plant.clear(low, begin)
    plant.clear(alarm, begin)


def _conveyor_jam(plant: Plant) -> Process:
    begin = plant.now_s
    plant.disturb("IT-402", 31.5, 41.0)
    for _ in range(plant.random.randrange(2, 4)):
        plant.reading("IT-402", "WARN", "above 30.0 A")
        yield plant.random.uniform(2, 4)
    plant.disturb("ST-401", 0.0, 0.0)
    plant.disturb("IT-402", 0.0, 0.0)
    plant.log("ERROR", "conveyor-c4", "drive tripped: overload F0021, belt stopped")
    alarm = plant.raise_alarm("P2", "C-4 stopped on overload")
    plant.log("INFO", "plc-01", "interlock I-22: feeder F-3 stopped, hopper gate closed")
    yield plant.random.uniform(6, 12)
    plant.acknowledge(alarm)
    yield plant.random.uniform(20, 35)
    plant.log("INFO", "hmi-02", f"{plant.operator} reports jam at transfer chute cleared")
    plant.log("INFO", "conveyor-c4", "restart, ramp 8 s")
    plant.disturb("IT-402", 27.0, 22.5)
    yield 8.5
    plant.disturb("ST-401", 1.24, 1.25)
    plant.reading("ST-401", "INFO", "recovered, feeder F-3 released")
    plant.clear(alarm, begin)


def _clock_drift(plant: Plant) -> Process:
    begin, offset = plant.now_s, plant.random.uniform(6, 12)
    plant.clock_lost = True
    plant.log("WARN", "ntpd", "peer 10.20.0.1 unreachable, reach 0, using local clock")
    yield plant.random.uniform(8, 14)
    for _ in range(2):
        plant.log("WARN", "ntpd", f"offset {offset:+.1f} ms and growing, stratum 16")
        offset *= plant.random.uniform(2.5, 4)
        yield plant.random.uniform(8, 14)
    late = plant.random.randrange(3, 20)
    plant.log("WARN", "historian", f"{late} samples out of order, source plc-01")
    alarm = plant.raise_alarm("P3", "time synchronisation lost")
    plant.acknowledge(alarm)
    yield plant.random.uniform(8, 16)
    plant.clock_lost = False
    plant.log("INFO", "ntpd", f"peer 10.20.0.1 reachable, clock slewed {offset:+.1f} ms, recovered")
    plant.clear(alarm, begin)
