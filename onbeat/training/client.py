"""The controller's handle of one trainer process, a rank (worker.py); ranks.py makes one trainer of them. No torch.

    accumulate ──▶ at most WINDOW micro-batches in the child ──▶ Accumulated
    step, snapshot, export ──▶ answered in order, after everything before them
    save_part ──▶ answered when it is written; one at a time

The window is 2: one being computed and one in the socket, so that the child never waits for us. `accumulate` waits
when it is full; that is all that holds the loop back. If the child dies, whoever waits, and every later call, gets
the same WorkerError; so they do if another rank dies (`fail`): this one may wait for it for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

from onbeat.errors import CheckpointError, WorkerError
from onbeat.handshake import first_word
from onbeat.messages import (
    Accumulate,
    Accumulated,
    Export,
    Exported,
    Failed,
    FromTrainer,
    Listening,
    PartSaved,
    SavePart,
    SnapshotTaken,
    Step,
    Stepped,
    TakeSnapshot,
    TrainerReady,
    WorkBeside,
    WorkerSettings,
)
from onbeat.protocols import Child, Launcher, Snapshot, Tracer, UpdateReport
from onbeat.types import MicroBatch, UpdateTotals

WINDOW = 2
END_S = 10.0
"""For a process to end that is wanted no more."""
R = TypeVar("R", Accumulated, Stepped, SnapshotTaken, Exported)
Answer = Accumulated | Stepped | SnapshotTaken | Exported


async def read_weights(launcher: Launcher, settings: WorkerSettings) -> Snapshot:
    """The weights in the model's directory, as version 0, read by a process that ends after it."""
    child: Child[FromTrainer] = await launcher.spawn(
        name=settings.name,
        entry="onbeat.training.worker:publish_model",
        settings=settings,
        receives=FromTrainer,
        uses_torch=True,
    )
    taken = await first_word(child, SnapshotTaken)
    handle = child.connection.take_fd()
    return Snapshot(version=taken.version, digest=taken.digest, num_bytes=taken.num_bytes, handle=handle)


_NAMES: dict[type[Struct], str] = {
    Accumulate: "forward and backward",
    Step: "optimizer step",
    TakeSnapshot: "publishing",
    Export: "writing the model",
}


class RankClient:
    def __init__(
        self,
        child: Child[FromTrainer],
        trace: Tracer,
        why_not_shared: str | None,
        on_work: Callable[[bool], None] = lambda works: None,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`on_work` is told when it begins to work, and when it waits again; `on_failure`, why it works no more."""
        self._child = child
        self._trace = trace
        self._on_work = on_work
        self._on_failure = on_failure
        self.why_not_shared = why_not_shared
        """Why completions are trained with a copy of the prompt each; None if they share it."""
        self._pending: deque[asyncio.Future[Answer]] = deque()
        self._orders: deque[str] = deque()
        """What each of them was."""
        self._window = asyncio.Semaphore(WINDOW)
        self._saving: asyncio.Future[PartSaved] | None = None
        self._failure: Exception | None = None
        self._reader = asyncio.create_task(self._read())

    @property
    def name(self) -> str:
        return self._child.name

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def doing(self) -> str:
        """What it was asked for first of what it has not answered."""
        return self._orders[0] if self._orders else "waiting"

    async def accumulate(self, microbatch: MicroBatch, num_parts: int = 0) -> asyncio.Future[Answer]:
        """Returns when it is on its way, with the answer to come."""
        await self._window.acquire()
        if self._failure is not None:
            self._window.release()
            raise self._failure
        answer = self._send(Accumulate(microbatch, num_parts))
        answer.add_done_callback(self._accumulated)
        return answer

    def _accumulated(self, answer: asyncio.Future[Answer]) -> None:
        self._window.release()
        if not answer.cancelled() and answer.exception() is None and isinstance(done := answer.result(), Accumulated):
            self._trace(self._child.name, f"micro-batch {done.index}", done.began_s, done.ended_s)

    def work_beside(self, num_generators: int) -> None:
        """So many generators of the machine work now."""
        if self._failure is None:
            self._child.connection.send(WorkBeside(num_generators))

    async def step(self, totals: UpdateTotals) -> UpdateReport:
        stepped = await self._ask(Step(totals), Stepped)
        self._trace(self._child.name, "optimizer step", stepped.began_s, stepped.ended_s)
        return stepped.report

    async def write_snapshot(self, version: int) -> SnapshotTaken:
        """Its share of it; rank 0 sends the memory, too (`take_fd`)."""
        return await self._ask(TakeSnapshot(version), SnapshotTaken)

    def take_fd(self) -> int:
        return self._child.connection.take_fd()

    async def save_part(self, directory: str, num_updates: int) -> PartSaved:
        """Write the trainer's part of a checkpoint, if its weights are those after so many updates. Other calls need
        not wait for it."""
        assert self._saving is None, "one part at a time"
        if self._failure is not None:
            raise self._failure
        self._saving = asyncio.get_running_loop().create_future()
        try:
            self._child.connection.send(SavePart(directory, num_updates))
            return await self._saving
        finally:
            self._saving = None

    async def export(self, directory: str) -> None:
        if (problem := (await self._ask(Export(directory), Exported)).problem) is not None:
            raise CheckpointError(problem)

    def close(self) -> None:
        """It is wanted no more: what becomes of the process is no news."""
        self._reader.cancel()

    async def end(self) -> None:
        """Until the process is gone. It has nothing left to do, and sees that nobody talks to it any more."""
        self.close()
        self._child.connection.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._child.exited()
        self._child.kill()

    async def _ask(self, order: Struct, answer: type[R]) -> R:
        reply = await self._send(order)
        if not isinstance(reply, answer):
            raise WorkerError(f"{self._child.name} answered {type(order).__name__} with {type(reply).__name__}")
        return reply

    def _send(self, order: Struct) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            answer.set_exception(self._failure)
        else:
            if not self._pending:
                self._on_work(True)
            self._pending.append(answer)
            self._orders.append(_NAMES[type(order)])
            self._child.connection.send(order)
        return answer

    async def _read(self) -> None:
        try:
            async for message in self._child.connection.messages():
                match message:
                    case Failed(reason=reason):
                        raise WorkerError(f"{self._child.name}: {reason}")
                    case Listening() | TrainerReady():
                        raise WorkerError(f"{self._child.name} started twice")
                    case PartSaved():
                        if self._saving is not None and not self._saving.done():
                            self._saving.set_result(message)
                    case _ if not self._pending:
                        raise WorkerError(f"{self._child.name} sent a {type(message).__name__} that nobody asked for")
                    case _:
                        answer = self._pending.popleft()
                        self._orders.popleft()
                        if not self._pending:
                            self._on_work(False)
                        if not answer.cancelled():  # else whoever asked is being stopped
                            answer.set_result(message)
            status = await self._child.exited()
            raise WorkerError(f"{self._child.name} died (status {status})", self._child.log_tail())
        except Exception as error:  # whatever it is: nobody else would hear of it, and everybody would wait
            self.fail(error)
            self._on_failure(error)

    def fail(self, error: Exception) -> None:
        """Whoever waits, and whoever calls from now on, gets this."""
        if self._failure is not None:
            return
        self._failure = error
        for answer in self._pending:
            if not answer.done():
                answer.set_exception(error)
        if self._saving is not None and not self._saving.done():
            self._saving.set_exception(error)
        self._pending.clear()
