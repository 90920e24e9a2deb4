"""Attention of a group's completions over their shared prompt and themselves, in matrix products of a useful size.

All completions' queries meet the prompt's keys in one product; each completion meets its own keys in a small one; the
two softmaxes are one, by their log-sum-exp. Nothing of the prompt is copied per completion, and in backward the sum
over completions is inside the product that gives the prompt's gradient.

    s_prompt = q · K_promptᵀ     s_own = q · K_ownᵀ (causal)     lse = log Σ exp of both     (q comes scaled)
    out = exp(s_prompt - lse) · V_prompt + exp(s_own - lse) · V_own

Kept for backward: inputs, output and lse. Scores exist piece by piece, at most PIECE_BYTES at a time, in forward and in
backward. Plain tensor operations: the same code on every device.

Axes: K kv heads, Q queries per kv head, T completion tokens of the group in a row, P prompt tokens seen, D head size,
C completions of a block, R their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.attention import causal_mask
from onbeat.batch.layout import Block

PIECE_BYTES = 4 << 20
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Where the group's completions stand in T, and what they may see of the prompt."""

    blocks: tuple[Block, ...]
    """With `start` counted from the group's first completion token."""
    prompt_length: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows r0 … r1 of completions c0 … c1 of a block, against their own keys 0 … r1."""

    block: Block
    c0: int
    c1: int
    r0: int
    r1: int

    def queries(self, tensor_KQT: torch.Tensor) -> torch.Tensor:
        """A view [K, Q, C, r, …] of these rows."""
        return self._completions(tensor_KQT, 2)[:, :, self.c0 : self.c1, self.r0 : self.r1]

    def keys(self, tensor_KT: torch.Tensor) -> torch.Tensor:
        """A view [K, C, r1, …] of what these rows may see of themselves."""
        return self._completions(tensor_KT, 1)[:, self.c0 : self.c1, : self.r1]

    def _completions(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        block = self.block
        rows = tensor.narrow(dim, block.start, block.end - block.start)
        return rows.view(*rows.shape[:dim], block.num_completions, block.length, *rows.shape[dim + 1 :])

    def mask(self, window: int | None) -> torch.Tensor:
        return causal_mask(self.r0, self.r1 - self.r0, window)


class _GroupAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_KQTD: torch.Tensor,
        prompt_k_KPD: torch.Tensor,
        prompt_v_KPD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        shape: GroupShape,
    ) -> torch.Tensor:
        out_KQTD = torch.empty_like(q_KQTD)
        lse_KQT, top_KQT = (q_KQTD.new_empty(q_KQTD.shape[:3]) for _ in range(2))
        for rows in _row_chunks(shape, q_KQTD):
            weights, top, total = _softmax_sums(_prompt_scores(rows, q_KQTD, prompt_k_KPD, shape))
            out_KQTD[:, :, rows] = _product(weights, prompt_v_KPD)
            top_KQT[:, :, rows], lse_KQT[:, :, rows] = top, top + total.log()
        for piece in _pieces(shape, q_KQTD):
            weights, top, total = _softmax_sums(_own_scores(piece, q_KQTD, k_KTD, shape))
            lse, out = piece.queries(lse_KQT), piece.queries(out_KQTD)
            lse.copy_(torch.logaddexp(lse, top + total.log()))
            out.mul_((piece.queries(top_KQT) - lse).exp_()[..., None])
            out.add_((weights @ piece.keys(v_KTD)[:, None]).mul_((top - lse).exp_()[..., None]))
        ctx.save_for_backward(q_KQTD, prompt_k_KPD, prompt_v_KPD, k_KTD, v_KTD, out_KQTD, lse_KQT)
        ctx.shape = shape
        return out_KQTD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, prompt_k, prompt_v, k, v, out, lse = ctx.saved_tensors
        shape: GroupShape = ctx.shape
        grad_out = gradients[0].contiguous()
        delta_KQT = (grad_out * out).sum(dim=-1)
        grad_q = torch.empty_like(q)
        grad_prompt_k, grad_prompt_v = torch.zeros_like(prompt_k), torch.zeros_like(prompt_v)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for rows in _row_chunks(shape, q):
            weights = _prompt_scores(rows, q, prompt_k, shape).sub_(lse[:, :, rows, None]).exp_().flatten(1, 2)
            queries, grads = q[:, :, rows].flatten(1, 2), grad_out[:, :, rows].flatten(1, 2)
            grad_prompt_v.baddbmm_(weights.transpose(1, 2), grads)
            grad_scores = torch.bmm(grads, prompt_v.transpose(1, 2)).sub_(delta_KQT[:, :, rows].flatten(1)[..., None])
            grad_scores.mul_(weights)
            grad_prompt_k.baddbmm_(grad_scores.transpose(1, 2), queries)
            grad_q[:, :, rows] = torch.bmm(grad_scores, prompt_k).view_as(grad_q[:, :, rows])
        for piece in _pieces(shape, q):
            weights = _own_scores(piece, q, k, shape).sub_(piece.queries(lse)[..., None]).exp_()
            grads = piece.queries(grad_out)
            piece.keys(grad_v).add_((weights.transpose(-1, -2) @ grads).sum(dim=1))
            grad_scores = (grads @ piece.keys(v)[:, None].transpose(-1, -2)).sub_(piece.queries(delta_KQT)[..., None])
            grad_scores.mul_(weights)
            piece.keys(grad_k).add_((grad_scores.transpose(-1, -2) @ piece.queries(q)).sum(dim=1))
            piece.queries(grad_q).add_(grad_scores @ piece.keys(k)[:, None])
        return grad_q, grad_prompt_k, grad_prompt_v, grad_k, grad_v, None


def _softmax_sums(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(scores - top), top, and the sum over keys, by row; in place. A row that sees nothing has sum 0."""
    top = scores.amax(dim=-1).clamp_(min=_LOWEST)
    weights = scores.sub_(top[..., None]).exp_()
    return weights, top, weights.sum(dim=-1)


