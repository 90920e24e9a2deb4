"""The loop over fakes: whatever the timing, order, deaths and repetitions, the trainer is handed the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.algorithms.catalogue import ALGORITHMS
from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings
from onbeat.rollout.pool import Pool
from onbeat.types import MicroBatch, UpdateTotals
from tests.fakes.roles import SAMPLING, FakeGenerator, FakeTrainer, run_fake_loop
from tests.fakes.virtual_time import run_virtual


@dataclass(frozen=True)
class Case:
    num_prompts: int
    group_size: int
    updates: int
    pack_tokens: int
    num_ranks: int
    elide: bool
    unscorable: frozenset[tuple[int, int]]


cases = st.builds(
    Case,
    num_prompts=st.integers(4, 13),
    group_size=st.integers(2, 5),
    updates=st.integers(1, 4),
    pack_tokens=st.sampled_from([1, 30, 60, 1000]),
    num_ranks=st.integers(1, 3),
    elide=st.booleans(),
    unscorable=st.frozensets(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=12),
)


@dataclass(frozen=True)
class Chaos:
    """How the generators behave: a function of one seed."""

    seed: int
    num_generators: int
    deaths: int
    duplicates: float
    late: float

    def generators(self, group_size: int) -> list[FakeGenerator]:
        rng = random.Random(self.seed)
        return [
            FakeGenerator(
                name=f"generator-{number}",
                capacity=rng.randint(group_size, 3 * group_size),
                rng=random.Random(rng.random()),
                duplicate_share=self.duplicates,
                late_share=self.late,
                dies_after=rng.randint(1, 12) if number < self.deaths else None,
                talks_after_death=rng.random() < 0.5,
            )
            for number in range(self.num_generators)
        ]


@st.composite
def chaos(draw: st.DrawFn) -> Chaos:
    num_generators = draw(st.integers(1, 4))
    return Chaos(
        seed=draw(st.integers(0, 10**6)),
        num_generators=num_generators,
        deaths=draw(st.integers(0, num_generators - 1)),
        duplicates=draw(st.sampled_from([0.0, 0.3])),
        late=draw(st.sampled_from([0.0, 0.3])),
    )


def loader_settings(case: Case, mode: str = "periodic", order: str = "dispatch") -> LoaderSettings:
    return LoaderSettings(
        mode=mode,  # type: ignore[arg-type]
        order=order,  # type: ignore[arg-type]
        group_size=case.group_size,
        sampling=SAMPLING,
        algorithm=ALGORITHMS["grpo"],
        elide=case.elide,
        updates_per_period=case.updates,
        pack_tokens=case.pack_tokens,
        num_ranks=case.num_ranks,
    )


NUM_PERIODS = 3


def run(
    case: Case, behaviour: Chaos, ledger: Path | None = None, **how: str
) -> tuple[FakeTrainer, Pool, list[FakeGenerator]]:
    generators = behaviour.generators(case.group_size)
    trainer, pool, _ = run_virtual(
        run_fake_loop(
            loader_settings(case, **how),
            generators,
            num_prompts=case.num_prompts,
            num_periods=NUM_PERIODS,
            ledger=Ledger(ledger),
            seed=behaviour.seed,
            unscorable=case.unscorable,
        )
    )
    return trainer, pool, generators


CALM = Chaos(seed=0, num_generators=1, deaths=0, duplicates=0.0, late=0.0)


@given(case=cases, first=chaos(), second=chaos())
@settings(max_examples=150)
def test_sync_and_periodic_hand_the_trainer_the_same_sequence_whatever_happens(
    case: Case, first: Chaos, second: Chaos, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ledgers")
    undisturbed, _, _ = run(case, CALM, folder / "calm", mode="sync")
    periodic, pool, generators = run(case, first, folder / "periodic", mode="periodic")
    sync, _, _ = run(case, second, folder / "sync", mode="sync")
    assert periodic.log == undisturbed.log
    assert sync.log == undisturbed.log
    assert (folder / "periodic").read_bytes() == (folder / "calm").read_bytes() == (folder / "sync").read_bytes()
    assert pool.counts.lost_workers == sum(generator.dead for generator in generators)
    assert all(active == asked for generator in generators for active, asked in generator.served)


@given(case=cases, behaviour=chaos())
@settings(max_examples=100)
def test_each_slot_is_trained_once_and_in_slot_order(case: Case, behaviour: Chaos) -> None:
    case = replace(case, elide=False, unscorable=frozenset())
    trainer, _, _ = run(case, behaviour)
    for period in range(NUM_PERIODS):
        assert trainer.slots(period) == list(range(case.num_prompts))


@given(case=cases, behaviour=chaos())
@settings(max_examples=100)
def test_completion_order_trains_the_same_groups_in_the_same_updates(case: Case, behaviour: Chaos) -> None:
    in_order, _, _ = run(case, CALM)
    by_arrival, _, _ = run(case, behaviour, order="completion")
    assert updates(by_arrival) == updates(in_order)


def updates(trainer: FakeTrainer) -> dict[tuple[int, int], tuple[list[object], UpdateTotals]]:
    """Per (period, update): its groups sorted by slot, and its denominators."""
    found: dict[tuple[int, int], tuple[list[object], UpdateTotals]] = {}
    groups: list[object] = []
    for item in trainer.log:
        if isinstance(item, MicroBatch):
            groups += item.groups
            if item.closes is not None:
                found[item.period, item.update] = (sorted(groups, key=lambda g: g.slot), item.closes)  # type: ignore[attr-defined]
                groups = []
    return found


@given(case=cases)
@settings(max_examples=50)
def test_denominators_count_elided_groups_and_leave_out_unscorable_rollouts(case: Case) -> None:
    trainer, _, _ = run(case, CALM)
    totals = [item for item in trainer.log if isinstance(item, UpdateTotals)]
    assert len(totals) == NUM_PERIODS * case.updates
    real = {(slot, sample) for slot, sample in case.unscorable if slot < case.num_prompts and sample < case.group_size}
    per_period = totals[: case.updates]
    assert sum(total.num_groups for total in per_period) == case.num_prompts
    assert sum(total.num_sequences for total in per_period) == case.num_prompts * case.group_size - len(real)


def test_faults_really_fire() -> None:
    """Guards the tests above: with these settings workers die, and duplicate and late messages arrive."""
    case = Case(12, 4, 1, 60, 1, True, frozenset())
    _, pool, generators = run(case, Chaos(seed=3, num_generators=4, deaths=3, duplicates=0.3, late=0.3))
    assert sum(generator.dead for generator in generators) == 3
    assert pool.counts.duplicate > 0
    assert pool.counts.late > 0
    assert pool.counts.resent > 0


def test_periodic_trains_the_first_group_before_the_last_is_generated_and_sync_does_not() -> None:
    case = Case(12, 4, 1, 1, 1, False, frozenset())
    starts = {}
    for mode in ("periodic", "sync"):
        trainer, _, generators = run(case, CALM, mode=mode)
        assert generators[0].num_completed == NUM_PERIODS * 12 * 4
        starts[mode] = trainer.began_s[0]
    assert starts["periodic"] < starts["sync"]
