"""The digest of a snapshot: of its pieces, so that several processes can verify one memory together. No torch.

    [ piece 0 ][ piece 1 ][ piece 2 ][ piece 3 ][ …     a digest each, written one after another
      share 0    share 1    share 0    share 1          of two processes

Within a process the cores take pieces in turn. The digest guards against a torn or mixed-up copy, not an enemy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

Share = tuple[int, int]
"""(which, of how many)"""
WHOLE: Share = (0, 1)
_SMALLEST_BYTES = 4 << 20
_MAX_PIECES = 256
_ALIGN = 64
_CHUNK_BYTES = 512 << 10
"""Small enough to be in the cache still when it has been written; large enough that threads do not wait for Python."""
_MAX_THREADS = 4
"""More gain nothing: memory is no faster."""


def piece_bytes(num_bytes: int) -> int:
    """Of each piece of a memory; the last is what is left. No number of several bytes lies in two."""
    return max(_SMALLEST_BYTES, -(-num_bytes // (_MAX_PIECES * _ALIGN)) * _ALIGN)


def digest(
    memory: memoryview, share: Share = WHOLE, write: Callable[[int, int], None] = lambda start, end: None
) -> str:
    """Of the pieces that fall to a share. `write` is told the place of each chunk just before it is read, and may write
    it; several threads call it."""
    size = piece_bytes(len(memory))
    which, count = share

    def of_piece(start: int) -> str:
        found = xxhash.xxh3_128()
        end = min(start + size, len(memory))
        for first in range(start, end, _CHUNK_BYTES):
            last = min(first + _CHUNK_BYTES, end)
            write(first, last)
            found.update(memory[first:last])
        return found.hexdigest()

    starts = range(which * size, len(memory), count * size)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) // count, len(starts))
    if threads < 2:
        return ",".join(map(of_piece, starts))
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return ",".join(pool.map(of_piece, starts))


def of_share(whole: str, share: Share) -> str:
    """The part of a whole digest."""
    which, count = share
    return ",".join(whole.split(",")[which::count])