def _product(rows_KQTX: torch.Tensor, matrix_KXY: torch.Tensor) -> torch.Tensor:
    """[K, Q, T, Y]: one product per kv head over all its queries, instead of one per query head."""
    heads, per_head, rows, _ = rows_KQTX.shape
    return torch.bmm(rows_KQTX.flatten(1, 2), matrix_KXY).view(heads, per_head, rows, -1)


def _prompt_scores(rows: slice, q: torch.Tensor, prompt_k: torch.Tensor, shape: GroupShape) -> torch.Tensor:
    """[K, Q, rows, P]"""
    scores = _product(q[:, :, rows], prompt_k.transpose(1, 2))
    if shape.window is not None:
        scores.masked_fill_(~_prompt_mask(shape, q.shape[2])[rows], float("-inf"))
    return scores


def _prompt_mask(shape: GroupShape, num_rows: int) -> torch.Tensor:
    """[T, P]: how far back into the prompt a sliding window reaches from each completion token."""
    assert shape.window is not None
    offsets = torch.cat([torch.arange(block.length).repeat(block.num_completions) for block in shape.blocks])
    assert len(offsets) == num_rows
    position = shape.prompt_length + offsets[:, None]
    return torch.arange(shape.prompt_length)[None] > position - shape.window


def _own_scores(piece: _Piece, q: torch.Tensor, k: torch.Tensor, shape: GroupShape) -> torch.Tensor:
    """[K, Q, C, r, r1]"""
    scores = piece.queries(q) @ piece.keys(k)[:, None].transpose(-1, -2)
    return scores.masked_fill_(~piece.mask(shape.window), float("-inf"))


def _row_chunks(shape: GroupShape, q: torch.Tensor) -> list[slice]:
    heads, per_head, rows, _ = q.shape
    step = max(1, PIECE_BYTES // (heads * per_head * max(1, shape.prompt_length) * q.element_size()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _pieces(shape: GroupShape, q: torch.Tensor) -> Iterator[_Piece]:
    """Whole completions if they fit, else rows of one."""
    row_bytes = q.shape[0] * q.shape[1] * q.element_size()
    for block in shape.blocks:
        length = block.length
        rows = min(length, max(1, PIECE_BYTES // (row_bytes * length)))
        count = max(1, PIECE_BYTES // (row_bytes * length * length)) if rows == length else 1
        for c0 in range(0, block.num_completions, count):
            for r0 in range(0, length, rows):
                yield _Piece(block, c0, min(c0 + count, block.num_completions), r0, min(r0 + rows, length))


def group_attention(
    query: torch.Tensor,
    prompt_key: torch.Tensor,
    prompt_value: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    shape: GroupShape,
) -> torch.Tensor:
    """query [heads, T, d], prompt's [kv heads, P, d], own [kv heads, T, d] → [heads, T, d]."""
    heads, rows, dim = query.shape
    grouped = (query * scale).view(key.shape[0], heads // key.shape[0], rows, dim)
    own_key, own_value = key.contiguous(), value.contiguous()
    out = _GroupAttention.apply(  # type: ignore[no-untyped-call]
        grouped, prompt_key.contiguous(), prompt_value.contiguous(), own_key, own_value, shape
    )
    return out.view(heads, rows, dim)  # type: ignore[no-any-return]
