"""Every algorithm against a straightforward implementation: its advantages, its loss, its gradient.

The other implementation goes completion by completion and token by token in Python, in float64, from the formulas of
the papers; it shares nothing with ours but the formulas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.algorithms.base import Tokens
from onbeat.algorithms.catalogue import ALGORITHMS, algorithm_of
from onbeat.algorithms.overlong import overlong_penalty
from onbeat.config import AlgorithmConfig
from onbeat.errors import InputError

NAMES = sorted(ALGORITHMS)

Completion = tuple[list[float], list[float], float]
"""Log-probabilities under policy and old policy, and the advantage."""


# Advantages


def plain_advantages(name: str, rewards: list[float]) -> list[float]:
    mean, n = statistics.fmean(rewards), len(rewards)
    if name == "rloo":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    if name in ("dr_grpo", "reinforce_pp"):
        return [r - mean for r in rewards]
    return [(r - mean) / (statistics.stdev(rewards) + 1e-4) for r in rewards]


@pytest.mark.parametrize("name", NAMES)
@given(rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=16).filter(lambda rewards: len(set(rewards)) > 1))
def test_advantages_of_a_group_are_those_of_the_formula(name: str, rewards: list[float]) -> None:
    found = ALGORITHMS[name].advantages(rewards)
    assert found == pytest.approx(plain_advantages(name, rewards), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(reward=st.floats(allow_nan=False, allow_infinity=False), count=st.integers(0, 16))
def test_equal_rewards_have_advantages_of_exactly_zero(name: str, reward: float, count: int) -> None:
    assert ALGORITHMS[name].advantages([reward] * count) == (0.0,) * count


@given(st.lists(st.lists(st.integers(-10, 10), min_size=1, max_size=6), min_size=1, max_size=6))
def test_reinforce_pp_normalises_over_all_of_the_period(groups: list[list[int]]) -> None:
    algorithm = ALGORITHMS["reinforce_pp"]
    assert algorithm.over_batch is not None
    found = algorithm.over_batch([algorithm.advantages(group) for group in groups])
    every = [reward - statistics.fmean(group) for group in groups for reward in group]
    mean, std = statistics.fmean(every), statistics.stdev(every) if len(every) > 1 else 0.0
    expected = [(value - mean) / (std + 1e-8) for value in every]
    assert [value for group in found for value in group] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert all(not any(mine) for group, mine in zip(groups, found, strict=True) if len(set(group)) == 1)


def test_all_others_stream() -> None:
    assert {name for name in NAMES if not ALGORITHMS[name].streams} == {"reinforce_pp"}


@pytest.mark.parametrize(
    ("length", "expected"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0), (81, -0.05)]
)
def test_overlong_completions_lose_reward_over_the_buffer(length: int, expected: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(expected)
    assert overlong_penalty(length, limit=100, buffer=0) == 0.0


# Losses


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)


def token_losses(name: str, completion: Completion, low: float, high: float) -> list[float]:
    policy, old, advantage = completion
    ratios = [math.exp(p - o) for p, o in zip(policy, old, strict=True)]
    if name == "gspo":
        ratio = math.exp(sum(p - o for p, o in zip(policy, old, strict=True)) / len(policy))
        return [clipped(ratio, advantage, low, high)] * len(policy)
    if name == "rloo":
        return [-ratio * advantage for ratio in ratios]
    return [clipped(ratio, advantage, low, high) for ratio in ratios]


def total_loss(name: str, completions: list[Completion], low: float, high: float) -> float:
    return sum(sum(token_losses(name, completion, low, high)) for completion in completions)


def numerical_gradient(
    loss: Callable[[list[Completion]], float], completions: list[Completion], step: float = 1e-6
) -> list[float]:
    """By central differences: one log-probability of the policy at a time."""
    found = []
    for number, (policy, old, advantage) in enumerate(completions):
        for at in range(len(policy)):
            values = []
            for sign in (1, -1):
                moved = [*policy[:at], policy[at] + sign * step, *policy[at + 1 :]]
                values.append(loss([*completions[:number], (moved, old, advantage), *completions[number + 1 :]]))
            found.append((values[0] - values[1]) / (2 * step))
    return found


@st.composite
def some_completions(draw: st.DrawFn) -> list[Completion]:
    """Ratios near and far; none so near to a bound that a difference quotient would straddle it."""
    completions = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 6))
        old = draw(st.lists(st.floats(-5, -0.1), min_size=length, max_size=length))
        moves = draw(
            st.lists(st.sampled_from([-1.7, -0.4, -0.1, 0.0, 0.11, 0.3, 1.9]), min_size=length, max_size=length)
        )
        completions.append(([o + m for o, m in zip(old, moves, strict=True)], old, draw(st.floats(-3, 3))))
    return completions


def tokens_of(completions: list[Completion], low: float, high: float) -> Tokens:
    lengths = [len(policy) for policy, _, _ in completions]
    return Tokens(
        policy_logprobs_T=torch.tensor([v for p, _, _ in completions for v in p], dtype=torch.float64).requires_grad_(),
        old_logprobs_T=torch.tensor([v for _, o, _ in completions for v in o], dtype=torch.float64),
        advantage_T=torch.tensor([a for p, _, a in completions for _ in p], dtype=torch.float64),
        sequence_T=torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)]),
        length_T=torch.tensor([length for length in lengths for _ in range(length)]),
        clip_low=low,
        clip_high=high,
    )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cispo"}))
@given(completions=some_completions())
@settings(max_examples=60)
def test_loss_and_gradient_are_those_of_the_formula(name: str, completions: list[Completion]) -> None:
    low, high = 0.2, 0.28
    tokens = tokens_of(completions, low, high)
    loss_T, _ = ALGORITHMS[name].loss(tokens)
    expected = [value for completion in completions for value in token_losses(name, completion, low, high)]
    assert loss_T.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.policy_logprobs_T)
    numerical = numerical_gradient(lambda moved: total_loss(name, moved, low, high), completions)
    assert gradient_T.tolist() == pytest.approx(numerical, rel=1e-4, abs=1e-4)


@given(completions=some_completions())
def test_cispo_clips_the_weight_and_keeps_every_tokens_gradient(completions: list[Completion]) -> None:
    low, high = 0.5, 1.5
    tokens = tokens_of(completions, low, high)
    loss_T, clipped_T = ALGORITHMS["cispo"].loss(tokens)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.policy_logprobs_T)
    weights = [
        (min(1 + high, max(1 - low, math.exp(p - o))), math.exp(p - o), a, p)
        for policy, old, a in completions
        for p, o in zip(policy, old, strict=True)
    ]
    assert loss_T.tolist() == pytest.approx([-w * a * p for w, _, a, p in weights], rel=1e-9)
    assert gradient_T.tolist() == pytest.approx([-w * a for w, _, a, _ in weights], rel=1e-9)
    assert clipped_T.tolist() == [abs(w - ratio) > 1e-12 for w, ratio, _, _ in weights]


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_algorithm_has_the_gradient_of_reinforce(name: str) -> None:
    """While the policy has not moved, all of them push each token by its advantage; GSPO by its share of it."""
    completions: list[Completion] = [([-1.0, -2.0], [-1.0, -2.0], 0.7), ([-0.5], [-0.5], -1.3)]
    algorithm = ALGORITHMS[name]
    tokens = tokens_of(completions, algorithm.clip_low, algorithm.clip_high)
    loss_T, clipped_T = algorithm.loss(tokens)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.policy_logprobs_T)
    assert gradient_T.tolist() == pytest.approx([-0.7, -0.7, 1.3])
    assert not clipped_T.any()


# The recipe's choices


def test_a_recipe_changes_what_it_names_and_nothing_else() -> None:
    own = ALGORITHMS["dapo"]
    found = algorithm_of(AlgorithmConfig(name="dapo", clip_high=0.5, dynamic_sampling=False), "loss")
    assert (found.clip_low, found.clip_high, found.loss_mean, found.dynamic_sampling) == (0.2, 0.5, "token", False)
    assert found.loss is own.loss
    assert algorithm_of(AlgorithmConfig(name="dapo"), "loss") == own


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return 1 / 0", "failed: ZeroDivisionError"),
        (
            "return tokens.policy_logprobs_T",
            "must return a TokenLoss, and returned Tensor",
        ),
        (
            "return TokenLoss(tokens.policy_logprobs_T.sum(), tokens.old_logprobs_T)",
            r"of \(3,\), and returned \[\(\), \(3,\)\]",
        ),
        ("return TokenLoss(tokens.old_logprobs_T, tokens.old_logprobs_T)", "does not depend on policy_logprobs_T"),
    ],
)
def test_mistakes_in_a_loss_of_ones_own_are_told(tmp_path: Path, body: str, complaint: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from onbeat.algorithms.base import TokenLoss\ndef mine(tokens):\n    {body}\n")
    algorithm = algorithm_of(AlgorithmConfig(loss=f"{file}:mine"), "loss")
    with pytest.raises(InputError, match=complaint):
        algorithm.loss(tokens_of([([-1.0, -2.0], [-1.0, -2.0], 0.7), ([-0.5], [-0.5], -1.3)], 0.2, 0.2))


def test_scaling_is_a_choice_of_those_that_have_it() -> None:
    rewards = [0.0, 1.0, 1.0]
    plain = algorithm_of(AlgorithmConfig(name="grpo", scale_advantages=False), "advantage")
    assert plain.advantages(rewards) == ALGORITHMS["dr_grpo"].advantages(rewards)
    with pytest.raises(InputError, match="the advantages of 'rloo' have no such choice"):
        algorithm_of(AlgorithmConfig(name="rloo", scale_advantages=True), "advantage")
