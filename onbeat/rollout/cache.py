"""Keys and values of the groups being decoded, and the attention over them, for any transformers decoder.

A group's prompt is kept once, for all its samples; each sample keeps what it wrote itself:

    prompt   keys and values, [kv heads, P, dim]               for every layer
    own      keys and values, [kv heads, samples, R, dim]      R = the most it may write

All tokens of a step, of whatever group and age, go through the model as one row of tokens. A `Step` says what they
are: chunks of prompts, and one token for each sample of some groups. Linear layers do not care; attention does, and
looks at each chunk and each group by itself.

Batch invariance (R1) decides the shape of everything here. What a sequence becomes must depend on its own prompt and
tokens alone, so:
- a prompt is cut into chunks at multiples of CHUNK_TOKENS, counted from its start;
- samples of a group start together and are always of the same length: no key is padded, nothing is masked;
- at least MIN_ROWS rows go through every matrix product whose rows are counted by samples: fewer take another kernel.
- attention is computed by functions made for it (kernels.c), in which a query stands alone. Where these are not there,
  that of samples is made of torch's products, which must not tell: a sample's products with its own keys have a row per
  head that shares them, which is the model's and not the batch's; samples share a product with their prompt's keys if
  it is large whatever their number, else each has its own: a small product, or one product instead of one per head of
  keys, takes another kernel with more rows.
tests/equivalence/test_batch_invariance.py holds this, because it rests on the libraries' kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from onbeat.admission import MIN_ROWS
from onbeat.attention import attend, causal_mask, refuse_unsupported
from onbeat.rollout.fused import Fused, attend_chunk, fits

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
    """Of one group. Memory is reserved at once and touched as it is needed; when a sample ends, the others move
    together, and the memory of its row is given back.
    """

    def __init__(self, shape: CacheShape, prompt_length: int, num_samples: int, max_new_tokens: int) -> None:
        self.num_heads = shape.num_heads
        self.prompt_length = prompt_length
        self.length = 0
        """Own tokens whose keys are here; the same for every sample."""
        self.num_samples = num_samples
        """That go on: the first rows, in the order of the samples. Further rows are filling."""
        self.rows = max(num_samples, MIN_ROWS)
        prefix, dtype = (shape.num_layers, 2, shape.num_heads), shape.dtype
        self.prompt = torch.empty(*prefix, prompt_length, shape.dim, dtype=dtype)
        """Keys and values, [layers, 2, K, P, D]."""
        sizes = (*prefix[1:], self.rows, max_new_tokens, shape.dim)
        self.own = [torch.empty(sizes, dtype=dtype) for _ in range(shape.num_layers)]
        """Of every layer, [2, K, rows, R, D]: layer by layer, so that moving them takes little more memory."""

    def keep(self, samples: list[int]) -> None:
        """Only these of the samples go on, by their places among those that did until now."""
        self.num_samples, rows = len(samples), max(len(samples), MIN_ROWS)
        taken = torch.tensor(samples + samples[:1] * (rows - len(samples)))
        for layer, own in enumerate(self.own):
            smaller = own.new_empty(2, self.num_heads, rows, *own.shape[3:])
            smaller[..., : self.length, :] = own[..., : self.length, :].index_select(2, taken)
            self.own[layer] = smaller
        self.rows = rows


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
        masks: dict[Any, torch.Tensor], out_THD: torch.Tensor,
    ) -> None:  # fmt: skip
        keys, values = self.cache.prompt[layer].unbind()
        keys[:, self.first : self.last] = k_KTD
        values[:, self.first : self.last] = v_KTD
        if fits(keys):
            attend_chunk(q_HTD, keys, values, self.first, window, out_THD)
            return
        seen = slice(0 if window is None else max(0, self.first - window + 1), self.last)
        causal = self.first == 0 and (window is None or self.last <= window)
        mask = None
        if not causal:
            name = (self.first - seen.start, self.num_tokens, window)
            if name not in masks:
                masks[name] = causal_mask(*name)
            mask = masks[name]
        out = attend(q_HTD[None], keys[None, :, seen], values[None, :, seen], mask, scale=1.0)
        out_THD.copy_(out[0].transpose(0, 1))


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next token of each sample of a group."""

    cache: GroupCache

    @property
    def num_tokens(self) -> int:
        return self.cache.num_samples

    def attend(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor, window: int | None,
        masks: dict[Any, torch.Tensor], out_THD: torch.Tensor,
    ) -> None:  # fmt: skip
        """One softmax over the shared prompt's keys and the sample's own."""
        cache, at = self.cache, self.cache.length
        k_KTRD, v_KTRD = cache.own[layer].unbind()
        heads, rows, num_samples, dim = cache.num_heads, cache.rows, cache.num_samples, q_HTD.shape[2]
        if num_samples < rows:
            q_HTD, k_KTD, v_KTD = (F.pad(one, (0, 0, 0, rows - num_samples)) for one in (q_HTD, k_KTD, v_KTD))
        k_KTRD[:, :, at].copy_(k_KTD)
        v_KTRD[:, :, at].copy_(v_KTD)
        q = q_HTD.view(heads, -1, rows, dim).transpose(1, 2).reshape(heads * rows, -1, dim)
        # A row of these products is a sample's head that reads, with a head of keys and values it reads from.
        first = 0 if window is None else max(0, at - window + 1)
        own_k, own_v = (one.flatten(0, 1)[:, first : at + 1] for one in (k_KTRD, v_KTRD))
        scores = torch.bmm(q, own_k.mT)
        seen = cache.prompt_length if window is None else min(cache.prompt_length, max(0, window - 1 - at))
        if seen:
            prompt_k, prompt_v = cache.prompt[layer].unbind()
            if seen < cache.prompt_length:
                prompt_k, prompt_v = (one[:, cache.prompt_length - seen :] for one in (prompt_k, prompt_v))
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
        if num_samples < rows:
            out_KTQD = out_KTQD[:, :num_samples]
        out_THD.view(num_samples, heads, -1, dim).copy_(out_KTQD.transpose(0, 1))


class Step:
    """What the tokens of one forward are, in their order; tokens beyond are filling."""

    def __init__(self, samples: list[Tokens], chunks: list[Chunk]) -> None:
        """First the samples' tokens, then the prompts'."""
        self.samples = samples
        self._parts: list[Tokens | Chunk] = [*samples, *chunks]
        self._fused: Fused | None = None
        self._masks: dict[Any, torch.Tensor] = {}
        if samples and fits(samples[0].cache.own[0]):
            self._fused, self._parts = Fused([one.cache for one in samples]), list(chunks)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [1, heads, N, dim], key and value [1, kv heads, N, dim] → [1, N, heads, dim]."""
        q_HND, k_KND, v_KND = query[0], key[0], value[0]
        out_NHD = torch.empty_like(q_HND.transpose(0, 1), memory_format=torch.contiguous_format)
        at = 0
        if self._fused is not None:
            self._fused.attend(layer, q_HND, k_KND, v_KND, scale, window, out_NHD)
            at = self._fused.num_tokens
        for part in self._parts:
            mine = slice(at, at + part.num_tokens)
            q_HTD = q_HND[:, mine] * scale
            part.attend(layer, q_HTD, k_KND[:, mine], v_KND[:, mine], window, self._masks, out_NHD[mine])
            at = mine.stop
        out_NHD[at:] = 0.0
        return out_NHD[None]


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
