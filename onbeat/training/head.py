"""Log-probabilities without the logits: head and softmax in blocks of words, at completion positions, both ways.

The logits of 4,096 tokens over a vocabulary of 49k take 800 MB, and several times that in backward. Here they exist for
one block of words at a time, which stays in the cache from the product that makes it to the sums that are wanted of it;
every row of the head's weight, and of its gradient, is read and written once. The exponentials of the first blocks stay
until backward, as far as there is room and layers are not checkpointed; backward computes the others once more. The
weight's gradient is added where it is kept (gradients.py).

Where the head is spread over a team of ranks, each has the blocks of its own words, and they tell each other the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from onbeat.device import as_given, product_dtype
from onbeat.training.gradients import add_product_to, collected
from onbeat.training.products import linear

KEPT_BYTES = 256 << 20
"""So much may stay from forward to backward: blocks beyond are computed twice."""

BLOCK_WORDS = 2048
"""At most, in a block."""
BLOCK_BYTES = 64 << 20
"""Of a block's logits, at most: with very many rows there are fewer words."""


class _HeadLogprobs(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] or None, targets [T], temperature, dtype of products, team, keep) →
    log-probabilities, entropies [T]. With a team, V are this rank's words. N: blocks, B: words of one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_T_H: torch.Tensor,
        weight_V_H: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_T: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        team: Team | None,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if team is not None:
            target_T = target_T - team.first_word
        hidden = hidden_T_H.to(dtype)
        logits = _Logits(hidden, weight_V_H, bias_V, temperature)
        room = KEPT_BYTES if keep and any(ctx.needs_input_grad) else 0
        kept, largest, sums, means = [], [], [], []
        of_target_T = torch.zeros(len(target_T), dtype=_exact(hidden_T_H.dtype))
        for words in logits.blocks:
            logits_T_B = logits.of(words)
            of_target_T += _at(logits_T_B, target_T - words.start)
            largest_T = _lower_by_largest(logits_T_B)
            exps_T_B = logits_T_B.clone().exp_()
            largest.append(largest_T)
            sums.append(exps_T_B.sum(dim=-1))
            means.append(torch.bmm(exps_T_B[:, None], logits_T_B[:, :, None])[:, 0, 0])
            if exps_T_B.nbytes <= room:
                room -= exps_T_B.nbytes
                kept.append(exps_T_B)
            else:
                room = 0  # the last block may be smaller: none after one that was not kept
        largest_N_T, sum_N_T, mean_N_T = torch.stack(largest), torch.stack(sums), torch.stack(means)
        top_T = largest_N_T.amax(dim=0)
        if team is not None:
            top_T = team.largest(top_T)
        below_N_T = largest_N_T - top_T
        share_N_T = below_N_T.exp()
        total_T = (share_N_T * sum_N_T).sum(dim=0)
        mean_T = (share_N_T * (mean_N_T + below_N_T * sum_N_T)).sum(dim=0)
        if team is not None:
            team.sum([total_T, mean_T, of_target_T])
        log_total_T = total_T.log()  # all of it relative to the largest logit, whose size would cost digits
        ctx.save_for_backward(hidden, target_T, share_N_T / total_T, *kept)
        ctx.weight, ctx.bias, ctx.temperature, ctx.team = weight_V_H, bias_V, temperature, team
        ctx.hidden_dtype = hidden_T_H.dtype
        entropy_T = log_total_T - mean_T / total_T
        ctx.mark_non_differentiable(entropy_T)
        return of_target_T - top_T - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_T_H, target_T, factor_N_T, *kept = ctx.saved_tensors
        weight_V_H, bias_V, team = ctx.weight, ctx.bias, ctx.team
        scale_T = gradients[0] / ctx.temperature
        grad_hidden = torch.zeros(hidden_T_H.shape, dtype=_exact(hidden_T_H.dtype))
        mine = _Own(weight_V_H, bias_V) if team is not None else None
        weight, bias = (mine.weight, mine.bias) if mine else (weight_V_H, bias_V)
        grad_weight = collected(weight) if weight_V_H.requires_grad else None
        grad_bias = collected(bias) if bias is not None and bias_V.requires_grad else None
        logits = _Logits(hidden_T_H, weight_V_H, bias_V, ctx.temperature)
        for number, words in enumerate(logits.blocks):
            if number < len(kept):
                exps_T_B = kept[number]
            else:
                exps_T_B = logits.of(words)
                _lower_by_largest(exps_T_B)
                exps_T_B.exp_()
            # d logprob / d logit = (one at the target) - probability, times the gradient, over the temperature.
            grad_T_B = exps_T_B.mul_((-scale_T * factor_N_T[number])[:, None])
            _add_at(grad_T_B, target_T - words.start, scale_T)
            grad_rows = grad_T_B.to(hidden_T_H.dtype)
            add_product_to(grad_hidden, grad_rows, weight_V_H[words].to(hidden_T_H.dtype))
            if grad_weight is not None:
                add_product_to(grad_weight[words], grad_rows.T, hidden_T_H)
            if grad_bias is not None:
                grad_bias[words] += grad_T_B.sum(dim=0)
        if team is not None:
            team.sum([grad_hidden])
        own = (mine.weight.grad, mine.bias.grad if mine.bias is not None else None) if mine else (None, None)
        return grad_hidden.to(ctx.hidden_dtype), *own, None, None, None, None, None


