"""The autoscaler over generators of a set pace: no clock but the one that is computed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.controller import autoscaling
from onbeat.rollout.autoscale import Autoscaler, Load


def period_s(count: int, generating_s: float, training_s: float, groups: int) -> float:
    """The design's formula: whoever is slower, and the first or last group of the other."""
    alone_s = generating_s / count
    return max(alone_s + training_s / groups, alone_s / groups + training_s)


def simulate(autoscaler: Autoscaler, works: list[float], training_s: float, cores: float = math.inf) -> list[int]:
    """The count in each period. `works`: seconds one generator alone would need; beyond `cores` nobody gets faster."""
    count, counts = 1, []
    for work_s in works:
        counts.append(count)
        wall_s = work_s / min(count, cores)
        decision = autoscaler.decide(Load(count, wall_s * count, training_s, 1000))
        count = decision.count if decision is not None else count
    return counts


@given(
    before=st.floats(2.0, 20.0), training_s=st.floats(2.0, 40.0), groups=st.integers(8, 64), highest=st.integers(2, 12)
)
def test_when_generation_becomes_four_times_as_long_it_settles_in_five_periods_near_the_best_fixed_count(
    before: float, training_s: float, groups: int, highest: int
) -> None:
    counts = simulate(Autoscaler(1, highest), [before] * 10 + [4 * before] * 15, training_s)
    for part, work_s in ((counts[:10], before), (counts[10:], 4 * before)):
        assert len(set(part[5:])) == 1, counts
        best = min(period_s(count, work_s, training_s, groups) for count in range(1, highest + 1))
        assert period_s(part[-1], work_s, training_s, groups) <= 1.15 * best


def test_it_shrinks_again_when_generators_idle() -> None:
    counts = simulate(Autoscaler(1, 4), [40.0] * 8 + [10.0] * 8, training_s=10.0)
    assert counts[7] == 4
    assert counts[-1] == 1


def test_a_single_odd_period_changes_nothing() -> None:
    counts = simulate(Autoscaler(1, 4), [9.0] * 5 + [80.0] + [9.0] * 5, training_s=10.0)
    assert set(counts) == {1}


def test_more_generators_that_bring_nothing_are_taken_back_and_not_tried_again_soon() -> None:
    autoscaler = Autoscaler(1, 4)
    counts = simulate(autoscaler, [80.0] * 20, training_s=10.0, cores=1)
    assert max(counts) > 1
    assert counts[5:] == [1] * 15


def test_a_runs_records_move_its_crew_and_every_decision_is_told() -> None:
    """What the controller does after each period, with generators that share nothing."""
    wanted, told = [1], []
    session: Any = SimpleNamespace(
        config=SimpleNamespace(generator=SimpleNamespace(bounds=(1, 4))),
        crew=SimpleNamespace(num_visitors=0, wanted=1, want=wanted.append),
    )
    after_period = autoscaling(session, SimpleNamespace(decided=told.append))  # type: ignore[arg-type]
    for work_s in [10.0] * 6 + [40.0] * 6 + [10.0] * 6:
        count = session.crew.wanted = wanted[-1]
        after_period(
            {
                "num_generators": count,
                "generators_busy_s": work_s / count,
                "training_s": 10.0,
                "num_generated_tokens": 1000,
            }
        )
    assert wanted == [1, 4, 1]
    assert told == [
        "4 generators instead of 1: they work 40.0 s a period in all, the trainer 10.0 s",
        "1 generators instead of 4: they work 10.0 s a period in all, the trainer 10.0 s",
    ]


def test_who_came_by_himself_counts_and_is_not_sent_away() -> None:
    """Two of ours and a visitor are three; two are enough, so one of ours goes."""
    wanted: list[int] = []
    session: Any = SimpleNamespace(
        config=SimpleNamespace(generator=SimpleNamespace(bounds=(1, 4))),
        crew=SimpleNamespace(num_visitors=1, wanted=2, want=wanted.append),
    )
    after_period = autoscaling(session, SimpleNamespace(decided=lambda why: None))  # type: ignore[arg-type]
    for _ in range(6):
        if not wanted:
            after_period(
                {"num_generators": 3, "generators_busy_s": 20 / 3, "training_s": 11.0, "num_generated_tokens": 1000}
            )
    assert wanted == [1]


def test_a_fixed_number_stays_whatever_the_records_say() -> None:
    wanted: list[int] = []
    session: Any = SimpleNamespace(
        config=SimpleNamespace(generator=SimpleNamespace(bounds=(2, 2))),
        crew=SimpleNamespace(num_visitors=0, wanted=2, want=wanted.append),
    )
    after_period = autoscaling(session, SimpleNamespace(decided=pytest.fail))  # type: ignore[arg-type]
    for _ in range(6):
        after_period({"num_generators": 2, "generators_busy_s": 40.0, "training_s": 1.0, "num_generated_tokens": 1000})
    assert wanted == []


@pytest.mark.parametrize("training_s", [0.0, 1e-12])
def test_a_trainer_without_work_wants_all_there_are(training_s: float) -> None:
    assert simulate(Autoscaler(2, 6), [80.0] * 6, training_s)[-1] == 6
