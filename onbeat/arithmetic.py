"""A fingerprint of the arithmetic of a machine: equal if its kernels give equal bits.

Two processors, or two builds of torch, may round differently. A generator whose fingerprint differs from the others'
would sample other tokens from the same weights and random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F


def _values(*shape: int) -> torch.Tensor:
    """Numbers in [-1, 1) without a pattern, exact in float32, by integers alone."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count, dtype=torch.int64) * 2654435761 + 12345) % 65521
    return (mixed.to(torch.float32) / 32768 - 1).reshape(shape)


def fingerprint(*others: torch.Tensor) -> str:
    """Of products, attention and the functions between them, at sizes that take different kernels, by one thread; and
    of `others`, results of what else there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _digest(others)
    finally:
        torch.set_num_threads(threads)


def _digest(others: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()

    def add(values: torch.Tensor) -> None:
        digest.update(values.cpu().numpy().tobytes())

    for rows, width in ((4, 96), (33, 576), (8, 1000)):
        hidden = F.rms_norm(F.linear(_values(rows, width), _values(width, width)), (width,))
        mixed = torch.softmax(F.silu(hidden) + torch.cos(hidden) * torch.exp(-hidden.abs()), dim=-1).log()
        add(mixed)
    query, keys = _values(4, 6, 1, 64), _values(4, 2, 64, 64)
    mask = torch.arange(64) < 41
    attended = F.scaled_dot_product_attention(query, keys, keys.flip(2), attn_mask=mask[None], enable_gqa=True)
    add(attended)
    for rows in (1, 4, 24):
        add(torch.bmm(_values(6, rows, 64), _values(6, 64, 77)))
    on_cpu = torch.get_default_device().type == "cpu"
    if on_cpu and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # what the engine packs layers for
        packed = torch.ops.mkldnn._reorder_linear_weight(_values(1000, 576), 32)
        for rows in (4, 33):
            add(torch.ops.mkldnn._linear_pointwise(_values(rows, 576), packed, None, "none", [], ""))
    for values in others:
        add(values)
    return digest.hexdigest()[:32]
