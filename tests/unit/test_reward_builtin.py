"""The built-in rewards."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.reward.builtin import answer_number, exact_match, last_number, matches_pattern, numeric_answer, text_of

NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12)


def without_zeros(number: Decimal) -> str:
    return f"{number:f}".rstrip("0").rstrip(".")


def with_dollar(number: Decimal) -> str:
    return f"{number:,f}".replace("-", "-$") if number < 0 else f"${number:,f}"


FORMATS = [lambda n: f"{n:f}", lambda n: f"{n:,f}", with_dollar, without_zeros, lambda n: f"{n:f}".replace("-", "−")]
PHRASES = [
    "{}",
    "The answer is {}.",
    "2 + 2 = {}",
    "so, **{}**",
    "\\boxed{{{}}}",
    "1, 2, {}, done",
    "it's ({})\n",
    "3-{}",
]


@given(number=NUMBERS, write=st.sampled_from(FORMATS), answer=st.sampled_from(FORMATS), phrase=st.sampled_from(PHRASES))
def test_a_number_is_recognised_however_it_is_written(number, write, answer, phrase) -> None:  # type: ignore[no-untyped-def]
    completion = phrase.format(write(number))
    assert numeric_answer([completion], [answer(number)]) == [1.0]
    assert numeric_answer([completion], [answer(number + Decimal("0.001"))]) == [0.0]


@given(number=st.integers(-(10**9), 10**9))
def test_the_answer_may_be_a_number_and_the_completion_gsm8k(number: int) -> None:
    assert numeric_answer([f"so\n#### {number}"] * 2, [number, f"Because.\n#### {number:,}"]) == [1.0, 1.0]
    assert numeric_answer([f"{number}.0"], [float(number)]) == [1.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5-3", "3"), ("5 - 3", "3"), ("5 -3", "-3"), ("= -3", "-3"), ("x = -.5", "-0.5"), ("$-3", "-3"), ("-$3", "-3"),
        ("+4", "4"), ("1,2,3", "3"), ("1,000,000", "1000000"), ("12,345.60", "12345.6"), ("1,0000", "0"), ("42.", "42"),
        ("3.14.15", "15"), ("6e3", "6000"), ("6.5E-2", "0.065"), ("2ex", "2"), ("50%", "50"), ("007", "7"), ("-0", "0"),
        ("(−7)", "-7"), ("9" * 50, "9" * 50),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_a_completion_without_a_number_is_wrong_and_not_an_error() -> None:
    assert numeric_answer(["", "none", "-", "$.", "…"], [0] * 5) == [0.0] * 5


@pytest.mark.parametrize("answer", ["1/2", "seven", "", "7 or 8", True, "#### x"])
def test_an_answer_that_is_no_number_is_an_error_and_not_a_zero(answer: object) -> None:
    with pytest.raises(ValueError, match=r"the column 'answer' holds .* which is no number"):
        answer_number(answer)


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match([" Paris\n", "paris", "Pa ris", "7"], ["Paris ", "Paris", "Paris", 7]) == [1.0, 0.0, 0.0, 1.0]


def test_format_wants_the_whole_completion_and_spans_lines() -> None:
    pattern = "<think>.*</think>.*"
    texts = ["<think>a\nb</think> 7\n", "well, <think>a</think> 7", "<think>a", ""]
    assert matches_pattern(texts, [pattern] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [exact_match, numeric_answer, matches_pattern])
def test_a_null_column_means_does_not_apply(reward) -> None:  # type: ignore[no-untyped-def]
    assert reward(["7", "7"], [None, "7"]) == [None, 1.0]


def test_a_chat_completion_is_the_content_of_its_last_message() -> None:
    assert text_of([{"role": "tool", "content": "x"}, {"role": "assistant", "content": "7"}]) == text_of("7") == "7"
