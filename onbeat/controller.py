"""`onbeat train`: the controller process. No torch here; it starts the others, runs the loop, writes the run down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.checkpoint import CheckpointStore
from onbeat.config import Config
from onbeat.control import Answer, Door, Join, Request, listening, serving
from onbeat.cores import rank_threads
from onbeat.inputs import TRAINER, check_inputs, layout_of
from onbeat.interrupt import Interruption
from onbeat.observe.metrics import Record
from onbeat.observe.recorder import Recorder, Say, percent
from onbeat.observe.trackers import open_trackers
from onbeat.period import train
from onbeat.protocols import Evaluated
from onbeat.rescale import Rescaling
from onbeat.rollout.autoscale import Autoscaler, Load
from onbeat.run_dir import RunDir, open_run_dir, seal
from onbeat.saver import Mark, Saver
from onbeat.secret import read_token
from onbeat.session import Session, open_session
from onbeat.status import Status
from onbeat.training.ranks import TrainerRanks
from onbeat.watch import Watch
from onbeat.wire import Connection

Display = Callable[[Callable[[], Status]], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def no_display(status: Callable[[], Status]) -> AsyncIterator[None]:
    """Lines are enough."""
    yield


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a finished run leaves behind."""

    run_dir: Path
    model_path: Path
    metrics: list[Record]
    """One record per period, as in metrics.jsonl."""
    accuracy_before: float | None
    accuracy_after: float | None
    """On the held-out prompts; None without any."""


class HeldOutEvaluation:
    """Before the first period, every so many, and after the last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._every = session.config.evaluation.every
        self._last = session.config.schedule.periods

    def due(self, version: int) -> bool:
        on_the_way = self._every > 0 and version % self._every == 0
        return bool(self._session.held_out) and (version in (0, self._last) or on_the_way)

    async def run(self, version: int) -> Evaluated:
        return await self._session.evaluate(version)


def environment(session: Session, trainer: TrainerRanks) -> dict[str, Any]:
    """What the run's numbers rest on. Known once the generators have been probed."""
    config, reason, cores = session.config, session.why_not_exact(), len(os.sched_getaffinity(0))
    return {
        "exact": reason is None,
        "why_not_exact": reason,
        "shared_prompt": trainer.why_not_shared is None,
        "why_not_shared": trainer.why_not_shared,
        "seed": config.seed,
        "cores": cores,
        "threads": {
            "generator": config.generator.threads or cores,
            "trainer": rank_threads(config.trainer.threads, config.trainer.ranks, cores) or cores,
            "why_trainer_fixed": trainer.why_threads_fixed,
        },
        "ranks": layout_of(config.trainer),
    }


async def run(
    config: Config,
    say: Say,
    warn: Say,
    *,
    resume: bool = False,
    display: Display = no_display,
    interruption: Interruption | None = None,
) -> TrainResult:
    """Train as the configuration says; every process is gone when this returns or raises.

    `say` gets a line about each step of the way, `warn` what went wrong without stopping the run. `display` is given a
    function that tells the state of things, and shows it meanwhile. Interrupted, by a signal or by `interruption`, it
    saves what it can and raises CancelledError.
    """
    interruption = interruption or Interruption()
    with interruption.handled(), open_run_dir(config, resume=resume, say=say, warn=warn) as run_dir:
        recorder = Recorder(
            run_dir,
            accuracy_threshold=config.reward.accuracy_threshold,
            num_periods=config.schedule.periods,
            rollout_groups=config.run.rollout_groups,
            trackers=open_trackers(config, run_dir.path, warn),
            say=say,
            warn=warn,
        )
        watch = Watch(config, run_dir, recorder)
        door = make_door(watch, recorder)
        try:
            async with (
                serving(run_dir.path, door),
                _open_to_others(config, door, say),
                display(watch.status),
                open_session(config, run_dir.path, recorder.span, say, warn) as session,
            ):
                watch.session = session
                await _train(session, run_dir, recorder, watch, interruption, say, warn)
        finally:
            recorder.close()
        return _result(config, run_dir, recorder, say)


def make_door(watch: Watch, recorder: Recorder) -> Door:
    """For whoever comes while the run goes on."""

    def scale(what: str, count: int) -> Answer:
        if watch.session is None or (what == "trainer" and watch.rescaling is None):
            return Answer("the run is still starting; try again in a moment", done=False)
        if what == "trainer" and watch.rescaling is not None:
            return watch.rescaling.want(count)
        answer = watch.session.scale(count)
        if answer.done:
            recorder.decided(f"{answer.sentence}, as asked")
        return answer

    def join(connection: Connection[Request], join: Join, local: bool) -> None:
        if watch.session is None:
            connection.close()
        else:
            watch.session.reception.join(connection, join, local)

    return Door(watch.status, scale, join)


