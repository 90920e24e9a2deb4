"""The trainer's gradient: what it is, and that it does not care how the groups were cut, packed or ordered."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, OPTConfig, OPTForCausalLM

from onbeat.batch.layout import Layout
from onbeat.config import Config
from onbeat.device import brought_to, load_model
from onbeat.errors import InputError
from onbeat.recipe import from_tree
from onbeat.training import tri_model
from onbeat.training.attention import ATTENTION
from onbeat.training.forward import completion_logprobs
from onbeat.training.merged import LONG_PROMPT
from onbeat.training.trainer import PolicyTrainer
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from onbeat.weights.snapshot import Mapped
from tests.fakes.models import VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def plain_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a model that scales its logits, which shared prompts do not know of."""
    directory = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CohereConfig(vocab_size=VOCABULARY, num_key_value_heads=2, logit_scale=0.25, **sizes)
    CohereForCausalLM(config).save_pretrained(directory)
    return str(directory)


def make_config(model_dir: str, trainer: dict[str, object] | None = None, **algorithm: object) -> Config:
    return from_tree(
        {
            "model": {"path": model_dir},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "algorithm": algorithm,
            "trainer": trainer or {},
            "sampling": {"max_new_tokens": 12, "temperature": 0.8},
            "schedule": {"updates_per_period": 2},
        }
    )


@st.composite
def train_groups(draw: st.DrawFn) -> list[TrainGroup]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    return [random_group(rng, slot) for slot in range(draw(st.integers(1, 5)))]


def random_group(rng: random.Random, slot: int) -> TrainGroup:
    completions = tuple(
        tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))) for _ in range(rng.randint(1, 5))
    )
    return TrainGroup(
        slot=slot,
        prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))),
        completion_ids=completions,
        sampler_logprobs=tuple(tuple(-1.0 for _ in completion) for completion in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def accumulate(trainer: PolicyTrainer, packs: list[list[TrainGroup]]) -> None:
    for index, pack in enumerate(packs):
        trainer.accumulate(MicroBatch(period=0, update=0, index=index, rank=0, groups=tuple(pack)))


def gradient(trainer: PolicyTrainer) -> torch.Tensor:
    parts = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    return torch.cat(parts)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


@given(groups=train_groups(), seed=st.integers(0, 10**6), cuts=st.lists(st.booleans(), min_size=5, max_size=5))
@settings(max_examples=20)
def test_permuted_and_repacked_groups_give_the_same_gradient_to_1e_6(
    model_dir: str, groups: list[TrainGroup], seed: int, cuts: list[bool]
) -> None:
    trainer = PolicyTrainer(make_config(model_dir, beta=0.05), model_dir)
    accumulate(trainer, [[group] for group in groups])
    in_order = gradient(trainer)
    shuffled = list(groups)
    random.Random(seed).shuffle(shuffled)
    packs: list[list[TrainGroup]] = []
    for group, cut in zip(shuffled, cuts, strict=False):
        if cut or not packs:
            packs.append([])
        packs[-1].append(group)
    accumulate(trainer, packs)
    assert relative_difference(gradient(trainer), in_order) < 1e-6


@given(groups=train_groups(), max_tokens=st.integers(33, 120))
@settings(max_examples=10)
def test_a_model_that_cannot_share_prompts_is_trained_in_passes_no_larger_than_the_limit(
    plain_model_dir: str, groups: list[TrainGroup], max_tokens: int
) -> None:
    whole = PolicyTrainer(make_config(plain_model_dir, beta=0.05), plain_model_dir)
    assert whole.why_not_shared is not None
    accumulate(whole, [groups])
    expected = gradient(whole)
    trainer = PolicyTrainer(make_config(plain_model_dir, {"max_tokens": max_tokens}, beta=0.05), plain_model_dir)
    with mock.patch.object(tri_model, "completion_logprobs", wraps=tri_model.completion_logprobs) as passes:
        accumulate(trainer, [groups])
    assert max(call.args[1].tokens_S_L.numel() for call in passes.call_args_list) <= max_tokens
    assert relative_difference(gradient(trainer), expected) < 1e-5


@pytest.mark.parametrize("prompt_length", [50, LONG_PROMPT])
def test_the_same_groups_give_the_same_bits_again_on_two_threads(model_dir: str, prompt_length: int) -> None:
    """Large enough that torch splits operations over threads; some of them then add in any order, unless forbidden."""
    rng = random.Random(2)
    completions = tuple(tuple(rng.randrange(VOCABULARY) for _ in range(40)) for _ in range(24))
    prompt_ids = tuple(rng.randrange(VOCABULARY) for _ in range(prompt_length))
    group = TrainGroup(
        slot=0,
        prompt_ids=prompt_ids,
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * 40 for _ in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )
    torch.set_num_threads(2)
    try:
        trainer = PolicyTrainer(make_config(model_dir, beta=0.05), model_dir)
        found = []
        alike = structs.replace(group, slot=1, prompt_ids=(*prompt_ids[:-4], 1, 2, 3, 4))
        assert Layout.shared([group, alike]).prefix_length >= prompt_length - 4
        for _ in range(10):
            accumulate(trainer, [[group], [group, alike]])
            found.append(gradient(trainer))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, found[0]) for one in found)


