"""Log-probabilities without the logits: head and log-softmax in chunks, at completion positions, forward and backward.

The logits of 4,096 tokens over a vocabulary of 49k take 800 MB, and several times that in backward. Here they exist for
one chunk of rows at a time; backward computes them once more. What is kept per token is one number.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_BYTES = 64 << 20
"""Of logits at a time."""


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
        for rows in _chunks(len(target_T), len(weight_V_H), hidden_T_H.element_size()):
            logits = _logits(hidden_T_H[rows], weight_V_H, bias_V, temperature)
            total = logits.logsumexp(dim=-1)
            logprobs_T[rows] = logits.gather(1, target_T[rows, None])[:, 0] - total
            # H = log Z - E[logit]: in place, for the logits are not needed any more.
            probabilities = (logits - total[:, None]).exp_()
            entropy_T[rows] = total - probabilities.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden_T_H, weight_V_H, bias_V, target_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_T_H, weight_V_H, bias_V, target_T = ctx.saved_tensors
        grad_T = gradients[0]
        grad_hidden = torch.empty_like(hidden_T_H)
        grad_weight = torch.zeros_like(weight_V_H) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V) if bias_V is not None else None
        for rows in _chunks(len(target_T), len(weight_V_H), hidden_T_H.element_size()):
            logits = _logits(hidden_T_H[rows], weight_V_H, bias_V, ctx.temperature)
            # d logprob / d logit = (one at the target) - probability, times the gradient, over the temperature.
            scale = grad_T[rows] / ctx.temperature
            grad_logits = logits.sub_(logits.logsumexp(dim=-1, keepdim=True)).exp_().mul_(-scale[:, None])
            grad_logits[torch.arange(len(scale)), target_T[rows]] += scale
            torch.mm(grad_logits, weight_V_H, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden_T_H[rows])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
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
