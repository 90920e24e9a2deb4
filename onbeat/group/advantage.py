"""Group advantages: how much better than its siblings a completion was.

GRPO (arXiv 2402.03300):  A_i = (r_i - mean(r)) / (std(r) + 1e-4),  over the scorable siblings of one prompt;
without the division it is the form of Dr. GRPO (arXiv 2503.20783). std is that of a sample (n - 1), as in the field.

An advantage depends on its own group alone: that is what lets a group be trained before the others exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_STD_FLOOR = 1e-4


def group_advantages(rewards: Sequence[float], *, scale: bool) -> tuple[float, ...]:
    """Advantages of the scorable rewards of one group. Fewer than two, or all equal: exactly 0."""
    n = len(rewards)
    if n < 2 or min(rewards) == max(rewards):
        return (0.0,) * n
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if not scale:
        return tuple(centred)
    std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1))
    return tuple(c / (std + _STD_FLOOR) for c in centred)
