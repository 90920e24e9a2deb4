"""What a reward function may return, and the sentence about everything else."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.functions import raised
from onbeat.reward.functions import RewardError, checked

REWARDS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)


@given(values=st.lists(REWARDS), container=st.sampled_from([list, tuple]))
def test_finite_numbers_and_none_come_back_as_they_are(values: list[Any], container: type) -> None:
    rewards = checked(container(values), len(values))
    assert rewards == values
    assert all(reward is None or type(reward) is float for reward in rewards)


@given(
    values=st.lists(REWARDS, min_size=1), data=st.data(), bad=st.sampled_from([math.nan, math.inf, -math.inf, "1", []])
)
def test_one_bad_value_among_good_ones_is_found_and_its_row_named(values: list[Any], data: Any, bad: object) -> None:
    row = data.draw(st.integers(0, len(values)))
    values.insert(row, bad)
    with pytest.raises(RewardError, match=f" in row {row}"):
        checked(values, len(values))


@given(num_values=st.integers(0, 9), num_rows=st.integers(0, 9))
def test_the_wrong_length_is_told_with_both_numbers(num_values: int, num_rows: int) -> None:
    if num_values == num_rows:
        assert checked([1.0] * num_values, num_rows) == [1.0] * num_values
    else:
        with pytest.raises(RewardError, match=f"^returned {num_values} values for {num_rows} completions$"):
            checked([1.0] * num_values, num_rows)


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.0, 0.0]),
        np.array([1, 0]),
        np.array([True, False]),
        [np.float32(1), np.int64(0)],
        [np.bool_(True), np.array(0.0)],
        [Fraction(1), np.array([0.0])],
    ],
)
def test_arrays_and_their_scalars_are_numbers(values: object) -> None:
    assert checked(values, 2) == [1.0, 0.0]


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (None, "returned None, not a list of 2 numbers"),
        ("ab", "returned a str ('ab'), not a list of 2 numbers"),
        (1.0, "returned a float (1.0), not a list of 2 numbers"),
        (np.float64(1.0), "returned a float (1.0), not a list of 2 numbers"),
        ({0: 1.0, 1: 1.0}, "returned a dict ({0: 1.0, 1: 1.0}), not a list of 2 numbers"),
        ({1.0}, "returned a set ({1.0}), not a list of 2 numbers"),
        (np.zeros((2, 2)), "returned a list ([0.0, 0.0]) in row 0, not a number or None"),
        ([1.0, 1j], "returned a complex (1j) in row 1, not a number or None"),
        ([1.0, Unshowable()], "returned a Unshowable (its repr fails) in row 1, not a number or None"),
        ([1.0, "x" * 1000], f"returned a str ('{'x' * 78}…) in row 1, not a number or None"),
        ([1.0, math.nan], "returned NaN in row 1"),
        ([np.float32("inf"), 1.0], "returned an infinite number in row 0"),
        ([10**400, 1.0], "returned an infinite number in row 0"),
    ],
)
def test_anything_else_is_an_error_that_says_what_came_back(values: object, sentence: str) -> None:
    with pytest.raises(RewardError) as error:
        checked(values, 2)
    assert str(error.value) == sentence


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_is_told_in_one_line_even_if_it_cannot_be_printed() -> None:
    assert raised(ValueError("two\nlines")) == "ValueError: two lines"
    assert raised(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert raised(UnprintableError()) == "UnprintableError: its message cannot be shown"
    assert len(raised(ValueError("x" * 10_000))) < 400
