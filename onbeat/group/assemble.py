"""From scored rollouts to what the trainer sees: unscorable rollouts leave, advantages come."""

from __future__ import annotations

from onbeat.group.advantage import group_advantages
from onbeat.types import Group, TrainGroup


def train_group(group: Group, *, scale_advantages: bool) -> TrainGroup:
    """The scorable completions of the group with their advantages."""
    scorable = [(rollout, rollout.reward) for rollout in group.rollouts if rollout.reward is not None]
    return TrainGroup(
        slot=group.slot,
        prompt_ids=group.prompt.token_ids,
        completion_ids=tuple(rollout.completion.token_ids for rollout, _ in scorable),
        sampler_logprobs=tuple(rollout.completion.sampler_logprobs for rollout, _ in scorable),
        advantages=group_advantages([reward for _, reward in scorable], scale=scale_advantages),
    )
