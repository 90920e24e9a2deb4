"""Publishing on one machine: one memory file, written once by the trainer, mapped by every generator (R4).

    trainer ──writes, seals──▶ memfd ──descriptor──▶ every generator: map, check its share of the digest   (stage)
                                                     when all have answered: serve                          (activate)

The memory is one, so it is verified once, by all generators of this host together, each a share of its pieces
(pieces.py). If one of them is lost meanwhile, the others verify it all again. Who is elsewhere verifies its own copy,
who joins the whole.

The controller passes the descriptor on and keeps it for the length of the period, so that whoever joins in the
middle loads the period's snapshot and never the live weights; it never maps it. The file has no name: when the
last holder is gone, so is the memory, whatever killed it.

    publish(t+1) ── stage, activate all but the joiners ─▶ serves          who joins: bring()
                                                             stage, activate version t ─▶ is t still current?
                                                             yes: serves t     no: once more, with t+1

A generator that dies or does not answer in either phase is lost to the pool, and the period opens with the others; if
none is left, with the first that comes. One that read other bytes than were published breaks a promise of the run
(UnverifiedWeightsError), and the run stops; unless it is a joiner so slow that its version is no longer current, whose
memory may have been written again: it begins anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Literal

from onbeat.errors import UnverifiedWeightsError, WorkerError
from onbeat.patience import FIRST_S, Patience
from onbeat.pieces import WHOLE
from onbeat.protocols import Generator, GeneratorPool, Snapshot

Phase = Literal["stage", "activate"]
_SLOWEST_BYTES_PER_S = 50e6
"""Of a disk or a network that is worth waiting for: a first load has no earlier one to be judged by."""


class MemoryChannel:
    def __init__(self, pool: GeneratorPool) -> None:
        self._pool = pool
        self._patience: dict[tuple[Phase, bool, bool], Patience] = {}
        """By phase, by whether it is the generator's first load, which takes longer (it is probed), and whether the
        weights travel."""
        self._loaded: set[str] = set()
        """Generators that have loaded something."""
        self._joining: set[str] = set()
        self.current: Snapshot | None = None

    async def publish(self, snapshot: Snapshot) -> None:
        """Every generator that is not joining serves the snapshot's version when this returns; at least one does."""
        self.close()
        self.current = snapshot
        members = [generator for generator in self._pool.generators if generator.name not in self._joining]
        staged = await self._stage(members, snapshot)
        for generator in await self._each(staged, "activate", lambda generator: generator.activate(snapshot.version)):
            self._loaded.add(generator.name)
            self._pool.serves(generator.name, snapshot.version)
        await self._pool.until_served(snapshot.version)

    async def _stage(self, members: list[Generator], snapshot: Snapshot) -> list[Generator]:
        """Those that have it, every byte of it verified."""
        here = [generator for generator in members if generator.local]
        shares = {generator.name: (which, len(here)) for which, generator in enumerate(here)}

        def begin(generator: Generator) -> Awaitable[None]:
            return generator.stage(snapshot, shares.get(generator.name, WHOLE))

        staged = await self._each(members, "stage", begin)
        left = [generator for generator in staged if generator.local]
        if len(left) == len(here):
            return staged
        return await self._stage(left, snapshot) + [generator for generator in staged if not generator.local]

    async def bring(self, generator: Generator) -> None:
        """A joiner serves what is current when this returns. Raises WorkerError or UndecodableError if it
        cannot."""
        self._joining.add(generator.name)
        try:
            while (snapshot := self.current) is not None:
                try:
                    await self._timed(generator, "stage", generator.stage(snapshot))
                    await self._timed(generator, "activate", generator.activate(snapshot.version))
                except UnverifiedWeightsError:
                    if snapshot is self.current:
                        raise
                    continue
                self._loaded.add(generator.name)
                if snapshot is self.current:
                    self._pool.serves(generator.name, snapshot.version)
                    return
        finally:
            self._joining.discard(generator.name)

    async def _each(
        self, generators: list[Generator], phase: Phase, begin: Callable[[Generator], Awaitable[None]]
    ) -> list[Generator]:
        """Run one phase on all of them at once; who dies is lost, the others go on."""
        work = (self._timed(generator, phase, begin(generator)) for generator in generators)
        results = await asyncio.gather(*work, return_exceptions=True)
        passed = []
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, WorkerError):
                self._pool.lost(generator.name, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                passed.append(generator)
        return passed

    async def _timed(self, generator: Generator, phase: Phase, work: Awaitable[None]) -> None:
        """Give up who takes many times as long as it usually takes."""
        clock = asyncio.get_running_loop().time
        patience = self._patience_of(phase, generator)
        began_s, limit_s = clock(), patience.limit_s
        try:
            async with asyncio.timeout(limit_s):  # wait_for would lose a cancellation that comes with the answer
                await work
        except TimeoutError:
            generator.kill()
            raise WorkerError(f"{generator.name} did not load its weights within {limit_s:.0f} s") from None
        patience.paused(clock() - began_s)

    def _patience_of(self, phase: Phase, generator: Generator) -> Patience:
        kind = phase, generator.name in self._loaded, generator.local
        if kind not in self._patience:
            num_bytes = self.current.num_bytes if self.current else 0
            times = 1 if generator.local else sum(not each.local for each in self._pool.generators)
            self._patience[kind] = Patience(FIRST_S + times * num_bytes / _SLOWEST_BYTES_PER_S)
        return self._patience[kind]

    def close(self) -> None:
        if self.current is not None:
            os.close(self.current.handle)
            self.current = None
