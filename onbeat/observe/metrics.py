"""What a period was, in numbers: pure functions from groups and reports to one flat record.

A share or a mean over nothing is None, never 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from onbeat.protocols import Evaluated, UpdateReport
from onbeat.types import Group, Rollout

Record = dict[str, Any]


def mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def accuracy(groups: Iterable[Group], threshold: float) -> float | None:
    """Share of scorable completions whose main (first) reward reaches the threshold."""
    scorable = [rollout for group in groups for rollout in group.rollouts if rollout.scorable]
    return mean(float(_right(rollout, threshold)) for rollout in scorable if rollout.rewards[0] is not None)


def _right(rollout: Rollout, threshold: float) -> bool:
    main = rollout.rewards[0]
    return rollout.scorable and main is not None and main >= threshold


def group_metrics(groups: Sequence[Group], threshold: float) -> Record:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    completions = [rollout.completion for rollout in rollouts]
    return {
        "reward_mean": mean(rewards),
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        "accuracy": accuracy(groups, threshold),
        "zero_variance_share": mean(float(_all_equal(group)) for group in groups),
        "unscorable_share": mean(float(not rollout.scorable) for rollout in rollouts),
        "truncated_share": mean(float(completion.finish_reason == "length") for completion in completions),
        "completion_tokens_mean": mean(len(completion.token_ids) for completion in completions),
        "num_generated_tokens": sum(len(completion.token_ids) for completion in completions),
    }


def evaluation_metrics(evaluated: Evaluated, threshold: float) -> Record:
    """Greedy accuracy; and of k sampled completions per prompt: the share that is right, and of prompts with a right
    one. What cannot be scored is not right here: a model must not seem better for it."""
    greedy = [rollout for group in evaluated.greedy for rollout in group.rollouts]
    record: Record = {
        "accuracy": mean(float(_right(rollout, threshold)) for rollout in greedy),
        "num_prompts": len(evaluated.greedy),
        "unscorable_share": mean(float(not rollout.scorable) for rollout in greedy),
        "truncated_share": mean(float(rollout.completion.finish_reason == "length") for rollout in greedy),
    }
    if evaluated.sampled:
        size = len(evaluated.sampled[0].rollouts)
        solved = [[_right(rollout, threshold) for rollout in group.rollouts] for group in evaluated.sampled]
        record["pass@1"] = mean(float(right) for group in solved for right in group)
        record[f"pass@{size}"] = mean(float(any(group)) for group in solved)
    return record


def rates(record: Record) -> Record:
    """Tokens per second of each side while it was at work."""
    return {
        "generated_tokens_per_s": _ratio(record["num_generated_tokens"], record["generators_busy_s"]),
        "trained_tokens_per_s": _ratio(record["num_trained_tokens"], record["training_s"]),
    }


def _ratio(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _all_equal(group: Group) -> bool:
    return len({rollout.reward for rollout in group.rollouts if rollout.scorable}) < 2


def update_metrics(reports: Sequence[UpdateReport]) -> Record:
    """Over the updates of one period: means, but the largest gap, the last learning rate and the sums."""
    gaps = [report.gap_max for report in reports if report.gap_max is not None]
    record: Record = {
        name: mean(value for report in reports if (value := getattr(report, name)) is not None)
        for name in ("loss", "grad_norm", "entropy", "kl", "clip_share", "gap_mean")
    }
    return record | {
        "gap_max": max(gaps) if gaps else None,
        "learning_rate": reports[-1].learning_rate,
        "num_skipped_updates": sum(not report.stepped for report in reports),
        "num_trained_tokens": sum(report.num_trained_tokens for report in reports),
    }
