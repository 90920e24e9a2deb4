"""The loss: the formula token by token, means that stream over any split of the batch, and the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.algorithms.base import LossMean
from onbeat.config import TrainerConfig
from onbeat.training.losses import KlEstimator, denominator, importance_weights, kl_estimate, token_weights
from onbeat.training.trainer import learning_rate
from onbeat.types import UpdateTotals

MEANS: list[LossMean] = ["sequence", "token", "constant", "sum"]


# The KL, and what a sampler's error costs


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_are_those_of_the_formulas(kind: KlEstimator) -> None:
    policy_T = torch.linspace(-5.0, 0.0, 101, dtype=torch.float64)
    ref_T = torch.full_like(policy_T, -2.5)
    expected = {
        "k1": [p + 2.5 for p in policy_T.tolist()],
        "k2": [(p + 2.5) ** 2 / 2 for p in policy_T.tolist()],
        "k3": [math.exp(-2.5 - p) - (-2.5 - p) - 1 for p in policy_T.tolist()],
    }[kind]
    found_T = kl_estimate(policy_T, ref_T, kind)
    assert found_T.tolist() == pytest.approx(expected)
    assert found_T[50] == 0.0
    assert kind == "k1" or (found_T >= 0).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: KlEstimator) -> None:
    policy, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / ref).log()).sum()
    assert torch.allclose((policy * kl_estimate(policy.log(), ref.log(), kind)).sum(), exact)


def test_importance_weights_are_truncated_at_the_cap() -> None:
    old_T, sampler_T = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, -0.5])
    found = importance_weights(old_T, sampler_T, cap=2.0).tolist()
    assert found == pytest.approx([1.0, 2.0, math.exp(-0.5)])


# Means that stream


def direct_mean(losses: list[list[float]], mean: LossMean, max_new_tokens: int) -> float:
    """Over sequences of token losses, the whole batch at once."""
    if mean == "token":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if mean == "sequence":
        return sum(sum(sequence) / len(sequence) for sequence in losses) / len(losses)
    if mean == "sum":
        return sum(map(sum, losses)) / len(losses)
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
