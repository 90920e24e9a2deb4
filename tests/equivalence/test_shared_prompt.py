"""The shared form computes what the plain form computes: every log-probability, every parameter's gradient.

Plain is the model's own forward over every completion with its own copy of the prompt, with its own attention.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from onbeat.batch.layout import MIN_PREFIX, Layout
from onbeat.batch.pack import split_group
from onbeat.training import attention, head, merged
from onbeat.training.forward import (
    checkpoint_layers,
    completion_logprobs,
    share_prompts,
    split_prompt,
    why_not_shared,
)
from onbeat.training.tri_model import TriModel
from onbeat.types import TrainGroup
from tests.fakes.models import ALL_ARCHITECTURES, VOCABULARY, tiny_model

TEMPERATURE = 0.8


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@st.composite
def train_groups(draw: st.DrawFn, max_groups: int = 3) -> list[TrainGroup]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    prefix = tokens(rng, draw(st.sampled_from([0, MIN_PREFIX - 1, MIN_PREFIX, 25])))
    sizes = [rng.choice([1, 2, 3, 8, 16]) for _ in range(draw(st.integers(1, max_groups)))]
    groups = [random_group(rng, slot, size, prefix) for slot, size in enumerate(sizes)]
    asked_alike = draw(st.booleans())
    return [structs.replace(group, prompt_ids=groups[0].prompt_ids) for group in groups] if asked_alike else groups


def random_group(rng: random.Random, slot: int, group_size: int, prefix: tuple[int, ...] = ()) -> TrainGroup:
    completions = tuple(tokens(rng, rng.choice([1, 1, 2, 5, rng.randint(1, 30)])) for _ in range(group_size))
    return TrainGroup(
        slot=slot,
        prompt_ids=prefix + tokens(rng, rng.choice([1, 2, rng.randint(3, 40)])),
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * len(completion) for completion in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def loss_of(logprobs_T: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Something that is not linear in the log-probabilities and treats every completion differently."""
    return (layout.advantage_T * logprobs_T.exp() + logprobs_T / layout.length_T).sum()


def run_by_hand(model: Any, groups: list[TrainGroup]) -> dict[tuple[int, int], torch.Tensor]:
    """The model's own forward and autograd's own backward, one completion after another: nothing of ours."""
    model.set_attn_implementation("sdpa")
    logprobs: dict[tuple[int, int], torch.Tensor] = {}
    for group in groups:
        for index, completion in enumerate(group.completion_ids):
            logits = model(torch.tensor([group.prompt_ids + completion])).logits[0, len(group.prompt_ids) - 1 : -1]
            all_logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
            found = all_logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]
            loss_of(found, Layout.plain([part_of(group, [index])])).backward()
            logprobs[group.slot, index] = found.detach()
    return logprobs


def run_plain(model: Any, groups: list[TrainGroup]) -> dict[tuple[int, int], torch.Tensor]:
    """Our plain form, for models that cannot share."""
    model.set_attn_implementation("sdpa")
    layout = Layout.plain(groups)
    found, _ = completion_logprobs(model, layout, TEMPERATURE)
    loss_of(found, layout).backward()
    names = [(group.slot, index, len(c)) for group in groups for index, c in enumerate(group.completion_ids)]
    parts = found.detach().split([length for _, _, length in names])
    return {(slot, index): part for (slot, index, _), part in zip(names, parts, strict=True)}


def run_packed(model: Any, groups: list[TrainGroup]) -> dict[tuple[int, int], torch.Tensor]:
    share_prompts(model)
    layout = Layout.shared(groups)
    found, _ = completion_logprobs(model, layout, TEMPERATURE)
    loss_of(found, layout).backward()
    return by_completion(found.detach(), groups)


def run_split(model: Any, groups: list[TrainGroup], max_tokens: int) -> dict[tuple[int, int], torch.Tensor]:
    share_prompts(model)
    logprobs: dict[tuple[int, int], torch.Tensor] = {}
    for group in groups:
        order = sorted(range(len(group.completion_ids)), key=lambda i: -len(group.completion_ids[i]))
        with split_prompt(model, group.prompt_ids) as prompt:
            for part in split_group(group, max_tokens):
                layout = Layout.completions_only(part)
                found, _ = completion_logprobs(model, layout, TEMPERATURE, prompt)
                loss_of(found, layout).backward()
                mine, order = order[: len(part.completion_ids)], order[len(part.completion_ids) :]
                for (_, index), value in by_completion(found.detach(), [part]).items():
                    logprobs[group.slot, mine[index]] = value
    return logprobs


