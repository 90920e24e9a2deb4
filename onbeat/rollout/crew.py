"""The crew: as many generators as are wanted, whatever happens to them.

    want(n) ──▶ too few: start ──▶ launch ─▶ pool.add ─▶ channel.bring (current weights) ─▶ serves
                too many: retire the youngest ──▶ finishes what it owes ─▶ gone
    pool: one was lost ──▶ start another, after a pause that grows while they die without having done anything
    every TICK_S ──▶ pool.tick: who is silent for too long is lost, stragglers get help

Who waits for whom: nobody waits for the crew but a period without any generator (Pool.until_served). A generator on its
way is a task of its own; when it fails that is one more death. (If the first ones cannot decode the model, nobody can,
and the run ends at once: UndecodableError.) Deaths count in a row: a completion in between, by
anybody, forgets them. After too many the crew gives up: if a generator is left the run goes on with it,
else whoever waits gets NoGeneratorsError, and the last checkpoint is whole.

Who joined from outside (`join`) is used while it is there and not replaced when it goes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

from onbeat.errors import NoGeneratorsError, UndecodableError, WorkerError
from onbeat.protocols import Generator
from onbeat.rollout.pool import Pool

TICK_S = 1.0
MAX_DEATHS = 5
"""In a row."""
_PAUSE_S = 0.5
"""Before another start after two futile ones; doubled for each further one."""
_MAX_PAUSE_S = 10.0
_END_S = 10.0

Start = Callable[[str], Awaitable[Generator]]
Bring = Callable[[Generator], Awaitable[None]]


class Crew:
    def __init__(
        self,
        pool: Pool,
        start: Start,
        bring: Bring,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        max_deaths: int = MAX_DEATHS,
    ) -> None:
        """`start` makes a generator process by name; `bring` gives a joiner the current weights. `say` hears who has
        joined, `warn` who could not."""
        self._pool = pool
        self._start = start
        self._bring = bring
        self._say = say
        self._warn = warn
        self._max_deaths = max_deaths
        self._numbers = itertools.count()
        self._wanted = 0
        self._ours: list[str] = []
        """Names of those we started and that are not leaving, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_starting = 0
        self._num_joining = 0
        self._deaths = 0
        self._accepted_before = 0
        self._futile = 0
        """Deaths in a row of generators that had not completed anything."""
        self._closed = False
        pool.help_is_coming = lambda: self._num_starting + self._num_joining > 0
        pool.on_gone = self._gone

    @property
    def wanted(self) -> int:
        return self._wanted

    @property
    def num_visitors(self) -> int:
        """Who joined from outside."""
        return max(0, self._pool.size() - len(self._ours))

    async def open(self, count: int) -> None:
        """Start the first ones; raises if one of them cannot be started."""
        self._wanted = count
        self._num_starting += count
        names = [self._name() for _ in range(count)]
        for generator in await asyncio.gather(*map(self._start, names)):
            self._num_starting -= 1
            self._ours.append(generator.name)
            self._pool.add(generator)
        self._spawn(self._tick())
        self._adjust()  # somebody may have changed the number meanwhile

    def want(self, count: int) -> None:
        """From now on so many."""
        self._wanted = count
        self._deaths = self._futile = 0
        self._adjust()

    def join(self, generator: Generator) -> None:
        """Somebody from outside."""
        self._spawn(self._admit(generator))

    def leave(self, worker: str) -> None:
        """It wants to go: finish what it owes first."""
        self._pool.retire(worker)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        generators = self._pool.generators
        for generator in generators:
            generator.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):  # whoever has servers of its own ends them
                await asyncio.gather(*(generator.ended() for generator in generators))

    def _name(self) -> str:
        return f"generator-{next(self._numbers)}"

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # a promise broken, or a bug: nobody else would hear of it
                self._pool.fail(error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        """Time in which this process itself did not run is not held against anybody."""
        clock = asyncio.get_running_loop().time
        before_s = clock()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = clock()
            self._pool.tick(min(now_s - before_s, 2 * TICK_S))
            before_s = now_s

    def _adjust(self) -> None:
        """Start or retire until there are as many as wanted."""
        while len(self._ours) + self._num_starting < self._wanted and not self._too_many_died:
            self._num_starting += 1
            self._spawn(self._start_one(self._name()))
        while len(self._ours) > max(self._wanted, 0):
            self._pool.retire(self._ours.pop())

    async def _start_one(self, name: str) -> None:
        if self._futile > 1:
            await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_S * 2 ** (self._futile - 2)))
        try:
            generator = await self._start(name)
        except (WorkerError, UndecodableError) as error:
            self._num_starting -= 1
            self._warn(str(error))
            self._died(error, served=False)
            return
        self._ours.append(name)
        self._num_starting -= 1
        await self._admit(generator)
        self._adjust()  # fewer may be wanted by now

    async def _admit(self, generator: Generator) -> None:
        """It may serve nothing before it has loaded and verified what is current."""
        self._num_joining += 1
        self._pool.add(generator)
        problem: WorkerError | UndecodableError | None = None
        try:
            await self._bring(generator)
        except (WorkerError, UndecodableError) as error:
            problem = error
        else:
            self._say(f"{generator.name} has joined; there are {self._pool.size()} generators")
        finally:
            self._num_joining -= 1
        if problem is not None:
            self._pool.lost(generator.name, problem)
        self._pool.check_who_is_left()

    @property
    def _too_many_died(self) -> bool:
        """One after another, with nothing done between; with a host, all that are on it die at once."""
        return self._deaths > max(self._max_deaths, self._wanted)

    def _gone(self, name: str, error: Exception | None, served: bool) -> None:
        if name in self._ours:
            self._ours.remove(name)
            if error is not None:
                self._died(error, served)
            else:
                self._adjust()  # it wanted to go, and is wanted still

    def _died(self, error: Exception, served: bool) -> None:
        """`served`: it had completed something before."""
        if self._closed:
            return
        if self._pool.counts.accepted > self._accepted_before:
            self._deaths = 0
        self._accepted_before = self._pool.counts.accepted
        self._deaths += 1
        self._futile = 0 if served else self._futile + 1
        if not self._too_many_died:
            self._adjust()
        elif self._pool.size() or self._num_starting:
            self._warn(f"{self._deaths} generators died one after another; going on with {self._pool.size()}")
        else:
            self._pool.fail(NoGeneratorsError(f"{self._deaths} generators died one after another; the last: {error}"))
