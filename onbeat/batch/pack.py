"""Groups into micro-batches. A function of slots and lengths alone, never of time or arrival (R1).

A pack is closed when another group like its last one would take it over `max_tokens`, or when the next one does; a
group larger than that goes alone. Closing early matters: a pack that waits for one more group is a trainer that waits.
"""

from __future__ import annotations

from onbeat.types import TrainGroup


class Packer:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._open: list[TrainGroup] = []
        self._num_tokens = 0

    def add(self, group: TrainGroup) -> list[tuple[TrainGroup, ...]]:
        """Take the next group; return the packs that are now closed (none, one or two)."""
        closed = []
        if self._open and self._num_tokens + group.num_tokens > self._max_tokens:
            closed.append(self.flush())
        self._open.append(group)
        self._num_tokens += group.num_tokens
        if self._num_tokens + group.num_tokens > self._max_tokens:
            closed.append(self.flush())
        return closed

    def flush(self) -> tuple[TrainGroup, ...]:
        """What is open, possibly nothing; the next pack starts empty."""
        pack = tuple(self._open)
        self._open, self._num_tokens = [], 0
        return pack
