"""What the training contenders read off a trace."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[str, float, float]
"""Lane, began, ended; in seconds."""


def covered(spans: Iterable[Span], lane: str, since_s: float = 0.0) -> float:
    """Seconds in which a lane of that kind was doing something."""
    total, until_s = 0.0, since_s
    for began_s, ended_s in sorted((began_s, ended_s) for name, began_s, ended_s in spans if name.startswith(lane)):
        total += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return total
