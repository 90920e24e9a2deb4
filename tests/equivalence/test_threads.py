"""Neither the products of training nor a micro-batch's gradient tell by how many threads they were computed, nor where
in memory things lay; so a trainer may take fewer while generators work."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.batch.layout import Layout
from onbeat.cores import possible_threads
from onbeat.messages import Accumulate, Accumulated, FromTrainer, Step, Stepped, ToTrainer, WorkBeside
from onbeat.protocols import UpdateReport
from onbeat.recipe import from_tree
from onbeat.training import attention, merged, threads
from onbeat.training.attention import SharedPrompt
from onbeat.training.merged import LONG_PROMPT
from onbeat.training.products import before_each, linear, product
from onbeat.training.threads import SharedCores, why_fixed
from onbeat.training.trainer import PolicyTrainer
from onbeat.training.worker import TrainerWorker
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from onbeat.wire import Channel
from tests.fakes.models import ARCHITECTURES, VOCABULARY, tiny_model

ALONE = 2
OTHER_BITS = "gradients by 2 and 1 threads have other bits"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that lies so many numbers after an address that is even by any measure."""
    room = torch.empty(tensor.numel() + 64)
    first = -room.data_ptr() // 4 % 32 + offset
    return room[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


@given(
    rows=st.integers(1, 400) | st.sampled_from([1023, 1100, 1537, 3000]),
    wide=st.sampled_from([1, 8, 48, 100, 192, 576]),
    deep=st.sampled_from([1, 8, 64, 100, 576, 1536]),
    offset=st.integers(0, 31),
    count=st.sampled_from([1, 2, 5]),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_a_product_is_that_of_float64_and_the_same_bits_anywhere_in_memory_with_any_number_of_threads(
    rows: int, wide: int, deep: int, offset: int, count: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, grad = (torch.randn(*size, generator=generator) for size in ((rows, deep), (wide, deep), (rows, wide)))
    bias = torch.randn(wide, generator=generator) if has_bias else None
    ways: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = [
        (lambda x, weight: linear(x, weight, bias), [x, weight]),
        (lambda grad, weight: product(grad, weight), [grad, weight]),
        (lambda grad, x: product(grad.T, x), [grad, x]),
    ]
    for compute, given_ in ways:
        torch.set_num_threads(ALONE)
        expected = compute(*given_)
        exact = compute(*(each.double() for each in given_)) if bias is None or compute is not ways[0][0] else (
            x.double() @ weight.double().T + bias.double()
        )  # fmt: skip
        torch.testing.assert_close(expected.double(), exact, rtol=1e-4, atol=1e-5 * max(rows, deep, wide) ** 0.5)
        # The gradient of a weight with one row is one sum of many terms, which threads share: such a model's trainer
        # keeps its threads (why_fixed).
        torch.set_num_threads(count if wide > 1 else ALONE)
        assert torch.equal(compute(*(placed(each, offset) for each in given_)), expected)


def make_trainer(directory: Path, architecture: str, beta: float = 0.0) -> PolicyTrainer:
    tiny_model(architecture).save_pretrained(directory)
    config = from_tree(
        {
            "model": {"path": str(directory)},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "algorithm": {"beta": beta},
        }
    )
    trainer = PolicyTrainer(config, str(directory))
    trainer._models.at_start = False  # the reference runs
    return trainer


def large_microbatch(seed: int) -> MicroBatch:
    """Large enough to be shared out over threads."""
    rng = random.Random(seed)

    def some(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(length))

    groups = []
    for slot in range(3):
        completions = tuple(some(rng.randint(20, 70)) for _ in range(8))
        groups.append(
            TrainGroup(
                slot=slot, prompt_ids=some(rng.choice([30, 300])), completion_ids=completions,
                sampler_logprobs=tuple((-1.0,) * len(each) for each in completions),
                advantages=tuple(rng.gauss(0, 1) for _ in completions),
            )
        )  # fmt: skip
    return MicroBatch(period=0, update=0, index=0, rank=0, groups=tuple(groups))


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    assert any(gradient.abs().sum() > 0 for gradient in found.values())
    return found


@pytest.mark.parametrize("prompt_length", [45, LONG_PROMPT, LONG_PROMPT + 100])
def test_attention_and_its_gradients_have_the_same_bits_with_any_number_of_threads(prompt_length: int) -> None:
    """Of so many heads and tokens that even what there is once per head and token is shared out."""
    num_heads, dim = 28, 16
    lengths = [151] * 7 + [144]
    group = TrainGroup(
        slot=0, prompt_ids=(1,) * prompt_length, completion_ids=tuple((2,) * n for n in lengths),
        sampler_logprobs=tuple((0.0,) * n for n in lengths), advantages=(1.0,) * len(lengths),
    )  # fmt: skip
    layout = Layout.shared([group])
    assert layout.segments is not None
    num_tokens = layout.tokens_S_L.shape[1]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, num_tokens, dim, generator=generator, requires_grad=True) for heads in (num_heads, 4, 4)
    )
    gradient = torch.randn(1, num_tokens, num_heads, dim, generator=generator)
    found = []
    for count in (1, 2, 3, 5, 8):
        torch.set_num_threads(count)
        attended = SharedPrompt(layout.segments, layout.prefix_length).attend(0, query, key, value, dim**-0.5, None)
        found.append([attended.detach(), *torch.autograd.grad(attended, (query, key, value), gradient)])
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


def changing(alone: int, rng: random.Random, seen: set[int]) -> AbstractContextManager[None]:
    """Generators begin and end between all products."""

    def listen() -> None:
        seen.add(torch.get_num_threads())
        cores.beside(rng.choice([0, 1, 3]))

    cores = SharedCores(alone, listen)
    return cores.sharing()


@pytest.mark.parametrize("alone", [2, 7])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "phi3", "olmo2", "smollm3"])
def test_a_micro_batch_has_the_same_gradient_however_often_the_number_of_threads_changes(
    architecture: str, alone: int, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, architecture, beta=0.1)
    microbatch = large_microbatch(0)
    torch.set_num_threads(alone)
    assert trainer.why_threads_fixed(possible_threads(alone)) is None
    trainer.accumulate(microbatch)
    expected = gradients(trainer)
    for seed in range(3):
        seen: set[int] = set()
        with changing(alone, random.Random(seed), seen):
            trainer.accumulate(microbatch)
        assert seen == set(possible_threads(alone)) - ({2} if alone == 7 else set())
        assert torch.get_num_threads() == alone
        found = gradients(trainer)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_same_bits_are_tried_and_leave_no_gradient_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "llama")
    torch.set_num_threads(2)
    assert trainer.why_threads_fixed([2, 1]) is None
    assert torch.get_num_threads() == 2
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.why_threads_fixed([1]) == "there is one core"
    assert trainer.why_threads_fixed([8, 4, 2, 1]) is None

    def by_threads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight) * (1 + 1e-6 * torch.get_num_threads())

    monkeypatch.setattr(threads, "linear", by_threads)
    assert why_fixed(trainer._models, [64], [2, 1]) == OTHER_BITS


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([2, 1], None),
        ([3, 1], "gelu of 64 numbers does not fill whole vectors for each of 3 threads"),
        ([4, 2, 1], "gelu of 64 numbers does not fill whole vectors for each of 3 threads"),  # few numbers take three
    ],
)
def test_with_activations_of_torch_threads_are_fixed_where_shares_end_within_a_vector(
    counts: list[int], reason: str | None, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, "llama")
    for layer in trainer.model.base_model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert trainer.why_threads_fixed(counts) == reason


