"""Generators join, leave, die, hang and dawdle, on a virtual clock: the trainer is handed the same as ever."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.algorithms.catalogue import ALGORITHMS
from onbeat.errors import NoGeneratorsError, UndecodableError, UnverifiedWeightsError, WorkerError
from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings, PeriodicLoader
from onbeat.period import train
from onbeat.pieces import WHOLE, Share
from onbeat.protocols import Generator, Snapshot
from onbeat.rollout.crew import MAX_DEATHS, Crew
from onbeat.rollout.pool import Pool
from onbeat.types import MicroBatch, UpdateTotals
from onbeat.weights.memory import MemoryChannel
from tests.fakes.roles import (
    SAMPLING,
    FakeGenerator,
    FakeScorer,
    FakeTrainer,
    NoEvaluation,
    PromptList,
    Silent,
    make_prompts,
    run_fake_loop,
)
from tests.fakes.virtual_time import run_virtual

SETTINGS = LoaderSettings(
    mode="periodic",
    order="dispatch",
    group_size=8,
    sampling=SAMPLING,
    algorithm=ALGORITHMS["grpo"],
    elide=True,
    pack_tokens=60,
)
NUM_PROMPTS, NUM_PERIODS = 9, 4
FOR_EVER_S = 1e6


@dataclass
class Company:
    """A real crew, pool, channel, loader and loop over fake generators, all of which are kept."""

    seed: int
    max_deaths: int = 10**9
    start_failures: int = 0
    """So many starts fail."""
    slowness: list[float] = field(default_factory=list)
    """Of the first generators."""
    all: list[FakeGenerator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.said: list[str] = []
        self.opened = False
        self.pool = Pool(warn=self.said.append)
        self.channel = MemoryChannel(self.pool)
        say = self.said.append
        self.crew = Crew(self.pool, self.start, self.channel.bring, say, say, self.max_deaths)
        self.trainer = FakeTrainer(random.Random(self.seed))

    def make(self, name: str) -> FakeGenerator:
        number = len(self.all)
        slowness = self.slowness[number] if number < len(self.slowness) else 1.0
        capacity = self.rng.choice((8, 16, 24))
        generator = FakeGenerator(name, capacity, random.Random(self.rng.random()), slowness=slowness)
        self.all.append(generator)
        return generator

    async def start(self, name: str) -> Generator:
        await asyncio.sleep(self.rng.random())
        if self.start_failures > 0 and self.opened:
            self.start_failures -= 1
            raise WorkerError(f"{name} could not be started")
        return self.make(name)

    @property
    def living(self) -> list[FakeGenerator]:
        return [it for it in self.all if not it.dead and not it.stopped and not it.hangs]

    async def run(self, count: int) -> list[MicroBatch | UpdateTotals]:
        observer = Silent()
        loader = PeriodicLoader(SETTINGS, self.pool, FakeScorer(random.Random(self.seed)), Ledger())
        async with asyncio.timeout(FOR_EVER_S):
            try:
                await self.crew.open(count)
                self.opened = True
                await train(
                    num_periods=NUM_PERIODS,
                    prompts_per_period=NUM_PROMPTS,
                    prompts=PromptList(make_prompts(NUM_PROMPTS)),
                    loader=loader,
                    trainer=self.trainer,
                    channel=self.channel,
                    evaluation=NoEvaluation(),
                    observer=observer,
                    saver=observer,
                )
            finally:
                await self.crew.close()
                self.channel.close()
        return self.trainer.log


def calm() -> list[MicroBatch | UpdateTotals]:
    generator = FakeGenerator(name="calm", capacity=16, rng=random.Random(0))
    trainer, _, _ = run_virtual(
        run_fake_loop(SETTINGS, [generator], num_prompts=NUM_PROMPTS, num_periods=NUM_PERIODS, ledger=Ledger())
    )
    return trainer.log


CALM = calm()

events = st.lists(
    st.tuples(
        st.floats(0.0, 400.0),
        st.sampled_from(["kill", "hang", "join", "leave", "scale 1", "scale 2", "scale 4"]),
    ),
    max_size=14,
)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 3), what_happens=events, failures=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_whoever_joins_leaves_dies_or_hangs_the_trainer_is_handed_the_same(
    seed: int, count: int, what_happens: list[tuple[float, str]], failures: int
) -> None:
    async def main() -> tuple[Company, list[MicroBatch | UpdateTotals]]:
        company = Company(seed, start_failures=failures)
        loop = asyncio.get_running_loop()
        for when_s, what in what_happens:
            loop.call_later(when_s, happen, company, what)
        return company, await company.run(count)

    def happen(company: Company, what: str) -> None:
        somebody = company.rng.choice(company.living) if company.living else None
        if what == "join":
            company.crew.join(company.make(f"visitor-{len(company.all)}"))
        elif what.startswith("scale"):
            company.crew.want(int(what.split()[1]))
        elif somebody is not None and somebody.events is not None:
            {"kill": somebody.die, "hang": somebody.hang, "leave": lambda: company.crew.leave(somebody.name)}[what]()

    company, log = run_virtual(main())
    assert log == CALM
    for generator in company.all:
        assert all(active == asked for active, asked in generator.served)  # nobody served what it had not loaded
    hanging = [it for it in company.all if it.hangs]
    assert all(it.dead or not any(it.owed.values()) for it in hanging)  # given up, if somebody waited for it


def test_a_generator_ten_times_as_slow_is_never_given_up_and_its_last_groups_are_helped_with() -> None:
    async def main() -> tuple[Company, list[MicroBatch | UpdateTotals]]:
        company = Company(seed=3, slowness=[10.0])
        return company, await company.run(3)

    company, log = run_virtual(main())
    assert log == CALM
    assert company.pool.counts.lost_workers == 0
    assert company.pool.counts.hedged > 0
    assert company.all[0].num_completed > 0


def test_one_that_hangs_is_given_up_and_replaced() -> None:
    async def main() -> tuple[Company, list[MicroBatch | UpdateTotals]]:
        company = Company(seed=1)
        asyncio.get_running_loop().call_later(30.0, lambda: company.all[0].hang())
        return company, await company.run(1)

    company, log = run_virtual(main())
    assert log == CALM
    assert company.pool.counts.lost_workers == 1
    assert any("generator-0 has been silent for" in line for line in company.said)
    assert company.all[0].dead


def test_one_that_hangs_while_it_loads_is_given_up_and_replaced() -> None:
    async def main() -> tuple[Company, list[MicroBatch | UpdateTotals]]:
        company = Company(seed=1)

        def hang_when_idle() -> None:
            if company.trainer.log and not any(company.all[0].owed.values()):
                company.all[0].hang()
            else:
                asyncio.get_running_loop().call_later(0.1, hang_when_idle)

        asyncio.get_running_loop().call_later(10.0, hang_when_idle)
        return company, await company.run(1)

    company, log = run_virtual(main())
    assert log == CALM
    assert any("generator-0 did not load its weights within" in line for line in company.said)


def test_generators_that_die_one_after_another_end_the_run_with_a_typed_error() -> None:
    async def main() -> None:
        company = Company(seed=1, max_deaths=MAX_DEATHS, start_failures=10**9)
        asyncio.get_running_loop().call_later(5.0, lambda: company.all[0].die())
        await company.run(1)

    with pytest.raises(NoGeneratorsError, match=r"6 generators died one after another; the last: generator-\d+ could"):
        run_virtual(main())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_generators_that_cannot_load_what_is_published_end_the_run_with_a_typed_error(count: int) -> None:
    class Refusing(FakeGenerator):
        async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
            raise WorkerError(f"{self.name} has no room for this model")

    class Poor(Company):
        def make(self, name: str) -> FakeGenerator:
            self.all.append(Refusing(name, 8, random.Random(0)))
            return self.all[-1]

    company = Poor(seed=1, max_deaths=MAX_DEATHS)
    with pytest.raises(NoGeneratorsError, match=r"\d generators died one after another; the last: .* has no room"):
        run_virtual(company.run(count))
    assert MAX_DEATHS < len(company.all) <= MAX_DEATHS + 1 + count


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_that_no_generator_can_decode_ends_the_run_and_nobody_is_started_again(count: int) -> None:
    class Unable(FakeGenerator):
        async def activate(self, version: int) -> None:
            raise UndecodableError("no such attention")

    class Poor(Company):
        def make(self, name: str) -> FakeGenerator:
            self.all.append(Unable(name, 8, random.Random(0)))
            return self.all[-1]

    company = Poor(seed=1, max_deaths=MAX_DEATHS)
    with pytest.raises(UndecodableError, match="no such attention"):
        run_virtual(company.run(count))
    assert len(company.all) == count


@pytest.mark.parametrize("when", ["starting", "activating"])
def test_a_generator_that_comes_later_and_cannot_decode_the_model_is_one_more_death(when: str) -> None:
    class Unable(FakeGenerator):
        async def activate(self, version: int) -> None:
            raise UndecodableError("no such attention")

    class Later(Company):
        async def start(self, name: str) -> Generator:
            if not self.opened:
                return await super().start(name)
            if when == "starting":
                raise UndecodableError("no such attention")
            self.all.append(Unable(name, 8, random.Random(0)))
            return self.all[-1]

    async def main(count: int) -> list[MicroBatch | UpdateTotals]:
        company = Later(seed=1, max_deaths=MAX_DEATHS)
        asyncio.get_running_loop().call_later(5.0, lambda: company.all[0].die())
        return await company.run(count)

    assert run_virtual(main(2)) == CALM
    with pytest.raises(NoGeneratorsError, match="the last: no such attention"):
        run_virtual(main(1))


def test_all_generators_of_a_host_may_die_at_once() -> None:
    count = MAX_DEATHS + 3

    async def main() -> tuple[Company, list[MicroBatch | UpdateTotals]]:
        company = Company(seed=1, max_deaths=MAX_DEATHS)

        def lose_the_host() -> None:
            for generator in company.living:
                generator.die()

        asyncio.get_running_loop().call_later(5.0, lose_the_host)
        return company, await company.run(count)

    company, log = run_virtual(main())
    assert log == CALM
    assert company.pool.counts.lost_workers >= count


def test_deaths_with_completions_between_them_are_forgiven() -> None:
    async def main() -> tuple[Company, list[MicroBatch | UpdateTotals]]:
        company = Company(seed=1, max_deaths=MAX_DEATHS)

        def kill_now_and_then() -> None:
            for generator in company.living:
                if generator.num_completed >= 3:
                    generator.die()
            asyncio.get_running_loop().call_later(1.0, kill_now_and_then)

        kill_now_and_then()
        return company, await company.run(1)

    company, log = run_virtual(main())
    assert log == CALM
    assert company.pool.counts.lost_workers > 2 * MAX_DEATHS


def test_those_that_die_before_they_have_done_anything_are_replaced_less_and_less_often() -> None:
    async def main() -> tuple[list[float], list[MicroBatch | UpdateTotals]]:
        company = Company(seed=1)
        seen: list[float] = []

        def kill_newcomers() -> None:
            for generator in company.living[1:]:
                seen.append(asyncio.get_running_loop().time())
                generator.die()
            asyncio.get_running_loop().call_later(0.05, kill_newcomers)

        asyncio.get_running_loop().call_later(2.0, kill_newcomers)
        return seen, await company.run(2)

    seen, log = run_virtual(main())
    assert log == CALM
    pauses = [after - before for before, after in itertools.pairwise(seen)]
    assert len(pauses) > 6
    assert max(pauses[:2]) < 2.0
    assert all(10.0 <= pause < 12.0 for pause in pauses[6:])


@pytest.mark.parametrize("whom", [0, 1])
def test_one_that_is_retired_while_weights_are_published_is_not_waited_for(whom: int) -> None:
    async def main() -> tuple[Company, list[float]]:
        company = Company(seed=4)
        await company.crew.open(2)
        company.all[whom].hang()  # so it would not answer
        clock = asyncio.get_running_loop().time
        began_s = clock()
        asyncio.get_running_loop().call_later(0.5, company.crew.leave, company.all[whom].name)
        company.crew.want(2)
        await company.channel.publish(await company.trainer.snapshot(0))
        took_s = clock() - began_s
        await company.crew.close()
        company.channel.close()
        return company, [took_s]

    company, (took_s,) = run_virtual(main())
    assert took_s < 5.0
    assert company.pool.counts.lost_workers == 0


def test_when_the_last_generator_leaves_and_none_is_coming_whoever_waits_is_told() -> None:
    async def main() -> None:
        company = Company(seed=1, max_deaths=0, start_failures=10**9)
        asyncio.get_running_loop().call_later(5.0, company.crew.join, company.make("visitor"))
        asyncio.get_running_loop().call_later(10.0, lambda: company.all[1].die())
        asyncio.get_running_loop().call_later(15.0, company.crew.leave, "visitor")
        await company.run(1)

    with pytest.raises(NoGeneratorsError, match="no generator is left"):
        run_virtual(main())


def test_a_joiner_too_slow_for_its_version_begins_anew_and_one_with_wrong_bytes_of_the_current_one_ends_the_run() -> (
    None
):
    class Slow(FakeGenerator):
        """The memory it reads is written again while it is at it, so that it comes to another digest."""

        async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
            if not self.staged_before:
                self.staged_before = True
                await asyncio.sleep(5.0)
                raise UnverifiedWeightsError("other bytes", period=snapshot.version, worker=self.name)
            await super().stage(snapshot, share)

        staged_before = False

    async def main(publishes: int) -> Slow:
        company = Company(seed=1)
        await company.crew.open(1)
        await company.channel.publish(await company.trainer.snapshot(0))
        joiner = Slow("joiner", 8, random.Random(0))
        company.pool.add(joiner)
        bringing = asyncio.create_task(company.channel.bring(joiner))
        await asyncio.sleep(0.1)
        for version in range(1, 1 + publishes):
            await company.channel.publish(await company.trainer.snapshot(version))
        try:
            await bringing
        finally:
            await company.crew.close()
            company.channel.close()
        return joiner

    assert run_virtual(main(publishes=2)).version == 2
    with pytest.raises(UnverifiedWeightsError):
        run_virtual(main(publishes=0))


def test_a_leaving_generator_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def main() -> tuple[Company, int, list[MicroBatch | UpdateTotals]]:
        company = Company(seed=2)
        asked: list[int] = []

        def leave() -> None:
            asked.append(len(company.all[0].slots))
            company.crew.leave(company.all[0].name)

        asyncio.get_running_loop().call_later(15.0, leave)
        log = await company.run(2)
        return company, asked[0], log

    company, asked, log = run_virtual(main())
    assert log == CALM
    assert company.all[0].stopped
    assert len(company.all[0].slots) == asked
    assert company.pool.counts.resent == 0


def test_a_group_is_shared_out_when_more_generators_are_idle_than_groups_wait() -> None:
    async def main() -> Company:
        company = Company(seed=2)
        await company.crew.open(3)
        for generator in company.all:
            generator.version = 0
            company.pool.serves(generator.name, 0)
        loader = PeriodicLoader(SETTINGS, company.pool, FakeScorer(random.Random(0)), Ledger())
        period = loader.period(0, make_prompts(1))
        async for microbatch in period:
            await company.trainer.accumulate(microbatch)
        await company.crew.close()
        return company

    company = run_virtual(main())
    assert sum(len(generator.slots) for generator in company.all) == 2  # 8 samples, at least 4 each
