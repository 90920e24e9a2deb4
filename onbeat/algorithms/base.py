"""What an algorithm is: how much better than expected each completion was, and what a token's loss is.

    advantages   of one group's rewards: in the controller, as soon as the group is scored
    over_batch   of a whole period's advantages: if there is one the algorithm does not stream, the loader waits (R3)
    loss         of tokens, from log-probabilities and advantages: in the trainer, micro-batch by micro-batch

All three are pure. Losses are written in the tensors' own methods, so that no file here imports torch and the
controller may read them too. Means over sequences or tokens, the KL, weights for a sampler's error: not the algorithm's
business (training/losses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LossMean = Literal["sequence", "token", "constant", "sum"]
Advantages = tuple[float, ...]
"""Of the scorable completions of one group, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a loss sees, per completion token, [T]. Completions are whole, one after another."""

    policy_logprobs_T: Tensor
    old_logprobs_T: Tensor
    """Without gradient; the policy's own while it has not moved since the period opened."""
    advantage_T: Tensor
    sequence_T: Tensor
    """Which completion it belongs to: 0, 1, 2 …"""
    length_T: Tensor
    """Tokens of that completion."""
    clip_low: float
    clip_high: float


class TokenLoss(NamedTuple):
    loss_T: Tensor
    clipped_T: Tensor
    """Where the clip had a say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    name: str
    advantages: Callable[[Sequence[float]], Advantages]
    """Of one group's rewards; all equal, or fewer than two: exactly 0."""
    loss: Callable[[Tokens], TokenLoss]
    over_batch: Callable[[list[Advantages]], list[Advantages]] | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_mean: LossMean = "sequence"
    dynamic_sampling: bool = False
    overlong_share: float = 0.0
    """The last so much of max_new_tokens is punished (overlong.py)."""

    @property
    def streams(self) -> bool:
        """Whether a group can be trained before the others are there."""
        return self.over_batch is None
