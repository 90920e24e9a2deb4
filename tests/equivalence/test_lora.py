"""LoRA: the trainer's gradients are those of peft's own model, reference and old policy are exact without weights of
their own, and generation with an adapter does not depend on the batch."""

from __future__ import annotations

import copy
import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from peft import LoraConfig, get_peft_model

from onbeat.batch.layout import Layout
from onbeat.checkpoint import Part, Tensor
from onbeat.config import Config, LoraSection
from onbeat.lora import add_adapter, trained_parameters
from onbeat.messages import SavePart, ToTrainer
from onbeat.recipe import from_tree
from onbeat.rollout import invariant
from onbeat.rollout.engine import Engine
from onbeat.rollout.probe import probe_invariance
from onbeat.training import worker
from onbeat.training.trainer import PolicyTrainer
from onbeat.training.tri_model import Logprobs, TriModel
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from onbeat.weights.snapshot import Mapped
from onbeat.wire import Channel
from tests.equivalence.test_batch_invariance import Arrival, arrivals, check_invariance
from tests.equivalence.test_shared_prompt import TEMPERATURE, all_in_float64, random_group
from tests.fakes.models import ARCHITECTURES, drain, request, sampling, tiny_model

ADAPTED = (*ARCHITECTURES, "gemma3", "phi3")
BETA = 0.3
LORA = LoraSection(rank=3, alpha=8.0)
SEED_OF_LARGE_GROUPS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    for architecture in ADAPTED:
        tiny_model(architecture).save_pretrained(directory / architecture)
    return {architecture: str(directory / architecture) for architecture in ADAPTED}


def random_groups(seed: int) -> list[TrainGroup]:
    """Of several completions each, with advantages that float32 holds exactly."""
    rng = random.Random(seed)
    groups = [random_group(rng, slot, rng.choice([2, 3, 8])) for slot in range(2)]
    return [
        structs.replace(group, advantages=tuple(rng.randint(-12, 12) / 8 for _ in group.advantages)) for group in groups
    ]


@torch.no_grad()
def move(model: torch.nn.Module, seed: int, distance: float = 0.1) -> None:
    """Change what is trained, as a step would; further than one, so that ratios leave the clip's range."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained_parameters(model).values():
        parameter.add_(distance * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


# The trainer


def make_config(model_dir: str, targets: Sequence[str] = (), **trainer: Any) -> Config:
    return from_tree(
        {
            "model": {"path": model_dir},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "algorithm": {"beta": BETA, "loss_mean": "sum"},
            "trainer": {"learning_rate": 0.01, **trainer},
            "sampling": {"temperature": TEMPERATURE},
            "schedule": {"updates_per_period": 2},
            "lora": {"rank": LORA.rank, "alpha": LORA.alpha, "targets": targets},
        }
    )


def straightforward_loss(model: Any, old: Any, groups: list[TrainGroup]) -> torch.Tensor:
    """GRPO by peft's own model, one completion at a time; the reference is the model with its adapter off."""

    def logprobs(one: Any) -> torch.Tensor:
        logits = one(ids).logits[0, len(group.prompt_ids) - 1 : -1] / TEMPERATURE
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]

    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for completion, advantage in zip(group.completion_ids, group.advantages, strict=True):
            ids = torch.tensor([group.prompt_ids + completion])
            policy = logprobs(model)
            with torch.no_grad():
                before = logprobs(old)
                with model.disable_adapter():
                    reference = logprobs(model)
            ratio, gap = (policy - before).exp(), reference - policy
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + (BETA * (gap.exp() - gap - 1) - gain).sum()
    return total


def plain_peft_model(architecture: str, like: torch.nn.Module, targets: Sequence[str] = ()) -> Any:
    """Made by peft alone, with the values of ours."""
    how = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=list(targets) or "all-linear")
    model = get_peft_model(copy.deepcopy(tiny_model(architecture)), how).double()
    model.set_attn_implementation("sdpa")
    theirs = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    ours = trained_parameters(like)
    assert theirs.keys() == ours.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(ours[name].data)
    return model


def in_float64(trainer: PolicyTrainer) -> None:
    trainer.model.double()
    models = trainer._models
    for others in (models._old_values, models._reference_values):
        assert others is not None
        others.update({name: value.double() for name, value in others.items()})


@pytest.mark.parametrize(
    "setting", [{}, {"max_tokens": 16}, {"gradient_checkpointing": True}], ids=["whole", "split", "checkpointing"]
)
@pytest.mark.parametrize("architecture", ADAPTED)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=3)
def test_gradients_are_those_of_pefts_own_model_before_and_after_a_step(
    model_dirs: dict[str, str], architecture: str, setting: dict[str, Any], seed: int
) -> None:
    check_two_updates(model_dirs[architecture], architecture, (), setting, seed)


