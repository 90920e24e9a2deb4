"""When a run is saved, and what an interrupt may and may not undo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onbeat.checkpoint import CheckpointStore, write_part
from onbeat.errors import CheckpointError, WorkerError
from onbeat.protocols import SavedParts
from onbeat.saver import Mark, Saver


class FakeTrainer:
    """Writes an empty part when it is let."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.failure: Exception | str | None = None
        self.asked: list[int] = []

    async def save_parts(self, directory: str, num_updates: int) -> SavedParts:
        self.asked.append(num_updates)
        await self.may_write.wait()
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure is not None or num_updates != self.num_steps:
            return SavedParts(self.num_steps, (), self.failure)
        return SavedParts(self.num_steps, (write_part(Path(directory), "rank-0.safetensors", {}),))


def saver_in(directory: Path, trainer: FakeTrainer, told: list[str] | None = None, **settings: Any) -> Saver:
    settings = {"every": 1, "last_version": 10, "updates_per_period": 1} | settings
    return Saver(
        CheckpointStore(directory, keep=3),
        trainer,
        config={},
        mark=lambda: Mark(cursor=0, lengths={}),
        warn=(told if told is not None else []).append,
        **settings,
    )


def run(check: Callable[[FakeTrainer], Any]) -> None:
    async def main() -> None:
        await check(FakeTrainer())

    asyncio.run(main())


def test_who_is_interrupted_while_waiting_for_a_save_does_not_undo_it(tmp_path: Path) -> None:
    async def check(trainer: FakeTrainer) -> None:
        saver = saver_in(tmp_path, trainer)
        trainer.may_write.clear()
        trainer.num_steps = 1
        await saver.boundary(1)
        trainer.num_steps = 2
        waiting = asyncio.create_task(saver.boundary(2))  # for the save of version 1
        await asyncio.sleep(0)  # it waits now
        assert saver.holds_up == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        trainer.num_steps = 1  # as the trainer sees it: its step waits for the part
        trainer.may_write.set()
        saved = await saver.interrupted()
        assert saved == tmp_path / "version-000001"
        assert saver.holds_up is saver.saving is None

    run(check)


def test_an_interrupted_run_is_saved_as_of_its_boundary_if_nothing_has_moved(tmp_path: Path) -> None:
    async def check(trainer: FakeTrainer) -> None:
        saver = saver_in(tmp_path, trainer, every=0)
        trainer.num_steps = 4
        await saver.boundary(4)
        assert saver.why_not_now() is None
        assert await saver.interrupted() == tmp_path / "version-000004"

    run(check)


def test_a_period_that_has_stepped_is_better_finished_and_the_run_ends_at_its_boundary(tmp_path: Path) -> None:
    async def check(trainer: FakeTrainer) -> None:
        ends = False
        saver = saver_in(tmp_path, trainer, every=0, updates_per_period=2, ends=lambda: ends)
        await saver.boundary(0)
        trainer.num_steps = 1
        assert "the period has moved the weights and is finished first" in (saver.why_not_now() or "")
        ends = True
        trainer.num_steps = 2
        with pytest.raises(asyncio.CancelledError):
            await saver.boundary(1)
        assert await saver.interrupted() == tmp_path / "version-000001"

    run(check)


def test_a_run_that_ends_at_once_in_the_middle_of_a_period_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    async def check(trainer: FakeTrainer) -> None:
        saver = saver_in(tmp_path, trainer, updates_per_period=2)
        trainer.num_steps = 2
        await saver.boundary(1)
        await saver.finish()
        trainer.num_steps = 4
        await saver.boundary(2)
        await saver.finish()
        trainer.num_steps = 5
        assert await saver.interrupted() == tmp_path / "version-000002"
        trainer.num_steps = 6
        told: list[str] = []
        late = saver_in(tmp_path / "late", trainer, told, every=0, updates_per_period=2)
        await late.boundary(2)
        assert await late.interrupted() is None  # 6 updates are not those of version 2
        assert told == []

    run(check)


def test_a_save_that_fails_is_told_tried_again_and_at_the_end_an_error(tmp_path: Path) -> None:
    async def check(trainer: FakeTrainer) -> None:
        told: list[str] = []
        saver = saver_in(tmp_path, trainer, told)
        trainer.failure = "no room"
        trainer.num_steps = 1
        await saver.boundary(1)
        await saver.finish()
        assert told == ["version 1 was not saved: no room"]
        with pytest.raises(CheckpointError, match="no room"):
            await saver.end()
        trainer.failure = None
        trainer.num_steps = 2
        await saver.boundary(2)
        await saver.end()
        assert CheckpointStore(tmp_path, keep=3).versions() == [2]

    run(check)


def test_a_trainer_that_dies_while_saving_is_the_loops_news(tmp_path: Path) -> None:
    async def check(trainer: FakeTrainer) -> None:
        told: list[str] = []
        saver = saver_in(tmp_path, trainer, told)
        trainer.failure = WorkerError("it is dead")
        trainer.num_steps = 1
        await saver.boundary(1)
        assert await saver.interrupted() is None
        assert told == []
        await saver.boundary(1)
        with pytest.raises(WorkerError, match="it is dead"):  # the loop may have asked nothing more of it
            await saver.end()

    run(check)
