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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from msgspec import structs

from onbeat.algorithms.base import Advantages, Algorithm
from onbeat.batch.pack import Packer
from onbeat.batch.ranks import Pack, Placing
from onbeat.group.assemble import rewards, train_group
from onbeat.ledger import Ledger
from onbeat.protocols import Evaluated, Scorer, Tracer, no_trace
from onbeat.rollout.pool import Pool
from onbeat.scored import Scored
from onbeat.status import GroupStatus
from onbeat.types import (
    Group,
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
    algorithm: Algorithm
    elide: bool
    """A group without advantage needs no forward: true when the loss has no other term."""
    elide_at_start: bool = False
    """The same before the first update, where the policy is the reference: true when the KL has no gradient there."""
    updates_per_period: int = 1
    pack_tokens: int = 1024
    num_ranks: int = 1
    """That compute micro-batches of their own."""
    rounds: bool = False
    """They do it together (batch/ranks.py)."""
    overlong_buffer: int = 0
    masks_truncated: bool = False
    max_attempts: float = 4.0
    """With dynamic sampling: times the period's prompts that are tried at most."""


class MorePrompts(Protocol):
    """Where further prompts come from, when some turned out to teach nothing."""

    def take(self, num_prompts: int) -> list[Prompt]: ...


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
        self._open: list[Scored] = []

    def use_ranks(self, num_ranks: int, *, rounds: bool) -> None:
        """From the next period on."""
        self.settings = replace(self.settings, num_ranks=num_ranks, rounds=rounds)

    def scoring(self, now_s: float) -> list[GroupStatus]:
        """Groups that are complete and wait for their rewards."""
        return [group for scored in self._open if not scored.closed for group in scored.scoring(now_s)]

    def period(self, version: int, prompts: Sequence[Prompt], more: MorePrompts | None = None) -> Period:
        """Send the prompts to the generators and return at once; iterate for micro-batches. `more` is where further
        prompts come from under dynamic sampling.

        `async for` on the controller's loop, plain `for` in a training script of your own (see own_loop.py).
        """
        if _running_loop() is not self._loop:
            return asyncio.run_coroutine_threadsafe(self._opened(version, prompts, more), self._loop).result()
        self.current = Period(self, version, prompts, more, self._loop)
        return self.current

    async def _opened(self, version: int, prompts: Sequence[Prompt], more: MorePrompts | None) -> Period:
        return self.period(version, prompts, more)

    def open(self, stream: Stream, version: int, on_scored: Callable[[Group], None] = lambda group: None) -> Scored:
        """The way of groups from the pool through the scorer."""
        scored = Scored(self.pool.open(stream, version), self.scorer, self.trace, on_scored)
        self._open = [*(before for before in self._open if not before.closed), scored]
        return scored

    async def evaluate(self, version: int, prompts: Sequence[Prompt], samples: int) -> Evaluated:
        """Score a greedy completion of each held-out prompt, and `samples` sampled ones; nothing is trained."""
        sampling = self.settings.sampling
        scored = self.open("eval", version)
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


class Period:
    """One period's micro-batches. Iterate once; then `groups` holds what was generated, by slot."""

    def __init__(
        self,
        loader: PeriodicLoader,
        version: int,
        prompts: Sequence[Prompt],
        more: MorePrompts | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._settings = loader.settings
        self._ledger = loader.ledger
        self._pool = loader.pool
        self._version = version
        self._loop = loop
        self._num_planned = len(prompts)
        self._held: list[dict[int, Group]] = [{} for _ in range(loader.settings.updates_per_period)]
        self._ledger.open(version)
        self._scored = loader.open("train", version, self._replace_if_it_teaches_nothing)
        self.groups: dict[int, Group] = {}
        self.num_elided = 0
        self.num_replaced = 0
        """Groups without advantage that were passed over, under dynamic sampling."""
        self._more = more if loader.settings.algorithm.dynamic_sampling else None
        self._num_seen = 0
        """Slots that have been accepted or passed over, under dynamic sampling."""
        self._normalised: dict[int, Advantages] = {}
        self.add(prompts)

    def _replace_if_it_teaches_nothing(self, group: Group) -> None:
        """Dynamic sampling. How many prompts are sent in the end is a function of what is in them: as many as hold the
        planned number that teach something, or the limit."""
        if self._more is None or self._teaches(group):
            return
        if self._scored.num_slots < self._settings.max_attempts * self._num_planned:
            self.add(self._more.take(1))

    def _teaches(self, group: Group) -> bool:
        return any(self._train_group(group, self._group_advantages(group)).advantages)

    def _train_group(self, group: Group, advantages: Advantages) -> TrainGroup:
        return train_group(group, advantages, masks_truncated=self._settings.masks_truncated)

    def _group_advantages(self, group: Group) -> Advantages:
        """By its own rewards alone."""
        settings = self._settings
        limit, buffer = settings.sampling.max_new_tokens, settings.overlong_buffer
        return settings.algorithm.advantages(rewards(group, max_new_tokens=limit, overlong_buffer=buffer))

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
        packer, placing = Packer(settings.pack_tokens), Placing(settings.num_ranks, rounds=settings.rounds)
        index = itertools.count()
        num_groups = num_sequences = num_tokens = 0

        def microbatch(rank: int, pack: Pack, closes: UpdateTotals | None = None) -> MicroBatch:
            number = next(index)
            return MicroBatch(period=self._version, update=update, index=number, rank=rank, groups=pack, closes=closes)

        async for group in self._released(update) if self._more is None else self._accepted(update):
            trained = self._train_group(group, self._advantages(group))
            num_groups += 1
            num_sequences += len(trained.completion_ids)
            num_tokens += sum(map(len, trained.completion_ids))
            if self._elides(trained, update):
                self.num_elided += 1
                self._ledger.record(group, "elided")
                continue
            self._ledger.record(group, "trained")
            for pack in packer.add(trained):
                for placed in placing.add(pack):
                    yield microbatch(*placed)
        totals = UpdateTotals(num_groups=num_groups, num_sequences=num_sequences, num_tokens=num_tokens)
        rest = packer.flush()
        *others, last = [*(placing.add(rest) if rest else []), *placing.flush()] or [(0, ())]
        for placed in others:
            yield microbatch(*placed)
        yield microbatch(*last, closes=totals)

    def _advantages(self, group: Group) -> Advantages:
        over_batch = self._settings.algorithm.over_batch
        if over_batch is None:
            return self._group_advantages(group)
        if not self._normalised:  # it does not stream: all groups are there
            batch = [each for each in self.in_slot_order() if self._more is None or self._teaches(each)]
            advantages = over_batch([self._group_advantages(each) for each in batch])
            self._normalised = {each.slot: found for each, found in zip(batch, advantages, strict=True)}
        return self._normalised[group.slot]

    def _elides(self, group: TrainGroup, update: int) -> bool:
        """Its gradient is exactly zero: nothing scorable, or no advantage and no other term that has a gradient."""
        at_start = self._version == 0 and update == 0
        elide = self._settings.elide or (self._settings.elide_at_start and at_start)
        return not group.completion_ids or (elide and not any(group.advantages))

    async def _released(self, update: int) -> AsyncIterator[Group]:
        """The update's groups in the order they are trained: here lies the whole difference between the schedules."""
        held = self._held[update]
        slot = self._first_slot(update)
        while slot < self._first_slot(update + 1):
            chosen = slot if self._settings.order == "dispatch" else next(iter(held), slot)
            if self._waits_for_all or chosen not in held:
                arrival = await self._scored.next()
                self.groups[arrival.slot] = arrival
                self._held[self._update_of(arrival.slot)][arrival.slot] = arrival
            else:
                slot += 1
                yield held.pop(chosen)

    async def _accepted(self, update: int) -> AsyncIterator[Group]:
        """The same under dynamic sampling: the update's share of the groups that teach something; others are passed
        over. When the last slot that was sent has been looked at, no other will be."""
        held = self._held[0]
        share = self._first_slot(update + 1, self._num_planned) - self._first_slot(update)
        num_accepted = 0
        while num_accepted < share and self._num_seen < self._scored.num_slots:
            chosen = self._num_seen if self._settings.order == "dispatch" else next(iter(held), self._num_seen)
            if self._waits_for_all or chosen not in held:
                arrival = await self._scored.next()
                self.groups[arrival.slot] = held[arrival.slot] = arrival
                continue
            self._num_seen += 1
            group = held.pop(chosen)
            if self._teaches(group):
                num_accepted += 1
                yield group
            else:
                self.num_replaced += 1
                self._ledger.record(group, "replaced")

    @property
    def _waits_for_all(self) -> bool:
        """Whether groups have to come before any may be trained."""
        waits = self._settings.mode == "sync" or not self._settings.algorithm.streams
        return waits and len(self.groups) < self._scored.num_slots

    def _update_of(self, slot: int) -> int:
        """Planned slots are spread evenly over the updates; added ones belong to the last."""
        updates = self._settings.updates_per_period
        return min(slot * updates // max(1, self._num_planned), updates - 1)

    def _first_slot(self, update: int, end: int | None = None) -> int:
        """The first slot of an update; for the one past the last, `end`, or the end of the period as it is now."""
        updates = self._settings.updates_per_period
        if update < updates:
            return -(-update * self._num_planned // updates)
        return self._scored.num_slots if end is None else end
