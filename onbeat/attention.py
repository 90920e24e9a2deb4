"""What our two attentions (the engine's, over a cache; the trainer's, over shared prompts) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
