"""R2 and R4: each promise of the run, broken on purpose, gives its typed error with period, slot and worker."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import pytest

from onbeat.algorithms.catalogue import ALGORITHMS
from onbeat.errors import (
    InputError,
    MissingSlotsError,
    NoGeneratorsError,
    OnbeatError,
    StaleRolloutError,
    TrainedTwiceError,
    UnverifiedWeightsError,
    WorkerError,
)
from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings, PeriodicLoader
from onbeat.pieces import WHOLE, Share
from onbeat.protocols import Snapshot
from onbeat.rollout.pool import Pool
from onbeat.session import check_room
from onbeat.types import Completion, Group, GroupRequest, MicroBatch, Prompt, Rollout
from onbeat.weights.memory import MemoryChannel
from tests.fakes.roles import SAMPLING, FakeGenerator, FakeScorer, make_prompts, run_fake_loop
from tests.fakes.virtual_time import run_virtual

SETTINGS = LoaderSettings(
    mode="periodic", order="dispatch", group_size=3, sampling=SAMPLING, algorithm=ALGORITHMS["grpo"], elide=False,
    pack_tokens=1,
)  # fmt: skip


def generator(name: str = "generator-0", **how: object) -> FakeGenerator:
    return FakeGenerator(name=name, capacity=6, rng=random.Random(1), **how)  # type: ignore[arg-type]


def snapshot(version: int) -> Snapshot:
    return Snapshot(version=version, digest="", num_bytes=0, handle=os.open(os.devnull, os.O_RDONLY))


async def one_period(
    pool: Pool, ledger: Ledger, version: int = 0, prompts: int = 4, scorer: FakeScorer | None = None
) -> list[MicroBatch]:
    loader = PeriodicLoader(SETTINGS, pool, scorer or FakeScorer(random.Random(0)), ledger)
    return [microbatch async for microbatch in loader.period(version, make_prompts(prompts))]


def test_a_completion_from_another_version_stops_the_run_and_names_the_worker() -> None:
    async def main() -> None:
        pool = Pool()
        pool.add(stale := generator())
        stale.version = 6  # what it samples from
        pool.serves(stale.name, 7)  # what the pool was told
        await one_period(pool, Ledger(), version=7)

    with pytest.raises(StaleRolloutError) as caught:
        run_virtual(main())
    assert (caught.value.period, caught.value.worker) == (7, "generator-0")
    assert caught.value.slot in range(4)
    assert "version 6" in str(caught.value)


class RelabellingScorer(FakeScorer):
    """A scorer that mixes up what it was given: the ledger is the last guard."""

    change: dict[str, int]

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Rollout, ...]:
        rollouts = await super().score(prompt, completions)
        return tuple(
            Rollout(
                completion=msgspec.structs.replace(r.completion, **self.change), text="", reward=1.0, rewards=(1.0,)
            )
            for r in rollouts
        )


def test_the_ledger_refuses_a_stale_rollout_that_got_past_the_pool() -> None:
    async def main() -> None:
        pool = Pool()
        pool.add(fresh := generator())
        fresh.version = 3
        pool.serves(fresh.name, 3)
        scorer = RelabellingScorer(random.Random(0))
        scorer.change = {"version": 2}
        await one_period(pool, Ledger(), version=3, scorer=scorer)

    with pytest.raises(StaleRolloutError) as caught:
        run_virtual(main())
    assert (caught.value.period, caught.value.slot) == (3, 0)


def test_a_slot_cannot_be_trained_twice() -> None:
    ledger = Ledger()
    ledger.open(4)
    group = Group(slot=2, prompt=make_prompts(1)[0], rollouts=())
    ledger.record(group, "trained")
    with pytest.raises(TrainedTwiceError) as caught:
        ledger.record(group, "trained")
    assert (caught.value.period, caught.value.slot) == (4, 2)


def test_a_period_cannot_close_with_a_slot_missing() -> None:
    ledger = Ledger()
    ledger.open(4)
    for slot in (0, 1, 3):
        ledger.record(Group(slot=slot, prompt=make_prompts(1)[0], rollouts=()), "elided")
    with pytest.raises(MissingSlotsError) as caught:
        ledger.close(num_slots=4)
    assert (caught.value.period, caught.value.slot) == (4, 2)


def test_a_period_abandoned_half_way_cannot_be_followed_by_another() -> None:
    async def main() -> None:
        pool, ledger = Pool(), Ledger()
        pool.add(worker := generator())
        worker.version = 0
        pool.serves(worker.name, 0)
        loader = PeriodicLoader(SETTINGS, pool, FakeScorer(random.Random(0)), ledger)
        iterator = aiter(loader.period(0, make_prompts(4)))
        await anext(iterator)
        await iterator.aclose()  # type: ignore[attr-defined]
        loader.period(1, make_prompts(4))

    with pytest.raises(MissingSlotsError):
        run_virtual(main())


def test_a_period_cannot_open_on_weights_no_generator_has_verified() -> None:
    async def main() -> None:
        pool = Pool()
        pool.add(generator())
        await one_period(pool, Ledger(), version=0)

    with pytest.raises(UnverifiedWeightsError) as caught:
        run_virtual(main())
    assert caught.value.period == 0


def test_a_generator_without_the_current_version_gets_no_work() -> None:
    async def main() -> tuple[FakeGenerator, FakeGenerator]:
        pool = Pool()
        current, behind = generator("current"), generator("behind")
        for worker, version in ((current, 5), (behind, 4)):
            pool.add(worker)
            worker.version = version
            pool.serves(worker.name, version)
        await one_period(pool, Ledger(), version=5)
        return current, behind

    current, behind = run_virtual(main())
    assert len(current.served) == 4
    assert behind.served == []


def test_a_joiner_serves_in_the_middle_of_a_period_once_it_holds_the_snapshot() -> None:
    async def main() -> tuple[list[int], FakeGenerator]:
        pool, ledger = Pool(), Ledger()
        pool.add(first := generator("first"))
        first.version = 2
        pool.serves("first", 2)
        joiner = generator("joiner")
        loader = PeriodicLoader(SETTINGS, pool, FakeScorer(random.Random(0)), ledger)
        slots = []
        async for microbatch in loader.period(2, make_prompts(9)):
            slots += [group.slot for group in microbatch.groups]
            if joiner.events is None:
                pool.add(joiner)
                assert joiner.served == []
                joiner.version = 2
                pool.serves("joiner", 2)
        return slots, joiner

    slots, joiner = run_virtual(main())
    assert slots == list(range(9))
    assert joiner.served
    assert set(joiner.served) == {(2, 2)}


def test_publishing_goes_on_without_a_generator_that_dies_in_it_and_fails_without_any() -> None:
    class Refusing(FakeGenerator):
        async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
            raise WorkerError("died while loading")

    async def publish(*workers: FakeGenerator) -> Pool:
        pool = Pool()
        for worker in workers:
            pool.add(worker)
        channel = MemoryChannel(pool)
        try:
            await channel.publish(snapshot(1))
        finally:
            channel.close()
        return pool

    bad = Refusing(name="bad", capacity=4, rng=random.Random(0))
    pool = run_virtual(publish(bad, generator("good")))
    assert [worker.name for worker in pool.generators] == ["good"]
    with pytest.raises(NoGeneratorsError, match="died while loading"):
        run_virtual(publish(Refusing(name="bad", capacity=4, rng=random.Random(0))))


def test_the_death_of_the_last_generator_ends_the_period_with_its_cause() -> None:
    async def main() -> None:
        pool = Pool()
        pool.add(mortal := generator(dies_after=4))
        mortal.version = 0
        pool.serves(mortal.name, 0)
        await one_period(pool, Ledger())

    with pytest.raises(NoGeneratorsError, match="told to die"):
        run_virtual(main())


def test_a_group_that_fits_no_generator_is_refused_with_both_numbers() -> None:
    async def main() -> None:
        pool = Pool()
        pool.add(small := FakeGenerator(name="small", capacity=2, rng=random.Random(0)))
        small.version = 0
        pool.serves("small", 0)
        await one_period(pool, Ledger())

    with pytest.raises(InputError, match="a group of 3 completions fits no generator of 2 rows"):
        run_virtual(main())


HOLDS_TWO_PROMPT_TOKENS = 2 + 4 * SAMPLING.max_new_tokens


def test_a_group_goes_to_a_generator_whose_cache_holds_it() -> None:
    async def main() -> tuple[FakeGenerator, FakeGenerator]:
        pool = Pool()
        small, large = generator("small", cache_tokens=HOLDS_TWO_PROMPT_TOKENS), generator("large")
        for worker in (small, large):
            pool.add(worker)
            worker.version = 0
            pool.serves(worker.name, 0)
        assert sum(len(batch.groups) for batch in await one_period(pool, Ledger(), prompts=15)) == 15
        return small, large

    small, large = run_virtual(main())
    assert set(small.slots) <= {0, 1, 5, 6, 10, 11}  # those with prompts of one or two tokens
    assert set(large.slots) >= {2, 3, 4, 7, 8, 9, 12, 13, 14}


def test_groups_that_would_wait_for_a_generators_cache_wait_in_the_pool_for_whoever_comes() -> None:
    def request(slot: int) -> GroupRequest:
        return GroupRequest(
            stream="train", period=0, slot=slot, samples=(0, 1, 2, 3), token_ids=(1, 2), sampling=SAMPLING
        )

    async def main() -> tuple[list[int], list[int]]:
        pool = Pool()
        workers = [FakeGenerator(name=name, capacity=64, rng=random.Random(1),
                                 cache_tokens=HOLDS_TWO_PROMPT_TOKENS) for name in ("first", "second")]  # fmt: skip
        harvest = None
        for worker in workers:
            pool.add(worker)
            worker.version = 0
            pool.serves(worker.name, 0)
            if harvest is None:
                harvest = pool.open("train", 0)
                for slot in range(8):
                    harvest.submit(request(slot))
        first, second = ([*worker.slots] for worker in workers)
        assert harvest is not None
        found = [(await harvest.next())[0].slot for _ in range(8)]
        assert sorted(found) == list(range(8))
        return first, second

    first, second = run_virtual(main())
    assert first == [0, 1]  # one that its cache holds, and one ahead
    assert second == [2, 3]


def test_who_can_begin_a_group_gets_it_before_who_has_more_rows_and_less_cache() -> None:
    async def main() -> tuple[list[int], list[int]]:
        pool = Pool()
        wide = FakeGenerator(name="wide", capacity=64, rng=random.Random(1), cache_tokens=HOLDS_TWO_PROMPT_TOKENS)
        narrow = FakeGenerator(name="narrow", capacity=8, rng=random.Random(1))
        for worker in (wide, narrow):
            pool.add(worker)
            worker.version = 0
            pool.serves(worker.name, 0)
        harvest = pool.open("train", 0)
        for slot in range(3):
            samples = (0, 1, 2, 3)
            harvest.submit(
                GroupRequest(stream="train", period=0, slot=slot, samples=samples, token_ids=(1, 2), sampling=SAMPLING)
            )
        first = [*wide.slots], [*narrow.slots]
        for _ in range(3):
            await harvest.next()
        return first

    wide, narrow = run_virtual(main())
    assert wide == [0]
    assert narrow == [1, 2]


@pytest.mark.parametrize("dies_after", [1, 6, 11])
def test_a_group_that_only_a_dead_generator_could_hold_ends_the_period_with_what_it_needs(dies_after: int) -> None:
    """Whether it had been sent to the dead one or was still waiting."""

    async def main() -> None:
        pool = Pool()
        small = generator("small", cache_tokens=HOLDS_TWO_PROMPT_TOKENS)
        large = generator("large", dies_after=dies_after)
        for worker in (small, large):
            pool.add(worker)
            worker.version = 0
            pool.serves(worker.name, 0)
        await one_period(pool, Ledger(), prompts=15)

    with pytest.raises(InputError, match=r"after a prompt of \d needs .* GiB of cache, and generator.cache_gib gives"):
        run_virtual(main())


def test_a_prompt_whose_group_no_generator_could_hold_is_refused_by_name_before_the_first_period() -> None:
    async def main() -> None:
        pool = Pool()
        pool.add(generator("small", cache_tokens=HOLDS_TWO_PROMPT_TOKENS))
        check_room(pool, make_prompts(2), 3, SAMPLING)
        check_room(pool, make_prompts(3), 3, SAMPLING)

    with pytest.raises(
        InputError, match="prompt row-2: a group of 3 completions of up to 8 tokens after a prompt of 3"
    ):
        run_virtual(main())


def test_a_scorer_that_fails_altogether_ends_the_period_and_leaves_no_task() -> None:
    class Broken(FakeScorer):
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Rollout, ...]:
            raise OnbeatError("no reward workers")

    async def main() -> None:
        pool = Pool()
        pool.add(worker := generator())
        worker.version = 0
        pool.serves(worker.name, 0)
        with pytest.raises(OnbeatError, match="no reward workers"):
            await one_period(pool, Ledger(), scorer=Broken(random.Random(0)))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_prompts_added_in_the_middle_of_a_period_take_the_next_slots() -> None:
    async def main() -> list[MicroBatch]:
        pool, ledger = Pool(), Ledger()
        pool.add(worker := generator())
        worker.version = 0
        pool.serves(worker.name, 0)
        loader = PeriodicLoader(SETTINGS, pool, FakeScorer(random.Random(0)), ledger)
        period = loader.period(0, make_prompts(3))
        microbatches = []
        async for microbatch in period:
            if not microbatches:
                period.add(make_prompts(5)[3:])
            microbatches.append(microbatch)
        return microbatches

    microbatches = run_virtual(main())
    assert [group.slot for microbatch in microbatches for group in microbatch.groups] == [0, 1, 2, 3, 4]
    assert [microbatch.closes is not None for microbatch in microbatches].count(True) == 1
    assert microbatches[-1].closes is not None
    assert microbatches[-1].closes.num_groups == 5


def test_what_the_pool_asks_per_group_does_not_grow_with_the_number_of_workers() -> None:
    num_asked = 0

    class Asked(FakeGenerator):
        def why_never(self, request: GroupRequest) -> str | None:
            nonlocal num_asked
            num_asked += 1
            return super().why_never(request)

    async def main(num_workers: int) -> None:
        pool = Pool()
        for number in range(num_workers):
            worker = Asked(f"generator-{number}", capacity=6, rng=random.Random(number))
            pool.add(worker)
            worker.version = 0
            pool.serves(worker.name, 0)
        assert sum(len(batch.groups) for batch in await one_period(pool, Ledger(), prompts=400)) == 400

    asked = []
    for num_workers in (2, 20, 200):
        num_asked = 0
        run_virtual(main(num_workers))
        asked.append(num_asked / 400)
    assert max(asked) <= 3


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_with_a_kl_groups_without_advantage_are_left_out_before_the_first_update_alone(
    mode: Literal["sync", "periodic"],
) -> None:
    """The scorer gives every third slot equal rewards. The first of two updates has slots 0 to 5."""
    settings = replace(SETTINGS, mode=mode, elide_at_start=True, updates_per_period=2)
    workers = [generator(f"generator-{number}") for number in range(2)]
    run = run_fake_loop(settings, workers, num_prompts=12, num_periods=2, ledger=Ledger())
    trainer, _, _ = run_virtual(run)
    assert trainer.slots(0) == [1, 2, 4, 5, *range(6, 12)]
    assert trainer.slots(1) == list(range(12))


def test_while_there_is_plenty_a_generator_has_one_group_ahead_of_its_rows() -> None:
    """Rows that get free are filled at once, without a word from the controller; the last groups wait for whoever is
    first."""

    async def main() -> None:
        pool = Pool()
        workers = [generator("generator-0"), generator("generator-1")]
        for worker in workers:
            worker.hang()  # it takes what it gets
            worker.version = 0
            pool.add(worker)
            pool.serves(worker.name, 0)
        harvest = pool.open("train", 0)
        for slot in range(8):
            harvest.submit(
                GroupRequest(
                    stream="train", period=0, slot=slot, samples=tuple(range(6)), token_ids=(1, 2), sampling=SAMPLING
                )
            )
        assert [worker.slots for worker in workers] == [[0, 2], [1, 3]]
        assert len(pool._waiting) == 4
        harvest.close()

    run_virtual(main())
