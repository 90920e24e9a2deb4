"""What a generator can hold: rows and cache. One arithmetic for the engine, which admits by it, and for the pool, which
refuses by it before anything is sent. No torch."""

from __future__ import annotations

from msgspec import Struct

from onbeat.types import GroupRequest

MIN_ROWS = 4
"""A matrix product over fewer rows takes another kernel, so that a group never has fewer (cache.py)."""


def cache_tokens(prompt_length: int, num_samples: int, max_new_tokens: int) -> int:
    """Places for keys and values that a group takes, at worst: its prompt once, and what each sample may write."""
    return prompt_length + max(num_samples, MIN_ROWS) * max_new_tokens


def needs(request: GroupRequest) -> int:
    return cache_tokens(len(request.token_ids), len(request.samples), request.sampling.max_new_tokens)


class Room(Struct, frozen=True, kw_only=True):
    """Of one generator."""

    max_sequences: int
    """Decoded at once."""
    cache_tokens: int
    bytes_per_token: int
    """Of the cache, for this model."""

    def why_never(self, request: GroupRequest) -> str | None:
        """Why the group can never be admitted, as a sentence for the user; None if it can."""
        samples, prompt, limit = len(request.samples), len(request.token_ids), request.sampling.max_new_tokens
        if samples > self.max_sequences:
            return f"a group of {samples} completions fits no generator of {self.max_sequences} rows"
        if (wanted := needs(request)) > self.cache_tokens:
            return (
                f"a group of {samples} completions of up to {limit} tokens after a prompt of {prompt} needs "
                f"{self._gib(wanted)} GiB of cache, and generator.cache_gib gives {self._gib(self.cache_tokens)}: "
                "raise it, or lower sampling.max_new_tokens or algorithm.group_size"
            )
        return None

    def _gib(self, num_tokens: int) -> str:
        return f"{num_tokens * self.bytes_per_token / 2**30:.3g}"
