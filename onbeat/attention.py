"""What our two attentions (the engine's, over a cache; the trainer's, over shared prompts) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface

_UNSUPPORTED = ("softcap", "s_aux")
"""Extras some architectures pass to attention; computing without them would be silently wrong."""


def refuse_unsupported(module: torch.nn.Module, extras: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if extras.get(name) is not None:
            kind = type(module).__name__
            raise NotImplementedError(f"{kind} uses {name!r} in attention, which onbeat does not compute")


def causal_mask(before: int, length: int, window: int | None) -> torch.Tensor:
    """[length, before + length]: everything before, then causal; no further back than the window, if there is one."""
    at = torch.arange(before + length)[None]
    own = before + torch.arange(length)[:, None]
    mask = at <= own
    return mask if window is None else mask & (at > own - window)


_LISTENING = "onbeat_listening"


def _listen(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
    sliding_window: int | None = None, heard: set[int | None], **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    heard.add(sliding_window)
    return query.transpose(1, 2), None


AttentionInterface.register(_LISTENING, _listen)


@torch.no_grad()
def why_window_unknown(model: Any) -> str | None:
    """None if a model whose layers see only so far back tells its attention how far; some put it into a mask alone,
    which attention of ours does not get. Else the reason, for the user."""
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or not ("sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)):
        return None
    before = model.config._attn_implementation
    heard: set[int | None] = set()
    try:
        model.set_attn_implementation(_LISTENING)
        model.base_model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False, heard=heard)
    finally:
        model.set_attn_implementation(before)
    if window in heard:
        return None
    return (
        f"{type(model).__name__} does not tell its attention of its sliding window of {window} tokens (if no sequence "
        "gets that long, set sliding_window to null in its config.json)"
    )
