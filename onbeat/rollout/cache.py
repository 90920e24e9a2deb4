"""Keys and values of the groups being decoded, and the attention over them, for any transformers decoder.

A group's prompt is kept once, for all its samples; each sample keeps what it wrote itself:

    prompt   [layers, 2, kv heads, P, dim]
    own      [layers, 2, samples, kv heads, R, dim]      R = the most it may write

All tokens of a step, of whatever group and age, go through the model as one row of tokens. A `Step` says what they
are: chunks of prompts, and one token for each sample of some groups. Linear layers do not care; attention does, and
looks at each chunk and each group by itself.

Batch invariance (R1) decides the shape of everything here. What a sequence becomes must depend on its own prompt and
tokens alone, so:
- a prompt is cut into chunks at multiples of CHUNK_TOKENS, counted from its start;
- samples of a group start together and are always of the same length: no key is padded, nothing is masked;
- at least MIN_ROWS rows go through every matrix product, in attention too: smaller ones take another kernel.
tests/equivalence/test_batch_invariance.py holds this, because it rests on the libraries' kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from onbeat.admission import MIN_ROWS
from onbeat.attention import causal_mask, refuse_unsupported

CHUNK_TOKENS = 128
ATTENTION = "onbeat_cached"
"""The name under which transformers finds `cached_attention`."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a token costs in a model's cache."""

    num_layers: int
    num_heads: int
    """Of keys and values."""
    dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any) -> CacheShape:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=getattr(config, "num_key_value_heads", None) or heads,
            dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_heads * self.dim * self.dtype.itemsize


class GroupCache:
    """Of one group. Memory is reserved at once and touched as it is needed."""

    def __init__(self, shape: CacheShape, prompt_length: int, num_samples: int, max_new_tokens: int) -> None:
        layers, heads, dim = shape.num_layers, shape.num_heads, shape.dim
        rows = max(num_samples, MIN_ROWS)
        self.prompt = torch.empty(layers, 2, heads, prompt_length, dim, dtype=shape.dtype)
        self.own = torch.empty(layers, 2, rows, heads, max_new_tokens, dim, dtype=shape.dtype)
        self.own[:, :, num_samples:] = 0.0  # rows that only fill up to MIN_ROWS
        self.length = 0
        """Own tokens whose keys are here; the same for every sample."""

    @property
    def prompt_length(self) -> int:
        return self.prompt.shape[3]

    def move(self, source: int, target: int) -> None:
        """Sample `target` becomes what sample `source` is."""
        self.own[:, :, target, :, : self.length] = self.own[:, :, source, :, : self.length]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens first … last - 1 of a prompt."""

    cache: GroupCache
    first: int
    last: int

    @property
    def num_tokens(self) -> int:
        return self.last - self.first

    def attend(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor, window: int | None,
        masks: dict[Any, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """[T, H, D]"""
        keys, values = self.cache.prompt[layer]
        keys[:, self.first : self.last] = k_KTD
        values[:, self.first : self.last] = v_KTD
        seen = slice(0 if window is None else max(0, self.first - window + 1), self.last)
        causal = self.first == 0 and (window is None or self.last <= window)
        mask = None
        if not causal:
            name = (self.first - seen.start, self.num_tokens, window)
            if name not in masks:
                masks[name] = causal_mask(*name)
            mask = masks[name]
        out = F.scaled_dot_product_attention(
            q_HTD[None], keys[None, :, seen], values[None, :, seen], attn_mask=mask, is_causal=causal, scale=1.0,
            enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next token of each of the first n samples of a group."""

    cache: GroupCache
    num_tokens: int

    def attend(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor, window: int | None,
        masks: dict[Any, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """[T, H, D]: one softmax over the shared prompt's keys and the sample's own."""
        cache, count, at = self.cache, self.num_tokens, self.cache.length
        own_k, own_v = cache.own[layer]
        own_k[:count, :, at] = k_KTD.transpose(0, 1)
        own_v[:count, :, at] = v_KTD.transpose(0, 1)
        rows = max(count, MIN_ROWS)
        first = 0 if window is None else max(0, at - window + 1)
        seen = cache.prompt_length if window is None else min(cache.prompt_length, max(0, window - 1 - at))
        prompt_k, prompt_v = cache.prompt[layer, :, :, cache.prompt_length - seen :]
        heads, dim = k_KTD.shape[0], k_KTD.shape[2]
        q_TKQD = q_HTD.transpose(0, 1).reshape(count, heads, -1, dim)
        if rows > count:
            q_TKQD = F.pad(q_TKQD, (0, 0, 0, 0, 0, 0, 0, rows - count))
        queries = q_TKQD.shape[2]
        own_k, own_v = own_k[:rows, :, first : at + 1].flatten(0, 1), own_v[:rows, :, first : at + 1].flatten(0, 1)
        scores = torch.bmm(q_TKQD.flatten(0, 1), own_k.transpose(1, 2))
        if not seen:
            out = torch.bmm(torch.softmax(scores, dim=-1), own_v).view(rows, heads, queries, dim)
            return out.flatten(1, 2)[:count]
        q_K_TQ_D = q_TKQD.transpose(0, 1).reshape(heads, rows * queries, dim)
        prompt_scores = torch.bmm(q_K_TQ_D, prompt_k.transpose(1, 2)).view(heads, rows, queries, seen).transpose(0, 1)
        scores = torch.cat([prompt_scores, scores.view(rows, heads, queries, -1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        out = torch.bmm(weights[..., seen:].flatten(0, 1), own_v).view(rows, heads, queries, dim)
        prompt_weights = weights[..., :seen].transpose(0, 1).reshape(heads, rows * queries, seen)
        out += torch.bmm(prompt_weights, prompt_v).view(heads, rows, queries, dim).transpose(0, 1)
        return out.flatten(1, 2)[:count]


@dataclass(slots=True)
class Step:
    """What the tokens of one forward are, in their order; tokens beyond are filling."""

    parts: list[Chunk | Tokens]
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [1, heads, N, dim], key and value [1, kv heads, N, dim] → [1, N, heads, dim]."""
        out = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
        q_HND = query[0] * scale
        at = 0
        for part in self.parts:
            mine = slice(at, at + part.num_tokens)
            out[0, mine] = part.attend(layer, q_HND[:, mine], key[0, :, mine], value[0, :, mine], window, self._masks)
            at = mine.stop
        return out


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cache_step: Step,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of the model calls. `cache_step` travels through the model's forward as a keyword."""
    refuse_unsupported(module, extras)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return cache_step.attend(layer, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION, cached_attention)
