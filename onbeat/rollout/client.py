"""The controller's handle of an embedded generator process (worker.py). No torch."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from onbeat.admission import Room
from onbeat.errors import UnverifiedWeightsError, WorkerError
from onbeat.handshake import first_word
from onbeat.messages import (
    Activate,
    Activated,
    Cancel,
    Completed,
    Failed,
    FirstToken,
    FromGenerator,
    GeneratorReady,
    Progress,
    Stage,
    Staged,
    Submit,
    WorkerSettings,
    Yield,
)
from onbeat.protocols import Child, GeneratorEvents, Launcher, Snapshot
from onbeat.types import GroupKey, GroupRequest

R = TypeVar("R", bound=Staged | Activated)


class EmbeddedGenerator:
    """One child process with its engine. Its death is reported to the pool once, with the end of its log."""

    def __init__(self, child: Child[FromGenerator], room: Room) -> None:
        self._child = child
        self._room = room
        self.row_variance: str | None = None
        """Why this model's rows depend on the batch on this machine; None if the probe found that they do not."""
        self._events: GeneratorEvents | None = None
        self._answer: asyncio.Future[Staged | Activated] | None = None
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, launcher: Launcher, settings: WorkerSettings) -> EmbeddedGenerator:
        child: Child[FromGenerator] = await launcher.spawn(
            name=settings.name,
            entry="onbeat.rollout.worker:main",
            settings=settings,
            receives=FromGenerator,
            uses_torch=True,
        )
        return cls(child, (await first_word(child, GeneratorReady)).room)

    @property
    def name(self) -> str:
        return self._child.name

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def capacity(self) -> int:
        return self._room.max_sequences

    def why_never(self, request: GroupRequest) -> str | None:
        return self._room.why_never(request)

    def attach(self, events: GeneratorEvents) -> None:
        self._events = events
        self._reader = asyncio.create_task(self._read(events))

    def submit(self, request: GroupRequest) -> None:
        self._child.connection.send(Submit(request))

    def cancel(self, key: GroupKey) -> None:
        self._child.connection.send(Cancel(key))

    def yield_to_trainer(self, trainer_works: bool) -> None:
        self._child.connection.send(Yield(trainer_works))

    async def stage(self, snapshot: Snapshot) -> None:
        order = Stage(version=snapshot.version, num_bytes=snapshot.num_bytes)
        staged = await self._ask(order, Staged, [snapshot.handle])
        if staged.digest != snapshot.digest or staged.version != snapshot.version:
            raise UnverifiedWeightsError(
                f"version {staged.version} arrived with digest {staged.digest}, published was {snapshot.digest}",
                period=snapshot.version,
                worker=self.name,
            )

    async def activate(self, version: int) -> None:
        activated = await self._ask(Activate(version), Activated)
        self.row_variance = activated.row_variance
        if activated.version != version:
            raise UnverifiedWeightsError(
                f"version {activated.version} was activated instead", period=version, worker=self.name
            )

    def close(self) -> None:
        """The run is over: what becomes of the process is no news any more."""
        if self._reader is not None:
            self._reader.cancel()

    async def _ask(self, order: Stage | Activate, answer: type[R], fds: list[int] | None = None) -> R:
        assert self._answer is None, "one question at a time"
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._child.connection.send(order, fds)
            reply = await self._answer
        finally:
            self._answer = None
        if not isinstance(reply, answer):
            raise WorkerError(f"{self.name} answered {type(order).__name__} with {type(reply).__name__}")
        return reply

    async def _read(self, events: GeneratorEvents) -> None:
        try:
            async for message in self._child.connection.messages():
                match message:
                    case Completed(completion=completion):
                        events.completed(self.name, completion)
                    case FirstToken(version=version, activated_s=activated_s, sampled_s=sampled_s):
                        events.first_token(self.name, version, activated_s, sampled_s)
                    case Progress(num_tokens=num_tokens):
                        events.progress(self.name, num_tokens)
                    case Staged() | Activated():
                        if self._answer is not None and not self._answer.done():
                            self._answer.set_result(message)
                    case Failed(reason=reason):
                        raise WorkerError(f"{self.name}: {reason}")
                    case GeneratorReady():
                        raise WorkerError(f"{self.name} started twice")
            status = await self._child.exited()
            raise WorkerError(f"{self.name} died (status {status})", self._child.log_tail())
        except Exception as error:  # whatever it is: nobody else would hear of it, and the pool would wait
            self._child.kill()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(error)
            events.lost(self.name, error)