def straightforward_loss(
    model: torch.nn.Module, reference: torch.nn.Module, groups: list[TrainGroup], config: Config
) -> torch.Tensor:
    """GRPO as the paper writes it: one completion at a time, one token at a time, one mean over everything."""
    algorithm, temperature = config.algorithm, config.sampling.temperature
    sequences = []
    for group in groups:
        for completion, advantage in zip(group.completion_ids, group.advantages, strict=True):
            ids = torch.tensor([group.prompt_ids + completion])
            policy = torch.log_softmax(model(ids).logits[0] / temperature, -1)
            ref = torch.log_softmax(reference(ids).logits[0] / temperature, -1).detach()
            terms = []
            for t, token in enumerate(completion):
                at = len(group.prompt_ids) - 1 + t
                ratio = torch.exp(policy[at, token] - policy[at, token].detach())
                clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
                gap = ref[at, token] - policy[at, token]
                terms.append(
                    -torch.min(ratio * advantage, clipped * advantage) + algorithm.beta * (gap.exp() - gap - 1)
                )
            sequences.append(torch.stack(terms))
    match algorithm.loss_mean:
        case "sequence":
            return torch.stack([terms.mean() for terms in sequences]).mean()
        case "token":
            return torch.cat(sequences).mean()
        case "constant":
            return torch.stack([terms.sum() / config.sampling.max_new_tokens for terms in sequences]).mean()
        case _:
            return torch.stack([terms.sum() for terms in sequences]).mean()


@pytest.mark.parametrize("loss_mean", ["sequence", "token", "constant", "sum"])
@given(groups=train_groups())
@settings(max_examples=8)
def test_the_streamed_gradient_is_that_of_the_formula(model_dir: str, loss_mean: str, groups: list[TrainGroup]) -> None:
    config = make_config(model_dir, beta=0.05, loss_mean=loss_mean)
    trainer = PolicyTrainer(config, model_dir)
    with torch.no_grad():  # away from the reference, so that the KL has a gradient
        for parameter in trainer.model.parameters():
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter))
    trainer._models.at_start = False
    trainer.model.set_attn_implementation("sdpa")
    straightforward_loss(trainer.model, load_model(model_dir), groups, config).backward()
    trainer.model.set_attn_implementation(ATTENTION)
    expected = gradient(trainer)
    accumulate(trainer, [[group] for group in groups])
    num_sequences = sum(len(group.completion_ids) for group in groups)
    num_tokens = sum(len(c) for group in groups for c in group.completion_ids)
    summed = gradient(trainer)
    assert relative_difference(summed / (num_tokens if loss_mean == "token" else num_sequences), expected) < 1e-5


