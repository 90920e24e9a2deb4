"""The run's directory: who may write there, and what a run that is resumed finds there.

config.toml          the resolved recipe
.lock                held by the run that writes here, for as long as it lives
ledger.jsonl  metrics.jsonl  evaluations.jsonl      appended to; cut back to the checkpoint by --resume
rollouts/            one file per period
checkpoints/         checkpoint.py
model/  trace.json  environment.json  logs/
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from onbeat.checkpoint import Checkpoint, CheckpointStore, Manifest
from onbeat.config import Config
from onbeat.errors import CheckpointError, ConfigError
from onbeat.recipe import load, to_toml

GROWING = ("ledger.jsonl", "metrics.jsonl", "evaluations.jsonl")
"""What a run appends to."""
ROLLOUTS = "rollouts"
Say = Callable[[str], None]

_MAY_CHANGE = (
    "run.",
    "checkpoint.",
    "evaluation.",
    "track.",
    "cluster.",
    "generator.count",
    "generator.max_sequences",
    "generator.cache_gib",
    "reward.workers",
    "reward.accuracy_threshold",
    "schedule.mode",
    "schedule.periods",
    "trainer.ranks",
    "trainer.tensor_parallel",
    "trainer.shard",
    "trainer.offload",
)
"""Keys, or sections, without influence on the weights but their rounding: a resumed run may set them anew. (Of other
ranks it is told that it may not be one run any more: inputs.py.)"""


_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path
    checkpoint: Checkpoint | None
    """What the run goes on from; None: it begins."""

    @property
    def model(self) -> Path:
        return self.path / "model"

    def rollouts(self, period: int) -> Path:
        return self.path / ROLLOUTS / f"period-{period:06d}.jsonl"

    def lengths(self) -> dict[str, int]:
        """Bytes of what the run appends to, now."""
        return {name: file.stat().st_size for name in GROWING if (file := self.path / name).exists()}


@contextmanager
def open_run_dir(config: Config, *, resume: bool, say: Say, warn: Say) -> Iterator[RunDir]:
    """The directory of the configuration's run, for us alone: new, or cut back to its last whole checkpoint."""
    path = Path(config.run.dir)
    with _full_disk_told(path), ExitStack() as held:
        try:
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(path))
            checkpoint = _resumed(path, config, say, warn) if resume else None
            if not resume:
                _refuse_a_run(path)
            _replace(path / "config.toml", to_toml(config))
            (path / ROLLOUTS).mkdir(exist_ok=True)
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise ConfigError(f"run.dir = {str(path)!r} cannot be written: {error.strerror}") from None
        yield RunDir(path, checkpoint)


def _replace(file: Path, text: str) -> None:
    """All of the new text, or the old one."""
    beside = file.with_name(f".{file.name}")
    with beside.open("w") as written:
        written.write(text)
        written.flush()
        os.fsync(written.fileno())
    beside.rename(file)


