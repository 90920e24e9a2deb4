"""Which rank computes which micro-batch. A function of slots and lengths alone (R1).

    replicated weights   each pack to the rank with the fewest tokens so far, as soon as it is closed
    sharded weights      ranks go through every layer together: packs are held until each rank can have one (a round);
                         the largest goes to the rank with the fewest tokens so far. In an update's last round some
                         ranks may have none.

Either way no rank is ever ahead of another by more than one pack.
"""

from __future__ import annotations

from onbeat.types import TrainGroup

Pack = tuple[TrainGroup, ...]
Placed = tuple[int, Pack]
"""A rank, and what it computes."""


class Placing:
    """Of one update's packs."""

    def __init__(self, num_ranks: int, *, rounds: bool) -> None:
        self._rounds = rounds
        self._num_tokens = [0] * num_ranks
        self._held: list[Pack] = []

    def add(self, pack: Pack) -> list[Placed]:
        """Take the next pack; what can be computed now."""
        self._held.append(pack)
        if self._rounds and len(self._held) < len(self._num_tokens):
            return []
        return self.flush()

    def flush(self) -> list[Placed]:
        """What is held, possibly nothing."""
        ranks = sorted(range(len(self._num_tokens)), key=lambda rank: (self._num_tokens[rank], rank))
        packs = sorted(self._held, key=_num_tokens, reverse=True)
        self._held = []
        placed = sorted(zip(ranks, packs, strict=False), key=lambda one: one[0])
        for rank, pack in placed:
            self._num_tokens[rank] += _num_tokens(pack)
        return placed


def _num_tokens(pack: Pack) -> int:
    return sum(group.num_tokens for group in pack)
