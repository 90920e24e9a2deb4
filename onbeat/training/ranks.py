"""The trainer: all its ranks as one. No torch.

    start        rank 0 ── Listening ──▶ Meet ──▶ every rank ──▶ they load, and find each other ──▶ TrainerReady
    accumulate   replicated   to the rank the micro-batch is placed on (batch/ranks.py), at most WINDOW in each; with
                              order = "completion", to the one that gets free first. No rank waits for another.
                 sharded      held until there is one for each rank, or the update closes: a round, in which every rank
                              takes part, with nothing to add if there is nothing for it
    step, snapshot, save_parts, export
                 to every rank, after everything before; done when all have answered

A micro-batch goes to all tensor-parallel ranks of the data-parallel rank it is for. A rank that dies leaves the others
in a collective that may never end: its error becomes everybody's, at once, and the run ends with it.

`become` exchanges the ranks for another number of them at a period's boundary, through a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from onbeat.batch.pack import num_parts
from onbeat.config import Config
from onbeat.cores import rank_threads
from onbeat.handshake import first_word
from onbeat.messages import FromTrainer, Listening, Meet, TrainerReady, WorkerSettings
from onbeat.protocols import Child, Launcher, SavedParts, Snapshot, Tracer, UpdateReport
from onbeat.training.client import WINDOW, Answer, RankClient
from onbeat.types import MicroBatch, UpdateTotals

Settings = Callable[[str, Path | None, Config], WorkerSettings]
"""Of a worker, by name, the checkpoint it goes on from, and configuration."""


class TrainerRanks:
    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        settings: Settings,
        trace: Tracer,
        on_work: Callable[[bool], None] = lambda works: None,
    ) -> None:
        """`on_work` is told when the trainer begins to work, and when all of it waits again."""
        self.config = config
        self._launcher = launcher
        self._settings = settings
        self._trace = trace
        self._on_work = on_work
        self.ranks: list[RankClient] = []
        self._busy: set[str] = set()
        self._beside = 0
        self._generation = 0
        self._round: dict[int, MicroBatch] = {}
        self._free: asyncio.Queue[int] = asyncio.Queue()
        """Data-parallel ranks that could take a micro-batch, as often as they could."""
        self.num_steps = 0
        """Optimizer steps it was asked for."""
        self.arithmetic = ""
        """Of the machines it is on: elsewhere it might compute other bits."""
        self.why_threads_fixed: str | None = None
        """Why it computes with all its threads while generators work, too; None if it takes its share then."""

    async def start(self, checkpoint: Path | None) -> None:
        """Start every rank, from the model or from a checkpoint of any number of ranks."""
        count = self.config.trainer.ranks
        spawned: dict[int, Child[FromTrainer]] = {}

        async def spawn(rank: int) -> None:
            spawned[rank] = await self._spawn(rank, checkpoint)

        try:
            async with asyncio.TaskGroup() as spawning:
                for rank in range(count):
                    spawning.create_task(spawn(rank))
            children = [spawned[rank] for rank in range(count)]
            ready = await self._meet(children)
        except BaseException as error:  # one is missing: the others would wait for it for ever
            for child in spawned.values():
                child.kill()
            raise (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error) from None
        self.ranks = [
            RankClient(child, self._trace, word.why_not_shared, self._works_if(child.name), self._failed)
            for child, word in zip(children, ready, strict=True)
        ]
        self.arithmetic = ", ".join(sorted({f"{word.arithmetic} by {word.threads} threads" for word in ready}))
        self.why_threads_fixed = ready[0].why_threads_fixed
        if self._beside:
            self.work_beside(self._beside)
        self._free = asyncio.Queue()
        for _ in range(WINDOW):
            for rank in range(self.config.trainer.data_parallel):
                self._free.put_nowait(rank)

    async def _spawn(self, rank: int, checkpoint: Path | None) -> Child[FromTrainer]:
        generation = f"-{self._generation}" if self._generation else ""
        settings = self._settings(f"trainer-{rank}{generation}", checkpoint, self._for_each())
        return await self._launcher.spawn(
            name=settings.name,
            entry="onbeat.training.worker:main",
            settings=structs.replace(settings, rank=rank, num_ranks=self.config.trainer.ranks),
            receives=FromTrainer,
            uses_torch=True,
        )

    def _for_each(self) -> Config:
        """The configuration, with the threads of a rank."""
        trainer = self.config.trainer
        reserved = trainer.resources.get("CPU", 0.0) if self.config.cluster.launcher == "ray" else 0.0
        threads = rank_threads(trainer.threads, trainer.ranks, len(os.sched_getaffinity(0)), reserved)
        return self.config.model_copy(update={"trainer": trainer.model_copy(update={"threads": threads})})

    async def _meet(self, children: Sequence[Child[FromTrainer]]) -> list[TrainerReady]:
        if len(children) > 1:
            listening = await first_word(children[0], Listening)
            for child in children:
                child.connection.send(Meet(listening.address))
        return await asyncio.gather(*(first_word(child, TrainerReady) for child in children))

    async def become(self, config: Config, checkpoint: Path) -> None:
        """From now on as many ranks as this configuration says; nothing is in flight, and the checkpoint is of now."""
        await self.end()
        self.config = config
        self._generation += 1
        await self.start(checkpoint)

    def work_beside(self, num_generators: int) -> None:
        """So many generators of the machine work now."""
        self._beside = num_generators
        for rank in self.ranks:
            rank.work_beside(num_generators)

    @property
    def why_not_shared(self) -> str | None:
        """Why completions are trained with a copy of the prompt each; None if they share it."""
        return self.ranks[0].why_not_shared

    @property
    def doing(self) -> str:
        return next((rank.doing for rank in self.ranks if rank.doing != "waiting"), "waiting")

    def _works_if(self, name: str) -> Callable[[bool], None]:
        def works(does: bool) -> None:
            before = bool(self._busy)
            (self._busy.add if does else self._busy.discard)(name)
            if bool(self._busy) != before:
                self._on_work(bool(self._busy))

        return works

    def _failed(self, error: Exception) -> None:
        for rank in self.ranks:
            rank.fail(error)

    async def accumulate(self, microbatch: MicroBatch) -> None:
        if self.config.trainer.shards:
            if microbatch.groups:
                self._round[microbatch.rank] = microbatch
            if len(self._round) == self.config.trainer.data_parallel or microbatch.closes is not None:
                await self._run_round(microbatch)
        elif microbatch.groups:
            if self.config.schedule.order == "completion":
                rank = await self._free.get()
                done = await self._send(structs.replace(microbatch, rank=rank))
                done.add_done_callback(lambda _: self._free.put_nowait(rank))
            else:
                await self._send(microbatch)

    async def _run_round(self, last: MicroBatch) -> None:
        held, self._round = self._round, {}
        parts = max((num_parts(each, self.config.trainer.max_tokens) for each in held.values()), default=0)
        for rank in range(self.config.trainer.data_parallel) if held else ():
            nothing = structs.replace(last, rank=rank, groups=(), closes=None)
            await self._send(structs.replace(held.get(rank, nothing), rank=rank), parts)

    async def _send(self, microbatch: MicroBatch, parts: int = 0) -> asyncio.Future[Answer]:
        """To every rank it is for; the answer of the first of them, to come."""
        size = self.config.trainer.tensor_parallel
        peers = self.ranks[microbatch.rank * size : (microbatch.rank + 1) * size]
        answers = [await peer.accumulate(microbatch, parts) for peer in peers]
        return answers[0]

    async def step(self, totals: UpdateTotals) -> UpdateReport:
        self.num_steps += 1
        return (await asyncio.gather(*(rank.step(totals) for rank in self.ranks)))[0]

    async def snapshot(self, version: int) -> Snapshot:
        taken, *_ = await asyncio.gather(*(rank.write_snapshot(version) for rank in self.ranks))
        handle = self.ranks[0].take_fd()
        return Snapshot(version=version, digest=taken.digest, num_bytes=taken.num_bytes, handle=handle)

    async def save_parts(self, directory: str, num_updates: int) -> SavedParts:
        """Write a checkpoint's parts, if the weights are those after so many updates. Other calls need not wait."""
        saved = await asyncio.gather(*(rank.save_part(directory, num_updates) for rank in self.ranks))
        bad = next((part for part in saved if part.part is None), None)
        if bad is not None:
            return SavedParts(bad.num_updates, (), bad.problem or "the trainer could not save")
        return SavedParts(num_updates, tuple(part.part for part in saved if part.part is not None))

    async def export(self, directory: str) -> None:
        await asyncio.gather(*(rank.export(directory) for rank in self.ranks))

    async def end(self) -> None:
        await asyncio.gather(*(rank.end() for rank in self.ranks))

    def close(self) -> None:
        """The run is over: what becomes of the processes is no news any more."""
        for rank in self.ranks:
            rank.close()
