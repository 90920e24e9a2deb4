"""Weights for a generator that shares no memory with the trainer: in pieces over its connection, or delivered to its
host by whoever started it. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable

DELIVERED = "delivered"
"""In place of a group's name (messages.Stage): the snapshot is in this host's memory already."""
_take: Callable[[int], memoryview] | None = None
"""Of this process."""


def deliver_by(take: Callable[[int], memoryview]) -> None:
    """From now on, snapshots that were delivered to this host are got by `take`, by their version."""
    global _take
    _take = take


def delivered(version: int) -> memoryview:
    if _take is None:
        raise RuntimeError(f"asked for version {version} as delivered, and nothing is delivered to this process")
    return _take(version)


class Arriving:
    """A snapshot that comes in pieces."""

    def __init__(self, version: int, num_bytes: int) -> None:
        self.version = version
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("onbeat-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self._num_taken = 0

    def take(self, data: bytes) -> bool:
        """Whether that was the last piece."""
        self._num_taken += os.pwrite(self.fd, data, self._num_taken)
        return self._num_taken >= self.num_bytes
