"""The next token of each row of logits, drawn by its own uniform number.

A row's distribution is inverted at its draw in two looks: over the sums of blocks of the vocabulary, then inside one
block. So the vocabulary is read by softmax and one sum, and never accumulated as a whole. A row's result depends on
that row alone. Probabilities and the sums of a block are in float32, what is added up over blocks and inside the
chosen one in float64: a draw is off by some 1e-7 of the distribution at most.
"""

from __future__ import annotations

import torch

from onbeat.errors import NumbersError

_BLOCK = 256


def sample(logits: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities, by inverting each row's cumulative distribution at its draw.

    logits [N, V]; temperatures, draws [N], draws in [0, 1). A temperature of 0 takes the most likely token and
    reports its log-probability at temperature 1. Raises NumbersError if there is nothing to draw from.
    """
    greedy = temperatures == 0
    if not bool((temperatures == 1).all()):
        logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    most = logits.amax(dim=-1)
    if not bool(most.isfinite().all()):
        raise NumbersError("logits are not finite")
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    tokens = _invert(probabilities, draws)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    # By the most likely token: the logarithm of a probability near float32's smallest would be far off.
    log_total = most - probabilities.amax(dim=-1).log()
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - log_total


def _invert(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw's share of the total."""
    num_rows, vocabulary = probabilities.shape
    whole = vocabulary // _BLOCK * _BLOCK
    sums = probabilities[:, :whole].view(num_rows, -1, _BLOCK).sum(dim=-1)
    if whole < vocabulary:
        sums = torch.cat([sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    sums = sums.double()
    ends = sums.cumsum(dim=1)
    target = _below(draws[:, None] * ends[:, -1:], ends[:, -1:])
    block = torch.searchsorted(ends, target, right=True)
    before = ends.gather(1, block) - sums.gather(1, block)
    columns = block * _BLOCK + torch.arange(_BLOCK)
    inside = probabilities.gather(1, columns.clamp(max=vocabulary - 1)).double()
    cumulative = inside.masked_fill_(columns >= vocabulary, 0.0).cumsum(dim=1)
    return columns.gather(1, torch.searchsorted(cumulative, _below(target - before, cumulative[:, -1:]), right=True))[
        :, 0
    ]


def _below(target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Between 0 and just below the total, whatever rounding did."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))).clamp_(min=0.0)
