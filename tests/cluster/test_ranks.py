"""Several ranks compute what one computes, however weights and groups are spread over them."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from transformers import CohereConfig, CohereForCausalLM

from onbeat import device
from onbeat.config import Config
from onbeat.errors import InputError
from onbeat.lora import add_adapter, merge_into
from onbeat.recipe import from_tree
from onbeat.training import parallel
from onbeat.training.parallel import ALONE
from onbeat.types import TrainGroup
from onbeat.weights.snapshot import write
from tests.cluster import jobs
from tests.cluster.ranks import Pools
from tests.equivalence.test_shared_prompt import all_in_float64, random_group
from tests.fakes.models import VOCABULARY, tiny_model

pytestmark = pytest.mark.cluster

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
    tied = copy.deepcopy(tiny_model("llama"))
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(directory / "tied")
    torch.manual_seed(0)
    scaled = CohereConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.25, initializer_range=0.2,
    )  # fmt: skip
    CohereForCausalLM(scaled).save_pretrained(directory / "cohere")
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
    """As many packs, of so many groups each, whose prompts begin alike; with advantages that float32 holds exactly."""
    rng = random.Random(seed)
    prefix = tuple(random.Random(seed).choices(range(VOCABULARY), k=12))
    groups = [random_group(rng, slot, rng.choice([1, 2, 3, 8]), prefix) for slot in range(sum(sizes))]
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


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_that_copy_no_prompt_and_take_few_words_at_a_time_have_the_gradient_of_one_that_does_neither(
    processes: Pools, model_dirs: dict[str, str], layout: str
) -> None:
    config = make_config(model_dirs["qwen3"], LAYOUTS[layout], trainer={"max_tokens": 40})
    found = processes[2].run(jobs.train_as_if_large, config, model_dirs["qwen3"], UPDATES, float64=True)
    check_equal(found, alone(config, model_dirs["qwen3"], UPDATES, float64=True), 1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "architecture"),
    [
        (layout, architecture)
        for layout in TWO
        for architecture in ("llama", "mistral", "gemma3", "phi3", "qwen2", "tied", "cohere")
        if (layout, architecture) != ("tensor", "gemma3")  # it has one head of keys
    ],
)
def test_two_ranks_have_the_gradient_of_one_for_other_architectures(
    processes: Pools, model_dirs: dict[str, str], layout: str, architecture: str
) -> None:
    """One has a weight for embedding and head, one cannot share prompts."""
    config = make_config(model_dirs[architecture], LAYOUTS[layout], trainer={"max_tokens": 40})
    found = processes[2].run(jobs.train, config, model_dirs[architecture], UPDATES, float64=True)
    check_equal(found, alone(config, model_dirs[architecture], UPDATES, float64=True), 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in TWO])
def test_four_ranks_have_the_gradient_of_one_in_float64(
    processes: Pools, model_dirs: dict[str, str], layout: str, setting: str
) -> None:
    config = make_config(model_dirs["llama"], LAYOUTS[layout], **SETTINGS[setting])
    found = processes[4].run(jobs.train, config, model_dirs["llama"], UPDATES, float64=True)
    check_equal(found, alone(config, model_dirs["llama"], UPDATES, float64=True), 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_gradient_of_one_in_float32(processes: Pools, model_dirs: dict[str, str], layout: str) -> None:
    """Of the first step: after it the weights differ by rounding."""
    for architecture in ("qwen3", "qwen3_moe"):
        config = make_config(model_dirs[architecture], LAYOUTS[layout], trainer={"max_tokens": 40})
        found = processes[config.trainer.ranks].run(jobs.train, config, model_dirs[architecture], UPDATES[1:])
        check_equal(found, alone(config, model_dirs[architecture], UPDATES[1:]), 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_groups_give_the_same_bits_again(processes: Pools, model_dirs: dict[str, str], layout: str) -> None:
    """So that a schedule that hands over the same micro-batches ends with the same weights."""
    config = make_config(model_dirs["qwen3"], LAYOUTS[layout], trainer={"max_tokens": 40})
    first, second = (
        processes[config.trainer.ranks].run(jobs.train, config, model_dirs["qwen3"], UPDATES)[0] for _ in range(2)
    )
    assert first.digest == second.digest != ""
    assert first.snapshot == second.snapshot


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_snapshot_has_the_bytes_that_one_rank_would_write(
    processes: Pools, model_dirs: dict[str, str], tmp_path: Path, layout: str
) -> None:
    """Through memory, and as if every rank were on a host of its own."""
    config = make_config(model_dirs["phi3"], LAYOUTS[layout])
    found = processes[config.trainer.ranks].run(jobs.train_and_publish, config, model_dirs["phi3"], UPDATES[:1])
    weights = jobs.whole([each.weights for each in found])
    fd, size, digest = write(weights.items())
    expected = os.pread(fd, size, 0)
    os.close(fd)
    for snapshots in ([each.near for each in found], [each.far for each in found]):
        assert len(snapshots[0]) == 3  # both blocks, and the first once more
        assert snapshots[0] == [(expected, digest)] * 3
        assert all(each == [None] * 3 for each in snapshots[1:])
    assert all(each.far_ranks == tuple(range(1, config.trainer.ranks)) for each in found)


@pytest.mark.parametrize("setting", ["plain", "lora"])
@pytest.mark.parametrize("first", ["sharded", "tensor", "replicated"])
def test_a_checkpoint_loads_on_another_number_of_ranks_bit_for_bit(
    processes: Pools, model_dirs: dict[str, str], tmp_path: Path, first: str, setting: str
) -> None:
    """2 ranks → 1 → 4 → 4 in another layout → 1."""
    model_dir, others = model_dirs["qwen3"], SETTINGS[setting]
    directories = [tmp_path / name for name in ("a", "b", "c", "d")]
    for directory in directories:
        directory.mkdir()
    a, b, c, d = map(str, directories)
    config = make_config(model_dir, LAYOUTS[first], **others)
    expected = jobs.whole(processes[2].run(jobs.train_and_save, config, model_dir, UPDATES, a))
    single = make_config(model_dir, **others)
    steps = [jobs.load_and_save(ALONE, single, model_dir, a, b)]
    assert_same(steps, expected)
    for layout, source, target in (("tensor and sharded", b, c), ("four sharded", c, d)):
        config = make_config(model_dir, LAYOUTS[layout], **others)
        assert_same(processes[4].run(jobs.load_and_save, config, model_dir, source, target), expected)
    (tmp_path / "e").mkdir()
    assert_same([jobs.load_and_save(ALONE, single, model_dir, d, str(tmp_path / "e"))], expected)
    assert (tmp_path / "e" / "rank-0.safetensors").read_bytes() == (tmp_path / "b" / "rank-0.safetensors").read_bytes()
    sizes = [(tmp_path / "d" / f"rank-{rank}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes) < 0.6 * (tmp_path / "b" / "rank-0.safetensors").stat().st_size


@pytest.mark.parametrize("layout", ["sharded", "tensor", "tensor and sharded"])
def test_a_state_taken_stays_what_it_was_while_the_reference_computes(
    processes: Pools, model_dirs: dict[str, str], layout: str
) -> None:
    """It is written in the background, from where it lies; the reference of an adapted model is the policy with other
    values for a moment."""
    config = make_config(model_dirs["llama"], LAYOUTS[layout], **SETTINGS["lora"])
    assert all(processes[config.trainer.ranks].run(jobs.state_during_reference, config, model_dirs["llama"], UPDATES))


def assert_same(found: list[tuple[int, dict[str, jobs.Piece]]], expected: dict[str, torch.Tensor]) -> None:
    assert [num_updates for num_updates, _ in found] == [2] * len(found)
    whole = jobs.whole([pieces for _, pieces in found])
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_model_is_that_of_the_ranks(
    processes: Pools, model_dirs: dict[str, str], tmp_path: Path, layout: str
) -> None:
    for setting in ("plain", "lora"):
        config = make_config(model_dirs["llama"], LAYOUTS[layout], **SETTINGS[setting])
        target = tmp_path / setting
        pieces = processes[config.trainer.ranks].run(
            jobs.train_and_export, config, model_dirs["llama"], UPDATES[:1], str(target)
        )
        weights = jobs.whole(pieces)
        expected = device.load_into_host_memory(model_dirs["llama"])
        if setting == "plain":
            assert weights.keys() == dict(expected.named_parameters()).keys()
            expected.load_state_dict(weights, strict=False)
        else:
            adapted = device.load_into_host_memory(model_dirs["llama"])
            add_adapter(adapted, config.lora, config.seed)
            adapted.load_state_dict(weights, strict=False)
            merge_into(expected, adapted)
        exported = dict(device.load_into_host_memory(str(target)).named_parameters())
        assert all(torch.equal(exported[name], parameter) for name, parameter in expected.named_parameters())


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"ranks": 1}, *LAYOUTS.values()], ids=["one", *LAYOUTS])
def test_products_in_bfloat16_give_about_the_same_gradient_and_float32_weights(
    processes: Pools, model_dirs: dict[str, str], layout: dict[str, Any]
) -> None:
    for setting in ("split", "lora", "checkpointing"):
        config = make_config(model_dirs["qwen3"], layout, **SETTINGS[setting])
        exact = alone(config, model_dirs["qwen3"], UPDATES[:1])
        lower = config.model_copy(update={"trainer": config.trainer.model_copy(update={"precision": "bfloat16"})})
        if layout["ranks"] == 1:
            found = [jobs.train(ALONE, lower, model_dirs["qwen3"], UPDATES[:1])]
        else:
            found = processes[layout["ranks"]].run(jobs.train, lower, model_dirs["qwen3"], UPDATES[:1])
        theirs = jobs.whole([exact.updates[0].gradients])
        ours = jobs.whole([each.updates[0].gradients for each in found])
        gap = flat({name: ours[name] - gradient for name, gradient in theirs.items()}).norm() / flat(theirs).norm()
        assert 1e-4 < gap < 0.1, setting
        assert all(piece.local.dtype == torch.float32 for each in found for piece in each.weights.values())
        assert all(gradient.dtype == torch.float32 for gradient in ours.values())


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name].get("shard")])
def test_offloaded_weights_give_the_same_gradient(processes: Pools, model_dirs: dict[str, str], layout: str) -> None:
    for setting in ("split", "lora"):
        config = make_config(model_dirs["qwen3"], LAYOUTS[layout] | {"offload": True}, **SETTINGS[setting])
        found = processes[config.trainer.ranks].run(jobs.train, config, model_dirs["qwen3"], UPDATES, float64=True)
        check_equal(found, alone(config, model_dirs["qwen3"], UPDATES, float64=True), 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_whose_gradient_is_not_finite_makes_all_skip_the_step(
    processes: Pools, model_dirs: dict[str, str], layout: str
) -> None:
    packs = list(UPDATES[1])
    packs[1] = (structs.replace(packs[1][0], advantages=(float("inf"),) * len(packs[1][0].advantages)),)
    config = make_config(model_dirs["llama"], LAYOUTS[layout])
    found = processes[config.trainer.ranks].run(jobs.train, config, model_dirs["llama"], [packs, UPDATES[0]])
    assert [update.report.stepped for each in found for update in each.updates] == [False, True] * len(found)
    expected = alone(config, model_dirs["llama"], [UPDATES[0]]).updates[0]
    ours = jobs.whole([each.updates[1].gradients for each in found])
    gap = flat({n: ours[n] - g for n, g in jobs.whole([expected.gradients]).items()}).norm()
    assert gap <= 1e-5 * flat(ours).norm()  # nothing of the first is left


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rounds_of_any_sizes_end_and_give_the_gradient_of_one(
    processes: Pools, model_dirs: dict[str, str], ranks: int, data: st.DataObject
) -> None:
    """Groups of very unequal sizes, split and packed, ranks without one: a deadlock would be an error."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=9))
    tensor = data.draw(st.sampled_from([1, 2])) if ranks == 4 else 1
    layout = {"ranks": ranks, "shard": True, "tensor_parallel": tensor, "max_tokens": data.draw(st.integers(2, 80))}
    updates = [packs_of(data.draw(st.integers(0, 10**6)), sizes)]
    config = make_config(model_dirs["llama"], layout)
    found = processes[ranks].run(jobs.train, config, model_dirs["llama"], updates, float64=True)
    check_equal(found, alone(config, model_dirs["llama"], updates, float64=True), 1e-9)


