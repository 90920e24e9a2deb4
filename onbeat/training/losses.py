"""GRPO's token loss (arXiv 2402.03300), in a form that streams.

    ratio_t = exp(policy_logprob_t - old_logprob_t)
    loss_t  = -min(ratio_t · A, clip(ratio_t, 1 - clip_low, 1 + clip_high) · A) + beta · k3_t
    k3_t    = exp(ref - policy) - (ref - policy) - 1          an unbiased, non-negative estimate of KL(policy, ref)

The loss of an update is a mean, and no mean is known before the last group is in (R3). So a micro-batch contributes
a sum, `token_weights` gives each token its share of that sum, and the gradient is divided by `denominator` at the
optimizer step: gradients are linear.

    mean over     weight of a token            denominator
    sequence      1 / length of its sequence   sequences
    token         1                            tokens               (DAPO, arXiv 2503.14476)
    constant      1 / max_new_tokens           sequences            (Dr. GRPO, arXiv 2503.20783)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from onbeat.types import UpdateTotals

LossMean = Literal["sequence", "token", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per completion token, [T]."""

    loss_T: torch.Tensor
    kl_T: torch.Tensor | None
    clipped_T: torch.Tensor
    """Where the clip took the gradient away."""


def grpo_token_loss(
    policy_logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    ref_logprobs_T: torch.Tensor | None,
    advantage_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
) -> TokenLoss:
    ratio_T = torch.exp(policy_logprobs_T - old_logprobs_T)
    gain_T = ratio_T * advantage_T
    clipped_gain_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_T
    loss_T = -torch.minimum(gain_T, clipped_gain_T)
    kl_T = None
    if ref_logprobs_T is not None:
        log_ratio_T = ref_logprobs_T - policy_logprobs_T
        kl_T = torch.exp(log_ratio_T) - log_ratio_T - 1.0
        loss_T = loss_T + beta * kl_T
    return TokenLoss(loss_T=loss_T, kl_T=kl_T, clipped_T=(clipped_gain_T < gain_T).detach())


def token_weights(length_T: torch.Tensor, mean: LossMean, max_new_tokens: int) -> torch.Tensor:
    match mean:
        case "sequence":
            return 1.0 / length_T
        case "token":
            return torch.ones(length_T.shape)
        case "constant":
            return torch.full(length_T.shape, 1.0 / max_new_tokens)


def denominator(totals: UpdateTotals, mean: LossMean) -> int:
    """What the summed gradient is divided by; 1 if nothing counted (the sum is 0 then)."""
    return max(1, totals.num_tokens if mean == "token" else totals.num_sequences)
