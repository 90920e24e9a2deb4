"""Shared-prompt attention for any transformers decoder: each prompt is computed once for all its completions.

Registered under a name, found by the model through its attention interface, told the layout by a keyword that travels
through the model's forward: nothing is patched.

    group in the sequence      [prompt P | completion | completion | … ]
    prompt                     causal over itself: scaled_dot_product_attention
    completions                over the prompt's keys and their own (group_attention.py)

A layer with a sliding window of W sees W positions back, its own included; of the prompt it needs the last W - 1 keys.

A split group runs in two steps. `keep` holds, layer by layer, the prompt's keys and values of the first; the parts of
the second read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from onbeat.attention import causal_mask, refuse_unsupported
from onbeat.batch.layout import Block, Segment
from onbeat.training.group_attention import GroupShape, group_attention

ATTENTION = "onbeat_shared"

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class SharedPrompt:
    """What the attention of one forward needs to know, and where a prompt's keys and values are kept."""

    segments: tuple[Segment, ...]
    kept: dict[int, KeysValues] = field(default_factory=dict)
    """By layer; filled by a `prompt_only` forward, read by `completions_only` ones."""
    keep: bool = False

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [1, heads, N, d], key and value [1, kv heads, N, d] → [1, heads, N, d]."""
        parts: list[torch.Tensor] = []
        for segment in self.segments:
            length = segment.prompt_length
            if segment.prompt_start is None:
                prompt_key, prompt_value = self.kept[layer]
            else:
                at = slice(segment.prompt_start, segment.prompt_start + length)
                prompt_key, prompt_value = key[:, :, at], value[:, :, at]
                mask = causal_mask(0, length, window) if window is not None and length > window else None
                parts.append(_sdpa(query[:, :, at], prompt_key, prompt_value, mask, scale))
            if self.keep:
                self.kept[layer] = (prompt_key, prompt_value)
            if segment.blocks:
                first, last = segment.blocks[0].start, segment.blocks[-1].end
                blocks = tuple(Block(b.start - first, b.num_completions, b.length) for b in segment.blocks)
                seen = slice(max(0, length - window + 1) if window is not None else 0, length)
                attended = group_attention(
                    query[0, :, first:last],
                    prompt_key[0, :, seen],
                    prompt_value[0, :, seen],
                    key[0, :, first:last],
                    value[0, :, first:last],
                    scale,
                    GroupShape(blocks, seen.stop - seen.start, window),
                )
                parts.append(attended[None])
        return torch.cat(parts, dim=2)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def shared_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    shared_prompt: SharedPrompt,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of the model calls."""
    refuse_unsupported(module, extras)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return shared_prompt.attend(layer, query, key, value, scale, sliding_window).transpose(1, 2), None


AttentionInterface.register(ATTENTION, shared_attention)
