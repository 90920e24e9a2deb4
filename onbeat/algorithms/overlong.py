"""Soft punishment of overlong completions (DAPO, arXiv 2503.14476, eq. 13).

length ≤ limit - buffer          nothing
… up to limit                    falls linearly from 0 to -1
"""

from __future__ import annotations


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """To be added to the reward; `buffer` 0: none."""
    if buffer <= 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))
