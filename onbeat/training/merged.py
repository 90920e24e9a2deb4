"""Attention of a group's completions over one copy of their prompt's keys, on a CPU.

    all T queries of the group  ─▶ prompt's keys           output, log of its weights' sum  ┐
    each block, causal          ─▶ its completions' keys   output, log of its weights' sum  ┴▶ the mean by weights

The kernel is the one that scaled_dot_product_attention runs there; it gives the logarithms too. Backward runs it over
both again, each told the merged output and logarithms: then the gradients are parts of the whole's, and add up.

Beside copying the keys for every completion (attention.py), the queries stand in longer rows, and C·P keys and values
per layer are neither written nor kept until backward. Short prompts are copied all the same, which is fewer steps. On
other devices the kernels are others, and copies are made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onbeat.batch.layout import Block, Segment
from onbeat.device import product_dtype

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

PARTS = 4
"""In which the queries meet the prompt: backward gives each head of a part to one thread, and a few heads are hard to
share out. A fixed number, for the sums of the prompt's gradients are taken in its order."""


LONG_PROMPT = 256
"""Tokens. From here on the two ways take equally long (benchmarks/attention.py): merged, 8 completions of 15 tokens
after 45 take half as long again, 8 of 128 after 128 take 14 % more, 8 of 32 after 256 as long, 16 of 32 after 512 take
4 % less."""


def merges(query: torch.Tensor, prompt_value: torch.Tensor) -> bool:
    """Whether attention is to be computed this way."""
    long = prompt_value.shape[2] >= LONG_PROMPT
    return long and query.device.type == "cpu" and query.shape[-1] == prompt_value.shape[-1]


def merged_attention(
    query: torch.Tensor,
    prompt: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    segment: Segment,
    scale: float,
) -> torch.Tensor:
    """query [1, heads, T, d]; keys and values of the prompt [1, kv heads, P, d], of the completions, block after block,
    [1, kv heads, T, d] → [1, T, heads, d]."""
    dtype = product_dtype(query.dtype)
    tensors = [_with_rows(tensor.to(dtype)) for tensor in (query, *prompt, *own)]
    attended: torch.Tensor = _Merged.apply(*tensors, segment, scale)  # type: ignore[no-untyped-call]
    return attended


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """As the kernel takes for granted: the numbers of a row stand side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        prompt_key: torch.Tensor,
        prompt_value: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segment: Segment,
        scale: float,
    ) -> torch.Tensor:
        many = [tensor.expand(PARTS, -1, -1, -1) for tensor in (prompt_key, prompt_value)]
        output, log_sum = _flash(_in_parts(query), *many, scale=scale)
        over_prompt, prompt_log_sum = _from_parts(output, query), _from_parts(log_sum[..., None], query)
        outputs, log_sums = [], []
        for block, rows in segment.by_block(query, key, value):
            output, log_sum = _flash(*(block.as_batch(each) for each in rows), 0.0, True, scale=scale)
            outputs.append(block.as_rows(output))
            log_sums.append(block.as_rows(log_sum[..., None]))
        own, own_log_sum = torch.cat(outputs, dim=1), torch.cat(log_sums, dim=1)
        # Two weights, each exact where it is small, in the precision of the logarithms: a share of 0.999 leaves 0.001.
        # By these functions alone, and one at a time: of others the bits tell where a number lies (threads.py).
        most = torch.maximum(prompt_log_sum, own_log_sum)
        prompt_weight, own_weight = ((each - most).exp_() for each in (prompt_log_sum, own_log_sum))
        total = prompt_weight + own_weight
        log_sum = total.log().add_(most)
        merged = own * (own_weight / total)
        merged += over_prompt * (prompt_weight / total)
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, prompt_key, prompt_value, key, value, merged, log_sum)
        ctx.segment, ctx.scale = segment, scale
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, prompt_key, prompt_value, key, value, merged, log_sum = ctx.saved_tensors
        gradient, merged, log_sum = (tensor.transpose(1, 2) for tensor in (gradients[0], merged, log_sum))
        many = [tensor.expand(PARTS, -1, -1, -1) for tensor in (prompt_key, prompt_value)]
        parts = [_in_parts(tensor) for tensor in (gradient, query, merged, log_sum)]
        over_prompt = _flash_backward(*parts[:2], *many, parts[2], parts[3].squeeze(-1), 0.0, False, scale=ctx.scale)
        of_query = _from_parts(over_prompt[0], query)
        of_prompt = [each.sum(dim=0, keepdim=True) for each in over_prompt[1:]]
        of_own = []
        for block, rows in ctx.segment.by_block(gradient, query, key, value, merged, log_sum):
            from_above, *given, log_sum_of = (block.as_batch(each) for each in rows)
            if block.unpadded_T is not None:  # nothing comes back from the places that repeat a token
                from_above = from_above * _stays(block)
            found = _flash_backward(from_above, *given, log_sum_of.squeeze(-1), 0.0, True, scale=ctx.scale)
            of_own.append([block.as_rows(each) for each in found])
        own_query, own_key, own_value = (torch.cat(each, dim=1) for each in zip(*of_own, strict=True))
        of_query = (of_query + own_query).transpose(1, 2)
        return of_query, *of_prompt, own_key.transpose(1, 2), own_value.transpose(1, 2), None, None


def _in_parts(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, d] → [PARTS, heads, T / PARTS, d], zeros at the end if it does not divide."""
    rows = tensor.squeeze(0).transpose(0, 1)
    if left := -len(rows) % PARTS:
        rows = F.pad(rows, (0, 0, 0, 0, 0, left))
    return rows.reshape(PARTS, -1, *rows.shape[1:]).transpose(1, 2)


def _from_parts(parts: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Back: [1, T, heads, d]."""
    return parts.transpose(1, 2).flatten(0, 1)[None, : query.shape[2]]


def _stays(block: Block) -> torch.Tensor:
    """[C, 1, R, 1]: 1 where a token stands, 0 where one is repeated."""
    lengths = torch.tensor(block.lengths)[:, None]
    return (torch.arange(block.longest) < lengths)[:, None, :, None]
