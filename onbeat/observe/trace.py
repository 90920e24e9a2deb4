"""trace.json in Chrome's trace format: open it in Perfetto or chrome://tracing.

One lane (a "process" of the format) per generator, scorer and trainer rank, one for publishing and one for the first
tokens after it; what overlaps within a lane, such as the groups a generator decodes at once, gets rows of its own.
Events are written as they happen, so a run that was killed leaves a trace that still opens (the format allows the
closing bracket to be missing).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec


class Trace:
    def __init__(self, path: Path, zero_s: float) -> None:
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self._file.write(b"[\n")
        self._zero_s = zero_s
        self._lanes: dict[str, tuple[int, list[float]]] = {}

    def span(self, lane: str, name: str, began_s: float, ended_s: float) -> None:
        """Something was done in `lane`. Spans of one lane must come in the order they ended."""
        number, rows = self._lane(lane)
        row = next((row for row, busy_until in enumerate(rows) if busy_until <= began_s), len(rows))
        rows[row : row + 1] = [ended_s]
        self._write(
            name=name,
            ph="X",
            pid=number,
            tid=row,
            ts=round((began_s - self._zero_s) * 1e6, 1),
            dur=round((ended_s - began_s) * 1e6, 1),
        )

    def _lane(self, lane: str) -> tuple[int, list[float]]:
        if lane not in self._lanes:
            number = len(self._lanes)
            self._lanes[lane] = (number, [])
            self._write(name="process_name", ph="M", pid=number, tid=0, args={"name": lane})
            self._write(name="process_sort_index", ph="M", pid=number, tid=0, args={"sort_index": number})
        return self._lanes[lane]

    def _write(self, **event: Any) -> None:
        with suppress(OSError):  # a full disk: what the run must keep is told of elsewhere, a trace is not worth it
            self._file.write(msgspec.json.encode(event) + b",\n")

    def close(self) -> None:
        """A last event without a comma, then the bracket."""
        if not self._file.closed:
            end = {"name": "end", "ph": "M", "pid": 0, "tid": 0, "args": {}}
            with suppress(OSError):
                self._file.write(msgspec.json.encode(end) + b"\n]\n")
            with suppress(OSError):
                self._file.close()
