"""Log-probabilities without the logits are those of log-softmax over all of them, and so are their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onbeat.device import computing_in
from onbeat.training import head

TEMPERATURE = 0.8
NUM_WORDS = 96


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed twice"])
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.sampled_from([0, 1]) | st.integers(2, 90),
    bias=st.booleans(),
    block_words=st.sampled_from([1, 7, 2048]),
    spread=st.sampled_from([1, 3000]),
)
@settings(max_examples=40)
def test_the_head_in_blocks_of_words_equals_log_softmax_over_all_logits(
    keep: bool, seed: int, num_rows: int, bias: bool, block_words: int, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "BLOCK_WORDS", block_words)
    torch.manual_seed(seed)
    linear = torch.nn.Linear(16, 50, bias=bias).double()
    hidden = (spread * torch.randn(num_rows, 16, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 50, (num_rows,))
    weights = torch.randn(num_rows, dtype=torch.float64)

    def results(logprobs: torch.Tensor) -> list[torch.Tensor]:
        (logprobs * weights).sum().backward()
        found = [logprobs.detach(), hidden.grad, *(p.grad for p in linear.parameters())]
        hidden.grad = None
        linear.zero_grad()
        return found  # type: ignore[return-value]

    all_logprobs = torch.log_softmax(linear(hidden) / TEMPERATURE, -1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1).detach()
    expected = results(all_logprobs.gather(1, targets[:, None])[:, 0])
    found_logprobs, found_entropy = head.head_logprobs(linear, hidden, targets, TEMPERATURE, keep=keep)
    torch.testing.assert_close(found_entropy, entropy)
    for mine, theirs in zip(results(found_logprobs), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("block_words", [7, 2048])
def test_the_head_of_products_in_bfloat16_is_as_near_as_those_products_are(
    block_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a token is all but certain: the little that is missing to one is not rounded away."""
    monkeypatch.setattr(head, "BLOCK_WORDS", block_words)
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 50, bias=False)
    linear.weight.data = linear.weight.data.bfloat16().float()
    targets = torch.randint(0, 50, (12,))
    certain = 60 * linear.weight.detach()[targets] / linear.weight.detach()[targets].norm(dim=1, keepdim=True) ** 2
    rows = torch.cat([torch.randn(12, 32), certain / 4, certain / 6]).bfloat16().float()
    targets = targets.repeat(3)

    def results(layer: torch.nn.Linear, hidden: torch.Tensor, logprobs: torch.Tensor) -> list[torch.Tensor]:
        logprobs.sum().backward()
        assert hidden.grad is not None
        assert layer.weight.grad is not None
        return [logprobs.detach().double(), hidden.grad.double(), layer.weight.grad.double()]

    exact, truth = copy.deepcopy(linear).double(), rows.double().requires_grad_()
    wanted = results(exact, truth, torch.log_softmax(exact(truth), -1).gather(1, targets[:, None])[:, 0])
    hidden = rows.clone().requires_grad_()
    with computing_in("bfloat16"):
        logprobs, _ = head.head_logprobs(linear, hidden, targets, 1.0)
    assert -wanted[0].max() < 0.01, "a token that is all but certain"
    for mine, theirs in zip(results(linear, hidden, logprobs), wanted, strict=True):
        assert ((mine - theirs).norm() / theirs.norm()).item() < 0.02


class NoLargerThan(TorchDispatchMode):
    """The largest tensor that anything made."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(found) if isinstance(tensor, torch.Tensor)]
        self.num_elements = max([self.num_elements, *(tensor.numel() for tensor in made)])
        return found


def test_no_more_logits_exist_at_a_time_than_fit_a_block_and_no_more_are_kept_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with very many rows, a block has fewer words."""
    monkeypatch.setattr(head, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(head, "BLOCK_BYTES", 1 << 19)
    rows, words, width = 1000, 5000, 4
    linear = torch.nn.Linear(width, words)
    hidden = torch.randn(rows, width, requires_grad=True)
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with NoLargerThan() as made:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _ = head.head_logprobs(linear, hidden, torch.randint(words, (rows,)), 1.0)
        logprobs.sum().backward()
    assert made.num_elements <= (1 << 19) // 4
    assert (1 << 19) < kept < (1 << 20) + (1 << 18)


@pytest.mark.parametrize("num_rows", [1, 16, 33, 50])
def test_however_much_of_the_head_is_kept_the_bits_are_the_same(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block is smaller: it would fit where one before it did not."""
    monkeypatch.setattr(head, "BLOCK_WORDS", 10)
    generator = torch.Generator().manual_seed(num_rows)
    layer = torch.nn.Linear(8, NUM_WORDS)
    hidden = torch.randn(num_rows, 8, generator=generator)
    targets = torch.randint(NUM_WORDS, (num_rows,), generator=generator)
    scale = torch.randn(num_rows, generator=generator)

    def gradients(kept_bytes: int) -> list[torch.Tensor]:
        monkeypatch.setattr(head, "KEPT_BYTES", kept_bytes)
        layer.zero_grad()
        leaf = hidden.clone().requires_grad_()
        (head.head_logprobs(layer, leaf, targets, 0.7)[0] * scale).sum().backward()
        return [
            gradient.clone() for gradient in (leaf.grad, layer.weight.grad, layer.bias.grad) if gradient is not None
        ]

    expected = gradients(0)
    assert len(expected) == 3
    row_bytes = 4 * NUM_WORDS
    for kept_bytes in range(0, (num_rows + 1) * row_bytes, row_bytes):
        for found, wanted in zip(gradients(kept_bytes), expected, strict=True):
            assert torch.equal(found, wanted)
