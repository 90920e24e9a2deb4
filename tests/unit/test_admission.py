"""What a generator refuses: one sentence with the numbers, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.admission import Room, positions
from onbeat.types import GroupRequest, Sampling

ROOM = Room(max_sequences=8, cache_tokens=1000, bytes_per_token=1 << 20, max_positions=100, vocabulary=50)


def request(prompt: tuple[int, ...], *, samples: int = 8, limit: int = 10) -> GroupRequest:
    sampling = Sampling(temperature=1.0, max_new_tokens=limit, stop_token_ids=(), seed=0)
    return GroupRequest(
        stream="train", period=0, slot=0, samples=tuple(range(samples)), token_ids=prompt, sampling=sampling
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request((1, 2, 49)), None),
        (request((1,) * 90), None),
        (request(()), "a prompt of 0 tokens"),
        (request((1,), limit=0), "completions of up to 0"),
        (request((1,), samples=9), "9 completions fits no generator of 8 rows"),
        (request((1,) * 91), "91 tokens and 10 more exceed the model's 100 positions"),
        (request((1, 50)), "the token 50, and the model knows 50"),
        (request((1,) * 5, limit=95, samples=8), None),
        (request((1,) * 5, limit=95, samples=20), "20 completions"),
    ],
)
def test_what_cannot_be_generated_is_told_with_its_numbers(asked: GroupRequest, reason: str | None) -> None:
    found = ROOM.why_never(asked)
    assert found is None if reason is None else reason in (found or "")


def test_a_group_that_needs_more_cache_than_there_is_names_the_keys() -> None:
    small = Room(max_sequences=8, cache_tokens=80, bytes_per_token=1 << 30)
    assert "needs 81 GiB of cache, and generator.cache_gib gives 80" in (small.why_never(request((1,))) or "")


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 4096}, "max_position_embeddings": 1}, 4096),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "llama3"}}, 8192),
        (
            {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
             "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            4096,
        ),
        (
            {"max_position_embeddings": 131072,
             "rope_parameters": {"full_attention": {"type": "longrope", "original_max_position_embeddings": 2048}}},
            2048,
        ),
    ],
)  # fmt: skip
def test_positions_end_where_one_sequence_would_change_the_others(config: dict[str, Any], most: int | None) -> None:
    assert positions(config) == most
