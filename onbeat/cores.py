"""How generators and trainer share the cores of one machine. No torch.

A second core makes a generator 1.4 to 1.6 times as fast, a trainer 1.7 to 1.9. So while both work each gets its share,
of which less is wasted, and who works alone takes all. Neither's bits depend on the number; both make sure
of that before they change it (rollout/probe.py, training/threads.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Threads(NamedTuple):
    """Of one generator."""

    alone: int
    """While the trainer waits."""
    beside_trainer: int


def generator_threads(asked: int, num_generators: int, cores: int) -> Threads:
    """As many as the recipe asks for; if it does not, an equal share."""
    if asked:
        return Threads(asked, asked)
    return Threads(max(1, cores // num_generators), max(1, cores // (num_generators + 1)))


def rank_threads(asked: int, num_ranks: int, cores: int, reserved: float = 0.0) -> int:
    """Of a trainer rank; 0: all cores there are. Ranks of one machine work at the same time, and share them; in a
    cluster each has at least the cores that are reserved for it."""
    return asked or (0 if num_ranks == 1 else max(1, cores // num_ranks, int(reserved)))


def beside_generators(alone: int, num_generators: int) -> int:
    """Of a trainer that has `alone` to itself while generators wait, and so many work now."""
    return max(1, alone // (num_generators + 1))


def possible_threads(alone: int) -> list[int]:
    """All that come of it, however many generators there are."""
    return sorted({beside_generators(alone, number) for number in range(alone)}, reverse=True)
