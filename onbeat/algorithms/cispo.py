"""CISPO, clipped importance-sampling policy optimization (MiniMax-M1, arXiv 2506.13585).

    loss_t = -stop_gradient(clip(ratio_t, 1 - clip_low, 1 + clip_high)) · A · policy_logprob_t

The weight is clipped, not the gradient: every token keeps teaching. By default there is no lower bound.
"""

from __future__ import annotations

from onbeat.algorithms.base import Algorithm, TokenLoss, Tokens
from onbeat.algorithms.grpo import scaled


def weighted_loss(tokens: Tokens) -> TokenLoss:
    ratio_T = (tokens.policy_logprobs_T.detach() - tokens.old_logprobs_T).exp()
    weight_T = ratio_T.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high)
    return TokenLoss(-weight_T * tokens.advantage_T * tokens.policy_logprobs_T, weight_T != ratio_T)


ALGORITHM = Algorithm(
    name="cispo", advantages=scaled, loss=weighted_loss, clip_low=1.0, clip_high=4.0, loss_mean="token"
)
