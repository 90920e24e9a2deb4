"""Where the time went: spans of lanes, as sets of intervals. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[str, float, float]
"""Lane, began, ended; in seconds."""
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time, as intervals that rise and do not touch."""
    joined: list[Interval] = []
    for began_s, ended_s in sorted(intervals):
        if joined and began_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended_s))
        else:
            joined.append((began_s, ended_s))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(ended_s - began_s for began_s, ended_s in union(intervals))


def overlap(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Seconds that are in both."""
    return length(left) + length(right) - length([*left, *right])


def of_lane(spans: Iterable[Span], kind: str, since_s: float, until_s: float) -> list[Interval]:
    """What a lane, or lanes of that kind (`generator`: generator-0, generator-1 …), did within a stretch of time."""
    return [
        (max(began_s, since_s), min(ended_s, until_s))
        for lane, began_s, ended_s in spans
        if (lane == kind or lane.startswith(f"{kind}-")) and ended_s > since_s and began_s < until_s
    ]
