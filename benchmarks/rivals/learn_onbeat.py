"""time_to_accuracy: a recipe period by period, evaluated on its held-out prompts after each, with the clock stopped.

A job: `seed`. Settings: `recipe`, `keys` over it, and `stale`: the generators then get the weights of the period
before, as in a schedule that generates the next period's groups while it trains this one's. (That schedule's seconds
would be others; what it learns is this.) It ends after so many `updates`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import contender
from msgspec import structs
from periods_onbeat import Period

from onbeat.config import Config
from onbeat.observe.metrics import evaluation_metrics, group_metrics
from onbeat.period import train
from onbeat.protocols import Snapshot, UpdateReport, no_trace
from onbeat.recipe import load
from onbeat.session import Session, open_session
from onbeat.training.ranks import TrainerRanks
from onbeat.types import Group, MicroBatch, Prompt, UpdateTotals


class Learning(Period):
    """What one period of the loop tells."""

    def __init__(self, prompts: list[Prompt], threshold: float) -> None:
        super().__init__(prompts)
        self._threshold = threshold
        self.reward = 0.0
        self.length = 0.0

    def period_closed(
        self, version: int, groups: list[Group], num_elided: int, reports: list[UpdateReport], num_replaced: int = 0
    ) -> None:
        super().period_closed(version, groups, num_elided, reports, num_replaced)
        metrics = group_metrics(groups, self._threshold)
        self.reward, self.length = metrics["reward_mean"], metrics["completion_tokens_mean"]


class Late:
    """A trainer that publishes what it was one period ago, under today's name."""

    def __init__(self, trainer: TrainerRanks) -> None:
        self._trainer = trainer
        self._before: Snapshot | None = None

    async def accumulate(self, microbatch: MicroBatch) -> None:
        await self._trainer.accumulate(microbatch)

    async def step(self, totals: UpdateTotals) -> UpdateReport:
        return await self._trainer.step(totals)

    async def snapshot(self, version: int) -> Snapshot:
        now = await self._trainer.snapshot(version)
        before, self._before = self._before, structs.replace(now, handle=_copied(now))
        if before is None:
            return now
        os.close(now.handle)
        return structs.replace(before, version=version)

    async def export(self, directory: str) -> None:
        await self._trainer.export(directory)

    def close(self) -> None:
        if self._before is not None:
            os.close(self._before.handle)


def _copied(snapshot: Snapshot) -> int:
    """The trainer writes over its memory two versions later."""
    copy = os.memfd_create("stale-weights")
    offset = 0
    while offset < snapshot.num_bytes:
        offset += os.sendfile(copy, snapshot.handle, offset, snapshot.num_bytes - offset)
    return copy


class Run:
    def __init__(self, session: Session, trainer: TrainerRanks, settings: dict[str, Any]) -> None:
        self._session = session
        self._trainer = trainer
        self._published = Late(trainer) if settings.get("stale") else trainer
        self._settings = settings
        self._clock_s = 0.0
        self.curve: list[dict[str, float]] = []
        """One record per version: updates, seconds of training so far, held-out accuracy."""
        self.digest = ""
        """Of the last weights."""

    async def learn(self) -> None:
        await self._evaluate(0, reward=None, length=None)
        for version in range(self._settings["updates"]):
            period = await self._period(version)
            await self._evaluate(version + 1, reward=period.reward, length=period.length)
        if isinstance(self._published, Late):
            self._published.close()

    async def _period(self, version: int) -> Learning:
        session, config = self._session, self._session.config
        num_prompts = config.schedule.prompts_per_period
        period = Learning(session.prompts.take(num_prompts), config.reward.accuracy_threshold)
        began_s = time.monotonic()
        await train(
            num_periods=version + 1, first_version=version, prompts_per_period=num_prompts, prompts=period,
            loader=session.loader, trainer=self._published, channel=session.channel, evaluation=period,
            observer=period, saver=period,
        )  # fmt: skip
        self._clock_s += time.monotonic() - began_s
        return period

    async def _evaluate(self, version: int, **period: float | None) -> None:
        """The weights as they are now, greedily; the loop publishes them again, on the clock."""
        session = self._session
        snapshot = await self._trainer.snapshot(version)
        self.digest = snapshot.digest
        await session.channel.publish(snapshot)
        evaluated = evaluation_metrics(await session.evaluate(version), session.config.reward.accuracy_threshold)
        self.curve.append({"updates": version, "seconds": self._clock_s, "accuracy": evaluated["accuracy"], **period})
        print(self.curve[-1], flush=True)


def prepare(settings: dict[str, Any]) -> contender.Run:
    def run(job: dict[str, Any]) -> dict[str, Any]:
        if job.get("warm_up"):  # every run starts from nothing, and its clock with its first period
            return {}
        with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
            keys = {"seed": job["seed"], "run.dir": folder, "schedule.periods": settings["updates"], **settings["keys"]}
            return asyncio.run(learn(load([settings["recipe"]], keys), Path(folder), settings))

    return run


async def learn(config: Config, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    async with open_session(config, folder, no_trace, print, print) as session:
        trainer = TrainerRanks(config, session.launcher, session.worker_settings, no_trace, session.pool.trainer_works)
        session.pool.on_work = trainer.work_beside
        session.closing.callback(trainer.close)
        await trainer.start(None)
        run = Run(session, trainer, settings)
        await run.learn()
        return {"curve": run.curve, "digest": run.digest}


if __name__ == "__main__":
    contender.main(prepare, ["onbeat", "torch", "transformers"])
