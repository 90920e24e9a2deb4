"""How many generators: as few as keep the trainer busy. A pure policy; whoever starts processes asks it.

Of each period it is told how long generators worked in all (W) and how long the trainer did (T). With n generators
generation takes about W/n, so the smallest n with W/n ≤ T is wanted. That is believed when two periods in a row say so,
by the medians of the last three.

Generators that share cores may be no faster together than fewer were. Then the larger number is taken back, and not
tried again for a while.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

_PERIODS = 3
"""Of which medians are taken."""
_SLACK = 1.05
"""Generation may take so many times as long as training: the last group is trained after it anyway."""
_GAIN = 1.1
"""What more generators must bring, at least, for each."""
_WHILE = 20
"""Periods for which a number that brought nothing is not tried again."""


class Load(NamedTuple):
    """Of one period."""

    num_generators: int
    generating_s: float
    """Over all generators."""
    training_s: float
    num_tokens: int
    """Generated."""

    @property
    def tokens_per_s(self) -> float:
        """While all of them work."""
        return self.num_tokens * self.num_generators / max(self.generating_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Decision:
    count: int
    why: str


class Autoscaler:
    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest
        self._loads: deque[Load] = deque(maxlen=_PERIODS)
        self._said_before: int | None = None
        self._grew_from: tuple[int, float] | None = None
        """Number and tokens per second before the last growth, until it has been judged."""
        self._ceiling: tuple[int, int] | None = None
        """A number, and for how many periods it is not exceeded."""

    def decide(self, load: Load) -> Decision | None:
        """After each period: another number and why, or None."""
        if self._loads and self._loads[-1].num_generators != load.num_generators:
            self._loads.clear()
        self._loads.append(load)
        if self._ceiling is not None:
            count, left = self._ceiling
            self._ceiling = (count, left - 1) if left > 1 else None
        if (back := self._judge(load)) is not None:
            return back
        wanted = self._wanted()
        said_before, self._said_before = self._said_before, wanted
        if wanted == load.num_generators or said_before is None or (wanted - load.num_generators) * (
            said_before - load.num_generators
        ) <= 0:  # fmt: skip
            return None
        self._said_before = None
        training_s = statistics.median(load.training_s for load in self._loads)
        generating_s = statistics.median(load.generating_s for load in self._loads)
        if wanted > load.num_generators:
            self._grew_from = load.num_generators, load.tokens_per_s
        return Decision(
            wanted,
            f"{wanted} generators instead of {load.num_generators}: they work {generating_s:.1f} s a period in all, "
            f"the trainer {training_s:.1f} s",
        )

    def _wanted(self) -> int:
        training_s = statistics.median(load.training_s for load in self._loads)
        generating_s = statistics.median(load.generating_s for load in self._loads)
        enough = math.ceil(generating_s / max(_SLACK * training_s, 1e-9))
        highest = min(self._highest, self._ceiling[0]) if self._ceiling is not None else self._highest
        return max(self._lowest, min(highest, enough))

    def _judge(self, load: Load) -> Decision | None:
        """Has the last growth brought anything?"""
        if self._grew_from is None or load.num_generators <= self._grew_from[0]:
            return None
        before, rate_before = self._grew_from
        self._grew_from = None
        if load.tokens_per_s >= rate_before * min(_GAIN, load.num_generators / before):
            return None
        self._ceiling = before, _WHILE
        self._said_before = None
        return Decision(
            before,
            f"back to {before} generators: {load.num_generators} sample {load.tokens_per_s:.0f} tokens/s together, "
            f"{before} had {rate_before:.0f}",
        )
