"""Shared-prompt attention for any transformers decoder: each prompt is computed once for all its completions.

Registered under a name, found by the model through its attention interface, told the layout by a keyword that travels
through the model's forward: nothing is patched. Built on scaled_dot_product_attention alone, which has a backward on
every device.

    group in the sequence      [prompt P | block of C completions of R | block … ]
    prompt                     causal over itself
    block                      queries [C, heads, R, d] over keys [C, kv heads, P + R, d]: the prompt's, then its own

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

ATTENTION = "onbeat_shared"

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class SharedPrompt:
    """What the attention of one forward needs to know, and where a prompt's keys and values are kept."""

    segments: tuple[Segment, ...]
    kept: dict[int, KeysValues] = field(default_factory=dict)
    """By layer; filled by a `prompt_only` forward, read by `completions_only` ones."""
    keep: bool = False
    _masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)

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
                mask = self._mask(0, length, window) if window is not None and length > window else None
                parts.append(_sdpa(query[:, :, at], prompt_key, prompt_value, mask, scale))
            if self.keep:
                self.kept[layer] = (prompt_key, prompt_value)
            if window is not None and length > window - 1:
                seen = slice(length - window + 1, None)
                prompt_key, prompt_value = prompt_key[:, :, seen], prompt_value[:, :, seen]
            for block in segment.blocks:
                own = _rows(query, block)
                keys = torch.cat([prompt_key.expand(block.num_completions, -1, -1, -1), _rows(key, block)], dim=2)
                values = torch.cat([prompt_value.expand(block.num_completions, -1, -1, -1), _rows(value, block)], dim=2)
                mask = self._mask(prompt_key.shape[2], block.length, window)
                attended = _sdpa(own, keys, values, mask, scale)
                parts.append(attended.transpose(0, 1).flatten(1, 2)[None])
        return torch.cat(parts, dim=2)

    def _mask(self, before: int, length: int, window: int | None) -> torch.Tensor:
        name = (before, length, window)
        if name not in self._masks:
            self._masks[name] = causal_mask(before, length, window)
        return self._masks[name]


def _rows(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """The block of [1, heads, N, d] as [C, heads, R, d], without copying."""
    heads, _, dim = tensor[0].shape
    at = tensor[0, :, block.start : block.end]
    return at.view(heads, block.num_completions, block.length, dim).transpose(0, 1)


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
