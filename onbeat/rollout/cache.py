"""Keys and values of the groups being decoded, and the attention over them, for any transformers decoder.

A group's prompt is kept once, for all its samples; each sample keeps what it wrote itself:

    prompt   [2, kv heads, P, dim]               for every layer
    own      [2, kv heads, samples, R, dim]      R = the most it may write

All tokens of a step, of whatever group and age, go through the model as one row of tokens. A `Step` says what they
are: chunks of prompts, and one token for each sample of some groups. Linear layers do not care; attention does, and
looks at each chunk and each group by itself.

Batch invariance (R1) decides the shape of everything here. What a sequence becomes must depend on its own prompt and
tokens alone, so:
- a prompt is cut into chunks at multiples of CHUNK_TOKENS, counted from its start;
- samples of a group start together and are always of the same length: no key is padded, nothing is masked;
- at least MIN_ROWS rows go through every matrix product whose rows are counted by samples: fewer take another kernel.
  (A sample's products with its own keys have a row per head that shares them: that is the model's, not the batch's.)
- samples share a product with their prompt's keys if it is large whatever their number, else each has its own: a small
  product, or one product instead of one per head of keys, takes another kernel with more rows.
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
_SHARED = 1024
"""Numbers in a head's keys of a prompt from which on samples share a product with them."""
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
    """Of one group. Memory is reserved at once and touched as it is needed.

    A sample that has ended leaves its row empty. When half of the rows are empty the others move together, and the
    memory of the empty ones is given back.
    """

    def __init__(self, shape: CacheShape, prompt_length: int, num_samples: int, max_new_tokens: int) -> None:
        self.num_heads, dim = shape.num_heads, shape.dim
        self.prompt_length = prompt_length
        self.length = 0
        """Own tokens whose keys are here; the same for every sample."""
        self.rows = max(num_samples, MIN_ROWS)
        self.prompt = [
            torch.empty(2, self.num_heads, prompt_length, dim, dtype=shape.dtype) for _ in range(shape.num_layers)
        ]
        self.own = [
            torch.empty(2, self.num_heads, self.rows, max_new_tokens, dim, dtype=shape.dtype)
            for _ in range(shape.num_layers)
        ]
        self._place(list(range(num_samples)))

    def _place(self, alive: list[int]) -> None:
        self.alive = alive
        """The row of each sample that goes on, in the order of the samples."""
        self.index = None if alive == list(range(self.rows)) else torch.tensor(alive)
        """The same; None if they are all rows in their order."""

    def keep(self, samples: list[int]) -> None:
        """Only these of the samples go on, by their places among those that did until now."""
        self._place([self.alive[sample] for sample in samples])
        if len(samples) > self.rows // 2 or self.rows // 2 < MIN_ROWS:
            return
        self.rows = max(len(samples), MIN_ROWS)
        taken = torch.tensor(self.alive + self.alive[:1] * (self.rows - len(samples)))
        for layer, own in enumerate(self.own):
            smaller = own.new_empty(2, self.num_heads, self.rows, *own.shape[3:])
            smaller[:, :, :, : self.length] = own[:, :, taken, : self.length]
            self.own[layer] = smaller
        self._place(list(range(len(samples))))

    def write(self, layer: int, k_KTD: torch.Tensor, v_KTD: torch.Tensor) -> None:
        """The keys and values of the next token of each sample; zeros for rows without one."""
        here = self.own[layer][:, :, :, self.length]
        if self.index is None:
            here[0].copy_(k_KTD)
            here[1].copy_(v_KTD)
        else:
            here.zero_()
            here[0].index_copy_(1, self.index, k_KTD)
            here[1].index_copy_(1, self.index, v_KTD)


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
    """The next token of each sample of a group."""

    cache: GroupCache

    @property
    def num_tokens(self) -> int:
        return len(self.cache.alive)

    def attend(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor, window: int | None,
        masks: dict[Any, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """[T, H, D]: one softmax over the shared prompt's keys and the sample's own."""
        cache, at = self.cache, self.cache.length
        cache.write(layer, k_KTD, v_KTD)
        heads, rows, dim = cache.num_heads, cache.rows, q_HTD.shape[2]
        q_KTQD = q_HTD.view(heads, -1, q_HTD.shape[1], dim).transpose(1, 2)
        if cache.index is not None:
            q_KTQD = q_HTD.new_zeros(heads, rows, q_KTQD.shape[2], dim).index_copy_(1, cache.index, q_KTQD)
        q = q_KTQD.reshape(heads * rows, -1, dim)
        # A row of these products is a sample's head that reads, with a head of keys and values it reads from.
        first = 0 if window is None else max(0, at - window + 1)
        own_k, own_v = cache.own[layer].flatten(1, 2)[:, :, first : at + 1]
        scores = torch.bmm(q, own_k.mT)
        seen = cache.prompt_length if window is None else min(cache.prompt_length, max(0, window - 1 - at))
        if seen:
            prompt_k, prompt_v = cache.prompt[layer][:, :, cache.prompt_length - seen :]
            products = (heads, rows * q.shape[1])
            if heads == 1 or seen * dim < _SHARED:
                products = (heads * rows, q.shape[1])
                prompt_k, prompt_v = (
                    one[:, None].expand(-1, rows, -1, -1).flatten(0, 1) for one in (prompt_k, prompt_v)
                )
            prompt_scores = torch.bmm(q.view(*products, dim), prompt_k.mT)
            weights = torch.softmax(torch.cat([prompt_scores, scores.view(*products, -1)], dim=-1), dim=-1)
            out = torch.bmm(weights[:, :, :seen], prompt_v).view(q.shape)
            out = torch.baddbmm(out, weights[:, :, seen:].view(scores.shape), own_v)
        else:
            out = torch.bmm(torch.softmax(scores, dim=-1), own_v)
        out_KTQD = out.view(heads, rows, -1, dim)
        if cache.index is not None:
            out_KTQD = out_KTQD[:, cache.index]
        return out_KTQD.transpose(0, 1).flatten(1, 2)


@dataclass(slots=True)
class Step:
    """What the tokens of one forward are, in their order; tokens beyond are filling."""

    parts: list[Chunk | Tokens]
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [1, heads, N, dim], key and value [1, kv heads, N, dim] → [1, N, heads, dim]."""
        q_HND = query[0] * scale
        outs = []
        at = 0
        for part in self.parts:
            mine = slice(at, at + part.num_tokens)
            outs.append(part.attend(layer, q_HND[:, mine], key[0, :, mine], value[0, :, mine], window, self._masks))
            at = mine.stop
        if at < q_HND.shape[1]:
            outs.append(q_HND.new_zeros(q_HND.shape[1] - at, q_HND.shape[0], q_HND.shape[2]))
        return torch.cat(outs)[None]


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
