"""Weights for a generator that shares no memory with the trainer. No torch."""

from __future__ import annotations

import os


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
