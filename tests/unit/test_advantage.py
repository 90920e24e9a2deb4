"""Group advantages: centred, of unit spread, exactly zero where there is nothing to learn, blind to other groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.algorithms.grpo import centred, scaled
from onbeat.group.assemble import rewards as rewards_of
from onbeat.group.assemble import train_group
from onbeat.types import Completion, Group, Prompt, Rollout


def group_advantages(rewards: Sequence[float], *, scale: bool) -> tuple[float, ...]:
    return scaled(rewards) if scale else centred(rewards)


REWARD = st.floats(-1000.0, 1000.0)
GROUP = st.lists(REWARD, min_size=2, max_size=64)


@settings(deadline=None)
@given(rewards=GROUP, scale=st.booleans())
def test_advantages_are_those_of_the_formula(rewards: list[float], scale: bool) -> None:
    mean = sum(map(Fraction, rewards)) / len(rewards)  # exact: a rounded mean of equal rewards is none of them
    expected = np.array([float(Fraction(reward) - mean) for reward in rewards])
    if scale:
        expected = expected / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards, scale=scale), expected, rtol=1e-6, atol=1e-9)


@settings(deadline=None)
@given(rewards=GROUP, scale=st.booleans())
def test_advantages_have_mean_zero_and_the_order_of_the_rewards(rewards: list[float], scale: bool) -> None:
    advantages = group_advantages(rewards, scale=scale)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    for i in range(len(rewards) - 1):
        assert (advantages[i] - advantages[i + 1]) * (rewards[i] - rewards[i + 1]) >= 0.0


@settings(deadline=None)
@given(rewards=st.lists(st.integers(-50, 50), min_size=2, max_size=64).filter(lambda rewards: len(set(rewards)) > 1))
def test_scaled_advantages_have_unit_spread(rewards: list[int]) -> None:
    assert np.std(group_advantages(rewards, scale=True), ddof=1) == pytest.approx(1.0, abs=1e-3)


@settings(deadline=None)
@given(reward=st.floats(allow_nan=False, allow_infinity=False), count=st.integers(0, 64), scale=st.booleans())
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, count: int, scale: bool) -> None:
    assert group_advantages([reward] * count, scale=scale) == (0.0,) * count


@pytest.mark.parametrize("scale", [True, False])
def test_fewer_than_two_rewards_have_no_advantage(scale: bool) -> None:
    assert group_advantages([], scale=scale) == ()
    assert group_advantages([7.0], scale=scale) == (0.0,)


def test_a_tiny_spread_is_not_blown_up() -> None:
    assert group_advantages([0.0, 1e-9], scale=True) == pytest.approx((-5e-6, 5e-6), rel=1e-3)


def rollout(sample: int, reward: float | None) -> Rollout:
    completion = Completion(
        stream="train",
        period=0,
        slot=4,
        sample=sample,
        version=0,
        token_ids=(sample, 9),
        sampler_logprobs=(-1.0, -float(sample)),
        finish_reason="stop",
    )
    return Rollout(completion=completion, text="", reward=reward, rewards=(reward,))


@settings(deadline=None)
@given(rewards=st.lists(st.none() | REWARD, max_size=16), scale=st.booleans())
def test_unscorable_rollouts_are_out_of_the_group_and_of_its_baseline(rewards: list[float | None], scale: bool) -> None:
    prompt = Prompt(prompt_id="p", token_ids=(1, 2, 3), source="", columns={})
    group = Group(slot=4, prompt=prompt, rollouts=tuple(rollout(n, reward) for n, reward in enumerate(rewards)))
    advantages = group_advantages(rewards_of(group, max_new_tokens=8, overlong_buffer=0), scale=scale)
    result = train_group(group, advantages, masks_truncated=False)
    scorable = [n for n, reward in enumerate(rewards) if reward is not None]
    assert (result.slot, result.prompt_ids) == (4, (1, 2, 3))
    assert result.completion_ids == tuple((n, 9) for n in scorable)
    assert result.sampler_logprobs == tuple((-1.0, -float(n)) for n in scorable)
    assert result.advantages == group_advantages([r for r in rewards if r is not None], scale=scale)
    assert result.num_tokens == 3 + 2 * len(scorable)