@asynccontextmanager
async def _open_to_others(config: Config, door: Door, say: Say) -> AsyncIterator[None]:
    """Other machines are listened to if the recipe says so."""
    if not config.cluster.listen:
        yield
        return
    token = read_token(config.cluster.token_file, "cluster.token_file")
    async with listening(config.cluster.listen, token, door) as place:
        say(f"workers may join at {place}")
        yield


def autoscaling(session: Session, recorder: Recorder) -> Callable[[Record], None]:
    """What is done after each period: nothing, if the number of generators is fixed."""
    lowest, highest = session.config.generator.bounds
    if lowest == highest:
        return lambda record: None
    autoscaler = Autoscaler(lowest, highest)

    def after_period(record: Record) -> None:
        count = record["num_generators"]
        load = Load(count, count * record["generators_busy_s"], record["training_s"], record["num_generated_tokens"])
        if count and (decision := autoscaler.decide(load)) is not None:
            ours = max(lowest, decision.count - session.crew.num_visitors)
            if ours != session.crew.wanted:
                recorder.decided(decision.why)
                session.crew.want(ours)

    return after_period


async def _train(
    session: Session,
    run_dir: RunDir,
    recorder: Recorder,
    watch: Watch,
    interruption: Interruption,
    say: Say,
    warn: Say,
) -> None:
    config = session.config
    checkpoint = run_dir.checkpoint
    if checkpoint is not None:
        check_inputs(checkpoint.manifest.inputs, session.inputs, warn)  # before anything is started
    trainer = TrainerRanks(config, session.launcher, session.worker_settings, recorder.span, session.pool.trainer_works)
    session.closing.callback(trainer.close)
    session.pool.on_work = trainer.work_beside
    await trainer.start(checkpoint.directory if checkpoint else None)
    session.inputs[TRAINER] = trainer.arithmetic
    if checkpoint is not None:
        check_inputs(checkpoint.manifest.inputs, session.inputs, warn, only=TRAINER)
    watch.trainer = trainer
    if trainer.why_not_shared is not None:
        warn(f"prompts are not shared in training: {trainer.why_not_shared}")
    recorder.counters = session.counters
    recorder.on_period = autoscaling(session, recorder)
    recorder.on_first_publish = lambda: recorder.environment(**environment(session, trainer))
    session.prompts.position = checkpoint.manifest.cursor if checkpoint else 0
    saver = make_saver(session, run_dir, recorder, trainer, interruption, warn)
    watch.saver = saver
    rescaling = Rescaling(saver, trainer, session.loader, session.inputs, recorder.decided, warn)
    watch.rescaling = rescaling
    interruption.say = say
    interruption.why_not_now = saver.why_not_now
    try:
        await train(
            num_periods=config.schedule.periods,
            first_version=checkpoint.manifest.version if checkpoint else 0,
            prompts_per_period=config.schedule.prompts_per_period,
            prompts=session.prompts,
            loader=session.loader,
            trainer=trainer,
            channel=session.channel,
            evaluation=HeldOutEvaluation(session),
            observer=recorder,
            saver=rescaling,
        )
        recorder.phase = "ending"
        await trainer.export(str(run_dir.model))
        await saver.end()
    except asyncio.CancelledError:
        if interruption.at_once:
            raise
        saved = await saver.interrupted()
        say(f"interrupted; go on with --resume, from {saved}" if saved else "interrupted before anything was saved")
        raise
    except Exception:  # ours or not: what has been done is not lost
        if (saved := await saver.interrupted()) is not None:
            say(f"the run ends here; --resume would go on from {saved}")
        raise


def make_saver(
    session: Session,
    run_dir: RunDir,
    recorder: Recorder,
    trainer: TrainerRanks,
    interruption: Interruption,
    warn: Say,
) -> Saver:
    config = session.config
    store = CheckpointStore(run_dir.path / "checkpoints", config.checkpoint.keep, best=recorder.best_of)
    return Saver(
        store,
        trainer,
        every=config.checkpoint.every,
        last_version=config.schedule.periods,
        updates_per_period=config.schedule.updates_per_period,
        config=config.model_dump(mode="json"),
        inputs=session.inputs,
        mark=lambda: Mark(cursor=session.prompts.position, lengths=run_dir.lengths()),
        seal=lambda lengths: seal(run_dir.path, lengths),
        warn=warn,
        ends=lambda: interruption.asked,
        trace=recorder.span,
        resumed=run_dir.checkpoint.manifest.version if run_dir.checkpoint else None,
    )


def _result(config: Config, run_dir: RunDir, recorder: Recorder, say: Say) -> TrainResult:
    periods = config.schedule.periods
    before, after = recorder.accuracy_of(0), recorder.accuracy_of(periods)
    if after is not None:
        say(f"held-out accuracy: {percent(before)} before, {percent(after)} after {periods} periods")
    say(f"model: {run_dir.model}")
    return TrainResult(
        run_dir=run_dir.path,
        model_path=run_dir.model,
        metrics=recorder.records,
        accuracy_before=before,
        accuracy_after=after,
    )
