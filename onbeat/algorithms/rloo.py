"""RLOO, REINFORCE leave-one-out (arXiv 2402.14740).

    A_i    = r_i - mean of its siblings' rewards = n / (n - 1) · (r_i - mean(r))
    loss_t = -ratio_t · A                         summed over a sequence, which is one action; mean over sequences

While the policy has not moved the ratio is 1 and this is REINFORCE; after that the ratio corrects for the movement,
unclipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.algorithms.base import Advantages, Algorithm, TokenLoss, Tokens
from onbeat.algorithms.grpo import centred


def leave_one_out(rewards: Sequence[float]) -> Advantages:
    n = len(rewards)
    return tuple(n / (n - 1) * difference if difference else 0.0 for difference in centred(rewards))


def reinforce_loss(tokens: Tokens) -> TokenLoss:
    ratio_T = (tokens.policy_logprobs_T - tokens.old_logprobs_T).exp()
    return TokenLoss(-ratio_T * tokens.advantage_T, (ratio_T != ratio_T).detach())


ALGORITHM = Algorithm(name="rloo", advantages=leave_one_out, loss=reinforce_loss, loss_mean="sum")
