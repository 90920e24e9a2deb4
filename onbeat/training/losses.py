"""From an algorithm's token losses to a gradient that streams.

    loss_t = the algorithm's · min(cap, old_prob / sampler_prob) + beta · KL estimate

The loss of an update is a mean, and no mean is known before the last group is in (R3). So a micro-batch contributes
a sum, `token_weights` gives each token its share of that sum, and the gradient is divided by `denominator` at the
optimizer step: gradients are linear.

    mean over     weight of a token            denominator
    sequence      1 / length of its sequence   sequences
    token         1                            tokens               (DAPO, arXiv 2503.14476)
    constant      1 / max_new_tokens           sequences            (Dr. GRPO, arXiv 2503.20783)
    sum           1                            sequences            (RLOO, arXiv 2402.14740)
"""

from __future__ import annotations

from typing import Literal

import torch

from onbeat.algorithms.base import LossMean
from onbeat.types import UpdateTotals

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(policy_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor, kind: KlEstimator) -> torch.Tensor:
    """Per token, of KL(policy, reference) under samples of the policy (Schulman, "Approximating KL divergence").

    k1 is unbiased and may be negative; k2 is biased, small and never negative; k3 is unbiased and never negative.
    """
    log_ratio_T = ref_logprobs_T - policy_logprobs_T
    match kind:
        case "k1":
            return -log_ratio_T
        case "k2":
            return 0.5 * log_ratio_T.square()
        case "k3":
            return torch.exp(log_ratio_T) - log_ratio_T - 1.0


def importance_weights(old_logprobs_T: torch.Tensor, sampler_logprobs_T: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling: what a token sampled from almost the old policy counts."""
    return torch.exp(old_logprobs_T - sampler_logprobs_T).clamp(max=cap)


def token_weights(length_T: torch.Tensor, mean: LossMean, max_new_tokens: int) -> torch.Tensor:
    match mean:
        case "sequence":
            return 1.0 / length_T
        case "token" | "sum":
            return torch.ones(length_T.shape)
        case "constant":
            return torch.full(length_T.shape, 1.0 / max_new_tokens)


def denominator(totals: UpdateTotals, mean: LossMean) -> int:
    """What the summed gradient is divided by; 1 if nothing counted (the sum is 0 then)."""
    return max(1, totals.num_tokens if mean == "token" else totals.num_sequences)
