"""The digest of a snapshot by pieces: shares make the whole, and it can be taken while the memory is written."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat import pieces
from onbeat.pieces import digest, of_share, piece_bytes


@pytest.fixture(autouse=True, scope="module")
def small() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_SMALLEST_BYTES", 64)
        patch.setattr(pieces, "_MAX_PIECES", 8)
        patch.setattr(pieces, "_CHUNK_BYTES", 24)
        yield


@given(size=st.integers(0, 2000), count=st.integers(1, 12))
def test_shares_make_the_whole(size: int, count: int) -> None:
    memory = memoryview(random.Random(size).randbytes(size))
    whole = digest(memory)
    shares = [(which, count) for which in range(count)]
    assert [digest(memory, share) for share in shares] == [of_share(whole, share) for share in shares]
    assert sum(len(of_share(whole, share).split(",")) for share in shares if of_share(whole, share)) == len(
        [each for each in whole.split(",") if each]
    )


@given(size=st.integers(1, 2000), seed=st.integers(0, 100))
def test_a_change_of_any_byte_changes_the_share_it_falls_to(size: int, seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(rng.randbytes(size))
    before = digest(memoryview(content))
    where = rng.randrange(size)
    content[where] ^= 1
    share = where // piece_bytes(size) % 3, 3
    assert digest(memoryview(content), share) != of_share(before, share)


@given(size=st.integers(1, 2000), count=st.integers(1, 3))
def test_what_is_written_on_the_way_is_in_it_and_every_byte_is_asked_for_once(size: int, count: int) -> None:
    content = random.Random(size).randbytes(size)
    written = bytearray(size)
    asked: list[tuple[int, int]] = []

    def write(start: int, end: int) -> None:
        asked.append((start, end))
        written[start:end] = content[start:end]

    for which in range(count):
        found = digest(memoryview(written), (which, count), write)
        assert found == of_share(digest(memoryview(content)), (which, count))
    assert [byte for start, end in sorted(asked) for byte in range(start, end)] == list(range(size))


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_it_does_not_depend_on_the_number_of_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memoryview(random.Random(0).randbytes(2000))
    expected = [digest(memory), digest(memory, (1, 3))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert [digest(memory), digest(memory, (1, 3))] == expected


def test_a_write_that_fails_is_told() -> None:
    def write(start: int, end: int) -> None:
        raise OSError("no more memory")

    with pytest.raises(OSError, match="no more memory"):
        digest(memoryview(bytearray(500)), write=write)


def test_a_large_memory_has_no_more_pieces_than_it_may() -> None:
    assert -(-(10**9) // piece_bytes(10**9)) <= 8
    assert piece_bytes(10**9) % 64 == 0
