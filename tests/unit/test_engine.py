"""The engine's bookkeeping: what fits, what waits, what ends where; and sampling against the plain definition."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback

from onbeat.admission import MIN_ROWS, bytes_per_token, cache_tokens
from onbeat.errors import InputError, NumbersError
from onbeat.rollout.cache import CacheShape, GroupCache
from onbeat.rollout.engine import PREFILL_TOKENS, Engine
from onbeat.rollout.probe import gap_to_own_forward
from onbeat.rollout.sampling import sample
from onbeat.rollout.stop import ends_with_stop
from onbeat.types import Completion, Sampling
from tests.fakes.models import ALL_ARCHITECTURES, drain, generate_alone, request, sampling, tiny_model


def engine_of(max_sequences: int, num_tokens: int) -> Engine:
    """With a cache of so many tokens."""
    model = tiny_model("llama")
    engine = Engine(model, max_sequences, cache_bytes=num_tokens * CacheShape.of(model).bytes_per_token)
    engine.version = 0
    return engine


def test_a_group_that_does_not_fit_the_cache_waits_until_another_has_ended() -> None:
    first, second = request(0, (1, 2, 3), 4, sampling(10)), request(1, (4, 5), 4, sampling(3))
    engine = engine_of(max_sequences=64, num_tokens=cache_tokens(3, 4, 10) + cache_tokens(2, 4, 3) - 1)
    engine.add(first)
    engine.add(second)
    order: list[int] = []
    while not engine.idle:
        order += [completion.slot for completion in engine.step()]
    assert order == [0] * 4 + [1] * 4

    with_room = engine_of(max_sequences=64, num_tokens=cache_tokens(3, 4, 10) + cache_tokens(2, 4, 3))
    with_room.add(first)
    with_room.add(second)
    order = []
    while not with_room.idle:
        order += [completion.slot for completion in with_room.step()]
    assert order == [1] * 4 + [0] * 4


def test_a_long_prompt_stalls_nobody_each_step_takes_a_piece_of_it_and_a_token_of_every_sample() -> None:
    engine = engine_of(max_sequences=64, num_tokens=10_000)
    taken: list[int] = []
    forward = engine._model.forward

    def counting(*arguments: Any, **named: Any) -> Any:
        taken.append(named["input_ids"].shape[1])
        return forward(*arguments, **named)

    engine.add(request(0, (1, 2, 3), 4, sampling(40)))
    engine.step()
    engine.add(request(1, tuple(1 + n % 50 for n in range(1000)), 4, sampling(3)))
    engine._model.forward = counting
    try:
        order = [completion.slot for _ in range(8) for completion in engine.step()]
        assert engine.num_tokens == 4 + 8 * 4 + 4, (
            "a token of each decoding sample in every step; then the others' first"
        )
        assert taken == [4 + PREFILL_TOKENS] * 7 + [4 + 1000 - 7 * PREFILL_TOKENS]
    finally:
        del engine._model.forward
    assert order == []
    assert len(drain(engine)) == 8


def test_of_a_prompt_the_last_token_alone_has_logits() -> None:
    engine = engine_of(max_sequences=64, num_tokens=10_000)
    rows: list[int] = []
    hook = engine._model.register_forward_hook(lambda model, given, output: rows.append(output.logits.shape[1]))
    try:
        engine.add(request(0, tuple(1 + n % 50 for n in range(100)), 6, sampling(3)))
        while not engine.idle:
            engine.step()
    finally:
        hook.remove()
    assert rows == [MIN_ROWS, 6, 6], "one of the prompt, filled up; then one of each sample"


def test_while_nobody_ends_no_key_is_copied_and_who_ends_gives_its_memory_back() -> None:
    engine = engine_of(max_sequences=64, num_tokens=10_000)
    wanted = request(0, (1, 2, 3), 8, sampling(30))
    engine.add(wanted)
    engine.step()
    cache = engine._groups[0].cache

    def places() -> list[int]:
        return [layer.data_ptr() for layer in (cache.prompt, *cache.own)]

    before = places()
    for _ in range(10):
        assert engine.step() == []
        assert places() == before
    full = cache.own[0].nbytes
    cache.keep([1, 2, 3, 4])
    assert cache.own[0].nbytes == full // 2
    assert places()[0] == before[0], "the prompt's stay where they are"


def test_a_group_that_can_never_fit_the_cache_is_refused_with_what_it_needs_and_what_there_is() -> None:
    engine = engine_of(max_sequences=64, num_tokens=42)
    engine.add(request(0, (1, 2), 4, sampling(10)))
    with pytest.raises(InputError, match=r"4 completions of up to 10 tokens after a prompt of 3 needs .* GiB of cache"):
        engine.add(request(1, (1, 2, 3), 4, sampling(10)))
    assert len(drain(engine)) == 4


def test_a_group_larger_than_the_engine_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match="a group of 9 completions fits no generator of 8 rows"):
        engine_of(max_sequences=8, num_tokens=1000).add(request(0, (1,), 9, sampling()))


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_what_a_token_takes_of_the_cache_is_told_by_the_configuration_alone(architecture: str) -> None:
    model = tiny_model(architecture)
    assert bytes_per_token(model.config.to_dict(), 4) == CacheShape.of(model).bytes_per_token


def test_eight_completions_of_a_long_prompt_take_little_more_cache_than_one() -> None:
    """Of 32 tokens; than one by itself, not one with the rows that fill up its products."""

    def num_bytes(num_samples: int) -> int:
        cache = GroupCache(CacheShape.of(tiny_model("llama")), 1000, num_samples, max_new_tokens=32)
        return sum(layer.nbytes for layer in cache.own) + cache.prompt.nbytes

    per_token = CacheShape.of(tiny_model("llama")).bytes_per_token
    assert num_bytes(8) < 1.3 * (1000 + 32) * per_token
    assert num_bytes(8) == cache_tokens(1000, 8, 32) * per_token


# -- stop strings ---------------------------------------------------------------------------------------------


def spelled(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def stopping_at(*stop: str) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=40, stop_token_ids=(), seed=0, stop=stop)


def test_a_completion_ends_with_the_token_that_completes_a_stop_string_and_keeps_it() -> None:
    model = tiny_model("llama")
    free = generate_alone(model, request(0, (1, 2, 3), 6, sampling(40)))
    texts = {name: spelled(completion.token_ids) for name, completion in free.items()}
    stop = texts[0, 2][10:12]
    engine = Engine(model, 6, decode=spelled)
    engine.version = 0
    engine.add(request(0, (1, 2, 3), 6, stopping_at("NEVER", stop)))
    for name, completion in drain(engine).items():
        at = texts[name].find(stop)
        expected = free[name].token_ids if at < 0 else free[name].token_ids[: at + len(stop)]
        assert completion.token_ids == expected
        assert completion.finish_reason == ("length" if at < 0 else "stop")


@given(data=st.data())
def test_a_stop_string_is_found_at_the_token_that_completes_it_though_characters_span_tokens(
    data: st.DataObject,
) -> None:
    """One token per byte of UTF-8. Some tokenizers replace a byte that fits nowhere, some everything around it."""
    text = data.draw(st.text(st.sampled_from("aβ€😀"), max_size=30))
    stops = data.draw(st.lists(st.text(st.sampled_from("aβ€😀"), min_size=1, max_size=4), min_size=1, max_size=3))
    tokens = list(text.encode())

    def replacing(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    fallback = ByteFallback()

    def falling_back(token_ids: Sequence[int]) -> str:
        return str(fallback.decode([f"<0x{byte:02X}>" for byte in token_ids]))

    decode = data.draw(st.sampled_from([replacing, falling_back]))

    found = next((n for n in range(1, len(tokens) + 1) if ends_with_stop(tokens[:n], stops, decode)), None)
    whole = next((n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops)), None)
    assert found == whole


# -- sampling -------------------------------------------------------------------------------------------------


@given(
    vocabulary=st.integers(1, 1400),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_a_token_is_the_inverse_of_the_cumulative_distribution_at_its_draw(
    vocabulary: int, scale: float, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, vocabulary, generator=generator) * scale
    draws = torch.rand(16, generator=generator, dtype=torch.float64)
    draws[0], draws[1] = 0.0, 1.0 - 2.0**-53
    tokens, logprobs = sample(logits, torch.full((16,), temperature), draws)
    exact = torch.log_softmax((logits / temperature).double(), dim=-1)
    ends = exact.exp().cumsum(dim=-1)
    # Where float32 cannot tell on which side of a boundary the draw lies, either token is right.
    slack = 2e-6
    reached = ends.gather(1, tokens[:, None])[:, 0]
    before = reached - exact.exp().gather(1, tokens[:, None])[:, 0]
    assert bool((tokens >= 0).all())
    assert bool((before <= draws + slack).all())
    assert bool((reached >= draws - slack).all())
    rounding = 2e-7 * (logits / temperature).abs().max().item() + 2e-6
    torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=rounding, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [1000, 49152])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_token_and_log_probability_depend_on_that_row_alone(vocabulary: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(70, vocabulary, generator=generator) * 3
        temperatures = torch.rand(70, generator=generator) + 0.5
        draws = torch.rand(70, generator=generator, dtype=torch.float64)
        tokens, logprobs = sample(logits, temperatures, draws)
        for first, last in [(0, 1), (1, 4), (9, 14), (30, 62), (5, 70)]:
            part = slice(first, last)
            some_tokens, some_logprobs = sample(logits[part], temperatures[part], draws[part])
            assert torch.equal(some_tokens, tokens[part])
            assert torch.equal(some_logprobs, logprobs[part])
    finally:
        torch.set_num_threads(before)


def test_a_draw_never_chooses_a_token_of_probability_zero() -> None:
    logits = torch.full((3, 700), float("-inf"))
    logits[:, [300, 650]] = 0.0
    draws = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, _ = sample(logits, torch.ones(3), draws)
    assert tokens.tolist() == [300, 650, 650]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_not_sampled_from(value: float) -> None:
    logits = torch.zeros(3, 300)
    logits[1, 7] = value
    with pytest.raises(NumbersError):
        sample(logits, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))


def test_a_greedy_row_takes_the_most_likely_token_beside_rows_that_are_sampled() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, torch.tensor([0.0, 1.0, 0.0, 0.5]), torch.full((4,), 0.9, dtype=torch.float64))
    assert tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits[0], -1).max())


def completions_of(engine: Engine) -> list[Completion]:
    return list(drain(engine).values())


def test_tokens_are_counted_as_they_are_sampled() -> None:
    engine = engine_of(max_sequences=8, num_tokens=1000)
    engine.add(request(0, (1, 2, 3), 8, sampling(5)))
    done = completions_of(engine)
    assert engine.num_tokens == sum(len(completion.token_ids) for completion in done) == 40


@pytest.mark.integration
@pytest.mark.full
def test_completions_of_eight_thousand_tokens_have_the_log_probabilities_of_the_models_own_forward() -> None:
    model, wanted = copy.deepcopy(tiny_model("llama")), request(0, (1, 2, 3), 4, sampling(8192))
    model.config.max_position_embeddings = 8200
    found = generate_alone(model, wanted)
    assert [len(completion.token_ids) for completion in found.values()] == [8192] * 4
    assert max(gap_to_own_forward(model, wanted, completion) for completion in found.values()) < 1e-3
