"""Attention of all samples at once, and of a prompt's chunk (kernels.c), computes what torch's operations do, group by
group, and what the formula says in float64; with the same bits by AVX2 and by AVX-512."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.compiled import KERNELS_VERSION
from onbeat.kernels import available, kernels
from onbeat.rollout import cache, invariant
from onbeat.rollout.cache import CacheShape, Chunk, GroupCache, Step, Tokens
from onbeat.rollout.engine import why_not_decodable
from onbeat.rollout.probe import kernels_fingerprint
from tests.fakes.models import ALL_ARCHITECTURES, generate_alone, request, sampling, tiny_model

NUM_LAYERS = 2


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """These tests compare it with something else: without it they would compare that with itself."""
    assert available(), "kernels.c was not compiled when onbeat was installed: it needs a C compiler, and AVX2"


@contextmanager
def at_once(numbers: int, threads: int) -> Iterator[None]:
    """Computing with that many threads, and no more numbers at once: 8 by AVX2, 16 by AVX-512 where it is."""
    widest = ctypes.c_int64.in_dll(kernels(), "onbeat_widest")
    before, widest.value = (widest.value, torch.get_num_threads()), numbers
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        widest.value = before[0]
        torch.set_num_threads(before[1])


groups = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=4
)  # tokens of the prompt, samples, own tokens so far


@given(
    groups=groups,
    heads=st.integers(1, 3),
    per_head=st.sampled_from([1, 2, 3, 7, 40]),
    dim=st.sampled_from([8, 24, 32, 64, 80, 128]),
    window=st.none() | st.integers(1, 90),
    spread=st.sampled_from([1.0, 30.0]),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_it_is_the_attention_of_torchs_operations_and_of_the_formula(
    groups: list[tuple[int, int, int]], heads: int, per_head: int, dim: int, window: int | None, spread: float,
    threads: int, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shape = CacheShape(num_layers=NUM_LAYERS, num_heads=heads, dim=dim, dtype=torch.float32)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    kept = [
        (some(NUM_LAYERS, 2, heads, prompt, dim), some(NUM_LAYERS, 2, heads, samples, length, dim))
        for prompt, samples, length in groups
    ]
    num_tokens = sum(samples for _, samples, _ in groups)
    query = spread * some(1, num_tokens, heads * per_head, dim).transpose(1, 2)
    key, value = (some(1, num_tokens, heads, dim).transpose(1, 2) for _ in range(2))

    def caches() -> list[GroupCache]:
        found = []
        for (prompt, samples, length), (prompt_keys, own_keys) in zip(groups, kept, strict=True):
            one = GroupCache(shape, prompt, samples, length + 3)
            one.prompt.copy_(prompt_keys)
            for layer, own in enumerate(one.own):
                own[:, :, :samples, :length] = own_keys[layer]
            one.length = length
            found.append(one)
        return found

    def attend(them: list[GroupCache]) -> torch.Tensor:
        return Step([Tokens(one) for one in them], []).attend(1, query, key, value, dim**-0.5, window)[0]

    ours, theirs = caches(), caches()
    with at_once(8, threads):
        found = attend(ours)
    with at_once(16, 1):
        assert torch.equal(attend(caches()), found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "fits", lambda own: False)
        torch.testing.assert_close(found, attend(theirs), atol=2e-5 * spread, rtol=1e-4)  # scores are so much larger
    torch.testing.assert_close(found.double(), formula(ours, query, key, value, window), atol=2e-5 * spread, rtol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        for layer, length in ((1, one.length + 1), (0, one.length)):  # the other layer's are left alone
            written = (slice(None), slice(None), slice(one.num_samples), slice(length))
            assert torch.equal(one.own[layer][written], other.own[layer][written])


def formula(
    caches: list[GroupCache], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Sample by sample, head by head, in float64; the caches have the new keys already."""
    rows, at = [], 0
    for one in caches:
        for sample in range(one.num_samples):
            keys, values = torch.cat([one.prompt[1], one.own[1][:, :, sample, : one.length + 1]], dim=2).double()
            assert torch.equal(keys[:, -1].float(), key[0, :, at])
            assert torch.equal(values[:, -1].float(), value[0, :, at])
            if window is not None:
                keys, values = keys[:, -window:], values[:, -window:]
            q = query[0, :, at].double().view(len(keys), -1, keys.shape[-1])
            weights = torch.softmax(q @ keys.mT * keys.shape[-1] ** -0.5, dim=-1)
            rows.append((weights @ values).flatten(0, 1))
            at += 1
    return torch.stack(rows)


@given(
    first=st.integers(0, 200),
    num_tokens=st.integers(1, 130),
    heads=st.integers(1, 3),
    per_head=st.sampled_from([1, 2, 3, 5, 7, 40]),
    dim=st.sampled_from([8, 24, 32, 64, 80, 128]),
    window=st.none() | st.integers(1, 250),
    spread=st.sampled_from([1.0, 30.0]),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=80)
