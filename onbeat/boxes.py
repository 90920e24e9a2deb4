"""Where a piece of a tensor lies in it: what a rank holds, what a file holds, what one needs of the other. No torch.

    a tensor of 6 × 4 over 2 · 2 ranks          Box(offset=(3, 2), shape=(3, 2))
        ┌────┬────┐                              is the piece at the bottom right
        ├────┼────┤
        └────┴────┘

A rank's piece may be several boxes: of a matrix in which two are fused, it holds some rows of the first and some of the
second. `Held` says where each box of the whole stands in what the rank has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

Ints = tuple[int, ...]


class Box(NamedTuple):
    offset: Ints
    shape: Ints

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    def moved(self, by: Ints) -> Box:
        """The same box, seen from `by`."""
        return Box(tuple(start - less for start, less in zip(self.offset, by, strict=True)), self.shape)

    def intersection(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(map(min, self._end, other._end))
        shape = tuple(b - a for a, b in zip(start, end, strict=True))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    @property
    def _end(self) -> Ints:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))


class Held(NamedTuple):
    """A box of the whole tensor, and where it stands in the piece that a rank has."""

    box: Box
    local: Box


def held(intervals_per_axis: Sequence[Sequence[tuple[int, int]]]) -> list[Held]:
    """Of a piece made of these [start, end) of every axis, one after another."""
    placed = []
    for intervals in intervals_per_axis:
        ends = itertools.accumulate(end - start for start, end in intervals)
        placed.append([(start, end, at - (end - start)) for (start, end), at in zip(intervals, ends, strict=True)])
    found = []
    for parts in itertools.product(*placed):
        shape = tuple(end - start for start, end, _ in parts)
        if all(shape):
            box, local = Box(tuple(p[0] for p in parts), shape), Box(tuple(p[2] for p in parts), shape)
            found.append(Held(box, local))
    return found


def chunk(intervals: Sequence[tuple[int, int]], num_chunks: int, index: int) -> list[tuple[int, int]]:
    """The index-th of equal chunks of the intervals in a row; the last ones are smaller, or empty."""
    total = sum(end - start for start, end in intervals)
    size = -(-total // num_chunks)
    first, last = min(index * size, total), min((index + 1) * size, total)
    found, at = [], 0
    for start, end in intervals:
        low, high = max(first - at, 0), min(last - at, end - start)
        if low < high:
            found.append((start + low, start + high))
        at += end - start
    return found


class Grid(NamedTuple):
    """Ranks by what they do: `tensor` of them compute a micro-batch together, and `data` such teams compute at a time.
    Rank r is number r % tensor of team r // tensor."""

    data: int = 1
    tensor: int = 1

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor


class Sharding(NamedTuple):
    """How a tensor is spread over a grid of ranks. Every rank can tell what any other has."""

    shape: Ints
    axis: int | None = None
    """Cut along this one over the ranks of a team."""
    fused: int = 1
    """So many matrices lie one after another along that axis, and each is cut by itself."""
    rows: bool = False
    """What a rank of a team has is cut by rows over the teams."""
    number: int = 0
    """Of the tensor among all: shares out the writing of what several ranks have."""

    def held_by(self, rank: int, grid: Grid) -> list[Held]:
        axes = [[(0, length)] for length in self.shape]
        if self.axis is not None:
            whole = axes[self.axis]
            matrices = [chunk(whole, self.fused, index) for index in range(self.fused)]
            axes[self.axis] = [part for matrix in matrices for part in chunk(matrix, grid.tensor, rank % grid.tensor)]
        if self.rows and axes:
            axes[0] = chunk(axes[0], grid.data, rank // grid.tensor)
        return held(axes)

    def owned_by(self, rank: int, grid: Grid) -> list[Held]:
        """The same, if it falls to this rank to write it: of those that have the same, one does."""
        team, place = divmod(rank, grid.tensor)
        teams = [team] if self.rows and self.shape else range(grid.data)
        places = [place] if self.axis is not None else range(grid.tensor)
        holders = [one * grid.tensor + other for one in teams for other in places]
        return self.held_by(rank, grid) if holders[self.number % len(holders)] == rank else []