def by_completion(found_T: torch.Tensor, groups: list[TrainGroup]) -> dict[tuple[int, int], torch.Tensor]:
    """The shared form stands in order of length within each group."""
    names = [
        (group.slot, index, len(group.completion_ids[index]))
        for group in groups
        for index in sorted(range(len(group.completion_ids)), key=lambda i: len(group.completion_ids[i]))
    ]
    parts = found_T.split([length for _, _, length in names])
    return {(slot, index): part for (slot, index, _), part in zip(names, parts, strict=True)}


def part_of(group: TrainGroup, indices: list[int]) -> TrainGroup:
    return TrainGroup(
        slot=group.slot,
        prompt_ids=group.prompt_ids,
        completion_ids=tuple(group.completion_ids[i] for i in indices),
        sampler_logprobs=tuple(group.sampler_logprobs[i] for i in indices),
        advantages=tuple(group.advantages[i] for i in indices),
    )


def take_gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def check_forms(model: Any, groups: list[TrainGroup], max_tokens: int, tolerance: float) -> None:
    by_hand = copy.deepcopy(model)
    by_hand.gradient_checkpointing_disable()
    expected = run_by_hand(by_hand, groups)
    gradients = take_gradients(by_hand)
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    for run in (run_plain, run_packed, lambda m, g: run_split(m, g, max_tokens)):
        found = run(model, groups)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
        for name, gradient in take_gradients(model).items():
            difference = (gradient - gradients[name]).norm()
            # In float64 to the parameter's own gradient (1e-12 of the whole for one that is 0 but for rounding).
            scale = gradients[name].norm() + 1e-3 * total if model.dtype == torch.float64 else total
            assert difference <= tolerance * scale, f"{name}: {difference / scale:.2e} of the gradient's norm"


