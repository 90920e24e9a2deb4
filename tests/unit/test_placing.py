"""Which rank computes which micro-batch: balanced, a function of the packs alone, in rounds where ranks go together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.batch.ranks import Pack, Placed, Placing
from onbeat.types import TrainGroup

PACKS = st.lists(st.integers(1, 5000), max_size=40)


def packs_of(sizes: list[int]) -> list[Pack]:
    return [(group(slot, size),) for slot, size in enumerate(sizes)]


def group(slot: int, num_tokens: int) -> TrainGroup:
    return TrainGroup(
        slot=slot, prompt_ids=(0,) * num_tokens, completion_ids=(), sampler_logprobs=(), advantages=()
    )  # fmt: skip


def placed(sizes: list[int], num_ranks: int, *, rounds: bool) -> list[list[Placed]]:
    """Step by step; the last is the flush."""
    placing = Placing(num_ranks, rounds=rounds)
    return [*(placing.add(pack) for pack in packs_of(sizes)), placing.flush()]


@given(PACKS, st.integers(1, 5), st.booleans())
def test_every_pack_is_placed_once_and_no_rank_is_ahead_by_more_than_one(
    sizes: list[int], num_ranks: int, rounds: bool
) -> None:
    tokens: Counter[int] = Counter(dict.fromkeys(range(num_ranks), 0))
    seen = []
    for step in placed(sizes, num_ranks, rounds=rounds):
        for rank, pack in step:
            tokens[rank] += pack[0].num_tokens
            seen.append(pack[0].slot)
        assert max(tokens.values()) - min(tokens.values()) <= max(sizes, default=0)
    assert sorted(seen) == list(range(len(sizes)))


@given(PACKS, st.integers(1, 5))
def test_a_round_begins_when_each_rank_has_one_and_the_last_may_leave_ranks_out(
    sizes: list[int], num_ranks: int
) -> None:
    *steps, last = placed(sizes, num_ranks, rounds=True)
    for number, step in enumerate(steps, 1):
        expected = list(range(num_ranks)) if number % num_ranks == 0 else []
        assert [rank for rank, _ in step] == expected
    assert len(last) == len(sizes) % num_ranks
    assert len({rank for rank, _ in last}) == len(last)


@given(PACKS)
def test_with_replicated_weights_nothing_is_held_back(sizes: list[int]) -> None:
    *steps, last = placed(sizes, 3, rounds=False)
    assert [len(step) for step in steps] == [1] * len(sizes)
    assert last == []


@pytest.mark.parametrize("rounds", [False, True])
def test_a_large_pack_leaves_the_next_ones_to_the_others(rounds: bool) -> None:
    steps = placed([100, 1, 1, 100], 2, rounds=rounds)
    where = {pack[0].slot: rank for step in steps for rank, pack in step}
    assert where == {0: 0, 1: 1, 2: 1, 3: 1} if not rounds else where == {0: 0, 1: 1, 2: 0, 3: 1}
