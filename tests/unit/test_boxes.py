"""Who has which piece of a tensor: every number once, whatever the grid."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from onbeat.boxes import Box, Grid, Sharding

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
grids = st.builds(Grid, st.integers(1, 4), st.integers(1, 3))


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    shape = draw(shapes)
    axis = draw(st.none() | st.integers(0, len(shape) - 1))
    fused = draw(st.sampled_from([1, 2])) if axis is not None else 1
    return Sharding(shape, axis, fused, draw(st.booleans()), draw(st.integers(0, 20)))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(part.start, part.stop) for part in box.slices)))


@given(sharding=shardings(), grid=grids)
def test_every_number_is_owned_by_one_rank_and_held_by_whoever_owns_it(sharding: Sharding, grid: Grid) -> None:
    owned = [
        cell for rank in range(grid.num_ranks) for held in sharding.owned_by(rank, grid) for cell in cells(held.box)
    ]
    assert sorted(owned) == sorted(cells(Box.whole(sharding.shape)))
    for rank in range(grid.num_ranks):
        assert sharding.owned_by(rank, grid) in ([], sharding.held_by(rank, grid))


@given(sharding=shardings(), grid=grids)
def test_what_a_rank_holds_lies_in_its_own_piece_without_gap_or_overlap(sharding: Sharding, grid: Grid) -> None:
    for rank in range(grid.num_ranks):
        held = sharding.held_by(rank, grid)
        local = [cell for one in held for cell in cells(one.local)]
        assert len(local) == len(set(local)) == sum(one.box.size for one in held)
        if local:
            ends = [max(cell[axis] for cell in local) + 1 for axis in range(len(sharding.shape))]
            assert set(local) == cells(Box.whole(ends))


@given(a=shapes, data=st.data())
def test_an_intersection_is_what_both_have(a: tuple[int, ...], data: st.DataObject) -> None:
    def box() -> Box:
        numbers = st.lists(st.integers(0, 5), min_size=len(a), max_size=len(a)).map(tuple)
        return Box(data.draw(numbers), data.draw(numbers))

    one, other = box(), box()
    common = one.intersection(other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)


def test_writing_is_shared_out_over_those_that_have_the_same() -> None:
    grid = Grid(data=2, tensor=2)
    owners = [
        next(rank for rank in range(4) if Sharding((8,), number=number).owned_by(rank, grid)) for number in range(8)
    ]
    assert owners == [0, 1, 2, 3] * 2
