"""The controller's handle of a generator process (worker.py, vllm/worker.py). No torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from msgspec.structs import replace

from onbeat.errors import NumbersError, UndecodableError, UnverifiedWeightsError, WorkerError
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
    Leaving,
    Progress,
    ShareCores,
    Stage,
    Staged,
    Submit,
    WeightBytes,
    WorkerSettings,
)
from onbeat.pieces import WHOLE, Share, of_share
from onbeat.protocols import Child, Courier, GeneratorEvents, Launcher, Snapshot
from onbeat.types import GroupKey, GroupRequest

ENTRIES = {"embedded": "onbeat.rollout.worker:main", "vllm": "onbeat.rollout.vllm.worker:main"}
"""By generator.backend."""
START_S = 1200.0
"""For a process to be ready: a large model from a slow disk, a server that compiles. Longer is a hang."""
END_S = 30.0
"""For a process to end that is wanted no more."""
POUR_BYTES = 1 << 20
"""At a time."""
R = TypeVar("R", bound=Staged | Activated)


class GeneratorProcess:
    """One child process with its engine. Its death is reported to the pool once, with the end of its log."""

    def __init__(self, child: Child[FromGenerator], ready: GeneratorReady) -> None:
        self._child = child
        self._room = ready.room
        self.arithmetic = ready.arithmetic
        self.repeatable = ready.repeatable
        self.row_variance: str | None = None
        """Why this model's rows depend on the batch on this machine; None if the probe found that they do not."""
        self._expected: tuple[object, int, Share] | None = None
        self._answer: asyncio.Future[Staged | Activated] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._gone: Exception | None = None
        """Why it answers no more."""
        self.courier: Courier | None = child.courier
        """For weights that go another way than over the connection."""

    @classmethod
    async def start(cls, launcher: Launcher, backend: str, settings: WorkerSettings) -> GeneratorProcess:
        child: Child[FromGenerator] = await launcher.spawn(
            name=settings.name,
            entry=ENTRIES[backend],
            settings=settings,
            receives=FromGenerator,
            uses_torch=True,
        )
        return await cls.ready(child)

    @classmethod
    async def ready(cls, child: Child[FromGenerator], within_s: float = START_S) -> GeneratorProcess:
        """Of a process that is there already."""
        try:
            async with asyncio.timeout(within_s):
                return cls(child, await first_word(child, GeneratorReady))
        except TimeoutError:
            child.kill()
            raise WorkerError(f"{child.name} was not ready within {within_s:.0f} s", child.log_tail()) from None

    @property
    def name(self) -> str:
        return self._child.name

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def capacity(self) -> int:
        return self._room.max_sequences

    @property
    def cache_tokens(self) -> int:
        return self._room.cache_tokens

    def why_never(self, request: GroupRequest) -> str | None:
        return self._room.why_never(request)

    @property
    def local(self) -> bool:
        return self._child.shares_memory

    def attach(self, events: GeneratorEvents) -> None:
        self._reader = asyncio.create_task(self._read(events))

    def submit(self, request: GroupRequest) -> None:
        self._child.connection.send(Submit(request))

    def cancel(self, key: GroupKey) -> None:
        self._child.connection.send(Cancel(key))

    def share_cores(self, num_generators: int, trainer_works: bool) -> None:
        if self.local:
            self._child.connection.send(ShareCores(num_generators, trainer_works))

    async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
        order = Stage(snapshot.version, snapshot.num_bytes, attached=self._child.shares_memory, share=share)
        if order.attached:
            staged = await self._ask(order, Staged, [snapshot.handle])
        elif self.courier is not None:
            async with self.courier.sending(snapshot) as group:
                staged = await self._ask(replace(order, group=group), Staged)
        else:
            async with self._pouring(snapshot):
                staged = await self._ask(order, Staged)
        if staged.digest != of_share(snapshot.digest, share):
            raise UnverifiedWeightsError(
                f"version {staged.version} arrived with digests {staged.digest[:100]} …, published were "
                f"{of_share(snapshot.digest, share)[:100]} …",
                period=snapshot.version,
                worker=self.name,
            )

    async def activate(self, version: int) -> None:
        self.row_variance = (await self._ask(Activate(version), Activated)).row_variance

    @asynccontextmanager
    async def _pouring(self, snapshot: Snapshot) -> AsyncIterator[None]:
        """Send the snapshot's bytes meanwhile, a piece whenever the one before is on its way."""
        fd = os.dup(snapshot.handle)  # the run may publish the next one before this is through

        async def pour() -> None:
            await asyncio.sleep(0)  # the order goes first
            for offset in range(0, snapshot.num_bytes, POUR_BYTES):
                self._child.connection.send(WeightBytes(os.pread(fd, POUR_BYTES, offset)))
                await self._child.connection.drained()

        pouring = asyncio.create_task(pour())
        try:
            yield
        finally:
            pouring.cancel()
            await asyncio.gather(pouring, return_exceptions=True)
            os.close(fd)

    def kill(self) -> None:
        self._child.kill()
        if self.courier is not None:
            self.courier.stop()

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._answers_no_more(WorkerError(f"{self.name} has left"))
        self._child.connection.close()  # it ends when it sees that
        if self.courier is not None:
            self.courier.stop()
        asyncio.get_running_loop().call_later(END_S, self._child.kill)  # or hangs

    async def ended(self) -> None:
        await self._child.exited()

    async def _ask(self, order: Stage | Activate, answer: type[R], fds: list[int] | None = None) -> R:
        assert self._answer is None, "one question at a time"
        if self._gone is not None:
            raise self._gone
        self._expected = answer, order.version, order.share if isinstance(order, Stage) else WHOLE
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._child.connection.send(order, fds)
            reply = await self._answer
        finally:
            self._expected = self._answer = None
        assert isinstance(reply, answer)
        return reply

    def _answers_no_more(self, why: Exception) -> None:
        self._gone = self._gone or why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(why)

    def _answered(self, message: Staged | Activated, version: int) -> None:
        """What it said before, it may say again; of a version that was not published it must not speak."""
        if self._expected is None or self._answer is None or self._answer.done():
            return
        _, wanted, _ = self._expected
        share = message.share if isinstance(message, Staged) else WHOLE
        if (type(message), version, share) == self._expected:
            self._answer.set_result(message)
        elif version > wanted:
            what = f"it answered with a {type(message).__name__} of version {version}"
            self._answer.set_exception(UnverifiedWeightsError(what, period=wanted, worker=self.name))

    async def _read(self, events: GeneratorEvents) -> None:
        try:
            async for message in self._child.connection.messages():
                match message:
                    case Completed(completion=completion):
                        events.completed(self.name, completion)
                    case FirstToken(version=version, after_s=after_s):
                        events.first_token(self.name, version, after_s)
                    case Progress(num_tokens=num_tokens):
                        events.progress(self.name, num_tokens)
                    case Leaving():
                        events.leaving(self.name)
                    case Staged(version=version) | Activated(version=version):
                        self._answered(message, version)
                    case Failed(reason=reason, diverged=True):
                        raise NumbersError(
                            f"{reason}: training has diverged; begin another run with a lower trainer.learning_rate or "
                            "trainer.max_grad_norm, from the model before, or from good weights of this run "
                            "(`onbeat export`)"
                        )
                    case Failed(reason=reason, undecodable=True):
                        raise UndecodableError(reason)
                    case Failed(reason=reason):
                        raise WorkerError(f"{self.name}: {reason}")
                    case GeneratorReady():
                        pass  # it has said so before
            status = await self._child.exited()
            raise WorkerError(f"{self.name} died (status {status})", self._child.log_tail())
        except Exception as error:  # whatever it is: nobody else would hear of it, and the pool would wait
            self.kill()
            self._answers_no_more(error)
            events.lost(self.name, error)
