"""A sequence's tokens and log-probabilities do not depend on who shares its batch, its row, or its moment. Bit for bit.

This rests on the kernels of torch and MKL, so it is tested rather than believed: random arrivals, batch sizes, rows,
siblings finishing early, cancelled neighbours, prompts of different lengths.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from onbeat.errors import UndecodableError
from onbeat.kernels import available
from onbeat.rollout import cache, invariant
from onbeat.rollout.cache import CacheShape, Step
from onbeat.rollout.engine import Engine
from onbeat.rollout.invariant import Packed, gelu, gelu_tanh, silu, stand_ins
from onbeat.rollout.probe import FarInto, probe_invariance
from onbeat.types import Completion, GroupRequest
from tests.chance import chi_square_p
from tests.fakes.models import (
    ALL_ARCHITECTURES,
    ARCHITECTURES,
    VOCABULARY,
    drain,
    generate_alone,
    request,
    sampling,
    tiny_model,
)

STOPS = tuple(range(0, VOCABULARY, 7))


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    group_size: int
    at_step: int
    cancelled_at: int | None
    max_new_tokens: int


arrivals = st.builds(
    Arrival,
    prompt=(st.integers(1, 80) | st.integers(1, 400)).flatmap(
        lambda n: st.integers(0, 1000).map(lambda s: tuple((s + 5 * i * i + i) % VOCABULARY for i in range(n)))
    ),
    group_size=st.integers(2, 9),
    at_step=st.integers(0, 12),
    cancelled_at=st.none() | st.integers(0, 15),
    max_new_tokens=st.integers(1, 40),
)


ATTENTIONS = ("fused", "by operations")
"""Compiled, norms and gates too, and torch's operations, which compute where nothing is (fused.py)."""


