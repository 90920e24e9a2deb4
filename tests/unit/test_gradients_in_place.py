"""Gradients added where they are kept are those of autograd: linear layers, embeddings, tied, frozen, checkpointed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onbeat.training.gradients import gradients_in_place


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6, padding_idx=3)
        self.inner = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.inner(self.embed(ids))))
        return logits


def tied() -> torch.nn.Module:
    return Tied()


def frozen() -> torch.nn.Module:
    model = Tied()
    model.inner.weight.requires_grad_(False)
    return model


def only_biases() -> torch.nn.Module:
    model = Tied().requires_grad_(False)
    model.inner.bias.requires_grad_(True)
    return model


def scaled_by_frequency() -> torch.nn.Module:
    model = Tied()
    model.embed.scale_grad_by_freq = True
    return model


def sliced_weight() -> torch.nn.Module:
    """A layer whose weight is a part of a parameter, as a mixture's experts are."""

    class Sliced(Tied):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.linear(self.embed(ids), self.inner.weight[:3], self.inner.bias[:3])
            logits: torch.Tensor = self.head(torch.cat([hidden, hidden], -1))
            return logits

    return Sliced()


@pytest.mark.parametrize("make", [tied, frozen, only_biases, scaled_by_frequency, sliced_weight])
def test_gradients_equal_autograds_also_when_they_are_accumulated(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    ours = make().double()
    theirs = copy.deepcopy(ours)
    for ids in (torch.tensor([[1, 3, 3, 7, 1]]), torch.tensor([[2, 2], [9, 1]])):
        with gradients_in_place():
            loss = ours(ids).logsumexp(-1).square().sum()
        loss.backward()
        theirs(ids).logsumexp(-1).square().sum().backward()
    for (name, found), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_a_checkpointed_layer_recomputed_in_the_mode_gives_its_gradient_to_the_parameter_itself() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Linear(4, 4).double()
    theirs = copy.deepcopy(ours)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with gradients_in_place():
        out = checkpoint(
            lambda t: torch.tanh(ours(t)),
            x,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), gradients_in_place()),
        )
    out.sum().backward()
    torch.tanh(theirs(x)).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-12, atol=1e-12)
