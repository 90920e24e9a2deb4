"""A generator that came by itself, seen from the controller: a connection, and nothing else to hold it by.

    door (control.py) ── Join ──▶ Welcome ──▶ GeneratorReady ──▶ crew.join: load, verify, serve
                                                     │
                         whose arithmetic differs from the run's is refused: its tokens would differ, too

It is given up by closing the connection, whereupon it ends. Nobody replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from onbeat.control import Join, Request
from onbeat.errors import OnbeatError, WorkerError
from onbeat.messages import FromGenerator, Refused, Welcome, WorkerSettings
from onbeat.model_source import small_files
from onbeat.protocols import Courier
from onbeat.rollout.client import GeneratorProcess
from onbeat.rollout.crew import Crew
from onbeat.rollout.pool import Pool
from onbeat.wire import Connection


class JoinedChild:
    def __init__(self, name: str, join: Join, connection: Connection[Any], *, local: bool) -> None:
        self.name = name
        self.pid = join.pid
        self.connection = connection
        self.shares_memory = local
        self.courier: Courier | None = None

    def kill(self) -> None:
        self.connection.close()

    async def exited(self) -> int:
        """All we can know is that it hung up."""
        return 0

    def log_tail(self) -> str:
        return ""


class Reception:
    """Brings whoever joins to the crew."""

    def __init__(
        self,
        pool: Pool,
        crew: Crew,
        settings: Callable[[str], WorkerSettings],
        warn: Callable[[str], None],
        *,
        only_local: bool = False,
        start_courier: Callable[[str], Awaitable[Courier]] | None = None,
    ) -> None:
        """`only_local`: what is published is not all that a generator needs (LoRA); the rest is on this machine.
        A courier brings weights to who is elsewhere."""
        self._pool = pool
        self._crew = crew
        self._settings = settings
        self._warn = warn
        self._only_local = only_local
        self._start_courier = start_courier
        self._known: str | None = None
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, connection: Connection[Request], join: Join, local: bool) -> None:
        self._count += 1
        child = JoinedChild(f"generator-{join.host[:32]}-{self._count}", join, connection, local=local)
        task = asyncio.create_task(self._receive(child))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, child: JoinedChild) -> None:
        settings = self._settings(child.name)
        child.connection.expect(FromGenerator)
        try:
            files = {} if child.shares_memory else small_files(Path(settings.model_dir))
            child.connection.send(Welcome(settings=settings, files=files))
            generator = await GeneratorProcess.ready(child)
            if (reason := self._why_not(generator, child)) is not None:
                child.connection.send(Refused(reason))
                await child.connection.drained()
                raise WorkerError(f"{child.name} was refused: {reason}")
            if self._start_courier is not None and not child.shares_memory:
                generator.courier = await self._start_courier(f"courier-{self._count}")
        except (OnbeatError, OSError) as error:
            child.connection.close()
            self._warn(str(error))
        else:
            self._crew.join(generator)

    def _why_not(self, generator: GeneratorProcess, child: JoinedChild) -> str | None:
        if self._only_local and not child.shares_memory:
            return "with lora.rank, what is published is the adapter alone: only workers of this machine can join"
        return self.why_not_exact_with(generator)

    def why_not_exact_with(self, generator: GeneratorProcess) -> str | None:
        """Of a generator from anywhere; the first of all is what the others are compared with."""
        if generator.repeatable and self._arithmetic() not in (None, generator.arithmetic):
            return (
                "its processor, its build of torch or its attention and norms (compiled, or not: docs/install.md) "
                "computes other bits than the run's generators do, so the run would not be exact any more"
            )
        self._known = self._known or generator.arithmetic
        return None

    def _arithmetic(self) -> str | None:
        """Of the run's generators, also when there is none at the moment."""
        for other in self._pool.generators:
            if self._known is None and isinstance(other, GeneratorProcess):
                self._known = other.arithmetic
        return self._known

    def remember(self) -> None:
        """What the first generators compute is what all must."""
        self._arithmetic()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
