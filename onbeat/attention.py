"""What our two attentions (the engine's, over a cache; the trainer's, over shared prompts) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

_UNSUPPORTED = ("softcap", "s_aux")
"""Extras some architectures pass to attention; computing without them would be silently wrong."""


def _unsupported(extras: Mapping[str, Any]) -> list[str]:
    return [name for name in _UNSUPPORTED if extras.get(name) is not None]


def refuse_unsupported(module: torch.nn.Module, extras: Mapping[str, Any]) -> None:
    for name in _unsupported(extras):
        raise NotImplementedError(f"{type(module).__name__} uses {name} in attention, which onbeat does not compute")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """query [B, heads, N, d], key and value [B, kv heads, M, d] → [B, heads, N, d]; causal, if there is no mask."""
    # Off the CPU the fused kernels take a mask or grouped heads, not both.
    if mask is not None and query.device.type != "cpu":
        key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def each_head(keys: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, kv heads, M, d] → [B, heads, M, d]: every head with keys of its own."""
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1)


def causal_mask(before: int, length: int, window: int | None) -> torch.Tensor:
    """[length, before + length]: everything before, then causal; no further back than the window, if there is one."""
    at = torch.arange(before + length)[None]
    own = before + torch.arange(length)[:, None]
    mask = at <= own
    return mask if window is None else mask & (at > own - window)


_LISTENING = "onbeat_listening"


@dataclass(slots=True)
class Heard:
    """What a model tells its attention layers."""

    windows: set[int | None] = field(default_factory=set)
    unsupported: set[str] = field(default_factory=set)
    dims: set[tuple[int, int]] = field(default_factory=set)
    """Of a head's keys, and of its values."""
    heads: set[int] = field(default_factory=set)
    """Of keys and values."""
    layers: list[int | None] = field(default_factory=list)
    """By number, as they were called."""


def _listen(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
    sliding_window: int | None = None, heard: Heard, **extras: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    heard.windows.add(sliding_window)
    heard.unsupported.update(_unsupported(extras))
    heard.dims.add((key.shape[-1], value.shape[-1]))
    heard.heads |= {key.shape[1], value.shape[1]}
    heard.layers.append(getattr(module, "layer_idx", None))
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_LISTENING, _listen)


@torch.no_grad()
def heard_by_attention(model: Any) -> Heard | str:
    """Or why the model does not tell what it is asked to; for the user."""
    before = model.config._attn_implementation
    heard = Heard()
    try:
        model.set_attn_implementation(_LISTENING)
        model.base_model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False, heard=heard)
    except TypeError as error:
        return f"{type(model).__name__} does not hand on to its attention what it is given: {error}"
    finally:
        model.set_attn_implementation(before)
    return heard


def why_not_attended(model: Any, heard: Heard | str) -> str | None:
    """None if attention of ours can stand in for the model's own; else the reason, for the user.

    Some models cap their scores or have sinks, which ours do not compute; some put their sliding window into a mask
    alone, which ours do not get; some run a layer more than once.
    """
    if isinstance(heard, str):
        return heard
    name = type(model).__name__
    if heard.unsupported:
        return f"{name} uses {', '.join(sorted(heard.unsupported))} in attention, which onbeat does not compute"
    if len(set(heard.layers) - {None}) < len(heard.layers):
        return f"{name} does not give each call of its attention a layer's number of its own, to keep keys under"
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or not ("sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)):
        return None
    if window in heard.windows:
        return None
    return (
        f"{name} does not tell its attention of its sliding window of {window} tokens (if no sequence gets that long, "
        "set sliding_window to null in its config.json)"
    )
