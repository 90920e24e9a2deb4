"""DAPO, decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476): GRPO with

clip-higher        the ratio may grow further than it may shrink: 1 + 0.28 against 1 - 0.2
token mean         every token of the batch has the same weight
dynamic sampling   groups of equal rewards are replaced by further prompts (loader.py)
overlong shaping   completions near the limit of length lose reward (overlong.py)
"""

from __future__ import annotations

from onbeat.algorithms.base import Algorithm
from onbeat.algorithms.grpo import clipped_loss, scaled

ALGORITHM = Algorithm(
    name="dapo",
    advantages=scaled,
    loss=clipped_loss,
    clip_high=0.28,
    loss_mean="token",
    dynamic_sampling=True,
    overlong_share=0.2,
)