@pytest.mark.parametrize("layer", [torch.nn.Linear(64, 1), torch.nn.ParameterList([torch.ones(1)])])
def test_with_a_weight_of_one_row_or_a_number_by_itself_threads_are_fixed(
    layer: torch.nn.Module, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, "llama")
    trainer.model.base_model.layers[0].gate = layer
    assert trainer.why_threads_fixed([2, 1]) == (
        "the gradient of a number by itself, or of a weight with one row, is a sum that threads share"
    )


def test_with_a_function_of_torch_that_was_never_tried_threads_are_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, "llama")
    norm = trainer.model.base_model.norm
    own = norm.forward
    monkeypatch.setattr(norm, "forward", lambda hidden: own(hidden) * torch.special.bessel_j0(hidden.detach()))
    reason = "nobody has tried special_bessel_j0 with different numbers of threads"
    assert trainer.why_threads_fixed([2, 1]) == reason


def test_attention_over_a_long_prompt_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of weights that rounds by where it lies: only there."""
    trainer = make_trainer(tmp_path, "llama")
    own = merged.merged_attention

    def by_threads(*given_: Any) -> torch.Tensor:
        return own(*given_) * (1 + 1e-6 * torch.get_num_threads())

    monkeypatch.setattr(attention, "merged_attention", by_threads)
    assert trainer.why_threads_fixed([2, 1]) == OTHER_BITS


def test_of_a_sum_that_depends_on_threads_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a product, but somewhere in the model."""
    trainer = make_trainer(tmp_path, "llama")
    norm = trainer.model.base_model.norm
    own = norm.forward
    monkeypatch.setattr(norm, "forward", lambda hidden: own(hidden) * (1 + 1e-6 * torch.get_num_threads()))
    assert trainer.why_threads_fixed([2, 1]) == OTHER_BITS


