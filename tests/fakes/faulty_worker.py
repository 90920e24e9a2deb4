"""A real generator worker in which faults go off at named points. Entry point for the fork server.

A directory of files, one per fault, named in their order: "decode 12" kills the process at its twelfth decode step. A
worker takes the first that nobody has taken (a rename is atomic), writes "fired" beside it when it goes off, and is
healthy if none is left. So the faults of a run are spread over its workers, and each goes off in one of them. With
"… after p" nothing counts before the worker has loaded p versions.

    idle n       the n-th time it waits for work                prefill n, decode n    in that forward
    load n       the n-th snapshot, before its digest is told   tensor n               after n tensors were copied
    reply n      half of its n-th completion is on the wire     stop n                 SIGSTOP at the n-th decode step
    talk n       no death: every message twice, some late and out of order
    slow n       no death: every step takes n times as long
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from onbeat.messages import Completed, Progress, WorkerSettings
from onbeat.pieces import WHOLE, Share
from onbeat.rollout import worker as real
from onbeat.rollout.engine import Engine
from onbeat.weights.snapshot import Mapped
from onbeat.wire import Channel, frame

FAULTS = "ONBEAT_TEST_FAULTS"
"""The environment variable that names the directory."""


def plan(directory: Path, faults: list[str]) -> None:
    directory.mkdir(parents=True)
    for number, fault in enumerate(faults):
        (directory / f"{number:04d}").write_text(fault)


def fired(directory: Path) -> list[str]:
    return [file.read_text() for file in sorted(directory.glob("*.fired"))]


def fired_when(directory: Path) -> dict[str, float]:
    """Each worker in which one went off, and the time at which it did."""
    return {file.read_text(): file.stat().st_mtime for file in directory.glob("*.who")}


class Fault(NamedTuple):
    kind: str
    count: int
    after: int
    file: Path


def take(directory: Path) -> Fault | None:
    """The first fault that is still there."""
    for file in sorted(directory.glob("????")):
        taken = file.with_suffix(".taken")
        try:
            file.rename(taken)
        except FileNotFoundError:
            continue
        kind, count, *after = taken.read_text().split()
        return Fault(kind, int(count), int(after[1]) if after else 0, taken)
    return None


class Faults:
    def __init__(self, directory: Path, worker: str) -> None:
        self._mine = take(directory)
        self._worker = worker
        self._counts: Counter[str] = Counter()
        self.num_loads = 0

    def has(self, kind: str) -> int:
        """The number that goes with it, or 0."""
        return self._mine.count if self._mine is not None and self._mine.kind == kind else 0

    def at(self, point: str) -> None:
        """We are there: is it time?"""
        if self._mine is None or self.num_loads < self._mine.after:
            return
        self._counts[point] += 1
        if self.has(point) and self._counts[point] == self.has(point):
            self.fire()
            os.kill(os.getpid(), signal.SIGSTOP if point == "stop" else signal.SIGKILL)

    def fire(self) -> None:
        assert self._mine is not None
        if not self._mine.file.with_suffix(".fired").exists():
            print(f"fault: {self._mine.kind} in {self._worker}", file=sys.stderr, flush=True)
        self._mine.file.with_suffix(".who").write_text(self._worker)
        self._mine.file.with_suffix(".fired").write_text(self._mine.file.read_text())


class FaultyChannel(Channel[Any]):
    def __init__(self, sock: socket.socket, expected: object, faults: Faults) -> None:
        super().__init__(sock, expected)
        self._faults = faults
        self._raw = sock
        self._rng = random.Random(0)
        self._late: list[msgspec.Struct] = []

    def recv(self) -> Any:
        self._faults.at("idle")
        self._send_late()
        return super().recv()

    def send(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        if isinstance(message, Completed):
            self._reply(message)
        if not self._faults.has("talk"):
            super().send(message, fds)
            return
        self._faults.fire()
        self._late.append(message)
        if isinstance(message, Completed | Progress) and self._rng.random() < 0.5:
            return  # it comes later, after others
        self._send_late()

    def _send_late(self) -> None:
        """In any order, each of them twice."""
        self._rng.shuffle(self._late)
        for message in self._late:
            super().send(message)
            super().send(message)
        self._late.clear()

    def _reply(self, message: Completed) -> None:
        if self._faults.has("reply") and self._faults._counts["reply"] + 1 == self._faults.has("reply"):
            data = frame(message)
            self._raw.sendall(data[: len(data) // 2])
        self._faults.at("reply")


def make_faulty(faults: Faults) -> None:
    """This process's engine and snapshots."""
    forward = Engine._forward
    digest, load_into, lend_to = Mapped.digest, Mapped.load_into, Mapped.lend_to

    def faulty_forward(self: Engine, chunks: Any, decoding: Any) -> None:
        began_s = time.monotonic()
        forward(self, chunks, decoding)
        if slowness := faults.has("slow"):
            faults.fire()
            time.sleep((slowness - 1) * (time.monotonic() - began_s))
        if self.version >= 0 and chunks:
            faults.at("prefill")
        if self.version >= 0 and decoding:
            faults.at("decode")
            faults.at("stop")

    def faulty_digest(self: Mapped, share: Share = WHOLE) -> str:
        faults.at("load")
        return digest(self, share)

    def faulty_load(self: Mapped, targets: Mapping[str, torch.Tensor]) -> None:
        die_half_way(self, targets)
        load_into(self, targets)
        faults.num_loads += 1

    def faulty_lend(self: Mapped, targets: Mapping[str, torch.Tensor]) -> None:
        die_half_way(self, targets)
        lend_to(self, targets)
        faults.num_loads += 1

    def die_half_way(mapped: Mapped, targets: Mapping[str, torch.Tensor]) -> None:
        if num_tensors := faults.has("tensor"):
            for name, tensor in list(mapped._tensors(mapped._places()))[:num_tensors]:
                targets[name].data = tensor
            faults.fire()
            os.kill(os.getpid(), signal.SIGKILL)

    Engine._forward = faulty_forward  # type: ignore[method-assign]
    Mapped.digest, Mapped.load_into = faulty_digest, faulty_load  # type: ignore[method-assign]
    Mapped.lend_to = faulty_lend  # type: ignore[method-assign]


def main(sock: socket.socket, settings: bytes) -> None:
    name = msgspec.msgpack.decode(settings, type=WorkerSettings).name
    faults = Faults(Path(os.environ[FAULTS]), name)
    make_faulty(faults)
    real.Channel = lambda sock, expected: FaultyChannel(sock, expected, faults)  # type: ignore[assignment,misc]
    real.main(sock, settings)