class _Own:
    """Where the gradients of a rank's words are collected: autograd brings them to the spread parameters."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks that have a part of the vocabulary each."""

    group: dist.ProcessGroup
    first_word: int

    def sum(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor


class _Logits:
    """Of all rows, a block of words at a time; the blocks are a function of the sizes alone."""

    def __init__(
        self, hidden_T_H: torch.Tensor, weight_V_H: torch.Tensor, bias_V: torch.Tensor | None, temperature: float
    ) -> None:
        self._hidden, self._weight, self._bias, self._temperature = hidden_T_H, weight_V_H, bias_V, temperature
        self._exact = _exact(hidden_T_H.dtype)
        word_bytes = max(1, len(hidden_T_H)) * self._exact.itemsize
        num_words = min(BLOCK_WORDS, max(64, BLOCK_BYTES // word_bytes))
        last = len(weight_V_H)
        self.blocks = [slice(first, min(first + num_words, last)) for first in range(0, last, num_words)]

    def of(self, words: slice) -> torch.Tensor:
        """[T, B]"""
        dtype = self._hidden.dtype
        bias = None if self._bias is None else self._bias[words].to(dtype)
        logits = linear(self._hidden, self._weight[words].to(dtype), bias).to(self._exact)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)


def _lower_by_largest(logits_T_B: torch.Tensor) -> torch.Tensor:
    """Each row, in place, by its largest; which is returned."""
    largest_T = logits_T_B.amax(dim=-1)
    logits_T_B.sub_(largest_T[:, None])
    return largest_T


def _at(logits_T_B: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each row's at its target; 0 where another block, or rank, has the word."""
    found = logits_T_B.gather(1, targets.clamp(0, logits_T_B.shape[1] - 1)[:, None])[:, 0]
    return found.masked_fill(_elsewhere(targets, logits_T_B), 0.0)


def _add_at(gradients: torch.Tensor, targets: torch.Tensor, values: torch.Tensor) -> None:
    values = values.masked_fill(_elsewhere(targets, gradients), 0.0)
    gradients[torch.arange(len(values)), targets.clamp(0, gradients.shape[1] - 1)] += values


def _elsewhere(targets: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return (targets < 0) | (targets >= words.shape[1])


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Of log-probabilities: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def head_logprobs(
    head: torch.nn.Linear, hidden_T_H: torch.Tensor, target_T: torch.Tensor, temperature: float, *, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy (without gradient) of each prediction, at the temperature. `keep`:
    the first blocks may stay until backward."""
    weight: torch.Tensor = head.weight
    bias: torch.Tensor | None = head.bias
    team = None
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        share = -(-weight.shape[0] // mesh.size())
        team = Team(mesh.get_group(), mesh.get_local_rank() * share)
        weight, bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    dtype = product_dtype(hidden_T_H.dtype)
    with as_given():
        logprobs, entropy = _HeadLogprobs.apply(hidden_T_H, weight, bias, target_T, temperature, dtype, team, keep)  # type: ignore[no-untyped-call]
    return logprobs, entropy
