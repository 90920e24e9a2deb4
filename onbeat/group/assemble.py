"""From scored rollouts to what the trainer sees: unscorable rollouts leave, advantages come."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.algorithms.overlong import overlong_penalty
from onbeat.types import Group, Rollout, TrainGroup


def scorable(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.rollouts if rollout.scorable]


def rewards(group: Group, *, max_new_tokens: int, overlong_buffer: int) -> list[float]:
    """Of the scorable rollouts, as the advantages see them."""
    return [
        rollout.reward + overlong_penalty(len(rollout.completion.token_ids), max_new_tokens, overlong_buffer)
        for rollout in group.rollouts
        if rollout.reward is not None
    ]


def train_group(group: Group, advantages: Sequence[float], *, masks_truncated: bool) -> TrainGroup:
    """The completions with a loss and their advantages: the scorable ones, less those cut off if they are masked."""
    trained = [
        (rollout.completion, advantage)
        for rollout, advantage in zip(scorable(group), advantages, strict=True)
        if not (masks_truncated and rollout.completion.finish_reason == "length")
    ]
    return TrainGroup(
        slot=group.slot,
        prompt_ids=group.prompt.token_ids,
        completion_ids=tuple(completion.token_ids for completion, _ in trained),
        sampler_logprobs=tuple(completion.sampler_logprobs for completion, _ in trained),
        advantages=tuple(advantage for _, advantage in trained),
    )
