"""A reward worker: the process in which users' reward functions run, one call at a time, in its main thread.

    controller ── ScoreCall ──▶ worker: function(…) → check ── ScoreResult ──▶ controller

The main thread, because time limits by SIGALRM (math-verify's) work nowhere else. Our own time limit is the
controller's: it kills this process and everything it started.

User code may do anything here. What must hold all the same:
- It prints to the log, and closing or replacing stdout, or changing directory, ends with the call.
- An alarm it left behind does not go off in the next call.
- A process it forked does not speak for us: it loses the socket, and ends if it comes back from the user's function.
- Whatever it raises, SystemExit included, is this call's answer and not the end of the worker.
- It takes no more memory and processor time than it may, and in a strict sandbox reaches nothing (sandbox.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from typing import TextIO

import msgspec

from onbeat.errors import InputError
from onbeat.functions import raised
from onbeat.messages import Failed, Limits, ScoreCall, ScoreResult, ScorerReady, ScoreSettings, ToScorer
from onbeat.reward.functions import LoadedFunction, RewardError, load
from onbeat.reward.sandbox import begin_call, confine
from onbeat.wire import Channel


def main(sock: socket.socket, settings: bytes) -> None:
    channel: Channel[ScoreCall] = Channel(sock, ToScorer)
    decoded = msgspec.msgpack.decode(settings, type=ScoreSettings)
    try:
        confine(decoded.limits)
    except InputError as error:
        channel.send(Failed(str(error)))
        return
    os.register_at_fork(after_in_child=sock.close)
    surroundings = Surroundings()
    with contextlib.suppress(ConnectionError), asyncio.Runner() as loop:
        try:
            functions = [load(path, loop) for path in decoded.paths]
        except InputError as error:
            traceback.print_exc()
            surroundings.restore()
            channel.send(Failed(_plain(str(error))))
            return
        surroundings.restore()
        channel.send(ScorerReady())
        serve(channel, functions, surroundings, decoded.limits)


def serve(
    channel: Channel[ScoreCall], functions: list[LoadedFunction], surroundings: Surroundings, limits: Limits
) -> None:
    """Answer calls until the controller is gone."""
    log = ErrorLog()
    while (call := channel.recv()) is not None:
        begin_call(limits)
        result, error = answer(call, functions[call.function])
        surroundings.restore()
        if error is not None:
            log.write(error)
        channel.send(result)


def answer(call: ScoreCall, function: LoadedFunction) -> tuple[ScoreResult, BaseException | None]:
    """The result, and what user code raised. Everything is caught: it is user code's, and it is data."""
    try:
        return ScoreResult(call.call, function.score(call)), None
    except RewardError as error:
        return ScoreResult(call.call, [], _plain(str(error))), None
    except BaseException as error:
        return ScoreResult(call.call, [], _plain(f"raised {raised(error)}")), error


class Surroundings:
    """The process as user code shall find it, and as we want it back."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._copies = {fd: os.dup(fd) for fd in (0, 1, 2)}
        self.restore()

    def restore(self) -> None:
        """After user code ran. A fork of it that got here ends."""
        if os.getpid() != self._pid:
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        os.fchdir(self._directory)
        for fd, copy in self._copies.items():
            os.dup2(copy, fd)
        sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(fd: int) -> TextIO:
    """Line by line, so that the log is whole when we are killed; closing it leaves the descriptor alone."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class ErrorLog:
    """Tracebacks to the log, each kind once: a function that always fails must not fill the disk."""

    def __init__(self) -> None:
        self._seen: set[tuple[type[BaseException], tuple[tuple[str, int | None], ...]]] = set()

    def write(self, error: BaseException) -> None:
        lines = tuple((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
        if (type(error), lines) not in self._seen:
            self._seen.add((type(error), lines))
            traceback.print_exception(error)


def _plain(text: str) -> str:
    """Text that can be sent: a message of user code may hold half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()
