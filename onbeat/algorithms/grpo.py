"""GRPO, group relative policy optimization (arXiv 2402.03300).

A_i     = (r_i - mean(r)) / (std(r) + 1e-4)                over the siblings of one prompt; std of a sample (n - 1)
ratio_t = exp(policy_logprob_t - old_logprob_t)
loss_t  = -min(ratio_t · A, clip(ratio_t, 1 - clip_low, 1 + clip_high) · A)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onbeat.algorithms.base import Advantages, Algorithm, TokenLoss, Tokens

_STD_FLOOR = 1e-4


def centred(rewards: Sequence[float]) -> Advantages:
    """r_i - mean(r); exactly 0 if all are equal, or if there are fewer than two."""
    n = len(rewards)
    if n < 2 or min(rewards) == max(rewards):
        return (0.0,) * n
    mean = math.fsum(rewards) / n
    return tuple(reward - mean for reward in rewards)


def scaled(rewards: Sequence[float]) -> Advantages:
    """… divided by their standard deviation."""
    differences = centred(rewards)
    if not any(differences):
        return differences
    std = math.sqrt(math.fsum(c * c for c in differences) / (len(differences) - 1))
    return tuple(c / (std + _STD_FLOOR) for c in differences)


def clipped_loss(tokens: Tokens) -> TokenLoss:
    ratio_T = (tokens.policy_logprobs_T - tokens.old_logprobs_T).exp()
    gain_T = ratio_T * tokens.advantage_T
    clipped_gain_T = ratio_T.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high) * tokens.advantage_T
    return TokenLoss(-gain_T.minimum(clipped_gain_T), (clipped_gain_T < gain_T).detach())


ALGORITHM = Algorithm(name="grpo", advantages=scaled, loss=clipped_loss)
