"""What the machine can do at most, now: it changes from minute to minute."""

from __future__ import annotations

import time
from collections.abc import Callable

SIZE = 1536


def gemm_flops() -> float:
    """Of a large matrix product in float32, with torch's threads as they are: by MKL or by oneDNN, whichever is faster.
    (onbeat's processes keep MKL, but not oneDNN, from using AVX-512.)"""
    import torch

    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    packed = torch.ops.mkldnn._reorder_linear_weight(right, SIZE)
    products = (
        lambda: torch.mm(left, right),
        lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
    )
    return 2 * SIZE**3 / min(_seconds(product) for product in products for _ in range(5))


def _seconds(product: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    product()
    return time.perf_counter() - began_s
