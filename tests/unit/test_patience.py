"""How long one waits for a word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.patience import FIRST_S, FLOOR_S, Patience


def after(pauses: list[float]) -> Patience:
    patience = Patience()
    for pause in pauses:
        patience.paused(pause)
    return patience


def test_before_the_first_word_one_waits_long_and_after_quick_ones_not() -> None:
    assert Patience().limit_s == FIRST_S
    assert after([0.0, 0.0]).limit_s == FLOOR_S


@given(st.floats(0.01, 100.0), st.integers(1, 200), st.integers(0, 50))
def test_ten_times_the_usual_pause_is_always_waited_for_however_many_words_come_in_bursts(
    usual_s: float, count: int, burst: int
) -> None:
    patience = after(([usual_s] + [0.0] * burst) * count)
    assert patience.limit_s > 10 * usual_s


@given(st.floats(0.5, 5.0), st.integers(50, 300))
def test_a_single_long_pause_makes_nobody_patient_for_ever(usual_s: float, count: int) -> None:
    patience = after([usual_s] * count + [10 * usual_s] + [usual_s] * count)
    assert patience.limit_s < max(FLOOR_S, 20 * usual_s * 3)


@pytest.mark.parametrize("usual_s", [1.0, 5.0])
def test_a_worker_that_became_slower_is_waited_for_in_proportion(usual_s: float) -> None:
    patience = after([usual_s] * 100)
    for _ in range(600):
        patience.paused(10 * usual_s)
    assert patience.limit_s == pytest.approx(20 * 10 * usual_s, rel=0.1)
