"""`onbeat scale RUN trainer=N`: another number of trainer ranks, from the next period boundary on.

    want(n) ··· boundary v: save now ─▶ end the ranks ─▶ start n of them from that checkpoint ─▶ publish v, go on

Nothing is in flight at a boundary, and a checkpoint loads on any number of ranks: weights and moments are the same bits
before and after. What comes later is rounded as n ranks round it; the checkpoints from then on say so.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Protocol

from pydantic import ValidationError

from onbeat.config import Config, TrainerConfig
from onbeat.control import Answer
from onbeat.errors import CheckpointError, WorkerError
from onbeat.inputs import TRAINER, layout_of
from onbeat.saver import Saver
from onbeat.training.ranks import TrainerRanks

MAX_RANKS = 1024


class HasRanks(Protocol):
    """Whoever places micro-batches on ranks (the loader)."""

    def use_ranks(self, num_ranks: int, *, rounds: bool) -> None: ...


class Rescaling:
    """The run's boundary: saves what is due, and exchanges the trainer's ranks if somebody asked for it."""

    def __init__(
        self,
        saver: Saver,
        trainer: TrainerRanks,
        loader: HasRanks,
        inputs: MutableMapping[str, str],
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """`inputs` are those that checkpoints keep; `tell` hears what was decided."""
        self._saver = saver
        self._trainer = trainer
        self._loader = loader
        self._inputs = inputs
        self._tell = tell
        self._warn = warn
        self._wanted: Config | None = None

    def want(self, num_ranks: int) -> Answer:
        """From the next boundary on."""
        before = self._trainer.config
        try:
            if not 1 <= num_ranks <= MAX_RANKS:
                raise ValueError(f"there must be between 1 and {MAX_RANKS}")
            trainer = TrainerConfig.model_validate(before.trainer.model_dump() | {"ranks": num_ranks})
        except ValidationError as error:
            return Answer(f"trainer={num_ranks}: {error.errors()[0]['msg'].removeprefix('Value error, ')}", done=False)
        except ValueError as error:
            return Answer(f"trainer={num_ranks}: {error}", done=False)
        self._wanted = before.model_copy(update={"trainer": trainer})
        return Answer(f"{num_ranks} trainer ranks instead of {before.trainer.ranks} from the next period on", done=True)

    async def boundary(self, version: int) -> None:
        await self._saver.boundary(version)
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted.trainer.ranks != self._trainer.config.trainer.ranks:
            await self._exchange(wanted, version)

    async def _exchange(self, wanted: Config, version: int) -> None:
        before = self._trainer.config
        asked = f"{wanted.trainer.ranks} trainer ranks instead of {before.trainer.ranks}"
        try:
            checkpoint = await self._saver.save_now()
        except CheckpointError as error:
            return self._warn(f"{asked} cannot be had now: {error}")
        try:
            await self._trainer.become(wanted, checkpoint)
        except WorkerError as error:
            self._warn(f"{asked} could not be started, going on with {before.trainer.ranks}: {error}")
            return await self._trainer.become(before, checkpoint)
        self._loader.use_ranks(wanted.trainer.data_parallel, rounds=wanted.trainer.shards)
        self._inputs["ranks"] = layout_of(wanted.trainer)
        self._inputs[TRAINER] = self._trainer.arithmetic
        return self._tell(f"{asked} from version {version} on, as asked")