def test_the_optimizer_steps_on_zeros_when_every_group_was_elided(model_dir: str) -> None:
    """AdamW has momentum: a period without gradient still moves the weights, and must not skip them."""
    trainer = PolicyTrainer(make_config(model_dir), model_dir)
    group = TrainGroup(
        slot=0, prompt_ids=(1, 2), completion_ids=((3, 4), (5,)), sampler_logprobs=((-1.0, -1.0), (-1.0,)),
        advantages=(1.0, -1.0),
    )  # fmt: skip
    totals = UpdateTotals(num_groups=1, num_sequences=2, num_tokens=3)
    accumulate(trainer, [[group]])
    first = trainer.step(totals)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    second = trainer.step(totals)
    assert first.loss is not None
    assert second.loss is None
    assert second.entropy is None
    assert second.grad_norm == 0.0
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_two_updates_over_two_periods_follow_the_formula_with_old_frozen_at_each_periods_start(model_dir: str) -> None:
    """With a rate so large that ratios leave the clip range: a stale or unused old policy gives other weights."""
    rng = random.Random(5)
    groups = [random_group(rng, slot) for slot in range(4)]
    config = make_config(model_dir, loss_mean="sequence", trainer={"learning_rate": 0.01, "max_grad_norm": 0.5})
    trainer = PolicyTrainer(config, model_dir)
    expected = load_model(model_dir)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    seen_clipping = False
    for period in range(2):
        os.close(trainer.snapshot()[0])
        old = copy.deepcopy(expected)
        for update in range(2):
            mine = groups[2 * update : 2 * update + 2]
            num_sequences = sum(len(group.completion_ids) for group in mine)
            for index, group in enumerate(mine):
                trainer.accumulate(MicroBatch(period=period, update=update, index=index, rank=0, groups=(group,)))
            totals = UpdateTotals(num_groups=2, num_sequences=num_sequences, num_tokens=1)
            report = trainer.step(totals)
            assert report.learning_rate == 0.01
            loss, clipped = formula_with_old(expected, old, mine, config)
            (loss / num_sequences).backward()
            norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            assert norm > 0.5  # or the clipping would not be tested
            assert report.grad_norm == pytest.approx(norm.item(), rel=1e-3)
            optimizer.step()
            optimizer.zero_grad()
            seen_clipping |= clipped
    assert seen_clipping
    for mine_p, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine_p, theirs, rtol=1e-3, atol=1e-4)


def formula_with_old(
    model: torch.nn.Module, old: torch.nn.Module, groups: list[TrainGroup], config: Config
) -> tuple[torch.Tensor, bool]:
    """The sum over sequences of the mean clipped loss; and whether a ratio left the clip range."""
    total, clipped = torch.zeros(()), False
    for group in groups:
        for completion, advantage in zip(group.completion_ids, group.advantages, strict=True):
            ids = torch.tensor([group.prompt_ids + completion])
            at = torch.arange(len(group.prompt_ids) - 1, ids.shape[1] - 1)
            targets = torch.tensor(completion)
            logits = [m(ids).logits[0, at] / config.sampling.temperature for m in (model, old)]
            new, before = (torch.log_softmax(part, -1)[torch.arange(len(at)), targets] for part in logits)
            ratio = torch.exp(new - before.detach())
            clipped |= bool(((ratio < 0.8) | (ratio > 1.2)).any())
            total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return total, clipped