def test_a_long_prompt_is_a_split_of_one_part_beside_which_a_pack_runs(
    processes: Pools, model_dirs: dict[str, str]
) -> None:
    """The pack's rank has no part of its own for the prompt's backward, and runs it all the same."""
    config = make_config(model_dirs["llama"], LAYOUTS["sharded"], trainer={"max_tokens": 40})
    (group,), pack = packs_of(3, [1, 2])
    updates = [[(structs.replace(group, prompt_ids=tuple(range(1, 50))),), pack]]
    ((_, parts),) = jobs.rounds(updates[0], config)
    assert parts == 1
    found = processes[2].run(jobs.train, config, model_dirs["llama"], updates, float64=True)
    check_equal(found, alone(config, model_dirs["llama"], updates, float64=True), 1e-9)


def test_an_update_without_a_group_steps_all_the_same(processes: Pools, model_dirs: dict[str, str]) -> None:
    for layout in TWO:
        config = make_config(model_dirs["llama"], LAYOUTS[layout])
        found = processes[2].run(jobs.train, config, model_dirs["llama"], [UPDATES[0], []])
        assert all(each.updates[1].report.loss is None for each in found)
        assert all(each.updates[1].report.stepped and each.updates[1].report.grad_norm == 0.0 for each in found)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("gemma3", "trainer.tensor_parallel = 2 does not divide the 1 num_key_value_heads of Gemma3ForCausalLM"),
        ("olmo2", "transformers has no plan"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused_with_a_sentence(model: str, sentence: str) -> None:
    spread = copy.deepcopy(tiny_model(model))
    if model == "olmo2":
        spread.tp_plan = None
    with pytest.raises(InputError, match=sentence):
        parallel._plan(spread, 2)
