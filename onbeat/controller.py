"""`onbeat train`: the controller process. No torch here; it starts the others, runs the loop, writes the run down."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.config import Config, to_toml
from onbeat.errors import ConfigError
from onbeat.observe.metrics import Record
from onbeat.observe.recorder import Recorder, percent
from onbeat.period import train
from onbeat.session import Session, open_session
from onbeat.training.client import TrainerClient
from onbeat.types import Group


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
    """Before the first period and after the last."""

    def __init__(self, session: Session, num_periods: int) -> None:
        self._session = session
        self._num_periods = num_periods

    def due(self, version: int) -> bool:
        return bool(self._session.held_out) and version in (0, self._num_periods)

    async def run(self, version: int) -> list[Group]:
        return await self._session.evaluate(version)


def environment(session: Session, trainer: TrainerClient) -> dict[str, Any]:
    """What the run's numbers rest on. Known once the generators have been probed."""
    config, reason, cores = session.config, session.why_not_exact(), len(os.sched_getaffinity(0))
    return {
        "exact": reason is None,
        "why_not_exact": reason,
        "shared_prompt": trainer.why_not_shared is None,
        "why_not_shared": trainer.why_not_shared,
        "seed": config.seed,
        "cores": cores,
        "threads": {"generator": config.generator.threads or cores, "trainer": config.trainer.threads or cores},
    }


def prepare_run_dir(config: Config) -> Path:
    """The run's directory: new, empty, or of a run that trained nothing. No period of an earlier run is overwritten."""
    run_dir = Path(config.run.dir)
    try:
        if (run_dir / "ledger.jsonl").exists():
            raise ConfigError(
                f"run.dir = {str(run_dir)!r} already holds a run; name another with --run.dir, or remove it"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.toml").write_text(to_toml(config))
    except OSError as error:
        raise ConfigError(f"run.dir = {str(run_dir)!r} cannot be written: {error.strerror}") from None
    return run_dir


async def run(config: Config, say: Callable[[str], None], warn: Callable[[str], None]) -> TrainResult:
    """Train as the configuration says; every process is gone when this returns or raises.

    `say` gets a line about each step of the way, `warn` what went wrong without stopping the run.
    """
    run_dir = prepare_run_dir(config)
    schedule = config.schedule
    recorder = Recorder(
        run_dir, accuracy_threshold=config.reward.accuracy_threshold, num_periods=schedule.periods, say=say, warn=warn
    )
    model_path = run_dir / "model"
    try:
        async with open_session(config, run_dir, recorder.span, warn) as session:
            if session.dropped:
                limit = config.data.max_prompt_tokens
                say(f"{len(session.dropped)} prompts were left out, having no token or more than {limit}")
            trainer = await TrainerClient.start(
                session.launcher, session.worker_settings("trainer-0"), recorder.span, session.pool.trainer_works
            )
            session.closing.callback(trainer.close)
            if trainer.why_not_shared is not None:
                warn(f"prompts are not shared in training: {trainer.why_not_shared}")
            recorder.counters = session.counters
            recorder.on_first_publish = lambda: recorder.environment(**environment(session, trainer))
            await train(
                num_periods=schedule.periods,
                prompts_per_period=schedule.prompts_per_period,
                prompts=session.prompts,
                loader=session.loader,
                trainer=trainer,
                channel=session.channel,
                evaluation=HeldOutEvaluation(session, schedule.periods),
                observer=recorder,
            )
            await trainer.export(str(model_path))
    finally:
        recorder.close()
    before, after = recorder.evaluations.get(0), recorder.evaluations.get(schedule.periods)
    if after is not None:
        say(f"held-out accuracy: {percent(before)} before, {percent(after)} after {schedule.periods} periods")
    say(f"model: {model_path}")
    return TrainResult(
        run_dir=run_dir,
        model_path=model_path,
        metrics=recorder.records,
        accuracy_before=before,
        accuracy_after=after,
    )
