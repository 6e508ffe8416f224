"""A trace of what happened when, as the Chrome trace event format has it (Perfetto reads it too)."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

TRACKS = ("host", "target", "draft")

MAX_SPANS = 1_000_000
"""Later spans displace the first: about 100 MB of memory."""


class Trace:
    """Spans on one track a device. Threads may share it."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, str, float, float, int]] = deque(maxlen=MAX_SPANS)

    def add(self, track: str, name: str, start: float, end: float) -> None:
        """A span by `time.perf_counter` at its two ends."""
        self._spans.append((track, name, start, end, threading.get_ident()))

    def clear(self) -> None:
        """Forgets all spans."""
        self._spans.clear()

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(track, name, start, time.perf_counter())

    def to_json(self) -> dict[str, object]:
        """The trace; times are in microseconds from its first span."""
        spans = sorted(self._spans, key=lambda span: span[2])
        zero = spans[0][2] if spans else 0.0
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": track}}
            for i, track in enumerate(TRACKS)
        ]
        events = [
            {
                "ph": "X",
                "name": name,
                "cat": track,
                "pid": 1,
                "tid": TRACKS.index(track),
                "ts": round((start - zero) * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
                "args": {"thread": thread},
            }
            for track, name, start, end, thread in spans
        ]
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}

    def save(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(json.dumps(self.to_json()))


def span(trace: Trace | None, track: str, name: str) -> AbstractContextManager[None]:
    """A span of a trace, if there is one."""
    return nullcontext() if trace is None else trace.span(track, name)