def opt() -> Any:
    """Drops out by functions, whole layers too, in the layer and in the model."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=2,
            word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
        )
    )  # fmt: skip


def llama() -> Any:
    model = copy.deepcopy(tiny_model("llama"))
    model.config.attention_dropout = 0.5
    return model


def test_old_and_reference_in_host_memory_change_no_bit(model_dir: str) -> None:
    groups = [random_group(random.Random(slot), slot) for slot in range(3)]

    def gradients(offload: bool) -> list[torch.Tensor]:
        trainer = PolicyTrainer(make_config(model_dir, {"offload": offload, "max_tokens": 20}, beta=0.5), model_dir)
        trainer._models._moved, trainer._models.at_start = True, False  # both run
        with mock.patch.object(tri_model, "brought_to", wraps=tri_model.brought_to) as bring:
            accumulate(trainer, [[group] for group in groups])
        assert bring.called is offload
        return [parameter.grad for parameter in trainer.model.parameters()]

    assert all(map(torch.equal, gradients(offload=True), gradients(offload=False)))


def test_a_model_that_is_brought_to_a_device_is_whole_there_and_the_same_tensors_again_at_home() -> None:
    """To the device without memory, since there is no other here."""
    model = copy.deepcopy(tiny_model("gemma3"))  # its head is its embedding
    at_home = {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with brought_to(torch.device("meta"), model):
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).logits.shape[:2] == (1, 4)
    assert {n: t.data_ptr() for n, t in [*model.named_parameters(), *model.named_buffers()]} == at_home
    assert isinstance(model.get_output_embeddings().weight, torch.nn.Parameter)


def test_a_model_that_gives_the_logits_of_all_positions_is_understood() -> None:
    model = copy.deepcopy(tiny_model("qwen3"))
    layout = Layout.plain([random_group(random.Random(slot), slot) for slot in range(2)])
    expected, _ = completion_logprobs(model, layout, 1.0)
    own = model.forward
    model.forward = lambda *inputs, logits_to_keep=None, **more: own(*inputs, **more)
    found, _ = completion_logprobs(model, layout, 1.0)
    torch.testing.assert_close(found, expected)


def test_a_cap_on_attention_is_kept_where_a_model_is_trained_plain(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma2Config(vocab_size=96, num_key_value_heads=2, head_dim=16, attn_logit_softcapping=0.1, **sizes)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)  # large enough to meet the cap
    model.save_pretrained(tmp_path)
    ids = torch.arange(1, 30)[None]
    found = load_model(str(tmp_path))(ids).logits
    assert torch.equal(found, model(ids).logits)
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(found, model(ids).logits, atol=1e-3)  # so it matters


def test_a_model_directory_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.gguf")
    with pytest.raises(InputError, match=r"has no weights: no \*\.safetensors"):
        PolicyTrainer(make_config(str(tmp_path)), str(tmp_path))
    load_model(str(tmp_path), weights_follow=True)  # as a generator that joins from another machine does


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [llama, opt])
def test_dropout_is_off_in_training(make: Callable[[], Any], checkpointing: bool, tmp_path: Path) -> None:
    """What is sampled from is what is trained."""
    make().save_pretrained(tmp_path)
    config = make_config(str(tmp_path), {"gradient_checkpointing": checkpointing})
    model = PolicyTrainer(config, str(tmp_path)).model
    model.set_attn_implementation("sdpa")
    ids = torch.arange(1, 30)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so(model_dir: str) -> None:
    trainer = PolicyTrainer(make_config(model_dir), model_dir)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    group = TrainGroup(
        slot=0, prompt_ids=(1,), completion_ids=((3,), (4,)), sampler_logprobs=((-1.0,), (-1.0,)),
        advantages=(float("inf"), 0.0),
    )  # fmt: skip
    accumulate(trainer, [[group]])
    report = trainer.step(UpdateTotals(num_groups=1, num_sequences=2, num_tokens=2))
    assert not report.stepped
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_snapshot_holds_the_weights_of_its_moment(model_dir: str, tmp_path: Path) -> None:
    trainer = PolicyTrainer(make_config(model_dir), model_dir)
    fd, num_bytes, digest = trainer.snapshot()
    expected = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    mapped = Mapped(os.dup(fd), num_bytes)
    os.close(fd)
    assert mapped.digest() == digest
    loaded = {name: torch.empty_like(value) for name, value in expected.items()}
    mapped.load_into(loaded)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
