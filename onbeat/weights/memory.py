"""Publishing on one machine: one memory file, written once by the trainer, mapped by every generator (R4).

    trainer ──writes, seals──▶ memfd ──descriptor──▶ every generator: map, check the digest     (stage)
                                                     when all have answered: load                (activate)

The controller passes the descriptor on and keeps it for the length of the period, so that whoever joins in the
middle loads the period's snapshot and never the live weights; it never maps it. The file has no name: when the
last holder is gone, so is the memory, whatever killed it.

A generator that dies in either phase is lost to the pool, and the period opens with the others. One that read other
bytes than were published breaks a promise of the run (UnverifiedWeightsError), and the run stops.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from onbeat.errors import NoGeneratorsError, WorkerError
from onbeat.protocols import Generator, GeneratorPool, Snapshot


class MemoryChannel:
    def __init__(self, pool: GeneratorPool) -> None:
        self._pool = pool
        self.current: Snapshot | None = None

    async def publish(self, snapshot: Snapshot) -> None:
        """Every generator serves the snapshot's version when this returns."""
        self.close()
        self.current = snapshot
        staged = await self._each(self._pool.generators, lambda generator: generator.stage(snapshot))
        active = await self._each(staged, lambda generator: generator.activate(snapshot.version))
        if not active:
            raise NoGeneratorsError(f"no generator could load version {snapshot.version}: {self._pool.last_loss}")
        for generator in active:
            self._pool.serves(generator.name, snapshot.version)

    async def _each(
        self, generators: list[Generator], phase: Callable[[Generator], Awaitable[None]]
    ) -> list[Generator]:
        """Run one phase on all of them at once; who dies is lost, the others go on."""
        results = await asyncio.gather(*(phase(generator) for generator in generators), return_exceptions=True)
        passed = []
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, WorkerError):
                self._pool.lost(generator.name, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                passed.append(generator)
        return passed

    def close(self) -> None:
        if self.current is not None:
            os.close(self.current.handle)
            self.current = None
