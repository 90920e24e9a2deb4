"""GSPO, group sequence policy optimization (arXiv 2507.18071): the ratio is the sequence's, not the token's.

    s_i    = exp(mean over the tokens of completion i of (policy_logprob_t - old_logprob_t))
    loss_i = -min(s_i · A_i, clip(s_i, 1 - clip_low, 1 + clip_high) · A_i)

Each of its tokens carries the sequence's loss, so that the mean over a sequence's tokens is that loss.
"""

from __future__ import annotations

from onbeat.algorithms.base import Algorithm, TokenLoss, Tokens
from onbeat.algorithms.grpo import scaled


def sequence_loss(tokens: Tokens) -> TokenLoss:
    share_T = (tokens.policy_logprobs_T - tokens.old_logprobs_T) / tokens.length_T
    num_sequences = int(tokens.sequence_T[-1]) + 1
    mean_C = share_T.new_zeros(num_sequences).index_add(0, tokens.sequence_T, share_T)
    ratio_T = mean_C.exp().index_select(0, tokens.sequence_T)
    gain_T = ratio_T * tokens.advantage_T
    clipped_gain_T = ratio_T.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high) * tokens.advantage_T
    return TokenLoss(-gain_T.minimum(clipped_gain_T), (clipped_gain_T < gain_T).detach())


ALGORITHM = Algorithm(name="gspo", advantages=scaled, loss=sequence_loss, clip_low=3e-4, clip_high=4e-4)
