"""Trackers people already look at: each gets every record's numbers, by name, at the period's number.

A tracker that is asked for and not installed is an error before anything starts; one that fails later costs a warning
and its own figures, never the run.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from onbeat.config import Config, TrackConfig
from onbeat.errors import ConfigError

Numbers = Mapping[str, float]


class Tracker(Protocol):
    def log(self, numbers: Numbers, step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files, written with TensorBoard's own writer: torch's would bring torch into this process."""

    def __init__(self, directory: Path) -> None:
        self._events = _module("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _module("tensorboard.compat.proto.summary_pb2", "tensorboard")
        writer = _module("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(directory))

    def log(self, numbers: Numbers, step: int) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    """Weights & Biases, and trackio, which has the same interface."""

    def __init__(self, module: str, **settings: Any) -> None:
        self._module = _module(module, module)
        try:
            self._module.init(**settings)
        except Exception as error:
            raise ConfigError(
                f"track.{module} is set, but it cannot be started: {error}; log in, or take the key out"
            ) from error

    def log(self, numbers: Numbers, step: int) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"track.{package} is set, but {package} cannot be imported ({error}); pip install {package}, "
                          "or take the key out") from error  # fmt: skip


def open_trackers(config: Config, run_dir: Path, warn: Callable[[str], None]) -> Trackers:
    """Those the recipe asks for."""
    track: TrackConfig = config.track
    settings = config.model_dump(mode="json")
    trackers: list[Tracker] = []
    if track.tensorboard:
        trackers.append(TensorBoard(run_dir / "tensorboard"))
    if track.wandb:
        trackers.append(
            WandbLike(
                "wandb",
                project=track.wandb,
                name=run_dir.name,
                config=settings,
                dir=str(run_dir),
                resume="allow",
                id=hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16],
            )
        )
    if track.trackio:
        trackers.append(WandbLike("trackio", project=track.trackio, name=run_dir.name, config=settings))
    return Trackers(trackers, warn)


class Trackers:
    def __init__(self, trackers: list[Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = trackers
        self._warn = warn

    def log(self, record: Mapping[str, Any], step: int) -> None:
        numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        self._each(lambda tracker: tracker.log(numbers, step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                do(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn(f"{type(tracker).__name__} gets no more figures: {type(error).__name__}: {error}")