@contextmanager
def attending(how: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if how == "by operations":
            patch.setattr(cache, "fits", lambda own: False)
            patch.setattr(invariant, "available", lambda: False)
        else:
            assert available()
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("architecture", [name for name in ALL_ARCHITECTURES if name != "qwen3_moe"])
@given(schedule=st.lists(arrivals, min_size=2, max_size=4), rows=st.integers(9, 24))
@settings(max_examples=10)
def test_completions_do_not_depend_on_the_batch(
    architecture: str, attention: str, schedule: list[Arrival], rows: int
) -> None:
    with attending(attention):
        check_invariance(tiny_model(architecture), schedule, rows)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@given(schedule=st.lists(arrivals, min_size=2, max_size=4), rows=st.integers(9, 24))
@settings(max_examples=4)
def test_completions_do_not_depend_on_the_batch_with_more_threads(
    architecture: str, threads: int, attention: str, schedule: list[Arrival], rows: int
) -> None:
    torch.set_num_threads(threads)
    with attending(attention):
        check_invariance(tiny_model(architecture), schedule, rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(schedule=st.lists(arrivals, min_size=2, max_size=6), threads=st.lists(st.integers(1, 2), min_size=2, max_size=5))
@settings(max_examples=6)
def test_completions_do_not_depend_on_threads_which_may_change_at_any_step(
    architecture: str, schedule: list[Arrival], threads: list[int]
) -> None:
    """A generator takes more of them while the trainer waits (cores.py)."""

    class Changing(Engine):
        def step(self) -> list[Completion]:
            torch.set_num_threads(next(numbers))
            return super().step()

    numbers = itertools.cycle(threads)
    model = tiny_model(architecture)
    wanted = [
        request(slot, arrival.prompt, arrival.group_size, sampling(arrival.max_new_tokens, stops=STOPS))
        for slot, arrival in enumerate(schedule)
    ]
    together = run_together(Changing(model, max_sequences=16), schedule, wanted)
    check_all_came(schedule, together)
    torch.set_num_threads(1)
    for one in wanted:
        for name, completion in generate_alone(model, one).items():
            if name in together:
                assert together[name] == completion


def check_all_came(schedule: list[Arrival], found: dict[tuple[int, int], Completion]) -> None:
    """But what was cancelled."""
    assert found.keys() >= {
        (slot, sample) for slot, a in enumerate(schedule) if a.cancelled_at is None for sample in range(a.group_size)
    }


def check_invariance(model: Any, schedule: list[Arrival], rows: int) -> None:
    wanted = [
        request(slot, arrival.prompt, arrival.group_size, sampling(arrival.max_new_tokens, stops=STOPS))
        for slot, arrival in enumerate(schedule)
    ]
    together = run_together(Engine(model, max_sequences=rows), schedule, wanted)
    check_all_came(schedule, together)
    for one in wanted:
        for samples in (one.samples[:1], one.samples[1:]):
            for name, completion in generate_alone(model, structs.replace(one, samples=samples)).items():
                if name in together:
                    assert together[name] == completion


def run_together(
    engine: Engine, schedule: list[Arrival], wanted: list[GroupRequest]
) -> dict[tuple[int, int], Completion]:
    engine.version = 0
    found: dict[tuple[int, int], Completion] = {}
    last = max(max(a.at_step, a.cancelled_at or 0) for a in schedule)
    for step in range(last + 1):
        for arrival, one in zip(schedule, wanted, strict=True):
            if arrival.at_step == step:
                engine.add(one)
            if arrival.cancelled_at == step:
                engine.cancel((one.stream, one.period, one.slot))
        found.update({(c.slot, c.sample): c for c in engine.step()})
    return found | drain(engine)


SOME_ROWS = [(20, 24), (5, 37), (16, 80), (3, 80), (100, 176), (31, 543), (0, 512)]


@pytest.mark.parametrize(
    "shape", [(49152, 576), (1000, 2048), (97, 65), (1, 576), (5, 64), (16, 576), (12, 1536), (576, 1536), (1600, 5000)]
)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_of_a_packed_layer_depends_on_that_row_alone(shape: tuple[int, int], threads: int) -> None:
    """Of at least two; the engine never has fewer than four."""
    layer, rows = layer_and_rows(shape, 80 if shape[0] > 10000 else 600)
    with torch.inference_mode():
        packed = Packed(layer)
        together = packed(rows)
        torch.set_num_threads(threads)
        for first, last in [(1, 3), (7, 10), (0, 4), *SOME_ROWS]:
            assert torch.equal(packed(rows[first:last]), together[first:last])
        torch.testing.assert_close(together.double(), rows.double() @ layer.weight.double().T, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("shape", [(576, 576), (576, 1536), (2048, 2048), (1600, 5000)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_of_a_layer_that_is_not_packed_depends_on_that_row_alone(shape: tuple[int, int], threads: int) -> None:
    """Of at least four, as they always are: where there is no oneDNN, or a layer is of another kind."""
    layer, rows = layer_and_rows(shape, 600)
    with torch.inference_mode():
        together = layer(rows)
        torch.set_num_threads(threads)
        for first, last in [(0, 4), (7, 12), *SOME_ROWS]:
            assert torch.equal(layer(rows[first:last]), together[first:last])


def layer_and_rows(shape: tuple[int, int], num_rows: int) -> tuple[torch.nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    layer.weight.data = torch.randn(shape, generator=generator)
    return layer, torch.randn(num_rows, shape[1], generator=generator)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(silu, F.silu), (gelu, F.gelu), (gelu_tanh, lambda x: F.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu", "gelu_tanh"],
)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_of_an_activation_depends_on_that_row_alone(ours: Any, theirs: Any, threads: int) -> None:
    rows = 4 * torch.randn(900, 100, generator=torch.Generator().manual_seed(0))
    together = ours(rows)
    torch.set_num_threads(threads)
    for first, last in [(0, 1), (1, 4), (7, 12), (5, 342), (16, 359), (3, 900)]:
        assert torch.equal(ours(rows[first:last]), together[first:last])
    torch.testing.assert_close(together.double(), theirs(rows.double()), atol=1e-6, rtol=1e-5)


def test_every_activation_of_these_models_has_a_stand_in() -> None:
    for architecture in ALL_ARCHITECTURES:
        model = tiny_model(architecture)
        layers = [layer for name, layer in model.named_modules() if name.endswith(("act_fn", "activation_fn"))]
        assert layers
        assert set(map(id, layers)) <= {id(other.layer) for other in stand_ins(model)}


def test_new_weights_reach_the_packed_head_with_their_version() -> None:
    model = copy.deepcopy(tiny_model("qwen2"))
    engine = Engine(model, max_sequences=4)
    greedy = request(0, (3, 4, 5), 1, sampling(6, temperature=0.0))
    engine.version = 0
    engine.add(greedy)
    before = drain(engine)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    engine.version = 1
    engine.add(greedy)
    after = drain(engine)
    assert before[0, 0].token_ids != after[0, 0].token_ids
    assert after[0, 0].token_ids == generate_alone(model, greedy)[0, 0].token_ids


def test_a_resent_sample_comes_out_as_the_first_time() -> None:
    model = tiny_model("llama")
    whole = request(3, (5, 6, 7), 4, sampling(20))
    part = GroupRequest(stream="train", period=0, slot=3, samples=(2,), token_ids=(5, 6, 7), sampling=sampling(20))
    assert generate_alone(model, part)[3, 2] == generate_alone(model, whole)[3, 2]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "phi3"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_group_whose_samples_end_one_by_one_gives_each_what_it_gets_in_a_small_one(
    architecture: str, threads: int, attention: str
) -> None:
    """A row is given back as its sample ends; other groups are of other sizes then."""
    torch.set_num_threads(threads)
    with attending(attention):
        model = tiny_model(architecture)
        how = sampling(60, stops=STOPS)
        prompt = tuple(range(3, 50))
        whole = generate_alone(model, request(0, prompt, 12, how))
        assert len({len(completion.token_ids) for completion in whole.values()}) > 4
        for samples in [(0,), (1, 2, 3), (4, 5, 6, 7, 8), tuple(range(11)), (3, 6, 9, 11), (10, 2)]:
            part = GroupRequest(stream="train", period=0, slot=0, samples=samples, token_ids=prompt, sampling=how)
            assert generate_alone(model, part) == {name: whole[name] for name in whole if name[1] in samples}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("architecture", [name for name in ALL_ARCHITECTURES if name != "qwen3_moe"])
@pytest.mark.parametrize("length", [100, 1000, 8000])
def test_a_step_far_into_the_completions_does_not_depend_on_the_other_samples(
    architecture: str, length: int, attention: str
) -> None:
    model = tiny_model(architecture)
    far = FarInto(CacheShape.of(model), model.config.num_attention_heads, length)
    with attending(attention):
        for window in (None, 64):
            torch.set_num_threads(1)
            together = far.attend(list(range(7)), window)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                for samples in ([3], [0, 6], [1, 2, 3], [0, 2, 3, 4, 6]):
                    assert torch.equal(far.attend(samples, window), together[samples])


def test_the_probe_notices_a_product_that_depends_on_the_others_only_in_long_completions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = Step.attend

    def leaky(self: Step, *arguments: Any) -> torch.Tensor:
        out = attend(self, *arguments)
        late = any(one.cache.length > 500 for one in self.samples)
        return out * (1 + 1e-6 * out.shape[1]) if late else out

    assert probe_invariance(tiny_model("llama")).rows is None
    monkeypatch.setattr(Step, "attend", leaky)
    assert probe_invariance(tiny_model("llama")).rows == "a sequence of 1000 tokens comes out differently in a batch"


def test_the_probe_finds_these_models_invariant_and_notices_a_model_that_is_not() -> None:
    assert probe_invariance(tiny_model("llama"), [2]) == (None, None)

    class LeaksBatchSize(torch.nn.Module):
        """Adds to every row something that depends on how many rows there are."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * (1 + 1e-6 * hidden.shape[0] * hidden.shape[1])

    model = tiny_model("qwen3")
    norm = model.model.norm
    try:
        model.model.norm = torch.nn.Sequential(norm, LeaksBatchSize())
        assert "differently" in (probe_invariance(model).rows or "")
    finally:
        model.model.norm = norm


def test_the_probe_notices_a_model_whose_bits_depend_on_the_number_of_threads_alone() -> None:
    class LeaksThreads(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * (1 + 1e-6 * torch.get_num_threads())

    model = tiny_model("qwen3")
    norm = model.model.norm
    try:
        model.model.norm = torch.nn.Sequential(norm, LeaksThreads())
        found = probe_invariance(model, [2])
        assert found.rows is None
        assert "with 2 threads" in (found.threads or "")
        assert torch.get_num_threads() == 1, "as it was before"
    finally:
        model.model.norm = norm


def test_the_probe_notices_small_products_that_samples_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "fits", lambda own: False)  # the compiled attention shares none
    model = copy.deepcopy(tiny_model("llama"))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        assert probe_invariance(model).rows is None
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_SHARED", 0)
            assert "differently" in (probe_invariance(model).rows or "")


def logprobs_of(model: Any, prompt: tuple[int, ...], completion: Completion, temperature: float) -> torch.Tensor:
    """By the model's own forward; from its logits on in float64."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[
        :, 0
    ]


def worst(errors: list[torch.Tensor]) -> float:
    return torch.cat(errors).abs().max().item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_as_close_to_the_exact_ones_as_the_models_own(
    architecture: str, temperature: float
) -> None:
    """The exact ones are those of a forward pass in float64."""
    model = tiny_model(architecture)
    prompt = tuple(range(3, 40))
    completions = generate_alone(model, request(0, prompt, 8, sampling(24, temperature))).values()
    own = copy.deepcopy(model)
    own.set_attn_implementation("sdpa")
    exact = copy.deepcopy(own).double()
    expected = [logprobs_of(exact, prompt, c, temperature) for c in completions]
    pairs = list(zip(completions, expected, strict=True))
    ours = worst([torch.tensor(c.sampler_logprobs) - wanted for c, wanted in pairs])
    assert ours < 2 * worst([logprobs_of(own, prompt, c, temperature) - wanted for c, wanted in pairs])
    assert ours < 5e-5


@pytest.mark.parametrize("architecture", [name for name in ALL_ARCHITECTURES if name != "qwen3_moe"])
@pytest.mark.parametrize("prompt_length", [37, 300], ids=["one chunk", "three chunks"])
def test_log_probabilities_are_those_of_a_fresh_forward(architecture: str, prompt_length: int) -> None:
    model = tiny_model(architecture)
    prompt = tuple((3 + 7 * i) % VOCABULARY for i in range(prompt_length))
    completions = generate_alone(model, request(0, prompt, 8, sampling(24))).values()
    own = copy.deepcopy(model)
    own.set_attn_implementation("sdpa")
    assert worst([torch.tensor(c.sampler_logprobs) - logprobs_of(own, prompt, c, 1.0) for c in completions]) < 1e-5


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_greedy_output_equals_that_of_transformers(architecture: str) -> None:
    model = tiny_model(architecture)
    long = tuple((7 * i * i + 3 * i) % VOCABULARY for i in range(300))
    for prompt in [(5,), tuple(range(3, 40)), long]:
        ours = generate_alone(model, request(0, prompt, 2, sampling(30, temperature=0.0)))
        model.set_attn_implementation("sdpa")
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert ours[0, 0].token_ids == ours[0, 1].token_ids == tuple(theirs[0, len(prompt) :].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_first_tokens_follow_the_exact_softmax(temperature: float) -> None:
    model = tiny_model("llama")
    prompt, draws = (9, 30, 2, 77), 4000
    engine = Engine(model, max_sequences=draws)
    engine.version = 0
    engine.add(request(0, prompt, draws, sampling(1, temperature)))
    counts = np.bincount([c.token_ids[0] for c in drain(engine).values()], minlength=VOCABULARY)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, -1).numpy() * draws
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    likelihood = chi_square_p(observed, np.append(expected[common], expected[~common].sum()))
    assert likelihood > 1e-3  # the draws are fixed by their keys: this does not flicker


@pytest.mark.parametrize(
    "model",
    [
        lambda: MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)),
        lambda: Lfm2ForCausalLM(Lfm2Config(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                           num_key_value_heads=2, layer_types=["conv", "full_attention"])),
        lambda: BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=2)),
        lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(
            vocab_size=96, hidden_size=64, moe_intermediate_size=32, num_experts=4, shared_expert_intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=512,
            layer_types=["sliding_attention"] * 2, use_sliding_window=True)),
        lambda: Gemma2ForCausalLM(Gemma2Config(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=16)),
        lambda: DeepseekV3ForCausalLM(DeepseekV3Config(
            vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=2)),
    ],
    ids=["mamba", "lfm2", "bloom", "window in the mask alone", "capped scores", "compressed keys"],
)  # fmt: skip
def test_a_model_the_engine_cannot_decode_is_refused_with_the_reason(model: Any) -> None:
    reasons = (
        r"ForCausalLM (has layers of a kind|does not let its attention|does not tell its attention of its"
        r"|uses softcap in attention|has keys and values of 24 and 16 numbers a head)"
    )
    with pytest.raises(UndecodableError, match=reasons):
        Engine(model(), max_sequences=4)


def test_the_probe_refuses_a_model_whose_own_forward_computes_something_else() -> None:
    class Unlike(torch.nn.Module):
        """Something that depends on the other tokens of the sequence, which the cache knows nothing of."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.5 * hidden.mean(dim=1, keepdim=True)

    model = tiny_model("qwen2")
    norm = model.model.norm
    try:
        model.model.norm = torch.nn.Sequential(norm, Unlike())
        with pytest.raises(UndecodableError, match="does not compute Qwen2ForCausalLM"):
            probe_invariance(model)
    finally:
        model.model.norm = norm


def test_a_cancelled_group_frees_its_rows_and_says_nothing_more() -> None:
    engine = Engine(tiny_model("llama"), max_sequences=4)
    engine.version = 0
    engine.add(request(0, (1, 2, 3), 4, sampling(50)))
    engine.add(request(1, (4, 5), 4, sampling(5)))
    engine.step()
    engine.cancel(("train", 0, 0))
    assert {slot for slot, _ in drain(engine)} == {1}
    assert engine.num_tokens == 4 * 1 + 4 * 5
