"""The loop. Sync and periodic run this same code: the difference is in the loader (loader.py).

    publish version t ─▶ submit prompts ─▶ train each micro-batch as it comes ─▶ optimizer step(s) ─▶ version t+1

At the top of the loop nothing is in flight: no group, no gradient, no message. That is where a run may be evaluated,
saved, resumed or stopped.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Protocol

from onbeat.loader import PeriodicLoader
from onbeat.protocols import Trainer, UpdateReport, WeightChannel
from onbeat.types import Group, Prompt


class PromptSource(Protocol):
    """Where a period's prompts come from."""

    def take(self, num_prompts: int) -> list[Prompt]: ...


class Observer(Protocol):
    """What a run tells about itself. Called at the period boundary, and around publishing for the trace."""

    def publishing(self, version: int) -> None: ...
    def published(self, version: int) -> None: ...
    def period_closed(
        self, version: int, groups: list[Group], num_elided: int, reports: list[UpdateReport]
    ) -> None: ...
    def evaluated(self, version: int, groups: list[Group]) -> None: ...


class Evaluation(Protocol):
    """Scores held-out prompts with the version that has just been published."""

    def due(self, version: int) -> bool: ...
    async def run(self, version: int) -> list[Group]: ...


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
    first_version: int = 0,
) -> None:
    """Train periods first_version … num_periods-1; the trainer ends at version num_periods."""
    for version in range(first_version, num_periods + 1):
        if version < num_periods or evaluation.due(version):
            observer.publishing(version)
            await channel.publish(await trainer.snapshot(version))
            observer.published(version)
        if evaluation.due(version):
            observer.evaluated(version, await evaluation.run(version))
        if version == num_periods:
            return
        reports: list[UpdateReport] = []
        period = loader.period(version, prompts.take(prompts_per_period))
        async with aclosing(aiter(period)) as microbatches:
            async for microbatch in microbatches:
                await trainer.accumulate(microbatch)
                if microbatch.closes is not None:
                    reports.append(await trainer.step(microbatch.closes))
        observer.period_closed(version, period.in_slot_order(), period.num_elided, reports)
