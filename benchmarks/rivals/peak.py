"""What the machine can do at most, now: it changes from minute to minute."""

from __future__ import annotations

import time

SIZE = 1536


def gemm_flops() -> float:
    """Of a large matrix product in float32, with torch's threads as they are."""
    import torch

    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * SIZE**3 / best_s
