"""Several ranks compute what one computes, however weights and groups are spread over them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from onbeat import device
from onbeat.config import Config
from onbeat.recipe import from_tree
from onbeat.training.parallel import ALONE
from onbeat.types import TrainGroup
from tests.cluster import jobs
from tests.cluster.ranks import Pools
from tests.equivalence.test_shared_prompt import all_in_float64, random_group
from tests.fakes.models import tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"ranks": 2},
    "sharded": {"ranks": 2, "shard": True},
    "tensor": {"ranks": 2, "tensor_parallel": 2},
    "four replicated": {"ranks": 4},
    "four sharded": {"ranks": 4, "shard": True},
    "tensor and replicated": {"ranks": 4, "tensor_parallel": 2},
    "tensor and sharded": {"ranks": 4, "tensor_parallel": 2, "shard": True},
}
TWO = [name for name, layout in LAYOUTS.items() if layout["ranks"] == 2]


@pytest.fixture(scope="module")
def processes() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    for architecture in ("llama", "qwen3", "mistral", "gemma3", "phi3", "qwen2", "qwen3_moe"):
        tiny_model(architecture).save_pretrained(directory / architecture)
    return {path.name: str(path) for path in directory.iterdir()}


def make_config(model_dir: str, layout: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": model_dir},
        "data": {"path": "unused.jsonl"},
        "reward": {"functions": [{"path": "exact_match"}]},
        "algorithm": {"beta": 0.05},
        "trainer": {"learning_rate": 0.01, "max_grad_norm": 0.5},
        "sampling": {"max_new_tokens": 12, "temperature": 0.8},
        "schedule": {"updates_per_period": 2},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    tree["trainer"] = tree["trainer"] | (layout or {})
    return from_tree(tree)


def packs_of(seed: int, sizes: Sequence[int]) -> list[tuple[TrainGroup, ...]]:
    """As many packs, of so many groups each; with advantages that float32 holds exactly."""
    rng = random.Random(seed)
    groups = [random_group(rng, slot, rng.choice([1, 2, 3, 8])) for slot in range(sum(sizes))]
    exact = [structs.replace(g, advantages=tuple(rng.randint(-12, 12) / 8 for _ in g.advantages)) for g in groups]
    remaining = iter(exact)
    return [tuple(next(remaining) for _ in range(size)) for size in sizes]


def alone(config: Config, model_dir: str, updates: Any, *, float64: bool = False) -> jobs.Trained:
    single = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"ranks": 1, "tensor_parallel": 1, "shard": False})}
    )
    device.DTYPE = torch.float64 if float64 else torch.float32
    try:
        with all_in_float64() if float64 else nullcontext():
            return jobs.train(ALONE, single, model_dir, updates)
    finally:
        device.DTYPE = torch.float32


def check_equal(found: Sequence[jobs.Trained], expected: jobs.Trained, tolerance: float) -> None:
    """The gradient of every update, to so much of its norm; the reports."""
    for number, update in enumerate(expected.updates):
        theirs = jobs.whole([update.gradients])
        ours = jobs.whole([each.updates[number].gradients for each in found])
        norm = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm().item()
        assert norm > 0.1
        for name, gradient in theirs.items():
            difference = (ours[name] - gradient).norm().item()
            assert difference <= tolerance * norm, f"update {number}, {name}: {difference / norm:.1e}"
        reports = [each.updates[number].report for each in found]
        assert all(report == reports[0] for report in reports)
        for field in structs.fields(type(reports[0])):
            one, other = getattr(reports[0], field.name), getattr(update.report, field.name)
            assert one == pytest.approx(other, rel=1e-4), field.name


UPDATES = [packs_of(1, [1, 2, 1]), packs_of(2, [1, 1, 1, 2, 1])]
"""Two steps of 3 and 5 micro-batches: some team is left over in some round."""

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "split": {"trainer": {"max_tokens": 24}},
    "checkpointing": {"trainer": {"gradient_checkpointing": True}},
    "lora": {"lora": {"rank": 3, "alpha": 8.0}},
    "lora split": {"lora": {"rank": 3, "alpha": 8.0}, "trainer": {"max_tokens": 24}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_have_the_gradient_of_one_in_float64(
    processes: Pools, model_dirs: dict[str, str], layout: str, setting: str
) -> None:
    config = make_config(model_dirs["qwen3"], LAYOUTS[layout], **SETTINGS[setting])
    found = processes[2].run(jobs.train, config, model_dirs["qwen3"], UPDATES, float64=True)
    check_equal(found, alone(config, model_dirs["qwen3"], UPDATES, float64=True), 1e-9)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "phi3", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_have_the_gradient_of_one_for_other_architectures(
    processes: Pools, model_dirs: dict[str, str], layout: str, architecture: str
) -> None:
    if layout == "tensor" and architecture == "gemma3":
        pytest.skip("it has one head of keys")
    config = make_config(model_dirs[architecture], LAYOUTS[layout], trainer={"max_tokens": 40})
    found = processes[2].run(jobs.train, config, model_dirs[architecture], UPDATES, float64=True)
    check_equal(found, alone(config, model_dirs[architecture], UPDATES, float64=True), 1e-9)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in TWO])
def test_four_ranks_have_the_gradient_of_one_in_float64(
    processes: Pools, model_dirs: dict[str, str], layout: str, setting: str
) -> None:
    config = make_config(model_dirs["llama"], LAYOUTS[layout], **SETTINGS[setting])
    found = processes[4].run(jobs.train, config, model_dirs["llama"], UPDATES, float64=True)
    check_equal(found, alone(config, model_dirs["llama"], UPDATES, float64=True), 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_gradient_of_one_in_float32(
    processes: Pools, model_dirs: dict[str, str], layout: str
) -> None:
    """And publish what one would."""
    config = make_config(model_dirs["qwen3"], LAYOUTS[layout], trainer={"max_tokens": 40})
    found = processes[config.trainer.ranks].run(jobs.train, config, model_dirs["qwen3"], UPDATES)
    check_equal(found, alone(config, model_dirs["qwen3"], UPDATES), 1e-5)