@contextmanager
def _full_disk_told(path: Path) -> Iterator[None]:
    """Whoever writes into the run's directory need not think of a disk without room."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        raise CheckpointError(
            f"the disk of run.dir = {str(path)!r} is full ({shutil.disk_usage(there).free:,} bytes are free); make "
            "room, and go on with --resume"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with the process, however it ends."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            _flock(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "another"
            raise ConfigError(
                f"run.dir = {str(path)!r} belongs to a run that is still going (process {holder}); wait for it, stop "
                "it, or name another directory with --run.dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> None:
    """Somebody who only looks (`held_by`) has it for a moment, and is waited for."""
    for _ in range(10):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def held_by(path: Path) -> str | None:
    """The process of the run that is going on there, if there is one. Anybody who may read may ask."""
    with suppress(FileNotFoundError), (path / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
    return None


def check_is_run(path: Path) -> None:
    try:
        found = (path / "config.toml").is_file()
    except PermissionError as error:
        raise ConfigError(f"{str(path)!r} cannot be looked into: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{str(path)!r} is not the directory of a run: it has no config.toml")


def _refuse_a_run(path: Path) -> None:
    """No period of an earlier run is overwritten."""
    if (path / "ledger.jsonl").exists():
        raise ConfigError(
            f"run.dir = {str(path)!r} already holds a run; go on with it by --resume, name another with --run.dir, or "
            "remove it"
        )


def _resumed(path: Path, config: Config, say: Say, warn: Say) -> Checkpoint | None:
    if not (path / "config.toml").exists():
        raise ConfigError(f"--resume: run.dir = {str(path)!r} holds no run; leave --resume out to begin one")
    changed = differences(load([path / "config.toml"]), config)
    refuse_changes(changed, config)
    for key, (before, now) in changed.items():
        say(f"resuming with {key} = {now!r} (was {before!r})")
    store = CheckpointStore(path / "checkpoints", config.checkpoint.keep)
    checkpoint = store.newest(warn, fits=lambda manifest: check_grown(path, manifest))
    version = checkpoint.manifest.version if checkpoint is not None else 0
    if version > config.schedule.periods:
        raise ConfigError(
            f"--resume: {version} periods are done, and schedule.periods = {config.schedule.periods}; raise it, or "
            "begin another run with --run.dir"
        )
    store.set_aside(after=version)
    cut_back(path, version, checkpoint.manifest.lengths if checkpoint is not None else {})
    if checkpoint is None:
        say("there is no checkpoint yet: the run begins anew")
    else:
        say(f"resuming from {checkpoint.directory} after {version} periods")
    return checkpoint


def check_grown(path: Path, manifest: Manifest) -> None:
    """What the run appended to must hold at least what it held then, and the same."""
    for name, length in manifest.lengths.items():
        found = prefix_digest(path / name, length)
        if found != manifest.digests.get(name, found):
            raise CheckpointError(
                f"{path / name} is not what it was when version {manifest.version} was saved: its first {length:,} "
                "bytes are others, or fewer"
            )


def prefix_digest(file: Path, length: int) -> str:
    """Of the first bytes; of all there are, if there are fewer."""
    with suppress(FileNotFoundError), file.open("rb") as opened:
        return f"{min(length, os.fstat(opened.fileno()).st_size)}:{xxhash.xxh3_128_hexdigest(opened.read(length))}"
    return "0:"


def seal(path: Path, lengths: Mapping[str, int]) -> dict[str, str]:
    """Bring what has been appended to the disk; its digests, up to these lengths."""
    for name in lengths:
        with (path / name).open("rb") as opened:
            os.fsync(opened.fileno())
    return {name: prefix_digest(path / name, length) for name, length in lengths.items()}


def cut_back(path: Path, version: int, lengths: Mapping[str, int]) -> None:
    """Forget what was written after the boundary."""
    for name in GROWING:
        file, length = path / name, lengths.get(name, 0)
        size = file.stat().st_size if file.exists() else 0
        if size > length:
            os.truncate(file, length)
        if length == 0:
            file.unlink(missing_ok=True)
    for file in (path / ROLLOUTS).glob("period-*.jsonl"):
        if int(file.stem.removeprefix("period-")) >= version:
            file.unlink()
    if (trace := path / "trace.json").exists():
        kept = sum(1 for _ in path.glob("trace-until-*.json"))
        trace.rename(path / f"trace-until-{version:06d}{f'-{kept}' if kept else ''}.json")


def differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value then, value now), where they differ."""
    old, new = (_flat(config.model_dump(mode="json")) for config in (before, now))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def refuse_changes(changed: Mapping[str, tuple[Any, Any]], config: Config) -> None:
    """What would make of the run another one."""
    for key, (before, now) in changed.items():
        if not key.startswith(_MAY_CHANGE):
            raise ConfigError(
                f"--resume: {key} was {before!r} when the run began and is {now!r} now, which would make it another "
                "run; set it back, or begin one with --run.dir"
            )
    if "schedule.periods" in changed and config.trainer.lr_schedule != "constant":
        before, now = changed["schedule.periods"]
        raise ConfigError(
            f"--resume: schedule.periods was {before} when the run began and is {now} now, but the learning rate falls "
            f"over all of them (trainer.lr_schedule = {config.trainer.lr_schedule!r}); set it back, or begin another "
            "run with --run.dir"
        )
