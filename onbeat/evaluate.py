"""`onbeat eval`: a model on a recipe's held-out prompts, by its generators and rewards, with nobody training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onbeat.config import Config
from onbeat.errors import InputError
from onbeat.interrupt import Interruption
from onbeat.messages import WorkerSettings
from onbeat.observe.metrics import Record, evaluation_metrics
from onbeat.protocols import Snapshot, no_trace
from onbeat.session import Session, open_session
from onbeat.training.client import read_weights


async def evaluate(config: Config, warn: Callable[[str], None]) -> Record:
    with Interruption().handled():
        async with open_session(config, Path(config.run.dir), no_trace, nobody, warn) as session:
            if not session.held_out:
                raise InputError(
                    "the recipe holds no prompts out: set data.eval_path, data.eval_split or data.eval_rows"
                )
            await session.channel.publish(await _own_weights(session))
            return evaluation_metrics(await session.evaluate(0), config.reward.accuracy_threshold)


def nobody(sentence: str) -> None:
    """Nobody listens."""


async def _own_weights(session: Session) -> Snapshot:
    """The weights in the model's directory, as version 0."""
    settings: WorkerSettings = session.worker_settings("weights")
    return await read_weights(session.launcher, settings)
