"""Dr. GRPO, "GRPO done right" (arXiv 2503.20783): GRPO without its two biases.

A_i = r_i - mean(r)                  no division by the standard deviation, which favours easy and hard prompts
mean over sequences of  Σ_t loss_t / max_new_tokens      a constant, not the length, which favours long mistakes
"""

from __future__ import annotations

from onbeat.algorithms.base import Algorithm
from onbeat.algorithms.grpo import centred, clipped_loss

ALGORITHM = Algorithm(name="dr_grpo", advantages=centred, loss=clipped_loss, loss_mean="constant")
