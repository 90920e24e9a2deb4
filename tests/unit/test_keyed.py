"""Random numbers with a name: the same for ever, uniform, and different wherever a name differs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.keyed import sequence_key, shuffled, uniform
from onbeat.types import Stream
from tests.chance import chi_square_p

SEEDS = st.integers(0, 2**63 - 1)


def test_the_numbers_are_the_same_on_every_machine_and_in_every_version() -> None:
    """A run that is resumed after an update goes on with these."""
    key = sequence_key(seed=0, stream="train", version=0, slot=0, sample=0)
    assert (key, uniform(key, 0)) == (17990875778844135198, 0.8620133310292344)
    key = sequence_key(seed=2**63 - 1, stream="eval", version=12, slot=3, sample=7)
    assert (key, uniform(key, 1000)) == (12926315979304246500, 0.026413435836186716)
    assert shuffled(10, seed=5, epoch=2) == [1, 6, 3, 0, 7, 5, 2, 9, 4, 8]


@settings(deadline=None)
@given(seed=SEEDS, version=st.integers(0, 10**6), slot=st.integers(0, 10**6), position=st.integers(0, 10**6))
def test_a_number_lies_in_the_half_open_unit_interval(seed: int, version: int, slot: int, position: int) -> None:
    key = sequence_key(seed=seed, stream="train", version=version, slot=slot, sample=0)
    assert 0 <= key < 2**64
    assert 0.0 <= uniform(key, position) < 1.0


def keys_along(name: str, count: int) -> list[int]:
    """Keys that differ in one field alone."""
    fields = {"seed": 3, "version": 3, "slot": 3, "sample": 3}
    return [sequence_key(stream="train", **(fields | {name: number})) for number in range(count)]


def draws(along: str) -> np.ndarray:
    """40 000 numbers over which one field counts up."""
    if along == "position":
        return np.array([uniform(key, position) for key in keys_along("sample", 4) for position in range(10_000)])
    return np.array([uniform(key, position) for position in range(4) for key in keys_along(along, 10_000)])


@pytest.mark.parametrize("along", ["seed", "version", "slot", "sample", "position"])
def test_numbers_are_uniform_along_every_field(along: str) -> None:
    counts, _ = np.histogram(draws(along), bins=200, range=(0.0, 1.0))
    assert chi_square_p(counts) > 1e-3


@pytest.mark.parametrize("along", ["seed", "version", "slot", "sample", "position"])
def test_neighbours_along_a_field_are_independent(along: str) -> None:
    for distance in (1, 2, 8):
        pairs = draws(along).reshape(-1, 2, distance)
        counts, _, _ = np.histogram2d(pairs[:, 0].ravel(), pairs[:, 1].ravel(), bins=10, range=[[0, 1], [0, 1]])
        assert chi_square_p(counts.ravel()) > 1e-3


def test_the_lowest_bits_are_random_too() -> None:
    low = np.array([int(number * 2**53) & 0xFF for number in draws("position")])
    assert chi_square_p(np.bincount(low, minlength=256)) > 1e-3


def test_no_two_names_share_a_key() -> None:
    streams: tuple[Stream, ...] = ("train", "eval")
    names = itertools.product(range(8), streams, range(8), range(8), range(8))
    keys = [
        sequence_key(seed=seed, stream=stream, version=version, slot=slot, sample=sample)
        for seed, stream, version, slot, sample in names
    ]
    assert len(set(keys)) == len(keys) == 2 * 8**4


@settings(deadline=None)
@given(count=st.integers(0, 200), seed=SEEDS, epoch=st.integers(0, 1000))
def test_shuffled_is_a_permutation_and_a_function_of_its_arguments(count: int, seed: int, epoch: int) -> None:
    permutation = shuffled(count, seed=seed, epoch=epoch)
    assert sorted(permutation) == list(range(count))
    assert permutation == shuffled(count, seed=seed, epoch=epoch)


def test_every_pair_of_seed_and_epoch_has_an_order_of_its_own() -> None:
    orders = {tuple(shuffled(30, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_every_index_is_as_likely_in_every_place() -> None:
    counts = np.zeros((6, 6))
    for seed in range(3000):
        for place, index in enumerate(shuffled(6, seed=seed, epoch=0)):
            counts[place, index] += 1
    assert chi_square_p(counts.ravel(), constraints=11) > 1e-3