@pytest.mark.parametrize("setting", [{}, {"max_tokens": 16}], ids=["whole", "split"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj",), ("down_proj",)], ids=" ".join)
def test_gradients_are_pefts_own_where_some_layers_have_an_adapter(
    model_dirs: dict[str, str], targets: tuple[str, ...], setting: dict[str, Any]
) -> None:
    """The first layer's keys, its values too, depend on nothing that is trained."""
    assert all(group.num_tokens > 16 for group in random_groups(SEED_OF_LARGE_GROUPS))
    check_two_updates(model_dirs["llama"], "llama", targets, setting, SEED_OF_LARGE_GROUPS)


def check_two_updates(
    model_dir: str, architecture: str, targets: tuple[str, ...], setting: dict[str, Any], seed: int
) -> None:
    groups = random_groups(seed)
    trainer = PolicyTrainer(make_config(model_dir, targets, **setting), model_dir)
    assert trainer.why_not_shared is None
    move(trainer.model, seed)
    trainer._models.at_start = False
    in_float64(trainer)
    with all_in_float64():
        os.close(trainer.snapshot()[0])  # opens a period
        old = plain_peft_model(architecture, trainer.model, targets)
        for update in (0, 1):
            expected = plain_peft_model(architecture, trainer.model, targets)
            straightforward_loss(expected, old, groups).backward()
            for index, group in enumerate(groups):
                trainer.accumulate(MicroBatch(period=0, update=update, index=index, rank=0, groups=(group,)))
            check_gradients(trainer.model, expected)
            trainer.step(UpdateTotals(num_groups=2, num_sequences=1, num_tokens=1))
            move(trainer.model, seed + 1)


def check_gradients(model: torch.nn.Module, expected: Any) -> None:
    gradients = {
        name.removeprefix("base_model.model."): p.grad for name, p in expected.named_parameters() if p.requires_grad
    }
    total = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, f"{name} is not trained and has a gradient"
            continue
        assert parameter.grad is not None
        difference, scale = (parameter.grad - gradients[name]).norm(), gradients[name].norm() + 1e-3 * total
        assert difference <= 1e-9 * scale, f"{name}: {difference / scale:.2e} of the gradient's norm"


def test_the_base_never_changes_and_only_the_adapter_is_published(model_dirs: dict[str, str]) -> None:
    trainer = PolicyTrainer(make_config(model_dirs["llama"]), model_dirs["llama"])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for period in range(2):
        os.close(trainer.snapshot()[0])
        for update in (0, 1):
            groups = tuple(random_groups(update))
            trainer.accumulate(MicroBatch(period=period, update=update, index=0, rank=0, groups=groups))
            trainer.step(UpdateTotals(num_groups=2, num_sequences=4, num_tokens=9))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    fd, num_bytes, _ = trainer.snapshot()
    mapped = Mapped(fd, num_bytes)
    assert all("lora_" in name for name in mapped._places())
    mapped.close()


def test_a_checkpoint_being_written_does_not_see_the_reference(model_dirs: dict[str, str], tmp_path: Path) -> None:
    """The state is taken by the thread that trains, between two orders, and stays what it was while that goes on."""
    trainer = PolicyTrainer(make_config(model_dirs["llama"]), model_dirs["llama"])
    move(trainer.model, seed=1)
    expected = {f"model.{name}": p.detach().clone() for name, p in trained_parameters(trainer.model).items()}
    written: dict[str, bytes] = {}
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        begun, halfway = threading.Event(), threading.Event()

        def write_in_the_middle(directory: Path, name: str, state: dict[str, Tensor]) -> Part:
            begun.set()
            halfway.wait()
            written.update({name: bytes(tensor.data) for name, tensor in state.items()})
            return Part(name=name, digest="", num_bytes=0)

        def state() -> dict[str, Tensor]:
            takers.append(threading.current_thread())
            return PolicyTrainer.state(trainer)

        takers: list[threading.Thread] = []
        patch.setattr(trainer, "state", state)
        patch.setattr(worker, "write_part", write_in_the_middle)
        saving = worker.TrainerWorker(Channel(ours, ToTrainer), trainer, tmp_path)
        saving._handle(SavePart(str(tmp_path), num_updates=0))
        begun.wait()
        with trainer._models._as_reference():
            halfway.set()
            saving._finish_saving()
    assert takers == [threading.current_thread()]
    assert {name: written[name] for name in expected} == {n: p.numpy().tobytes() for n, p in expected.items()}


# The tri-model


def tri_model(model_dir: str, lora: LoraSection) -> TriModel:
    needed = lora.rank > 0
    return TriModel(
        model_dir,
        temperature=TEMPERATURE,
        needs_old=needed,
        needs_reference=needed,
        checkpointing=False,
        lora=lora,
        seed=7,
    )


def logprobs(models: TriModel, group: TrainGroup, split: bool) -> Logprobs:
    if not split:
        return models.logprobs(models.layout((group,)))
    with models.split_prompt(group.prompt_ids) as prompt:
        found = models.logprobs(Layout.completions_only(group), prompt)
        found.policy_T.sum().backward()  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("architecture", ADAPTED)
def test_the_reference_is_bit_for_bit_the_base_model(
    model_dirs: dict[str, str], architecture: str, split: bool
) -> None:
    adapted = tri_model(model_dirs[architecture], LORA)
    assert adapted.old is None  # no second copy of the weights
    assert adapted.reference is None
    base = tri_model(model_dirs[architecture], LoraSection())
    move(adapted.policy, seed=1)
    adapted.at_start = False
    for group in random_groups(3):
        found, expected = logprobs(adapted, group, split), logprobs(base, group, split)
        assert found.ref_T is not None
        assert torch.equal(found.ref_T, expected.policy_T)
        assert (found.policy_T - found.ref_T).abs().max() > 0.01


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("architecture", ADAPTED)
def test_old_log_probabilities_are_bit_for_bit_those_of_the_periods_start(
    model_dirs: dict[str, str], architecture: str, split: bool
) -> None:
    models = tri_model(model_dirs[architecture], LORA)
    (group, _) = random_groups(4)
    for period in range(2):
        move(models.policy, seed=period)
        models.open_period()
        recorded = logprobs(models, group, split).policy_T.detach().clone()
        for update in range(2):
            models.before_step()
            move(models.policy, seed=10 + update)
            found = logprobs(models, group, split)
            assert torch.equal(found.old_T, recorded)
            assert (found.policy_T - recorded).abs().max() > 0.01


# Generation


def adapted_model(architecture: str, rank: int, *, adds: bool = True) -> Any:
    model = copy.deepcopy(tiny_model(architecture))
    add_adapter(model, LoraSection(rank=rank), seed=0)
    if adds:
        move(model, seed=0, distance=0.05)
    return model


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rank", [1, 5, 16])
@given(schedule=st.lists(arrivals, min_size=2, max_size=6), rows=st.integers(9, 24))
@settings(max_examples=4)
def test_completions_of_an_adapted_model_do_not_depend_on_the_batch(
    rank: int, threads: int, schedule: list[Arrival], rows: int
) -> None:
    """These ranks take another kernel with some numbers of rows or threads, unless their layers are packed."""
    torch.set_num_threads(threads)
    check_invariance(adapted_model("llama", rank), schedule, rows)


def test_the_probe_sees_through_an_adapter_that_adds_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted_model("llama", rank=1, adds=False)
    before = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    assert probe_invariance(model).rows is None
    assert all(torch.equal(p, before[name]) for name, p in trained_parameters(model).items())
    monkeypatch.setattr(invariant, "_PACKED", ())
    assert probe_invariance(model).rows is not None


def test_what_is_packed_of_the_base_is_packed_once_and_what_is_packed_of_the_adapter_for_every_version() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    add_adapter(model, LORA, seed=0)
    engine = Engine(model, max_sequences=4)
    engine.version = 0
    first = {other.layer: other.compute for other in engine.stand_ins()}
    engine.version = 1
    second = {other.layer: other.compute for other in engine.stand_ins()}
    assert first.keys() == second.keys()
    trained = {layer for layer in first if any(parameter.requires_grad for parameter in layer.parameters())}
    assert trained
    assert {layer for layer in first if first[layer] is not second[layer]} == trained


def test_without_an_adapter_everything_is_packed_for_every_version() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    engine = Engine(model, max_sequences=4)
    wanted = structs.replace(request(0, (1, 2, 3), 4, sampling(6)), period=0)
    found = []
    for version in range(2):
        engine.version = version
        engine.add(wanted)
        found.append({name: completion.sampler_logprobs for name, completion in drain(engine).items()})
        move_all(model)
    fresh = Engine(model, max_sequences=4)
    fresh.version = engine.version = 2
    for each in (engine, fresh):
        each.add(wanted)
        found.append({name: completion.sampler_logprobs for name, completion in drain(each).items()})
    assert found[0] != found[1] != found[2] == found[3]


@torch.no_grad()
def move_all(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.01)
