"""REINFORCE++ with a group baseline (arXiv 2501.03262).

    A_i = a_i / (std(a) + 1e-8),   a_i = r_i - mean of its group's rewards,   std over all of the period

and the clipped loss, as a mean over tokens. (The paper subtracts mean(a), too: it is 0, group by group.) The standard
deviation is known when the last group is: the algorithm does not stream, and generation and training do not overlap.
"""

from __future__ import annotations

import math

from onbeat.algorithms.base import Advantages, Algorithm
from onbeat.algorithms.grpo import centred, clipped_loss

_STD_FLOOR = 1e-8


def normalised(groups: list[Advantages]) -> list[Advantages]:
    """Over all completions of all groups. What is exactly 0 stays it."""
    every = [advantage for group in groups for advantage in group]
    if not any(every):
        return groups
    std = math.sqrt(math.fsum(advantage**2 for advantage in every) / (len(every) - 1))
    return [tuple(advantage / (std + _STD_FLOOR) for advantage in group) for group in groups]


ALGORITHM = Algorithm(
    name="reinforce_pp", advantages=centred, over_batch=normalised, loss=clipped_loss, loss_mean="token"
)
