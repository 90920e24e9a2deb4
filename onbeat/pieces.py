"""The digest of a snapshot: of its pieces, so that several processes can verify one memory together. No torch.

    [ piece 0 ][ piece 1 ][ piece 2 ][ piece 3 ][ …     a digest each, written one after another
      share 0    share 1    share 0    share 1          of two processes

It guards against a torn or mixed-up copy, not an enemy.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

Share = tuple[int, int]
"""(which, of how many)"""
WHOLE: Share = (0, 1)
_SMALLEST_BYTES = 4 << 20
_MAX_PIECES = 256
_ALIGN = 64
_CHUNK_BYTES = 512 << 10
"""Small enough to be in the cache still when it has been written."""


def piece_bytes(num_bytes: int) -> int:
    """Of each piece of a memory; the last is what is left. No number of several bytes lies in two."""
    return max(_SMALLEST_BYTES, -(-num_bytes // (_MAX_PIECES * _ALIGN)) * _ALIGN)


def digest(memory: memoryview, share: Share = WHOLE) -> str:
    """Of the pieces that fall to a share."""
    size = piece_bytes(len(memory))
    which, count = share
    starts = range(which * size, len(memory), count * size)
    return ",".join(xxhash.xxh3_128_hexdigest(memory[start : start + size]) for start in starts)


def of_share(whole: str, share: Share) -> str:
    """The part of a whole digest."""
    which, count = share
    return ",".join(whole.split(",")[which::count])


class WhileWriting:
    """The digest of memory that is written from its beginning to its end, while it is still in the cache."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._size = piece_bytes(len(memory))
        self._digests: list[str] = []
        self._piece = xxhash.xxh3_128()
        self._done = 0

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The places between the two, in chunks; when one is asked for, those before it have been written."""
        while start < end:
            self.written_to(start)
            stop = min(end, start + _CHUNK_BYTES)
            yield start, stop
            start = stop
        self.written_to(end)

    def whole(self) -> str:
        """When everything has been written."""
        self.written_to(len(self._memory))
        if self._done % self._size:
            self._digests.append(self._piece.hexdigest())
        return ",".join(self._digests)

    def written_to(self, end: int) -> None:
        while self._done < end:
            stop = min(end, (self._done // self._size + 1) * self._size)
            self._piece.update(self._memory[self._done : stop])
            self._done = stop
            if stop % self._size == 0:
                self._digests.append(self._piece.hexdigest())
                self._piece = xxhash.xxh3_128()
