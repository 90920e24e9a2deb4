"""The digest of a snapshot by pieces: shares make the whole, and it can be taken while the memory is written."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat import pieces
from onbeat.pieces import WhileWriting, digest, of_share, piece_bytes


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


@given(size=st.integers(1, 2000), seed=st.integers(0, 100))
def test_it_can_be_taken_while_the_memory_is_written(size: int, seed: int) -> None:
    """Some of it in chunks, some at once, some not at all (it was there before)."""
    rng = random.Random(seed)
    content = rng.randbytes(size)
    written = bytearray(size)
    taken = WhileWriting(memoryview(written))
    ends = sorted({rng.randrange(size + 1) for _ in range(5)})
    for start, end in zip([0, *ends], [*ends, size], strict=True):
        if rng.random() < 0.5:
            for first, last in taken.chunks(start, end):
                written[first:last] = content[first:last]
        else:
            written[start:end] = content[start:end]
    assert taken.whole() == digest(memoryview(content))


def test_a_large_memory_has_no_more_pieces_than_it_may() -> None:
    assert -(-(10**9) // piece_bytes(10**9)) <= 8
    assert piece_bytes(10**9) % 64 == 0
