"""The built-in texts: a plant log, questions about it, and a text to calibrate and check with.

All are functions of a seed or constants, since the figures of exports and benchmarks rest on them:
the same seed gives the same text on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from headrace.models.plant import Plant

QUESTIONS = (
    "Which alarms were raised, and has each of them been cleared?",
    "What went wrong first, and what followed from it? Answer in two sentences.",
    "Which equipment tripped, and at what time did it run again?",
    "Is anything still abnormal that the next shift should watch?",
    'List every WARN and ERROR event as JSON: [{"time": ..., "source": ..., "event": ...}]',
)
"""What an operator asks about a log such as `sample_log()`."""


def lines(seed: int = 0) -> Iterator[str]:
    """Log lines, without end and without newlines.

    A line is `2026-08-08T05:57:29Z INFO  plc-01       text`, at most 160 characters of ASCII;
    times never go back.
    """
    return Plant(seed).run()


def sample_log(num_lines: int = 200, seed: int = 0) -> str:
    """The first lines of the log, each with its newline; 200 hold a fault and its recovery."""
    return "".join(f"{line}\n" for line in islice(lines(seed), num_lines))


def calibration_text() -> str:
    """About 2,000 tokens of what a model sees in service: log lines, questions, answers, JSON.

    Never changes but with the version, because figures measured on it are compared.
    """
    log = list(islice(lines(seed=7), 120))
    notable = [line for line in log if any(word in line for word in _NOTABLE)]
    return _TEXT.format(routine="\n".join(log[:10]), notable="\n".join(notable[:12]))


_NOTABLE = (" WARN ", " ERROR ", " alarm-server ", " hmi-02 ", "automatic", "recovered")

_TEXT = """\
Standing instruction 12: pump house. Two feed pumps serve boiler B-1. P-101 runs, P-102 waits with \
its suction valve open and its motor warm. If the suction pressure of the running pump falls below \
1.1 bar, look at the strainer before you look at the pump: nine times out of ten a handful of rust \
flakes is all there is to find. A pump that cavitates sounds as if it were moving gravel. Do not \
wait for the vibration trip; change over by hand, note the time, and write down what you saw.

{routine}

Question: What does this part of the log show?
Answer: Normal operation. The sensors report steady values, the controller keeps its scan time near \
8 ms, and no warning or alarm is present.

{notable}

Question: What happened here, and in which order?
Answer: The first sign was a warning from the equipment itself. An alarm followed within half a \
minute, then a trip or a limit took effect, and the control system moved to its fallback without \
help. The operator acknowledged the alarm, removed the cause, and the reading returned to normal.

User: Summarise the night shift for the handover book, please. Three points are enough.
Assistant: Here are the three points:
1. The conveyor C-4 stopped once on overload at 02:41; the jam at the transfer chute was cleared \
and the belt ran again after eleven minutes.
2. Communication with remote I/O rack 3 was lost for 38 s. The outputs held their last values, and \
nothing was shut down. The cable at port 6 should be replaced this week.
3. Tank TK-2 is at 71 %, which is enough until the tanker arrives on Thursday.

User: Give me the second point as JSON.
Assistant: {{"time": "2026-03-14T03:07:52Z", "source": "plc-01", "severity": "error", "event": \
"communication lost", "duration_s": 38, "tags": ["FT-310", "PT-311", "LT-312"], "recovered": true, \
"action": "replace cable at port 6", "cost": null}}

Why does a boiler need its water level kept within such narrow limits? If the level is too high, \
drops of water are carried into the steam line, where they damage valves and turbines. If it is too \
low, the tubes are no longer cooled by boiling water; the steel softens within minutes, and the \
pressure inside does the rest. That is why two independent sensors watch the level, why the burner \
is cut off without asking anyone, and why nobody should ever bridge that interlock.

The morning after the storm, Anna walked along the canal with her father's old torch in her pocket. \
The lock keeper's house was dark, but the weir was open, and she could hear the water long before \
she saw it. "You're early," said the keeper. "Couldn't sleep," she answered. "How high is it?" He \
pointed at the gauge: four metres and twenty. In 1962, he told her, it had been almost six.

def average(values: list[float]) -> float:
    \"\"\"Mean of the readings; 0.0 if there are none.\"\"\"
    return sum(values) / len(values) if values else 0.0

| tag    | description       | unit | low  | high  |
|--------|-------------------|------|------|-------|
| PT-104 | suction pressure  | bar  | 1.10 | 2.50  |
| TT-303 | flue gas          | °C   | 140  | 230   |
| VT-105 | vibration         | mm/s | 0.00 | 4.50  |

A flow of 48 m³/h through a pipe of 100 mm diameter moves at 48 / 3600 / (π · 0.05²) ≈ 1.7 m/s. \
Doubling the diameter would divide the speed by four. In German the same tag sheet says: Druck auf \
der Saugseite, Rauchgastemperatur, Schwingung; in French: pression d'aspiration, température des \
fumées, vibration.

Question: Which is the capital of France, and what is 17 times 6?
Answer: Paris, and 102.
"""
