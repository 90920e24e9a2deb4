"""Attention of all samples at once (kernels.c) computes what torch's operations do, group by group, and what the
formula says in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.rollout import cache, fused, invariant
from onbeat.rollout.cache import CacheShape, GroupCache, Step, Tokens
from onbeat.rollout.engine import why_not_decodable
from onbeat.rollout.fused import available
from onbeat.rollout.probe import kernels_fingerprint
from tests.fakes.models import ALL_ARCHITECTURES, generate_alone, request, sampling, tiny_model

NUM_LAYERS = 2


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """These tests compare it with something else: without it they would compare that with itself."""
    assert available(), "kernels.c was not compiled when onbeat was installed: it needs a C compiler, and AVX2"


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
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = attend(ours)
    finally:
        torch.set_num_threads(before)
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
    monkeypatch.setattr(fused, "KERNELS_VERSION", fused.KERNELS_VERSION + 1)
    fused.kernels.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="install onbeat again"):
            available()
    finally:
        monkeypatch.undo()
        fused.kernels.cache_clear()
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
