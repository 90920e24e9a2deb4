"""What a run is doing at this moment, and what exactly it waits for. Structs for `onbeat status`, and their text."""

from __future__ import annotations

from msgspec import Struct

from onbeat.types import Stream


class WorkerStatus(Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    state: str
    """What it does, in a few words."""


class GroupStatus(Struct, frozen=True, kw_only=True):
    """A group that has been sent for and is not complete."""

    stream: Stream
    slot: int
    state: str
    """waiting (for a generator), generating, scoring"""
    worker: str | None
    num_done: int
    """Completions that are there, of `num_samples`."""
    num_samples: int
    age_s: float


class Status(Struct, frozen=True, kw_only=True):
    run_dir: str
    pid: int | None
    """Of the controller; None: the run is not going."""
    phase: str
    """starting, publishing, training, evaluating, ending, not running"""
    period: int
    """That is being trained, counted from 0; also the version of its weights."""
    num_periods: int
    version: int
    num_groups_done: int
    num_groups: int
    groups: list[GroupStatus]
    """The oldest first."""
    workers: list[WorkerStatus]
    waiting_for: str
    reward_means: list[float]
    """Of the last periods, the newest last."""
    accuracy: float | None
    """Held-out, of the last evaluation."""
    elapsed_s: float
    left_s: float | None
    """Until the last period ends, at the pace of the last few."""

    @property
    def num_in_flight(self) -> int:
        return sum(group.state != "waiting" for group in self.groups if group.stream == "train")

    @property
    def num_waiting(self) -> int:
        return sum(group.state == "waiting" for group in self.groups if group.stream == "train")


def describe(status: Status) -> list[str]:
    """For a person, line by line."""
    if status.pid is None:
        return [f"{status.run_dir}: not running; {status.period} of {status.num_periods} periods are done",
                status.waiting_for]  # fmt: skip
    lines = [headline(status), f"waits for {status.waiting_for}"]
    lines += [f"  {worker.name:14} pid {worker.pid:<8} {worker.state}" for worker in status.workers]
    for group in status.groups[:8]:
        where = f" at {group.worker}" if group.worker else ""
        lines.append(
            f"  {group.stream} slot {group.slot}: {group.state}{where}, {group.num_done} of {group.num_samples} "
            f"completions, {group.age_s:.1f} s"
        )
    if len(status.groups) > 8:
        lines.append(f"  … and {len(status.groups) - 8} more groups")
    return lines


def headline(status: Status) -> str:
    return (
        f"period {status.period + 1}/{status.num_periods}, {status.phase}: {status.num_groups_done} groups done, "
        f"{status.num_in_flight} in flight, {status.num_waiting} waiting; {duration(status.elapsed_s)} so far, "
        f"{duration(status.left_s)} left"
    )


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sparkline(values: list[float]) -> str:
    """A trend in one line of text."""
    if not values:
        return ""
    low, high = min(values), max(values)
    steps = "▁▂▃▄▅▆▇█"
    return "".join(steps[int((value - low) / (high - low) * 7.999)] if high > low else steps[3] for value in values)
