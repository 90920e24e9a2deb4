"""Log-probabilities without the logits: head and log-softmax in chunks, at completion positions, forward and backward.

The logits of 4,096 tokens over a vocabulary of 49k take 800 MB, and several times that in backward. Here they exist for
one chunk of rows at a time; backward computes them once more, but for the first chunks where layers are not
checkpointed. The weight's gradient is added where it is kept (gradients.py).

Where the head is spread over a team of ranks, each has the logits of its own words, and they tell each other the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from onbeat.device import as_given, product_dtype
from onbeat.training.gradients import add, add_product

KEPT_BYTES = 256 << 20
"""So much may stay from forward to backward: chunks beyond are computed twice."""

CHUNK_BYTES = 64 << 20
"""Of logits at a time."""


class _HeadLogprobs(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] or None, targets [T], temperature, dtype of products, team, keep) →
    log-probabilities, entropies [T]. With a team, V are this rank's words."""

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
        logprobs_T = torch.empty(len(target_T), dtype=_exact(hidden_T_H.dtype))
        entropy_T = torch.empty_like(logprobs_T)
        room = KEPT_BYTES if keep and any(ctx.needs_input_grad) else 0
        kept = []
        weight, hidden = weight_V_H.to(dtype), hidden_T_H.to(dtype)
        for rows in _chunks(len(target_T), len(weight_V_H), logprobs_T.element_size()):
            logits = _logits(hidden[rows], weight, bias_V, temperature)
            probabilities, log_total = _softmax(logits, team)
            of_target = _at(logits, target_T[rows], team)
            mean_logit = torch.bmm(probabilities[:, None], logits[:, :, None])[:, 0, 0]
            if team is not None:
                team.sum([of_target, mean_logit])
            logprobs_T[rows] = of_target - log_total
            entropy_T[rows] = log_total - mean_logit
            if probabilities.nbytes <= room:
                room -= probabilities.nbytes
                kept.append(probabilities)
            else:
                room = 0  # the last chunk may be smaller: none after one that was not kept
        ctx.save_for_backward(hidden, target_T, *kept)
        ctx.weight, ctx.bias, ctx.temperature, ctx.team = weight_V_H, bias_V, temperature, team
        ctx.hidden_dtype = hidden_T_H.dtype
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_T_H, target_T, *kept = ctx.saved_tensors
        weight_V_H, bias_V, team = ctx.weight, ctx.bias, ctx.team
        weight = weight_V_H.to(hidden_T_H.dtype)
        scale_T = gradients[0] / ctx.temperature
        grad_hidden = torch.empty_like(hidden_T_H)
        mine = _Own(weight_V_H, bias_V) if team is not None else None
        for number, rows in enumerate(_chunks(len(target_T), len(weight_V_H), scale_T.element_size())):
            if number < len(kept):
                probabilities = kept[number]
            else:
                logits = _logits(hidden_T_H[rows], weight, bias_V, ctx.temperature)
                probabilities, _ = _softmax(logits, team)
                del logits  # a chunk less at the peak
            # d logprob / d logit = (one at the target) - probability, times the gradient, over the temperature.
            scale = scale_T[rows]
            grad_logits = probabilities.mul_(-scale[:, None])
            _add_at(grad_logits, target_T[rows], scale, team)
            grad_rows = grad_logits.to(hidden_T_H.dtype)
            torch.mm(grad_rows, weight, out=grad_hidden[rows])
            if weight_V_H.requires_grad:
                add_product(mine.weight if mine else weight_V_H, grad_rows.T, hidden_T_H[rows])
            if bias_V is not None and bias_V.requires_grad:
                add(mine.bias if mine else bias_V, grad_logits.sum(dim=0))
        if team is not None:
            team.sum([grad_hidden])
        grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        own = (mine.weight.grad, mine.bias.grad) if mine else (None, None)
        return grad_hidden, *own, None, None, None, None, None


class _Own:
    """Where the gradients of a rank's words are collected: autograd brings them to the spread parameters."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight.detach()
        self.bias = torch.empty(0) if bias is None else bias.detach()


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


def _softmax(logits: torch.Tensor, team: Team | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and the logarithm of their common denominator."""
    if team is None:
        probabilities = torch.softmax(logits, dim=-1)
        # log Z from the largest: its probability is at least 1/V, so the logarithm is safe.
        return probabilities, logits.amax(dim=-1) - probabilities.amax(dim=-1).log_()
    largest = team.largest(logits.amax(dim=-1))
    weights = (logits - largest[:, None]).exp_()
    total = weights.sum(dim=-1)
    team.sum([total])
    return weights.div_(total[:, None]), largest + total.log()


def _at(logits: torch.Tensor, targets: torch.Tensor, team: Team | None) -> torch.Tensor:
    """Each row's at its target; 0 where another rank has the word."""
    if team is None:
        return logits.gather(1, targets[:, None])[:, 0]
    found = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return found.masked_fill(_elsewhere(targets, logits), 0.0)


def _add_at(gradients: torch.Tensor, targets: torch.Tensor, values: torch.Tensor, team: Team | None) -> None:
    if team is not None:
        values = values.masked_fill(_elsewhere(targets, gradients), 0.0)
        targets = targets.clamp(0, gradients.shape[1] - 1)
    gradients[torch.arange(len(values)), targets] += values


def _elsewhere(targets: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return (targets < 0) | (targets >= words.shape[1])


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Of log-probabilities: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden, weight, None if bias is None else bias.to(weight.dtype)).to(_exact(hidden.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(num_rows: int, vocabulary: int, element_bytes: int) -> list[slice]:
    """Equal chunks of rows: a function of the sizes alone."""
    largest = max(16, CHUNK_BYTES // (vocabulary * element_bytes))
    count = -(-num_rows // largest)
    step = -(-num_rows // max(1, count))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, max(1, step))]


def head_logprobs(
    head: torch.nn.Linear, hidden_T_H: torch.Tensor, target_T: torch.Tensor, temperature: float, *, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy (without gradient) of each prediction, at the temperature. `keep`:
    the first chunks may stay until backward."""
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
