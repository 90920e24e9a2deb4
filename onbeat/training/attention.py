"""Shared-prompt attention for any transformers decoder: each prompt is computed once for all its completions.

Registered under a name, found by the model through its attention interface, told the layout by a keyword that travels
through the model's forward: nothing is patched.

    sequence                   [prefix | prompt | completion | completion | … | prompt | completion | … ]
    prefix of all prompts      causal over itself, if there is one
    prompt of a group          causal over [prefix's keys | own keys]
    block of C completions     a batch of C over [prefix's and prompt's keys | own keys]

All by scaled_dot_product_attention: the kernel that runs, forward and backward, on every device. The prompt's keys are
copied per completion, for attention alone; long prompts on a CPU, where the kernel can be asked for more, are not
(merged.py).

A layer with a sliding window of W sees W positions back, its own included; of the prompt it needs the last W - 1 keys.

A split group runs in two steps. `keep` holds, layer by layer, the prompt's keys and values of the first; the parts of
the second read them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from onbeat.attention import attend, causal_mask, refuse_unsupported
from onbeat.batch.layout import Segment
from onbeat.training.merged import merged_attention, merges

ATTENTION = "onbeat_shared"

KeysValues = tuple[torch.Tensor, torch.Tensor]


class SharedPrompt:
    """What the attention of one forward needs to know, and where a prompt's keys and values are kept.

    No dataclass: FSDP looks for tensors in those that pass through a layer, and puts copies in their place.
    """

    def __init__(
        self,
        segments: tuple[Segment, ...],
        prefix_length: int = 0,
        kept: dict[int, KeysValues] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self.segments = segments
        self.prefix_length = prefix_length
        self.kept = {} if kept is None else kept
        """By layer; filled by a `prompt_only` forward, read by `completions_only` ones."""
        self.keep = keep
        prefix = [prefix_length] if prefix_length else []
        self._lengths = [*prefix, *(length for segment in segments for length in segment.lengths)]
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [1, heads, N, d], key and value [1, kv heads, N, d] → [1, N, heads, d]."""
        # Rows once apart and once together: the backward of a slice would write a whole sequence of zeros.
        rows = zip(*(torch.split(tensor, self._lengths, dim=2) for tensor in (query, key, value)), strict=True)
        parts: list[torch.Tensor] = []
        prefix: KeysValues | None = None
        if self.prefix_length:
            own_query, own_key, own_value = next(rows)
            prefix = (own_key, own_value)
            parts.append(self._prompt(own_query, prefix, scale, window))
        for segment in self.segments:
            if segment.own_prompt_length:
                own_query, own_key, own_value = next(rows)
                prompt = (own_key, own_value)
                if prefix is not None:
                    prompt = (torch.cat([prefix[0], own_key], dim=2), torch.cat([prefix[1], own_value], dim=2))
                parts.append(self._prompt(own_query, prompt, scale, window))
            else:
                prompt = self.kept[layer]
            if self.keep:
                self.kept[layer] = prompt
            if segment.blocks:
                own_query, own_key, own_value = next(rows)
                parts += self._completions(segment, own_query, prompt, (own_key, own_value), scale, window)
        return torch.cat(parts, dim=1)

    def _prompt(self, query: torch.Tensor, keys_values: KeysValues, scale: float, window: int | None) -> torch.Tensor:
        """Causal; keys before the first query's are those of a prefix."""
        key, value = keys_values
        length = query.shape[2]
        before = key.shape[2] - length
        seen = before if window is None else min(before, window - 1)
        mask = self._mask(seen, length, window) if seen or (window is not None and length > window) else None
        return attend(query, key[:, :, before - seen :], value[:, :, before - seen :], mask, scale).transpose(1, 2)

    def _completions(
        self,
        segment: Segment,
        query: torch.Tensor,
        prompt: KeysValues,
        own: KeysValues,
        scale: float,
        window: int | None,
    ) -> list[torch.Tensor]:
        length = segment.prompt_length
        if merges(query, prompt[1]) and (window is None or window >= length + segment.longest):
            return [merged_attention(query, prompt, own, segment, scale)]
        seen = length if window is None else min(length, window - 1)
        prompt_key, prompt_value = (tensor[:, :, length - seen :] for tensor in prompt)
        attended = []
        for block, rows in segment.by_block(query, *own):
            own_query, own_key, own_value = (block.as_batch(each) for each in rows)
            keys, values = _after_prompt(prompt_key, own_key), _after_prompt(prompt_value, own_value)
            batch = attend(own_query, keys, values, self._mask(seen, block.longest, window), scale)
            attended.append(block.as_rows(batch))
        return attended

    def _mask(self, before: int, length: int, window: int | None) -> torch.Tensor:
        name = (before, length, window)
        if name not in self._masks:
            self._masks[name] = causal_mask(before, length, window)
        return self._masks[name]


def _after_prompt(prompt: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return torch.cat([prompt.expand(own.shape[0], -1, -1, -1), own], dim=2)


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
    return shared_prompt.attend(layer, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION, shared_attention)
