"""PeriodicLoader: the one place where a synchronous loop becomes a periodically asynchronous one.

    period(version, prompts)
        │ submit all prompts, return at once
        ▼
      Pool ──group──▶ collect ──▶ score (one task per group) ──▶ arrivals
                                                                    │
                     sync: hold until all have arrived ─────────────┤
                     dispatch: release in slot order                │
                     completion: release as they arrive ────────────┤
                                                                    ▼
                       ledger check ─▶ advantages ─▶ elide ─▶ pack ─▶ MicroBatch ─▶ whoever iterates

Who waits for whom: the iterating trainer waits for the next micro-batch; `collect` for groups; a scoring task for the
scorer. Generators and scorer never wait for the trainer: within a period they run ahead of it, bounded by the
period's own groups, and at its end there is nothing left to run ahead with. When pool or scorer fail, the exception
travels through `arrivals` and is raised to whoever iterates. When whoever iterates stops (exception, break), `close`
cancels both kinds of tasks and the period's groups.

What is handed over (which groups, in which micro-batch, on which rank, in which optimizer step) is a function of
slots and contents alone in dispatch order, so both modes hand over the same sequence (R1).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from onbeat.batch.pack import Packer
from onbeat.errors import OnbeatError
from onbeat.group.assemble import train_group
from onbeat.ledger import Ledger
from onbeat.protocols import Evaluated, Scorer, Tracer, no_trace
from onbeat.rollout.pool import Pool
from onbeat.status import GroupStatus
from onbeat.types import (
    Completion,
    Group,
    GroupRequest,
    MicroBatch,
    Prompt,
    Sampling,
    Stream,
    TrainGroup,
    UpdateTotals,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    mode: Literal["periodic", "sync"]
    order: Literal["dispatch", "completion"]
    group_size: int
    sampling: Sampling
    scale_advantages: bool
    elide: bool
    """A group without advantage needs no forward: true when the loss has no other term (KL, entropy)."""
    updates_per_period: int = 1
    pack_tokens: int = 768
    num_ranks: int = 1


class PeriodicLoader:
    def __init__(
        self, settings: LoaderSettings, pool: Pool, scorer: Scorer, ledger: Ledger, trace: Tracer = no_trace
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.scorer = scorer
        self.ledger = ledger
        self.trace = trace
        self._loop = asyncio.get_running_loop()
        self.current: Period | None = None
        """The period that was opened last."""
        self._open: set[_Scored] = set()

    def scoring(self, now_s: float) -> list[GroupStatus]:
        """Groups that are complete and wait for their rewards."""
        return [group for scored in self._open for group in scored.scoring(now_s)]

    def period(self, version: int, prompts: Sequence[Prompt]) -> Period:
        """Send the prompts to the generators and return at once; iterate for micro-batches.

        `async for` on the controller's loop, plain `for` in a training script of your own (see own_loop.py).
        """
        if _running_loop() is not self._loop:
            return asyncio.run_coroutine_threadsafe(self._opened(version, prompts), self._loop).result()
        self.current = Period(self, version, prompts, self._loop)
        return self.current

    async def _opened(self, version: int, prompts: Sequence[Prompt]) -> Period:
        return self.period(version, prompts)

    async def evaluate(self, version: int, prompts: Sequence[Prompt], samples: int) -> Evaluated:
        """Score a greedy completion of each held-out prompt, and `samples` sampled ones; nothing is trained."""
        sampling = self.settings.sampling
        scored = _Scored(self, "eval", version)
        try:
            scored.submit(prompts, 1, structs.replace(sampling, temperature=0.0))
            if samples:
                scored.submit(prompts, samples, sampling)
            groups = [await scored.next() for _ in range(scored.num_slots)]
        finally:
            await scored.close()
        groups.sort(key=lambda group: group.slot)
        return Evaluated(greedy=groups[: len(prompts)], sampled=groups[len(prompts) :])


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Scored:
    """Groups of one stream and version, generated and scored, in order of arrival."""

    def __init__(self, loader: PeriodicLoader, stream: Stream, version: int) -> None:
        self._scorer = loader.scorer
        self._trace = loader.trace
        self._harvest = loader.pool.open(stream, version)
        self._prompts: list[Prompt] = []
        self._arrivals: asyncio.Queue[Group | Exception] = asyncio.Queue()
        self._tasks = {asyncio.create_task(self._collect())}
        self._scoring: dict[int, tuple[int, float]] = {}
        """By slot: how many completions, since when."""
        self._siblings = loader._open
        self._siblings.add(self)

    def scoring(self, now_s: float) -> list[GroupStatus]:
        return [
            GroupStatus(
                stream=self._harvest.stream,
                slot=slot,
                state="scoring",
                worker=None,
                num_done=count,
                num_samples=count,
                age_s=now_s - since_s,
            )
            for slot, (count, since_s) in self._scoring.items()
        ]

    @property
    def num_slots(self) -> int:
        return len(self._prompts)

    def submit(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling) -> None:
        for prompt in prompts:
            slot = len(self._prompts)
            self._prompts.append(prompt)
            self._harvest.submit(
                GroupRequest(
                    stream=self._harvest.stream,
                    period=self._harvest.period,
                    slot=slot,
                    samples=tuple(range(samples)),
                    token_ids=prompt.token_ids,
                    sampling=sampling,
                )
            )

    async def next(self) -> Group:
        arrival = await self._arrivals.get()
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    async def _collect(self) -> None:
        try:
            while True:
                task = asyncio.create_task(self._score(await self._harvest.next()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _score(self, completions: tuple[Completion, ...]) -> None:
        slot = completions[0].slot
        began_s = asyncio.get_running_loop().time()
        self._scoring[slot] = len(completions), began_s
        try:
            rollouts = await self._scorer.score(self._prompts[slot], completions)
        except Exception as error:
            self._arrivals.put_nowait(error)
        else:
            del self._scoring[slot]
            name = f"{self._harvest.stream} {self._harvest.period}.{slot}"
            self._trace("scorer", name, began_s, asyncio.get_running_loop().time())
            self._arrivals.put_nowait(Group(slot=slot, prompt=self._prompts[slot], rollouts=rollouts))

    async def close(self) -> None:
        """Stop everything; whoever still waits for a group is told."""
        self._siblings.discard(self)
        self._harvest.close()
        self._arrivals.put_nowait(OnbeatError("the period was closed before its last group"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Period:
    """One period's micro-batches. Iterate once; then `groups` holds what was generated, by slot."""

    def __init__(
        self, loader: PeriodicLoader, version: int, prompts: Sequence[Prompt], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._settings = loader.settings
        self._ledger = loader.ledger
        self._pool = loader.pool
        self._version = version
        self._loop = loop
        self._num_planned = len(prompts)
        self._held: list[dict[int, Group]] = [{} for _ in range(loader.settings.updates_per_period)]
        self._ledger.open(version)
        self._scored = _Scored(loader, "train", version)
        self.groups: dict[int, Group] = {}
        self.num_elided = 0
        self.add(prompts)

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Send further prompts in the middle of the period; they take the next slots, in the last update."""
        if _running_loop() is not self._loop:
            asyncio.run_coroutine_threadsafe(self._add(prompts), self._loop).result()
        else:
            self._scored.submit(prompts, self._settings.group_size, self._settings.sampling)

    async def _add(self, prompts: Sequence[Prompt]) -> None:
        self.add(prompts)

    def in_slot_order(self) -> list[Group]:
        """The groups that have arrived so far."""
        return [self.groups[slot] for slot in sorted(self.groups)]

    def __aiter__(self) -> AsyncGenerator[MicroBatch]:
        return self._microbatches()

    def __iter__(self) -> Iterator[MicroBatch]:
        """For a loop of your own, in another thread than the loader's."""
        microbatches = self._microbatches()

        async def next_or_none() -> MicroBatch | None:
            self._pool.trainer_works(False)
            microbatch = await anext(microbatches, None)
            self._pool.trainer_works(microbatch is not None)
            return microbatch

        async def abandon() -> None:
            await self._scored.close()
            with contextlib.suppress(RuntimeError):  # it is being woken by the line above, and ends by itself
                await microbatches.aclose()

        try:
            while (microbatch := asyncio.run_coroutine_threadsafe(next_or_none(), self._loop).result()) is not None:
                yield microbatch
        finally:
            asyncio.run_coroutine_threadsafe(abandon(), self._loop).result()

    async def _microbatches(self) -> AsyncGenerator[MicroBatch]:
        try:
            for update in range(self._settings.updates_per_period):
                async for microbatch in self._update(update):
                    yield microbatch
            self._ledger.close(self._scored.num_slots)
        finally:
            await self._scored.close()

    async def _update(self, update: int) -> AsyncIterator[MicroBatch]:
        """The micro-batches of one optimizer step; the last one carries the denominators."""
        settings = self._settings
        packer = Packer(settings.pack_tokens)
        index = itertools.count()
        num_groups = num_sequences = num_tokens = 0

        def microbatch(pack: tuple[TrainGroup, ...], closes: UpdateTotals | None = None) -> MicroBatch:
            number = next(index)
            rank = number % settings.num_ranks
            return MicroBatch(period=self._version, update=update, index=number, rank=rank, groups=pack, closes=closes)

        async for group in self._released(update):
            trained = train_group(group, scale_advantages=settings.scale_advantages)
            num_groups += 1
            num_sequences += len(trained.completion_ids)
            num_tokens += sum(map(len, trained.completion_ids))
            if self._elides(trained):
                self.num_elided += 1
                self._ledger.record(group, "elided")
                continue
            self._ledger.record(group, "trained")
            for pack in packer.add(trained):
                yield microbatch(pack)
        totals = UpdateTotals(num_groups=num_groups, num_sequences=num_sequences, num_tokens=num_tokens)
        yield microbatch(packer.flush(), closes=totals)

    def _elides(self, group: TrainGroup) -> bool:
        """Its gradient is exactly zero: nothing scorable, or no advantage and no other term in the loss."""
        return not group.completion_ids or (self._settings.elide and not any(group.advantages))

    async def _released(self, update: int) -> AsyncIterator[Group]:
        """The update's groups in the order they are trained: here lies the whole difference between the schedules."""
        held = self._held[update]
        slot = self._first_slot(update)
        while slot < self._first_slot(update + 1):
            waits_for_all = self._settings.mode == "sync" and len(self.groups) < self._scored.num_slots
            chosen = slot if self._settings.order == "dispatch" else next(iter(held), slot)
            if waits_for_all or chosen not in held:
                arrival = await self._scored.next()
                self.groups[arrival.slot] = arrival
                self._held[self._update_of(arrival.slot)][arrival.slot] = arrival
            else:
                slot += 1
                yield held.pop(chosen)

    def _update_of(self, slot: int) -> int:
        """Planned slots are spread evenly over the updates; added ones belong to the last."""
        updates = self._settings.updates_per_period
        return min(slot * updates // max(1, self._num_planned), updates - 1)

    def _first_slot(self, update: int) -> int:
        """The first slot of an update; for the one past the last, the end of the period as it is now."""
        updates = self._settings.updates_per_period
        return -(-update * self._num_planned // updates) if update < updates else self._scored.num_slots
