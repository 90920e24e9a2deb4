"""What is left out adds nothing: with and without each elision, the gradient has the same bits.

One group per micro-batch: in a pack, leaving a group out changes the shapes of the products, and so the rounding.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.checkpoint import write_part
from onbeat.protocols import UpdateReport
from onbeat.recipe import from_tree
from onbeat.training import tri_model
from onbeat.training.trainer import PolicyTrainer
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from tests.equivalence.test_gradients import random_group
from tests.fakes.models import tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(directory)
    return str(directory)


def make_trainer(model_dir: str, beta: float = 0.0, updates: int = 1, kl: str = "k3") -> PolicyTrainer:
    config = from_tree(
        {
            "model": {"path": model_dir},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "algorithm": {"beta": beta, "kl": kl},
            "schedule": {"updates_per_period": updates},
        }
    )
    return PolicyTrainer(config, model_dir)


@contextmanager
def forwards_per_group(expected: int) -> Iterator[None]:
    """Of all models together, counted where a model is run."""
    with mock.patch.object(tri_model, "completion_logprobs", wraps=tri_model.completion_logprobs) as calls:
        yield
    assert calls.call_count == 3 * expected


def gradients(trainer: PolicyTrainer, groups: list[TrainGroup]) -> list[torch.Tensor]:
    for index, group in enumerate(groups):
        trainer.accumulate(MicroBatch(period=0, update=0, index=index, rank=0, groups=(group,)))
    found = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    return found


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert any(gradient.any() for gradient in expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def random_groups(seed: int) -> list[TrainGroup]:
    return [random_group(random.Random(seed + slot), slot) for slot in range(3)]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_old_is_not_run_while_the_weights_have_not_moved(model_dir: str, seed: int) -> None:
    trainer = make_trainer(model_dir, updates=2)
    with forwards_per_group(1):
        elided = gradients(trainer, random_groups(seed))
    trainer._models._moved = True  # makes the old policy run; its weights are still those of the policy
    with forwards_per_group(2):
        assert_same_bits(gradients(trainer, random_groups(seed)), elided)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_the_reference_is_not_run_when_the_kl_has_no_weight(model_dir: str, seed: int) -> None:
    with forwards_per_group(1):
        elided = gradients(make_trainer(model_dir), random_groups(seed))
    trainer = make_trainer(model_dir, beta=0.5)
    assert trainer._models.reference is not None
    trainer._loss_settings = trainer._loss_settings.model_copy(update={"beta": 0.0})
    trainer._models.at_start = False  # makes the reference run
    with forwards_per_group(2):
        assert_same_bits(gradients(trainer, random_groups(seed)), elided)
    assert make_trainer(model_dir)._models.reference is None


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_the_reference_is_not_run_before_the_first_update(model_dir: str, kl: str, seed: int) -> None:
    trainer = make_trainer(model_dir, beta=0.5, kl=kl)
    assert trainer._models.at_start
    with forwards_per_group(1):
        elided = gradients(trainer, random_groups(seed))
    trainer._models.at_start = False  # makes the reference run; the policy is still the same
    with forwards_per_group(2):
        assert_same_bits(gradients(trainer, random_groups(seed)), elided)


def test_the_reference_runs_from_the_first_update_on_also_in_a_run_that_was_resumed(
    model_dir: str, tmp_path: Path
) -> None:
    trainer = make_trainer(model_dir, beta=0.5)
    trainer.accumulate(MicroBatch(period=0, update=0, index=0, rank=0, groups=(random_groups(0)[0],)))
    assert trainer.step(UpdateTotals(num_groups=1, num_sequences=1, num_tokens=1)).kl == 0.0
    assert not trainer._models.at_start
    write_part(tmp_path, "rank-0.safetensors", trainer.state())
    resumed = make_trainer(model_dir, beta=0.5)
    resumed.restore(tmp_path)
    assert not resumed._models.at_start


@pytest.mark.parametrize("kl", ["k2", "k3"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_before_the_first_update_a_group_without_advantage_is_left_out_with_a_kl_too(
    model_dir: str, kl: str, seed: int
) -> None:
    groups = random_groups(seed)
    nothing = msgspec.structs.replace(groups[1], advantages=tuple(0.0 for _ in groups[1].advantages))
    trainer = make_trainer(model_dir, beta=0.5, kl=kl)
    trainer._models.at_start = False  # with a reference that runs
    elided = gradients(trainer, [groups[0], groups[2]])
    assert_same_bits(gradients(trainer, [groups[0], nothing, groups[2]]), elided)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_a_group_without_advantage_is_left_out(model_dir: str, seed: int) -> None:
    groups = random_groups(seed)
    nothing = msgspec.structs.replace(groups[1], advantages=tuple(0.0 for _ in groups[1].advantages))
    trainer = make_trainer(model_dir)
    elided = gradients(trainer, [groups[0], groups[2]])
    assert_same_bits(gradients(trainer, [groups[0], nothing, groups[2]]), elided)


def test_with_a_kl_a_group_without_advantage_has_a_gradient(model_dir: str) -> None:
    """Why the loader elides only if the loss has no other term."""
    group = random_groups(1)[0]
    nothing = msgspec.structs.replace(group, advantages=tuple(0.0 for _ in group.advantages))
    trainer = make_trainer(model_dir, beta=0.5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.05)
    trainer._models.at_start = False
    assert any(gradient.any() for gradient in gradients(trainer, [nothing]))


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_leaves_weights_and_moments_as_they_are(
    model_dir: str,
) -> None:
    trainer = make_trainer(model_dir)
    good, bad = random_groups(0)[:2]
    bad = msgspec.structs.replace(bad, advantages=tuple(float("nan") for _ in bad.advantages))
    totals = UpdateTotals(num_groups=1, num_sequences=1, num_tokens=1)

    def update(group: TrainGroup) -> UpdateReport:
        os.close(trainer.snapshot()[0])  # opens a period
        trainer.accumulate(MicroBatch(period=0, update=0, index=0, rank=0, groups=(group,)))
        return trainer.step(totals)

    assert update(good).stepped
    before = {name: bytes(tensor.data) for name, tensor in trainer.state().items()}
    report = update(bad)
    assert (report.stepped, math.isfinite(report.grad_norm)) == (False, False)
    after = {name: bytes(tensor.data) for name, tensor in trainer.state().items()}
    assert after.pop("num_updates") != before.pop("num_updates")
    assert after == before
    assert update(good).stepped