def test_threads_are_all_while_generators_wait_and_a_share_while_they_work() -> None:
    assert possible_threads(1) == [1]
    assert possible_threads(2) == [2, 1]
    assert possible_threads(8) == [8, 4, 2, 1]
    cores = SharedCores(8, lambda: None)
    for num_generators, expected in ((0, 8), (1, 4), (3, 2), (20, 1)):
        cores.beside(num_generators)
        with cores.sharing():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 8, "outside of a micro-batch it has all"


class Computing:
    """A trainer that computes two products per micro-batch, and notes by how many threads."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accumulate(self, microbatch: MicroBatch, num_parts: int) -> None:
        for _ in range(2):
            product(torch.ones(4, 4), torch.ones(4, 4))
            self.seen.append(torch.get_num_threads())

    def step(self, totals: UpdateTotals) -> UpdateReport:
        self.seen.append(torch.get_num_threads())
        return UpdateReport(
            loss=None, grad_norm=0.0, learning_rate=0.0, stepped=True, entropy=None, kl=None, clip_share=None,
            gap_mean=None, gap_max=None, num_trained_tokens=0,
        )  # fmt: skip


def test_what_a_trainer_is_told_while_it_computes_counts_at_once_and_orders_wait_their_turn() -> None:
    torch.set_num_threads(2)
    ours, theirs = socket.socketpair()
    order = Accumulate(MicroBatch(period=0, update=0, index=0, rank=0, groups=()))
    totals = UpdateTotals(num_groups=1, num_sequences=1, num_tokens=1)
    with ours, theirs:
        trainer = Computing()
        worker = TrainerWorker(Channel(ours, ToTrainer), trainer, Path(), shares_cores=True)  # type: ignore[arg-type]
        controller: Channel[FromTrainer] = Channel(theirs, FromTrainer)
        # All of it is there when the first micro-batch begins: what is said behind orders that wait is heard as well.
        for message in (order, order, WorkBeside(1), Step(totals)):
            controller.send(message)
        theirs.shutdown(socket.SHUT_WR)
        worker.run()
        answers = [type(controller.recv()) for _ in range(3)]
    assert trainer.seen == [1, 1, 1, 1, 2]
    assert answers == [Accumulated, Accumulated, Stepped]


def test_a_trainer_whose_threads_are_fixed_stays_with_them() -> None:
    torch.set_num_threads(2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        trainer = Computing()
        worker = TrainerWorker(Channel(ours, ToTrainer), trainer, Path())  # type: ignore[arg-type]
        worker._handle(WorkBeside(1))
        worker._handle(Accumulate(MicroBatch(period=0, update=0, index=0, rank=0, groups=())))
    assert trainer.seen == [2, 2]


def test_what_is_called_before_each_product_is_so_until_the_block_ends() -> None:
    told: list[int] = []
    with before_each(lambda: told.append(1)):
        product(torch.ones(4, 4), torch.ones(4, 4))
        linear(torch.ones(4, 4), torch.ones(4, 4))
    product(torch.ones(4, 4), torch.ones(4, 4))
    assert told == [1, 1]