@contextmanager
def all_in_float64() -> Iterator[None]:
    """transformers computes norms and routers in float32, whatever the model's precision; that would hide behind 1e-7
    what this test looks for. Here float64 stays float64."""
    to, softmax, as_float = torch.Tensor.to, torch.nn.functional.softmax, torch.Tensor.float

    def keep(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.dtype == torch.float64 and torch.float32 in (*args, kwargs.get("dtype")):
            return tensor
        return to(tensor, *args, **kwargs)

    def keep_softmax(tensor: torch.Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        return softmax(tensor, *args, dtype=None if tensor.dtype == torch.float64 else dtype, **kwargs)

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.Tensor, "to", keep)
    patch.setattr(torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else as_float(t))
    patch.setattr(torch.nn.functional, "softmax", keep_softmax)
    try:
        yield
    finally:
        patch.undo()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@given(groups=train_groups(), max_tokens=st.integers(1, 40))
@example(groups=[random_group(random.Random(0), 0, 16), random_group(random.Random(1), 1, 1)], max_tokens=20)
@settings(max_examples=4)
def test_shared_equals_plain_in_float64(
    architecture: str, checkpointing: bool, groups: list[TrainGroup], max_tokens: int
) -> None:
    model = copy.deepcopy(tiny_model(architecture)).double()
    if checkpointing:
        model.train()
        checkpoint_layers(model)
    with all_in_float64():
        check_forms(model, groups, max_tokens, tolerance=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("prefix_length", [MIN_PREFIX, 25])
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_prompts_that_begin_alike_share_the_beginning_and_change_nothing(
    architecture: str, prefix_length: int, checkpointing: bool
) -> None:
    rng = random.Random(prefix_length)
    prefix = tokens(rng, prefix_length)
    groups = [random_group(rng, slot, 4, prefix) for slot in range(3)]
    assert Layout.shared(groups).prefix_length >= prefix_length
    model = copy.deepcopy(tiny_model(architecture)).double()
    if checkpointing:
        model.train()
        checkpoint_layers(model)
    with all_in_float64():
        check_forms(model, groups, max_tokens=20, tolerance=1e-9)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@given(groups=train_groups(), max_tokens=st.integers(1, 40), checkpointing=st.booleans())
@settings(max_examples=4)
def test_attention_over_one_copy_of_the_prompt_equals_plain_in_float64(
    architecture: str, groups: list[TrainGroup], max_tokens: int, checkpointing: bool
) -> None:
    """Prompts count as long from their first token on."""
    model = copy.deepcopy(tiny_model(architecture)).double()
    if checkpointing:
        model.train()
        checkpoint_layers(model)
    with pytest.MonkeyPatch.context() as patch, all_in_float64():
        patch.setattr(merged, "LONG_PROMPT", 1)
        merges = mock.Mock(wraps=merged.merged_attention)
        patch.setattr(attention, "merged_attention", merges)
        check_forms(model, groups, max_tokens, tolerance=1e-9)
    longest = max(len(group.prompt_ids) + max(map(len, group.completion_ids)) for group in groups)
    assert merges.called or longest > model.config.get_text_config().sliding_window


def test_a_long_prompt_is_not_copied_for_its_completions() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    share_prompts(model)
    rng = random.Random(0)
    group = structs.replace(random_group(rng, 0, 16), prompt_ids=tokens(rng, merged.LONG_PROMPT))

    def kept_bytes() -> int:
        """For the backward."""
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            completion_logprobs(model, Layout.shared([group]), TEMPERATURE)[0].sum().backward()
        return sum(storages.values())

    without = kept_bytes()
    with mock.patch.object(merged, "LONG_PROMPT", merged.LONG_PROMPT + 1):
        copied = kept_bytes()
    config = model.config
    keys_and_values = 2 * 4 * len(group.prompt_ids) * config.num_key_value_heads * config.head_dim
    assert copied - without > 0.9 * config.num_hidden_layers * 16 * keys_and_values


@pytest.mark.parametrize("kept_bytes", [0, 30000, 1 << 30])
@pytest.mark.parametrize("block_words", [7, 64])
@given(groups=train_groups(), max_tokens=st.integers(1, 40))
@settings(max_examples=3)
def test_shared_equals_plain_however_many_words_the_head_takes_at_once_and_however_much_is_kept(
    kept_bytes: int, block_words: int, groups: list[TrainGroup], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(head, "BLOCK_WORDS", block_words)
    with all_in_float64():
        check_forms(copy.deepcopy(tiny_model("gemma3")).double(), groups, max_tokens, tolerance=1e-9)


@pytest.mark.parametrize("architecture", [name for name in ALL_ARCHITECTURES if name != "qwen3_moe"])
@given(groups=train_groups(), max_tokens=st.integers(1, 40), checkpointing=st.booleans())
@example(
    groups=[random_group(random.Random(0), 0, 16), random_group(random.Random(1), 1, 1)],
    max_tokens=20,
    checkpointing=True,
)
@settings(max_examples=4)
def test_shared_equals_plain_in_float32(
    architecture: str, groups: list[TrainGroup], max_tokens: int, checkpointing: bool
) -> None:
    model = copy.deepcopy(tiny_model(architecture))
    if checkpointing:
        checkpoint_layers(model)
    check_forms(model, groups, max_tokens, tolerance=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_of_experts_by_the_kernel_that_trains_it_equals_plain(seed: int) -> None:
    """There is none in float64; in float32 these groups find no two experts so near that rounding decides."""
    model = copy.deepcopy(tiny_model("qwen3_moe"))
    model.set_experts_implementation(None)  # as a model is loaded
    assert model.config._experts_implementation == "grouped_mm"
    rng = random.Random(seed)
    check_forms(model, [random_group(rng, slot, 4) for slot in range(3)], max_tokens=20, tolerance=1e-4)


@pytest.mark.parametrize("in_parts", [False, True], ids=["", "in parts"])
def test_checkpointed_layers_are_computed_again_in_backward(in_parts: bool) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    checkpoint_layers(model)
    calls: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    group = random_group(random.Random(0), 0, 8)
    if in_parts:
        run_split(model, [group], max_tokens=20)
        forwards = 1 + len(split_group(group, 20))
    else:
        run_packed(model, [group])
        forwards = 1
    assert len(calls) == 2 * forwards


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_these_architectures_share_prompts(architecture: str) -> None:
    model = copy.deepcopy(tiny_model(architecture))
    model.set_attn_implementation("sdpa")
    assert why_not_shared(model) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)), "attention"),
        (
            lambda: Lfm2ForCausalLM(
                Lfm2Config(
                    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, layer_types=["conv", "full_attention"],
                )
            ),
            "layers without attention (conv)",
        ),
        (
            lambda: CohereForCausalLM(
                CohereConfig(
                    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, logit_scale=0.25,
                )
            ),
            "differ by",
        ),
        (
            lambda: Qwen2MoeForCausalLM(
                Qwen2MoeConfig(
                    vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=4,
                    shared_expert_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, sliding_window=512, layer_types=["sliding_attention"] * 2,
                    use_sliding_window=True,
                )
            ),
            "does not tell its attention of its sliding window of 512 tokens",
        ),
    ],
    ids=["mamba", "lfm2", "cohere", "window in the mask alone"],
)  # fmt: skip
def test_a_model_that_cannot_share_is_trained_plain_and_told_with_the_reason(
    model: Any, reason: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    built = model()
    assert reason in (why_not_shared(built) or "")
    built.save_pretrained(tmp_path)
    models = TriModel(str(tmp_path), temperature=1.0, needs_old=False, needs_reference=False, checkpointing=False)
    assert reason in (models.why_not_shared or "")
    layout = models.layout((random_group(random.Random(1), 0, 3),))
    assert layout.segments is None
    models.logprobs(layout).policy_T.sum().backward()
    assert all(p.grad is not None for p in models.policy.parameters())


def test_a_group_is_computed_once_per_token_without_padding() -> None:
    group = random_group(random.Random(3), 0, 8)
    layout = Layout.shared([group])
    assert layout.tokens_S_L.shape == (1, group.num_tokens)
    assert len(layout.target_T) == sum(map(len, group.completion_ids))


def test_what_all_prompts_of_a_pack_begin_with_is_computed_once() -> None:
    rng = random.Random(0)
    prefix = tokens(rng, 30)
    groups = [random_group(rng, slot, 4, prefix) for slot in range(3)]
    layout = Layout.shared(groups)
    assert layout.prefix_length == 30
    assert tuple(layout.tokens_S_L[0, :30].tolist()) == prefix
    assert layout.tokens_S_L.numel() == sum(group.num_tokens for group in groups) - 2 * layout.prefix_length


def test_a_few_tokens_alike_before_long_prompts_are_not_worth_a_prefix() -> None:
    rng = random.Random(0)
    prefix = tokens(rng, MIN_PREFIX)
    long = [structs.replace(random_group(rng, n, 4), prompt_ids=prefix + tokens(rng, 300)) for n in range(2)]
    assert Layout.shared(long).prefix_length == 0
    short = [structs.replace(group, prompt_ids=group.prompt_ids[:40]) for group in long]
    assert Layout.shared(short).prefix_length == MIN_PREFIX


def test_a_prompt_keeps_a_token_of_its_own_though_all_prompts_are_the_same() -> None:
    rng = random.Random(0)
    group = random_group(rng, 0, 4, tokens(rng, 30))
    layout = Layout.shared([group, group])
    assert layout.prefix_length == len(group.prompt_ids) - 1


@given(groups=train_groups(max_groups=1), max_tokens=st.integers(1, 60))
@settings(max_examples=50)
def test_a_split_keeps_every_completion_once_and_no_part_over_the_limit(
    groups: list[TrainGroup], max_tokens: int
) -> None:
    """Of the tokens of a prompt and a part; half of it is a part's, however long the prompt."""
    prompt = len(groups[0].prompt_ids)
    parts = split_group(groups[0], max_tokens)
    assert sorted(c for part in parts for c in part.completion_ids) == sorted(groups[0].completion_ids)
    room = max(max_tokens - prompt, max_tokens // 2)
    for part in parts:
        assert sum(map(len, part.completion_ids)) <= room or len(part.completion_ids) == 1
    largest = max(sum(map(len, part.completion_ids)) for part in parts)
    less_room = prompt + largest - 1
    if 2 * prompt <= less_room and all(len(part.completion_ids) > 1 for part in parts):
        assert len(split_group(groups[0], less_room)) > len(parts)


def test_the_parts_of_a_split_group_are_of_about_the_same_size() -> None:
    group = structs.replace(random_group(random.Random(0), 0, 8), completion_ids=((1,) * 10,) * 28)
    group = structs.replace(group, sampler_logprobs=((0.0,) * 10,) * 28, advantages=(0.0,) * 28)
    prompt = len(group.prompt_ids)
    assert [len(part.completion_ids) for part in split_group(group, prompt + 120)] == [10, 10, 8]
    assert [len(part.completion_ids) for part in split_group(group, prompt + 160)] == [14, 14]


def test_a_model_that_runs_a_layer_twice_is_trained_plain_since_keys_are_kept_by_layer() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("sdpa")
    assert why_not_shared(model) is None
    model.model.layers[1] = model.model.layers[0]
    assert why_not_shared(model) == (
        "LlamaForCausalLM does not give each call of its attention a layer's number of its own, to keep keys under"
    )
