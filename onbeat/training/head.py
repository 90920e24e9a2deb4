"""Log-probabilities without the logits: head and log-softmax in chunks, at completion positions, forward and backward.

The logits of 4,096 tokens over a vocabulary of 49k take 800 MB, and several times that in backward. Here they exist for
one chunk of rows at a time; backward computes them once more, unless all of them are small. The weight's gradient is
added where it is kept (gradients.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onbeat.training.gradients import add, add_product

CHUNK_BYTES = 64 << 20
"""Of logits at a time."""

KEPT_BYTES = 256 << 20
"""So much may stay from forward to backward; a larger micro-batch, where memory is short, computes its logits twice."""


class _HeadLogprobs(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] or None, targets [T], temperature) → log-probabilities, entropies [T]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_T_H: torch.Tensor,
        weight_V_H: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_T: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_T = torch.empty(len(target_T), dtype=hidden_T_H.dtype)
        entropy_T = torch.empty_like(logprobs_T)
        size = len(target_T) * len(weight_V_H) * hidden_T_H.element_size()
        keeps = size <= KEPT_BYTES and any(ctx.needs_input_grad)
        kept = []
        for rows in _chunks(len(target_T), len(weight_V_H), hidden_T_H.element_size()):
            logits = _logits(hidden_T_H[rows], weight_V_H, bias_V, temperature)
            probabilities = torch.softmax(logits, dim=-1)
            # log Z from the largest: its probability is at least 1/V, so the logarithm is safe.
            log_total = logits.amax(dim=-1) - probabilities.amax(dim=-1).log_()
            logprobs_T[rows] = logits.gather(1, target_T[rows, None])[:, 0] - log_total
            entropy_T[rows] = log_total - torch.bmm(probabilities[:, None], logits[:, :, None])[:, 0, 0]
            if keeps:
                kept.append(probabilities)
        ctx.save_for_backward(hidden_T_H, target_T, *kept)
        ctx.weight, ctx.bias, ctx.temperature = weight_V_H, bias_V, temperature
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_T_H, target_T, *kept = ctx.saved_tensors
        weight_V_H, bias_V = ctx.weight, ctx.bias
        scale_T = gradients[0] / ctx.temperature
        grad_hidden = torch.empty_like(hidden_T_H)
        for number, rows in enumerate(_chunks(len(target_T), len(weight_V_H), hidden_T_H.element_size())):
            if kept:
                probabilities = kept[number]
            else:
                logits = _logits(hidden_T_H[rows], weight_V_H, bias_V, ctx.temperature)
                probabilities = torch.softmax(logits, dim=-1)
            # d logprob / d logit = (one at the target) - probability, times the gradient, over the temperature.
            scale = scale_T[rows]
            grad_logits = probabilities * -scale[:, None]
            grad_logits[torch.arange(len(scale)), target_T[rows]] += scale
            torch.mm(grad_logits, weight_V_H, out=grad_hidden[rows])
            if weight_V_H.requires_grad:
                add_product(weight_V_H, grad_logits.T, hidden_T_H[rows])
            if bias_V is not None and bias_V.requires_grad:
                add(bias_V, grad_logits.sum(dim=0))
        return grad_hidden, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(num_rows: int, vocabulary: int, element_bytes: int) -> list[slice]:
    """Equal chunks of rows: a function of the sizes alone."""
    largest = max(16, CHUNK_BYTES // (vocabulary * element_bytes))
    count = -(-num_rows // largest)
    step = -(-num_rows // max(1, count))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, max(1, step))]


def head_logprobs(
    head: torch.nn.Linear, hidden_T_H: torch.Tensor, target_T: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy (without gradient) of each prediction, at the temperature."""
    logprobs, entropy = _HeadLogprobs.apply(hidden_T_H, head.weight, head.bias, target_T, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy
