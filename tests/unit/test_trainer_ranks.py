"""Several trainer ranks as one trainer: who gets what, who waits for whom, what a death does. Ranks are fakes here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from onbeat.config import Config
from onbeat.errors import WorkerError
from onbeat.messages import (
    Accumulate,
    Accumulated,
    Listening,
    Meet,
    SavePart,
    Step,
    Stepped,
    TrainerReady,
    WorkBeside,
    WorkerSettings,
)
from onbeat.protocols import UpdateReport
from onbeat.training.ranks import TrainerRanks
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from tests.fakes.runs import RECIPE

TOTALS = UpdateTotals(num_groups=1, num_sequences=1, num_tokens=1)
REPORT = UpdateReport(
    loss=0.0, grad_norm=0.0, learning_rate=0.0, stepped=True, entropy=None, kl=None, clip_share=None, gap_mean=None,
    gap_max=None, num_trained_tokens=0,
)  # fmt: skip


READY = TrainerReady(1, None, arithmetic="digest", threads=1)


class FakeRank:
    """A child that answers as soon as it is let."""

    shares_memory = True
    courier = None
    pid = 1

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.connection = self
        self.told: list[Struct] = []
        self.killed = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._words: asyncio.Queue[Struct | None] = asyncio.Queue()
        if settings.num_ranks > 1 and settings.rank == 0:
            self._words.put_nowait(Listening("here:1"))
        if settings.num_ranks == 1:
            self._words.put_nowait(READY)

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        self.told.append(message)
        match message:
            case Meet():
                self._words.put_nowait(READY)
            case Accumulate(microbatch=microbatch):
                self._words.put_nowait(Accumulated(microbatch.index, 0.0, 0.0))
            case Step():
                self._words.put_nowait(Stepped(REPORT, 0.0, 0.0))

    async def messages(self) -> AsyncIterator[Any]:
        while (word := await self._words.get()) is not None:
            if isinstance(word, Accumulated):
                await self.may_answer.wait()
            yield word

    def die(self) -> None:
        self._words.put_nowait(None)

    def close(self) -> None:
        self.die()

    def kill(self) -> None:
        self.killed = True

    async def exited(self) -> int:
        return -9

    def log_tail(self) -> str:
        return "its last words"

    @property
    def microbatches(self) -> list[tuple[tuple[int, ...], int]]:
        """The slots it was given, micro-batch by micro-batch, and in how many parts."""
        orders = [message for message in self.told if isinstance(message, Accumulate)]
        return [(tuple(group.slot for group in order.microbatch.groups), order.num_parts) for order in orders]


class FakeLauncher:
    def __init__(self) -> None:
        self.children: list[FakeRank] = []

    async def spawn(self, *, name: str, entry: str, settings: Any, receives: object, uses_torch: bool) -> Any:
        self.children.append(FakeRank(settings))
        return self.children[-1]


def config_of(**trainer: Any) -> Config:
    from onbeat.recipe import load

    order = trainer.pop("order", "dispatch")
    return load(
        [Path(RECIPE)], {"schedule.order": order, **{f"trainer.{key}": value for key, value in trainer.items()}}
    )


def microbatch(index: int, rank: int, *, num_tokens: int = 10, closes: bool = False, empty: bool = False) -> MicroBatch:
    completion = (1,) * (num_tokens - 1)
    group = TrainGroup(
        slot=index, prompt_ids=(1,), completion_ids=(completion,), sampler_logprobs=((0.0,),), advantages=(1.0,)
    )  # fmt: skip
    groups = () if empty else (group,)
    return MicroBatch(period=0, update=0, index=index, rank=rank, groups=groups, closes=TOTALS if closes else None)


def run(check: Callable[[TrainerRanks, list[FakeRank]], Coroutine[Any, Any, None]], **trainer: Any) -> None:
    async def main() -> None:
        launcher = FakeLauncher()

        def settings(name: str, checkpoint: Path | None, config: Config) -> WorkerSettings:
            return WorkerSettings(config=config.model_dump_json(), model_dir="", name=name)

        ranks = TrainerRanks(config_of(**trainer), launcher, settings, lambda *span: None)  # type: ignore[arg-type]
        await ranks.start(None)
        try:
            await asyncio.wait_for(check(ranks, launcher.children), 10)
        finally:
            ranks.close()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["it is started", "it has started"])
def test_if_a_rank_is_missing_the_others_are_ended_and_its_reason_is_told(when: str) -> None:
    class Failing(FakeLauncher):
        async def spawn(self, *, name: str, entry: str, settings: Any, receives: object, uses_torch: bool) -> Any:
            if settings.rank == 1 and when == "it is started":
                await asyncio.sleep(0)  # the others are there already
                raise WorkerError("no place for trainer-1")
            child = await super().spawn(
                name=name, entry=entry, settings=settings, receives=receives, uses_torch=uses_torch
            )
            if settings.rank == 1:
                child.die()
            return child

    async def main() -> None:
        launcher = Failing()

        def settings(name: str, checkpoint: Path | None, config: Config) -> WorkerSettings:
            return WorkerSettings(config=config.model_dump_json(), model_dir="", name=name)

        ranks = TrainerRanks(config_of(ranks=3), launcher, settings, lambda *span: None)  # type: ignore[arg-type]
        with pytest.raises(WorkerError, match="trainer-1"):
            await asyncio.wait_for(ranks.start(None), 10)
        assert len(launcher.children) == (2 if when == "it is started" else 3)
        assert all(child.killed for child in launcher.children)

    asyncio.run(main())


def test_all_ranks_meet_where_the_first_one_listens() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        assert [(rank.settings.rank, rank.settings.num_ranks) for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
        assert all(rank.told == [Meet("here:1")] for rank in ranks)

    run(check, ranks=3)


def test_every_rank_hears_how_many_generators_work_beside_it_without_being_asked_for_an_answer() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        trainer.work_beside(3)
        assert all(rank.told[-1] == WorkBeside(3) for rank in ranks)
        assert trainer.doing == "waiting"

    run(check, ranks=2)


def test_a_single_rank_meets_nobody() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        assert [rank.told for rank in ranks] == [[]]

    run(check)


def test_replicated_ranks_get_what_is_placed_on_them_and_every_rank_steps() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        for index, rank in enumerate((0, 1, 1)):
            await trainer.accumulate(microbatch(index, rank))
        await trainer.accumulate(microbatch(3, 0, closes=True, empty=True))
        assert await trainer.step(TOTALS) == REPORT
        assert [rank.microbatches for rank in ranks] == [[((0,), 0)], [((1,), 0), ((2,), 0)]]
        assert all(isinstance(rank.told[-1], Step) for rank in ranks)

    run(check, ranks=2)


def test_tensor_parallel_ranks_get_the_same_micro_batch() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        await trainer.accumulate(microbatch(0, 1))
        assert [rank.microbatches for rank in ranks] == [[], [], [((0,), 0)], [((0,), 0)]]

    run(check, ranks=4, tensor_parallel=2)


def test_in_completion_order_a_micro_batch_goes_to_whoever_gets_free() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        ranks[0].may_answer.clear()
        for index in range(8):
            await trainer.accumulate(microbatch(index, 0))  # rank 0 keeps the two it was given at first
        assert len(ranks[0].microbatches) == 2
        assert len(ranks[1].microbatches) == 6
        ranks[0].may_answer.set()

    run(check, ranks=2, order="completion")


def test_sharded_ranks_begin_a_round_together_and_who_has_nothing_takes_part() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        await trainer.accumulate(microbatch(0, 0))
        assert [rank.microbatches for rank in ranks] == [[], []]
        await trainer.accumulate(microbatch(1, 1))
        assert [rank.microbatches for rank in ranks] == [[((0,), 0)], [((1,), 0)]]
        await trainer.accumulate(microbatch(2, 1, closes=True))
        assert [rank.microbatches[1] for rank in ranks] == [((), 0), ((2,), 0)]

    run(check, ranks=2, shard=True)


def test_an_update_without_a_micro_batch_is_no_round() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        await trainer.accumulate(microbatch(0, 0, closes=True, empty=True))
        await trainer.step(TOTALS)
        assert [rank.microbatches for rank in ranks] == [[], []]

    run(check, ranks=2, shard=True)


def test_if_one_rank_of_a_round_splits_its_group_all_run_as_many_parts() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        await trainer.accumulate(microbatch(0, 0))
        await trainer.accumulate(microbatch(1, 1, num_tokens=200))
        assert [rank.microbatches for rank in ranks] == [[((0,), 1)], [((1,), 1)]]

    run(check, ranks=2, shard=True, max_tokens=100)


def test_the_death_of_one_rank_is_told_to_whoever_waits_for_another_and_to_every_later_call() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        ranks[0].may_answer.clear()  # in a collective that never ends
        for index in range(2):
            await trainer.accumulate(microbatch(index, 0))
        waiting = asyncio.create_task(trainer.accumulate(microbatch(2, 0)))
        await asyncio.sleep(0)
        assert not waiting.done()
        ranks[1].die()
        with pytest.raises(WorkerError, match="trainer-1 died"):
            await waiting
        with pytest.raises(WorkerError, match="trainer-1 died"):  # what is left of the period need not be generated
            await trainer.accumulate(microbatch(3, 0))
        with pytest.raises(WorkerError, match="trainer-1 died"):
            await trainer.step(TOTALS)

    run(check, ranks=2)


def test_another_number_of_ranks_starts_from_the_checkpoint_under_names_of_its_own() -> None:
    async def check(trainer: TrainerRanks, ranks: list[FakeRank]) -> None:
        await trainer.become(config_of(ranks=2), Path("there"))
        assert [rank.name for rank in ranks] == ["trainer-0", "trainer-0-1", "trainer-1-1"]
        await trainer.step(TOTALS)
        assert not any(isinstance(message, Step | SavePart) for message in ranks[0].told)
        assert all(isinstance(rank.told[-1], Step) for rank in ranks[1:])

    run(check)
