"""How long to wait for a word: from how long one had to wait for words so far.

A generator at work says something about once a second, or once a step if its steps are slower. What counts is the pause
one finds oneself in at any moment, so that a burst of words weighs nothing and a single long pause little: the mean of
the pauses, each weighted by its length. The limit is many times that, since a slow worker is to be waited for and only
a hanging one given up.
"""

from __future__ import annotations

TIMES = 20.0
"""The limit over the usual pause: somebody ten times as slow as usual is still waited for."""
FLOOR_S = 10.0
"""Machines stutter."""
FIRST_S = 120.0
"""While nothing has been heard yet."""
_MEMORY_S = 600.0
"""Over which earlier pauses lose their weight."""


class Patience:
    def __init__(self, first_s: float = FIRST_S) -> None:
        self._first_s = first_s
        self._sum_s = 0.0
        self._sum_of_squares = 0.0
        self._heard = False

    def paused(self, seconds: float) -> None:
        """There was a word, after so long."""
        kept = max(0.0, 1.0 - seconds / _MEMORY_S)
        self._sum_s = kept * self._sum_s + seconds
        self._sum_of_squares = kept * self._sum_of_squares + seconds**2
        self._heard = True

    @property
    def limit_s(self) -> float:
        if not self._heard:
            return self._first_s
        usual_s = self._sum_of_squares / self._sum_s if self._sum_s else 0.0
        return max(FLOOR_S, TIMES * usual_s)
