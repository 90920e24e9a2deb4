"""The loop. Sync and periodic run this same code: the difference is in the loader (loader.py).

    publish version t ─▶ submit prompts ─▶ train each micro-batch as it comes ─▶ optimizer step(s) ─▶ version t+1

At the top of the loop nothing is in flight: no group, no gradient, no message. That is where a run is saved, and
resumed. Held-out prompts are evaluated beside the period that trains on the same version: their groups wait behind its
groups, and are done before the next version comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from onbeat.loader import PeriodicLoader
from onbeat.protocols import Evaluated, Trainer, UpdateReport, WeightChannel
from onbeat.types import Group, Prompt


class PromptSource(Protocol):
    """Where a period's prompts come from."""

    def take(self, num_prompts: int) -> list[Prompt]: ...


class Observer(Protocol):
    """What a run tells about itself. Called at the period boundary, and around publishing for the trace."""

    def publishing(self, version: int) -> None: ...
    def published(self, version: int) -> None: ...
    def period_closed(
        self, version: int, groups: list[Group], num_elided: int, reports: list[UpdateReport], num_replaced: int = 0
    ) -> None: ...
    def evaluated(self, version: int, evaluated: Evaluated) -> None: ...


class Evaluation(Protocol):
    """Scores held-out prompts with the version that has just been published."""

    def due(self, version: int) -> bool: ...
    async def run(self, version: int) -> Evaluated: ...


class Boundary(Protocol):
    """Told when nothing is in flight: where a run is saved."""

    async def boundary(self, version: int) -> None: ...


async def train(
    *,
    num_periods: int,
    prompts_per_period: int,
    prompts: PromptSource,
    loader: PeriodicLoader,
    trainer: Trainer,
    channel: WeightChannel,
    evaluation: Evaluation,
    observer: Observer,
    saver: Boundary,
    first_version: int = 0,
) -> None:
    """Train periods first_version … num_periods-1; the trainer ends at version num_periods."""
    for version in range(first_version, num_periods + 1):
        await saver.boundary(version)
        if version < num_periods or evaluation.due(version):
            observer.publishing(version)
            await channel.publish(await trainer.snapshot(version))
            observer.published(version)
        async with _evaluating(evaluation, version, observer):
            if version == num_periods:
                return
            reports: list[UpdateReport] = []
            period = loader.period(version, prompts.take(prompts_per_period), more=prompts)
            async with aclosing(aiter(period)) as microbatches:
                async for microbatch in microbatches:
                    await trainer.accumulate(microbatch)
                    if microbatch.closes is not None:
                        reports.append(await trainer.step(microbatch.closes))
            groups = period.in_slot_order()
            observer.period_closed(version, groups, period.num_elided, reports, period.num_replaced)


@asynccontextmanager
async def _evaluating(evaluation: Evaluation, version: int, observer: Observer) -> AsyncIterator[None]:
    """Evaluate, if it is due, while the block runs; done when this ends, given up if the block fails."""
    if not evaluation.due(version):
        yield
        return
    running = asyncio.create_task(evaluation.run(version))
    try:
        yield
        observer.evaluated(version, await running)
    finally:
        running.cancel()
