"""The reward processes, seen from the controller: seats that are refilled, and one call at a time for each.

A seat is a place for one process. `RewardWorkers.call` waits for a free seat, fills it if its process has ended, asks,
and frees it. A process is read by one task of its own (`RewardProcess._read`) from its first message to its end;
that task alone learns of its death, and it is what `close` waits for.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from typing import Any

from onbeat.errors import InputError, WireError, WorkerError
from onbeat.messages import Failed, FromScorer, Limits, ScoreCall, ScoreResult, ScoreSettings
from onbeat.protocols import Child, Launcher

_LOADING = -1
"""Stands for the number of the call while a process has not said that it is ready."""


class CallError(Exception):
    """A call without rewards; the text continues the sentence "The reward function x …"."""


@dataclass(kw_only=True)
class ScorerCounts:
    calls: int = 0
    failures: int = 0
    """Calls that gave no rewards, whatever the cause."""
    timeouts: int = 0
    restarts: int = 0
    """Processes started in the place of one that was killed or died."""
    dropped: int = 0
    """Messages that nobody had asked for."""


class RewardProcess:
    """One reward process, from its start to its end."""

    def __init__(self, child: Child[FromScorer], counts: ScorerCounts) -> None:
        self._child = child
        self._counts = counts
        self._expected: int | None = _LOADING
        self._awaited: asyncio.Future[FromScorer] = asyncio.get_running_loop().create_future()
        self.end: str | None = None
        """How it ended; None while it can be asked."""
        self.reader = asyncio.create_task(self._read())

    @property
    def name(self) -> str:
        return self._child.name

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def state(self) -> str:
        if self.end is not None:
            return self.end
        return "waiting" if self._expected is None else "loading" if self._expected == _LOADING else "scoring"

    async def loaded(self, timeout_s: float) -> str | None:
        """None once its functions are loaded, or the sentence that says why they are not."""
        try:
            first = await self._answer(timeout_s)
        except TimeoutError:
            return f"{self._child.name} did not load its reward functions within {timeout_s:g} s."
        except CallError as failure:
            tail = self._child.log_tail()
            log = f"\nThe end of its log:\n{tail}" if tail else ""
            return f"{self._child.name} {failure} while it loaded its reward functions.{log}"
        return first.reason if isinstance(first, Failed) else None

    async def ask(self, call: ScoreCall, timeout_s: float) -> list[float | None]:
        """The rewards. Raises CallError, or TimeoutError."""
        if self.end is not None:
            raise CallError(f"found that its process {self.end}")
        self._expected, self._awaited = call.call, asyncio.get_running_loop().create_future()
        try:
            self._child.connection.send(call)
        except (WireError, TypeError, ValueError, OverflowError) as error:
            self._expected = None
            raise CallError(f"cannot be given its arguments: {error}") from error
        answer = await self._answer(timeout_s)
        assert isinstance(answer, ScoreResult)
        if answer.error is not None:
            raise CallError(answer.error)
        return answer.rewards

    async def _answer(self, timeout_s: float) -> FromScorer:
        """What was asked for. If it does not come, or nobody wants it any more, the process is not to be trusted."""
        try:
            done, _ = await asyncio.wait([self._awaited], timeout=timeout_s)
        except asyncio.CancelledError:
            self._expected = None
            self.kill("was given up")
            raise
        if not done:
            self._expected = None
            self.kill("took too long")
            raise TimeoutError
        return self._awaited.result()

    def kill(self, why: str) -> None:
        """Kill it and all it started. Its reader sees the end, and fails the call that is still waited for."""
        self.end = self.end or why
        self._child.kill()
        self._child.connection.close()

    async def _read(self) -> None:
        how = ""
        try:
            async for message in self._child.connection.messages():
                self._take(message)
        except WireError as error:
            how = f"wrote into our socket: {error}"
        self.end = self.end or "is ending"
        self._child.kill()
        self._child.connection.close()
        status = await self._child.exited()
        if self._expected is not None:
            self._expected = None
            self._awaited.set_exception(CallError(how or f"ended with its process: {_ending(status)}"))

    def _take(self, message: FromScorer) -> None:
        number = message.call if isinstance(message, ScoreResult) else _LOADING
        if number == self._expected:
            self._expected = None
            self._awaited.set_result(message)
        else:
            self._counts.dropped += 1


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    causes = {"SIGKILL": " (by itself, or by the system for want of memory)", "SIGXCPU": " (out of processor time)"}
    return name + causes.get(name, "")


@dataclass
class Seat:
    """A place for one process; `num_filled` makes the names of those that follow each other in it."""

    index: int
    process: RewardProcess | None = None
    num_filled: int = field(default=0)


class RewardWorkers:
    def __init__(
        self,
        launcher: Launcher,
        paths: tuple[str, ...],
        num_workers: int,
        timeout_s: float,
        load_timeout_s: float,
        limits: Limits,
    ) -> None:
        self.counts = ScorerCounts()
        self._launcher = launcher
        self._settings = ScoreSettings(paths=paths, limits=limits)
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._seats = [Seat(index) for index in range(num_workers)]
        self._free: asyncio.Queue[Seat] = asyncio.Queue()
        self._readers: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._closed = False

    def states(self) -> list[tuple[str, int, str]]:
        """Name, pid and state of every process."""
        return [(seat.process.name, seat.process.pid, seat.process.state) for seat in self._seats if seat.process]

    async def start(self) -> None:
        """Fill every seat. Raises InputError if the functions cannot be loaded; then nothing is left running."""
        filled = await asyncio.gather(*map(self._fill, self._seats), return_exceptions=True)
        for error in filled:
            if isinstance(error, BaseException):
                await self.close()
                raise error
        for seat in self._seats:
            self._free.put_nowait(seat)

    async def call(self, function: int, num_rows: int, arguments: dict[str, Any]) -> list[float | None]:
        """Rewards of one call, on the first seat that is free. Raises CallError."""
        seat = await self._free.get()
        try:
            process = await self._fill(seat)
            self._num_calls += 1
            self.counts.calls += 1
            try:
                return await process.ask(
                    ScoreCall(call=self._num_calls, function=function, **arguments), self._timeout_s
                )
            except TimeoutError as error:
                self.counts.timeouts += 1
                self.counts.failures += 1
                rows = "" if num_rows == 1 else f" for {num_rows} completions"
                raise CallError(f"took longer than {self._timeout_s:g} s{rows} and was killed") from error
            except CallError:
                self.counts.failures += 1
                raise
        finally:
            self._free.put_nowait(seat)

    async def _fill(self, seat: Seat) -> RewardProcess:
        """The seat's process, ready to be asked: the one that sits there, or a new one if that has ended."""
        if seat.process is not None and seat.process.end is None:
            return seat.process
        if self._closed:
            raise WorkerError("the reward workers have been closed")
        is_first = seat.num_filled == 0
        name = f"reward-{seat.index}" + ("" if is_first else f".{seat.num_filled}")
        seat.num_filled += 1
        self.counts.restarts += not is_first
        seat.process = await self._started(name)
        problem = await seat.process.loaded(self._load_timeout_s)
        if problem is not None:
            seat.process.kill("was not loaded")
            raise InputError(problem) if is_first else WorkerError(f"A reward worker cannot be replaced: {problem}")
        return seat.process

    async def _started(self, name: str) -> RewardProcess:
        child: Child[FromScorer] = await self._launcher.spawn(
            name=name,
            entry="onbeat.reward.worker:main",
            settings=self._settings,
            receives=FromScorer,
            uses_torch=False,
        )
        process = RewardProcess(child, self.counts)
        self._readers.add(process.reader)
        process.reader.add_done_callback(self._readers.discard)
        if self._closed:
            process.kill("was closed")
        return process

    async def close(self) -> None:
        """Kill every process and wait until it is gone."""
        self._closed = True
        for seat in self._seats:
            if seat.process is not None:
                seat.process.kill("was closed")
        await asyncio.gather(*self._readers)