def test_a_prompts_chunk_is_the_formula_and_a_token_of_it_stands_alone(
    first: int, num_tokens: int, heads: int, per_head: int, dim: int, window: int | None, spread: float, threads: int,
    seed: int, data: st.DataObject,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    length = first + num_tokens
    shape = CacheShape(num_layers=NUM_LAYERS, num_heads=heads, dim=dim, dtype=torch.float32)

    def some(tokens: int, of: int) -> torch.Tensor:
        return torch.randn(1, tokens, of, dim, generator=generator).transpose(1, 2)  # as a model has them

    query, key, value = spread * some(length, heads * per_head), some(length, heads), some(length, heads)

    def attend(start: int, end: int, prompt_length: int) -> torch.Tensor:
        """A chunk by itself, after keys that are there already; what comes after it must not be read."""
        one = GroupCache(shape, prompt_length, 1, 2)
        one.prompt.fill_(float("nan"))
        one.prompt[1, :, :, :start] = torch.cat([key, value])[:, :, :start]
        mine = [some[:, :, start:end] for some in (query, key, value)]
        return Step([], [Chunk(one, start, end)]).attend(1, *mine, dim**-0.5, window)[0]

    with at_once(8, threads):
        found = attend(first, length, length)
    at = torch.arange(length)
    seen = at[None] <= at[first:, None]
    if window is not None:
        seen &= at[None] > at[first:, None] - window
    keys, values = (one[0].double().repeat_interleave(per_head, dim=0) for one in (key, value))
    scores = query[0, :, first:].double() @ keys.mT * dim**-0.5
    weights = torch.softmax(scores.masked_fill(~seen, -float("inf")), dim=-1)
    torch.testing.assert_close(found.double(), (weights @ values).transpose(0, 1), atol=2e-5 * spread, rtol=1e-4)

    start = data.draw(st.integers(first, length - 1))
    end = data.draw(st.integers(start + 1, length))
    with at_once(16, data.draw(st.sampled_from([1, 2, 5]))):
        assert torch.equal(attend(first, length, length + 3), found)
        assert torch.equal(attend(start, end, length), found[start - first : end - first])


def test_a_token_that_is_no_number_does_not_spoil_those_before_it_nor_those_that_are_too_far_from_it() -> None:
    shape = CacheShape(num_layers=1, num_heads=1, dim=64, dtype=torch.float32)
    key = torch.ones(1, 1, 130, 64)
    key[:, :, 70] = float("nan")
    for numbers in (8, 16):
        one = GroupCache(shape, 130, 1, 2)
        with at_once(numbers, 2):
            found = Step([], [Chunk(one, 0, 130)]).attend(0, torch.ones(1, 2, 130, 64), key, key, 0.1, 20)[0]
        assert torch.equal(found.isnan().all(dim=(1, 2)), found.isnan().any(dim=2).any(dim=1))
        assert found.isnan().any(dim=2).any(dim=1).nonzero()[:, 0].tolist() == list(range(70, 90))


def test_both_forms_of_the_kernels_have_one_fingerprint() -> None:
    """So that generators with and without AVX-512 are not kept apart because of these."""
    model = tiny_model("llama")
    found = set()
    for numbers in (8, 16):
        with at_once(numbers, 1):
            found.add(kernels_fingerprint(model))
    assert len(found) == 1


def test_numbers_that_are_none_are_not_hidden() -> None:
    """A model that diverged must be noticed, not sampled from."""
    shape = CacheShape(num_layers=1, num_heads=1, dim=8, dtype=torch.float32)
    for bad in (float("nan"), float("inf")):
        one = GroupCache(shape, 20, 1, 4)
        one.prompt.fill_(0.5)
        one.prompt[0, 0, 0, 3, 2] = bad
        ones = torch.ones(1, 1, 1, 8)
        assert Step([Tokens(one)], []).attend(0, ones, ones, ones, 1.0, None).isnan().all()


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_both_ways_give_every_model_the_same_log_probabilities(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny_model(architecture))
    wanted = request(0, tuple(range(2, 50)), 5, sampling(30, temperature=0.0))
    compiled = generate_alone(model, wanted)
    digest = kernels_fingerprint(model)
    monkeypatch.setattr(cache, "fits", lambda own: False)
    assert kernels_fingerprint(model) != digest  # generators of both kinds must not share a run
    monkeypatch.setattr(invariant, "available", lambda: False)
    for name, completion in generate_alone(model, wanted).items():
        assert completion.sampler_logprobs == pytest.approx(compiled[name].sampler_logprobs, abs=1e-4)
        assert completion.token_ids == compiled[name].token_ids


def test_a_compiled_file_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.kernels.KERNELS_VERSION", KERNELS_VERSION + 1)
    kernels.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="install onbeat again"):
            available()
    finally:
        monkeypatch.undo()
        kernels.cache_clear()
    assert available()


def test_keys_the_cache_has_no_place_for_are_refused_before_anything_is_written() -> None:
    shape = CacheShape(num_layers=1, num_heads=2, dim=16, dtype=torch.float32)
    step = Step([Tokens(GroupCache(shape, 3, 4, 5))], [])
    for heads, dim, layer in ((3, 16, 0), (2, 24, 0), (2, 16, 1)):
        q, kv = torch.zeros(1, 6, 4, dim), torch.zeros(1, heads, 4, dim)
        with pytest.raises(ValueError, match="the cache is of 1 layers with 2 of 16"):
            step.attend(layer, q, kv, kv, 1.0, None)


def test_a_model_with_another_number_of_heads_than_it_says_is_refused() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.config.num_key_value_heads += 1
    assert "heads of keys, and its configuration says" in (why_not_decodable(model) or "")
