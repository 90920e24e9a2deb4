"""One period of the real loop after another, each in the way it is asked for, over the same workers.

A job: `seed`, which names the period; and what is to be different from the recipe's keys: `mode`, `order`, `elide`,
`num_prompts`, `group_size`, `prompt_tokens` (random ones, exactly so many), `new_tokens` (exactly so many: completions
do not stop), `generators`. Settings may name a `trainer` or a `generator` of switched_off.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import contender
import switched_off
from msgspec import structs
from switched_off import Launching

from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings, PeriodicLoader
from onbeat.observe.intervals import Span, length, of_lane
from onbeat.period import train
from onbeat.protocols import Evaluated, UpdateReport
from onbeat.recipe import load
from onbeat.rollout import client
from onbeat.session import Session, open_session
from onbeat.training.ranks import TrainerRanks
from onbeat.types import Group, Prompt

TASKS = Path(__file__).with_name("tasks.py")


class Period:
    """What the loop wants beside loader and trainer, for one period: its prompts, no evaluation, somebody to tell."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self.num_elided = 0
        self.num_tokens = 0
        self.num_trained_tokens = 0
        self.grad_norms: list[float | None] = []
        self.sampled = ""
        """A digest of all tokens and of the log-probabilities they were sampled with, in slot order."""
        self.publish_s = 0.0

    def take(self, num_prompts: int) -> list[Prompt]:
        return self._prompts[:num_prompts]

    def due(self, version: int) -> bool:
        return False

    async def run(self, version: int) -> Evaluated:
        raise AssertionError("not due")

    def publishing(self, version: int) -> None:
        self.publish_s -= time.monotonic()

    def published(self, version: int) -> None:
        self.publish_s += time.monotonic()

    def period_closed(
        self, version: int, groups: list[Group], num_elided: int, reports: list[UpdateReport], num_replaced: int = 0
    ) -> None:
        self.num_elided = num_elided
        self.num_tokens = sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)
        self.num_trained_tokens = sum(report.num_trained_tokens for report in reports)
        self.grad_norms = [report.grad_norm for report in reports]
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        tokens = [(each.slot, each.sample, each.token_ids, each.sampler_logprobs) for each in completions]
        self.sampled = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]

    def evaluated(self, version: int, evaluated: Evaluated) -> None: ...

    async def boundary(self, version: int) -> None: ...


class Workers:
    """A session with a trainer, kept up between jobs."""

    def __init__(self, session: Session, trainer: TrainerRanks, spans: list[Span], num_prompts: int) -> None:
        self._session = session
        self._trainer = trainer
        self._spans = spans
        self._num_prompts = num_prompts

    async def period(self, job: dict[str, Any]) -> dict[str, Any]:
        """If it takes another number of generators, after one off the record: the first of a process is slower."""
        if await self._want(job.get("generators", self._session.crew.wanted)):
            await self._period(job)
        return await self._period(job)

    async def _period(self, job: dict[str, Any]) -> dict[str, Any]:
        session = self._session
        settings = self._settings(job)
        num_prompts = job.get("num_prompts", self._num_prompts)
        # The same prompts and, by the version, the same random numbers, whatever way is next: the same tokens.
        version = job["seed"]
        session.prompts.position = version * self._num_prompts
        prompts = session.prompts.take(num_prompts)
        if "prompt_tokens" in job:
            prompts = [_of_length(prompt, job["prompt_tokens"]) for prompt in prompts]
        period = Period(prompts)
        self._spans.clear()
        began_s = time.monotonic()
        await train(
            num_periods=version + 1,
            first_version=version,
            prompts_per_period=num_prompts,
            prompts=period,
            loader=PeriodicLoader(settings, session.pool, session.scorer, Ledger()),
            trainer=self._trainer,
            channel=session.channel,
            evaluation=period,
            observer=period,
            saver=period,
        )
        ended_s = time.monotonic()
        waiting_s = {
            kind: ended_s - began_s - period.publish_s - length(of_lane(self._spans, kind, began_s, ended_s))
            for kind in ("generator", "trainer")
        }
        return {
            "seconds": ended_s - began_s,
            "generated_tokens": period.num_tokens,
            "trained_tokens": period.num_trained_tokens,
            "elided_groups": period.num_elided,
            "sampled": period.sampled,
            "grad_norms": period.grad_norms,
            "publish_s": period.publish_s,
            "generators_waiting_s": waiting_s["generator"],
            "trainer_waiting_s": waiting_s["trainer"],
        }

    def _settings(self, job: dict[str, Any]) -> LoaderSettings:
        changed = {key: job[key] for key in ("mode", "order", "elide", "group_size") if key in job}
        settings = dataclasses.replace(self._session.loader.settings, **changed)
        if "new_tokens" in job:
            sampling = structs.replace(settings.sampling, max_new_tokens=job["new_tokens"], stop_token_ids=())
            settings = dataclasses.replace(settings, sampling=sampling)
        return settings

    async def _want(self, count: int) -> bool:
        """So many generators, no more and no fewer, when this returns. Whether they were others before."""
        if self._session.pool.size() == count:
            return False
        self._session.crew.want(count)
        while self._session.pool.size() != count or self._session.pool.help_is_coming():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return True


def _of_length(prompt: Prompt, num_tokens: int) -> Prompt:
    rng = random.Random(prompt.prompt_id)
    return structs.replace(prompt, token_ids=tuple(rng.randrange(5, 40000) for _ in range(num_tokens)))


def prepare(settings: dict[str, Any]) -> contender.Run:
    loop = asyncio.new_event_loop()
    folder = tempfile.mkdtemp(prefix="onbeat-bench-")
    # Where workers find switched_off.py.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TASKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = load(
        [],
        {
            "run.dir": folder,
            "model.path": settings["model"],
            "data.path": f"{TASKS}:{settings['rows']}",
            "reward.functions": [{"path": f"{TASKS}:{settings['reward']}"}],
            "trainer.learning_rate": 1e-60,  # nothing in float32: every period finds the same model, bit for bit
            **settings["keys"],
        },
    )
    if "generator" in settings:
        client.ENTRIES["embedded"] = f"{switched_off.__name__}:{settings['generator']}"
    spans: list[Span] = []

    async def start() -> Workers:
        session = await opened.__aenter__()
        launcher = Launching(session.launcher, settings["trainer"]) if "trainer" in settings else session.launcher
        trainer = TrainerRanks(config, launcher, session.worker_settings, trace, session.pool.trainer_works)
        session.pool.on_work = trainer.work_beside
        session.closing.callback(trainer.close)
        await trainer.start(None)
        return Workers(session, trainer, spans, config.schedule.prompts_per_period)

    def trace(lane: str, name: str, began_s: float, ended_s: float) -> None:
        spans.append((lane, began_s, ended_s))

    opened = open_session(config, Path(folder), trace, print, print)
    workers = loop.run_until_complete(start())

    def close() -> None:
        loop.run_until_complete(opened.__aexit__(None, None, None))
        shutil.rmtree(folder)

    contender.closing.callback(close)
    return lambda job: loop.run_until_complete(workers.period(job))


if __name__ == "__main__":
    contender.main(prepare, ["onbeat", "torch", "transformers"])
