"""The loss: the formula token by token, means that stream over any split of the batch, and the learning rate."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.config import TrainerConfig
from onbeat.training.losses import LossMean, denominator, grpo_token_loss, token_weights
from onbeat.training.trainer import learning_rate
from onbeat.types import UpdateTotals

MEANS: list[LossMean] = ["sequence", "token", "constant"]


def expected_token(
    policy: float, old: float, ref: float | None, advantage: float, *, clip_low: float, clip_high: float, beta: float
) -> tuple[float, float, bool]:
    """Loss, its derivative by the policy's log-probability, and whether the clip took the gradient away."""
    ratio = math.exp(policy - old)
    clipped = (advantage > 0 and ratio > 1 + clip_high) or (advantage < 0 and ratio < 1 - clip_low)
    if clipped:
        bound = 1 + clip_high if advantage > 0 else 1 - clip_low
        loss, slope = -bound * advantage, 0.0
    else:
        loss = slope = -ratio * advantage
    if ref is not None:
        loss += beta * (math.exp(ref - policy) - (ref - policy) - 1)
        slope += beta * (1 - math.exp(ref - policy))
    return loss, slope, clipped


@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_formula(seed: int, distance: float, has_reference: bool) -> None:
    """`distance` is how far the policy has gone from the old one: at 2 the clip is active on most tokens."""
    rng = random.Random(seed)
    size = 200
    old = [-rng.expovariate(1.0) for _ in range(size)]
    policy = [value + rng.gauss(0.0, distance) for value in old]
    ref = [value + rng.gauss(0.0, 0.5) for value in old] if has_reference else None
    advantage = [rng.choice([0.0, rng.gauss(0.0, 1.0)]) for _ in range(size)]
    options = {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.7 if has_reference else 0.0}

    policy_T = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    result = grpo_token_loss(
        policy_T,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(ref, dtype=torch.float64) if ref else None,
        torch.tensor(advantage, dtype=torch.float64),
        **options,
    )
    (gradient_T,) = torch.autograd.grad(result.loss_T.sum(), policy_T)

    expected = [
        expected_token(policy[t], old[t], ref[t] if ref else None, advantage[t], **options) for t in range(size)
    ]
    torch.testing.assert_close(
        result.loss_T.detach(), torch.tensor([loss for loss, _, _ in expected], dtype=torch.float64)
    )
    torch.testing.assert_close(gradient_T, torch.tensor([slope for _, slope, _ in expected], dtype=torch.float64))
    assert result.clipped_T.tolist() == [clipped for _, _, clipped in expected]
    assert any(clipped for _, _, clipped in expected) == (distance > 0)
    if ref is None:
        assert result.kl_T is None
    else:
        assert result.kl_T is not None
        torch.testing.assert_close(
            result.kl_T.detach(),
            torch.tensor(
                [math.exp(r - p) - (r - p) - 1 for r, p in zip(ref, policy, strict=True)], dtype=torch.float64
            ),
        )


def test_on_policy_the_gradient_is_that_of_the_log_probability_times_the_advantage() -> None:
    policy_T = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantage_T = torch.randn(50, generator=torch.Generator().manual_seed(1))
    result = grpo_token_loss(policy_T, policy_T.detach(), None, advantage_T, clip_low=0.2, clip_high=0.2, beta=0.0)
    (gradient_T,) = torch.autograd.grad(result.loss_T.sum(), policy_T)
    assert torch.equal(gradient_T, -advantage_T)
    assert not result.clipped_T.any()


def test_the_kl_estimate_is_never_negative_and_zero_at_the_reference() -> None:
    policy_T = torch.linspace(-5.0, 0.0, 101, dtype=torch.float64)
    zero_T = torch.zeros(101, dtype=torch.float64)
    result = grpo_token_loss(
        policy_T, policy_T, torch.full_like(policy_T, -2.5), zero_T, clip_low=0.2, clip_high=0.2, beta=0.5
    )
    assert result.kl_T is not None
    assert (result.kl_T >= 0).all()
    assert result.kl_T[50] == 0.0
    torch.testing.assert_close(result.loss_T, 0.5 * result.kl_T)


# Means that stream


def direct_mean(losses: list[list[float]], mean: LossMean, max_new_tokens: int) -> float:
    """Over sequences of token losses, the whole batch at once."""
    if mean == "token":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if mean == "sequence":
        return sum(sum(sequence) / len(sequence) for sequence in losses) / len(losses)
    return sum(sum(sequence) / max_new_tokens for sequence in losses) / len(losses)


SEQUENCES = st.lists(st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=8), min_size=1, max_size=12)


@pytest.mark.parametrize("mean", MEANS)
@settings(deadline=None)
@given(losses=SEQUENCES, data=st.data())
def test_sums_over_micro_batches_divided_at_the_end_are_the_mean_over_the_batch(
    mean: LossMean, losses: list[list[float]], data: Any
) -> None:
    total = 0.0
    remaining = list(losses)
    while remaining:
        size = data.draw(st.integers(1, len(remaining)))
        microbatch, remaining = remaining[:size], remaining[size:]
        loss_T = torch.tensor([loss for sequence in microbatch for loss in sequence])
        length_T = torch.tensor([len(sequence) for sequence in microbatch for _ in sequence])
        total += (loss_T * token_weights(length_T, mean, 8)).sum().item()
    totals = UpdateTotals(num_groups=1, num_sequences=len(losses), num_tokens=sum(map(len, losses)))
    assert total / denominator(totals, mean) == pytest.approx(direct_mean(losses, mean, 8), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("mean", MEANS)
def test_an_update_of_which_nothing_counted_divides_by_one(mean: LossMean) -> None:
    assert denominator(UpdateTotals(num_groups=4, num_sequences=0, num_tokens=0), mean) == 1


# The learning rate


def schedule(num_updates: int, **settings_: Any) -> list[float]:
    settings = TrainerConfig(learning_rate=8.0, **settings_)
    return [learning_rate(update, num_updates, settings) for update in range(num_updates)]


def test_a_constant_learning_rate_is_constant() -> None:
    assert schedule(4) == [8.0, 8.0, 8.0, 8.0]


def test_warm_up_rises_linearly_and_its_last_step_is_the_full_rate() -> None:
    assert schedule(6, warmup_updates=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_a_linear_schedule_would_reach_zero_with_the_step_after_the_last() -> None:
    assert schedule(4, lr_schedule="linear") == [8.0, 6.0, 4.0, 2.0]
    assert schedule(6, lr_schedule="linear", warmup_updates=2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_a_cosine_schedule_falls_slowly_at_both_ends() -> None:
    root = math.sqrt(0.5)
    expected = [8.0, 4.0 * (1 + root), 4.0, 4.0 * (1 - root)]
    assert schedule(4, lr_schedule="cosine") == pytest.approx(expected)
    assert schedule(6, lr_schedule="cosine", warmup_updates=2) == pytest.approx([4.0, 8.0, *expected])


@pytest.mark.parametrize("lr_schedule", ["linear", "cosine"])
def test_past_the_end_the_learning_rate_stays_zero(lr_schedule: Any) -> None:
    settings = TrainerConfig(learning_rate=8.0, lr_schedule=lr_schedule, warmup_updates=2)
    assert [learning_rate(update, 6, settings) for update in (6, 7, 100)] == [0.0, 0.0, 0.0]


def test_a_run_shorter_than_its_warm_up_never_reaches_the_full_rate() -> None:
    assert schedule(3, warmup_updates=4, lr_schedule="cosine") == [2.0, 4.0, 6.0]
