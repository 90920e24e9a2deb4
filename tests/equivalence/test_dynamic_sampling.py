"""Groups that teach nothing are replaced within the period: which, and by what, does not depend on time or workers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from onbeat.algorithms.catalogue import ALGORITHMS
from onbeat.errors import InputError
from onbeat.ledger import Entry, Ledger
from onbeat.loader import LoaderSettings, PeriodicLoader
from onbeat.rollout.pool import Pool
from onbeat.types import Completion, MicroBatch, Prompt, Rollout, TrainGroup
from tests.fakes.roles import SAMPLING, FakeGenerator, FakeScorer, make_prompts
from tests.fakes.virtual_time import run_virtual

PROMPTS = make_prompts(200)


@dataclass
class Source:
    """Prompts in their order, and how many were taken."""

    position: int = 0

    def take(self, num_prompts: int) -> list[Prompt]:
        taken = PROMPTS[self.position : self.position + num_prompts]
        self.position += num_prompts
        return taken


@dataclass
class Teaching(FakeScorer):
    """Rewards differ within a group only for the slots that teach."""

    teaching: frozenset[int] = frozenset()

    def _rollout(self, completion: Completion) -> Rollout:
        reward = float(completion.sample % 2) if completion.slot in self.teaching else 0.5
        return Rollout(completion=completion, text="", reward=reward, rewards=(reward,))


def loader_settings(mode: str, updates: int, max_attempts: float) -> LoaderSettings:
    return LoaderSettings(
        mode=mode,  # type: ignore[arg-type]
        order="dispatch",
        group_size=4,
        sampling=SAMPLING,
        algorithm=replace(ALGORITHMS["dapo"], dynamic_sampling=True),
        elide=True,
        updates_per_period=updates,
        pack_tokens=90,
        max_attempts=max_attempts,
    )


Result = tuple[list[MicroBatch], int, list[Entry]]


def run_period(
    settings_: LoaderSettings,
    teaching: frozenset[int],
    num_prompts: int,
    seed: int,
    num_generators: int,
    scorer_type: type[Teaching] = Teaching,
) -> Result:
    async def main() -> Result:
        rng = random.Random(seed)
        pool, entries = Pool(), []

        class Remembering(Ledger):
            def close(self, num_slots: int) -> list[Entry]:
                entries.extend(super().close(num_slots))
                return entries

        for number in range(num_generators):
            worker = FakeGenerator(f"generator-{number}", rng.choice((4, 8, 12)), random.Random(rng.random()))
            pool.add(worker)
            worker.version = 0
            pool.serves(worker.name, 0)
        scorer = scorer_type(random.Random(seed), teaching=teaching)
        loader = PeriodicLoader(settings_, pool, scorer, Remembering())
        source = Source()
        batches = [batch async for batch in loader.period(0, source.take(num_prompts), more=source)]
        return batches, source.position, entries

    return run_virtual(main())


def slots(batches: Sequence[MicroBatch]) -> list[int]:
    groups: list[TrainGroup] = [group for batch in batches for group in batch.groups]
    return [group.slot for group in groups]


@given(
    teaching=st.frozensets(st.integers(0, 60), max_size=50),
    num_prompts=st.integers(2, 9),
    updates=st.integers(1, 2),
    seeds=st.tuples(st.integers(0, 999), st.integers(0, 999)),
    num_generators=st.integers(1, 3),
    mode=st.sampled_from(["sync", "periodic"]),
)
@settings(max_examples=80)
def test_the_first_that_teach_are_trained_whatever_the_timing_and_the_cursor_ends_after_the_last_of_them(
    teaching: frozenset[int], num_prompts: int, updates: int, seeds: tuple[int, int], num_generators: int, mode: str
) -> None:
    limit = 4 * num_prompts
    first = run_period(loader_settings("sync", updates, 4.0), teaching, num_prompts, seeds[0], 1)
    second = run_period(loader_settings(mode, updates, 4.0), teaching, num_prompts, seeds[1], num_generators)
    assert first == second
    batches, position, entries = first
    good = [slot for slot in range(limit) if slot in teaching][:num_prompts]
    assert slots(batches) == good
    assert position == (good[-1] + 1 if len(good) == num_prompts else limit)
    assert [entry.outcome for entry in entries] == [
        "trained" if slot in teaching else "replaced" for slot in range(position)
    ]
    closes = [batch.closes for batch in batches if batch.closes is not None]
    assert len(closes) == updates
    assert sum(totals.num_groups for totals in closes) == len(good)


@pytest.mark.parametrize("max_attempts", [1.0, 1.5, 3.0])
def test_a_period_in_which_nothing_teaches_ends_at_the_limit(max_attempts: float) -> None:
    batches, position, entries = run_period(loader_settings("periodic", 1, max_attempts), frozenset(), 8, 0, 2)
    assert slots(batches) == []
    assert position == 8 * max_attempts
    assert {entry.outcome for entry in entries} == {"replaced"}


def test_updates_have_equal_shares_of_what_is_accepted() -> None:
    teaching = frozenset(range(0, 40, 2))
    batches, _, _ = run_period(loader_settings("periodic", 2, 4.0), teaching, 8, 0, 2)
    by_update = [[group.slot for batch in batches if batch.update == u for group in batch.groups] for u in (0, 1)]
    assert by_update == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_a_group_whose_only_lessons_are_masked_is_replaced() -> None:
    """Every completion is cut off, and those have no loss."""

    class CutOff(Teaching):
        def _rollout(self, completion: Completion) -> Rollout:
            rollout = super()._rollout(completion)
            reason = "length" if completion.slot < 3 else "stop"
            return structs.replace(rollout, completion=structs.replace(completion, finish_reason=reason))

    masking = replace(loader_settings("periodic", 1, 4.0), masks_truncated=True)
    batches, position, entries = run_period(masking, frozenset(range(40)), 4, 0, 2, scorer_type=CutOff)
    assert slots(batches) == [3, 4, 5, 6]
    assert position == 7
    assert [entry.outcome for entry in entries] == ["replaced"] * 3 + ["trained"] * 4


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_what_was_replaced_has_no_part_in_a_normalisation_over_the_period(mode: str) -> None:
    algorithm = replace(ALGORITHMS["reinforce_pp"], dynamic_sampling=True)
    every = frozenset(range(0, 40, 2))
    some = replace(loader_settings(mode, 1, 4.0), algorithm=algorithm)
    batches, _, _ = run_period(some, every, 4, 0, 2)
    advantages = [value for batch in batches for group in batch.groups for value in group.advantages]
    assert len(advantages) == 4 * 4
    assert statistics.stdev(advantages) == pytest.approx(1.0, rel=1e-6)


def test_an_advantage_that_fails_ends_the_period_with_its_error() -> None:
    def fails(rewards: Sequence[float]) -> tuple[float, ...]:
        raise InputError("no advantage today")

    failing = replace(loader_settings("periodic", 1, 4.0), algorithm=replace(ALGORITHMS["dapo"], advantages=fails))
    with pytest.raises(InputError, match="no advantage today"):
        run_period(failing, frozenset(), 4, 0, 2)
