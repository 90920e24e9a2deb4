"""The engine's keys and values, and the attention over them, for any transformers decoder.

Rows are sequences. Row r of layer l keeps its keys in `keys[l][r, :, :length]`. Active rows are always 0 … n-1: when
a sequence ends, the last row moves into its place, so that a decode step works on a slice and copies nothing.

Batch invariance (R1) decides the shape of everything here:
- a prompt is prefilled alone, so that its keys depend on its own length and nothing else;
- a decode step has one query row per sequence and a key length padded to a multiple of KEY_MULTIPLE: then the
  attention kernel gives a row the same bits whatever the other rows are and however long the padding is;
- at least MIN_ROWS rows go through every matrix product: smaller ones take another kernel.
tests/equivalence/test_batch_invariance.py holds this, because it rests on the libraries' kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from onbeat.attention import causal_mask, refuse_unsupported

KEY_MULTIPLE = 32
MIN_ROWS = 4
ATTENTION = "onbeat_cached"
"""The name under which transformers finds `cached_attention`."""


class KVCache:
    def __init__(self, config: Any, num_rows: int, dtype: torch.dtype) -> None:
        heads = config.num_attention_heads
        self._shape = (
            max(num_rows, MIN_ROWS),
            getattr(config, "num_key_value_heads", None) or heads,
            0,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        self._dtype = dtype
        self._num_layers: int = config.num_hidden_layers
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._reserve(KEY_MULTIPLE)
        # What the coming forward is: set by prefill() or decode() and read by every layer.
        self._prefill_row: int | None = None
        self._prompt_length = 0
        self._positions = torch.zeros(0, dtype=torch.long)
        self._key_length = 0
        self._masks: dict[int | None, torch.Tensor] = {}

    def _reserve(self, length: int) -> None:
        """Room for sequences of `length` tokens. Zeros: what is masked must not be NaN."""
        rows, heads, have, dim = self._shape
        if length <= have:
            return
        length = -(-max(length, 2 * have) // KEY_MULTIPLE) * KEY_MULTIPLE
        self._shape = (rows, heads, length, dim)
        for name in ("keys", "values"):
            grown = [torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._num_layers)]
            for new, old in zip(grown, getattr(self, name), strict=False):
                new[:, :, :have] = old
            setattr(self, name, grown)

    def prefill(self, row: int, prompt_length: int, max_length: int) -> None:
        """The next forward is one prompt, whose keys go to `row`, which may grow to `max_length`."""
        self._reserve(max_length)
        self._prefill_row, self._prompt_length = row, prompt_length

    def decode(self, positions: torch.Tensor) -> None:
        """The next forward is one token for each of the rows 0 … n-1, at these positions."""
        self._prefill_row = None
        self._positions = positions
        self._key_length = -(-(int(positions.max()) + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        self._masks = {}

    def copy(self, source: int, target: int, length: int) -> None:
        """Row `target` becomes what row `source` is."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Store the new keys and values ([rows, kv heads, tokens, dim]) and attend over what the rows may see."""
        keys, values = self.keys[layer], self.values[layer]
        if self._prefill_row is not None:
            length = self._prompt_length
            keys[self._prefill_row, :, :length] = key[0, :, :length]
            values[self._prefill_row, :, :length] = value[0, :, :length]
            mask = None if window is None or key.shape[2] <= window else causal_mask(0, key.shape[2], window)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        num_rows = query.shape[0]
        rows = torch.arange(num_rows)
        keys[rows, :, self._positions] = key[:, :, 0]
        values[rows, :, self._positions] = value[:, :, 0]
        return F.scaled_dot_product_attention(
            query,
            keys[:num_rows, :, : self._key_length],
            values[:num_rows, :, : self._key_length],
            attn_mask=self._decode_mask(window),
            scale=scale,
            enable_gqa=True,
        )

    def _decode_mask(self, window: int | None) -> torch.Tensor:
        """[rows, 1, 1, keys]: each row sees its own past, no further back than the layer's window."""
        if window not in self._masks:
            at, own = torch.arange(self._key_length)[None], self._positions[:, None]
            mask = at <= own
            if window is not None:
                mask &= at > own - window
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kv_cache: KVCache,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of the model calls. `kv_cache` travels through the model's forward as a keyword."""
    refuse_unsupported(module, extras)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = kv_cache.attend(layer, query, key, value, scale, sliding_window)
    return attended.transpose(1, 2), None


AttentionInterface.register(ATTENTION, cached_attention)
