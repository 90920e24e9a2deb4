"""What a generator can take: rows, cache, positions. One arithmetic for the engine, which admits by it, and for the
pool, which refuses by it before anything is sent. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from onbeat.types import GroupRequest

MIN_ROWS = 4
"""A matrix product over fewer rows takes another kernel, so that a group never has fewer (cache.py)."""


def cache_tokens(prompt_length: int, num_samples: int, max_new_tokens: int) -> int:
    """Places for keys and values that a group takes, at worst: its prompt once, and what each sample may write."""
    return prompt_length + max(num_samples, MIN_ROWS) * max_new_tokens


def needs(request: GroupRequest) -> int:
    return cache_tokens(len(request.token_ids), len(request.samples), request.sampling.max_new_tokens)


def head_dim(config: Mapping[str, Any]) -> int | None:
    """Numbers of a head, by a model's configuration; None if it does not say."""
    config = config.get("text_config") or config
    heads = config.get("num_attention_heads")
    return (config.get("head_dim") or config.get("hidden_size", 0) // heads or None) if heads else None


def bytes_per_token(config: Mapping[str, Any], bytes_per_number: int) -> int | None:
    """Of a model's cache, by its configuration: keys and values of every layer; None if it does not say."""
    config, dim = config.get("text_config") or config, head_dim(config)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not layers or not dim:
        return None
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * dim * bytes_per_number)


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions of a model, by its configuration, come out the same whatever else is computed with them; None
    if it does not say.

    Under "longrope" all sequences of a forward change as soon as one of them is longer than what the model was first
    trained on, under "dynamic" as soon as one is longer than the model says it may be.
    """
    config = config.get("text_config") or config  # of a model that reads more than text
    most = config.get("max_position_embeddings")
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for rope in [ropes, *ropes.values()]:  # of the model, or of each kind of layer
        if isinstance(rope, Mapping) and "longrope" in (rope.get("rope_type"), rope.get("type")):
            most = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings", most))
    return most if isinstance(most, int) else None


class Room(Struct, frozen=True, kw_only=True):
    """Of one generator."""

    max_sequences: int
    """Decoded at once."""
    cache_tokens: int
    bytes_per_token: int
    """Of the cache, for this model."""
    max_positions: int | None = None
    vocabulary: int | None = None
    """Tokens the model knows; None: not told."""

    def why_never(self, request: GroupRequest) -> str | None:
        """Why the group can never be admitted, as a sentence for the user; None if it can."""
        samples, prompt, limit = len(request.samples), len(request.token_ids), request.sampling.max_new_tokens
        if prompt == 0 or limit < 1:
            return f"a prompt of {prompt} tokens and completions of up to {limit}: there must be at least one of each"
        if samples > self.max_sequences:
            return f"a group of {samples} completions fits no generator of {self.max_sequences} rows"
        if self.max_positions is not None and prompt + limit > self.max_positions:
            return f"a prompt of {prompt} tokens and {limit} more exceed the model's {self.max_positions} positions"
        if self.vocabulary is not None and (largest := max(request.token_ids)) >= self.vocabulary:
            return (
                f"the prompt has the token {largest}, and the model knows {self.vocabulary}: its tokenizer was "
                "extended, and the model was not (resize_token_embeddings)"
            )
        if (wanted := needs(request)) > self.cache_tokens:
            return (
                f"a group of {samples} completions of up to {limit} tokens after a prompt of {prompt} needs "
                f"{self._gib(wanted)} GiB of cache, and generator.cache_gib gives {self._gib(self.cache_tokens)}: "
                "raise it, or lower sampling.max_new_tokens or algorithm.group_size"
            )
        return None

    def _gib(self, num_tokens: int) -> str:
        return f"{num_tokens * self.bytes_per_token / 2**30:.3g}"
