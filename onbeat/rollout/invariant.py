"""Layers that stand in for the model's own during a forward of the engine, so that a row of a result depends on that
row alone (R1), for any number of rows and threads. The model is not changed.

    linear layers          the matrix library chooses its kernel, and bits with it, by rows and threads where the output
                           is not wider than some 12 columns per thread; and with few rows it spends much of its time
                           on rearranging weights that have not changed. oneDNN with weights packed once per version
                           does neither: a tenth faster as a whole on one thread, and nothing lost on two. (One row by
                           itself, with more than 1,024 inputs, is another kernel of its for AVX-512: there are never
                           fewer than MIN_ROWS.)
    activations            torch computes what does not fill a vector register by another function, which rounds
                           differently: the end of each thread's share, wherever that falls. Exponential, tanh and erf
                           by themselves have one function for all.

Packed weights are a second copy of these layers, made anew for every version in the memory of the last one; under LoRA
once, and the adapter's anew.
Only in float32 on a CPU, where these were found (tests/equivalence/test_batch_invariance.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import activations

_EXPECTED_ROWS = 32
_PACKED: tuple[type[torch.nn.Module], ...] = (torch.nn.Linear,)


class Packed:
    """What a linear layer computes with the weights it has now."""

    def __init__(self, dense: Any) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach(), _EXPECTED_ROWS)
        self._bias = dense.bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self._bias, "none", [], "")
        return out


def silu(x: torch.Tensor) -> torch.Tensor:
    scale = x.neg().exp_().add_(1)
    return torch.div(x, scale, out=scale)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x.mul(math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    cube = (x * x).mul_(x).mul_(0.044715)
    return cube.add_(x).mul_(math.sqrt(2 / math.pi)).tanh_().add_(1).mul_(x).mul_(0.5)


_ACTIVATIONS: dict[type[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]] = {
    torch.nn.SiLU: silu,
    activations.SiLUActivation: silu,
    activations.GELUActivation: gelu,
    activations.GELUTanh: gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class StandIn:
    layer: torch.nn.Module
    compute: Callable[[torch.Tensor], torch.Tensor]


def stand_ins(model: Any, kept: Sequence[StandIn] = ()) -> list[StandIn]:
    """For the model's weights as they are now; those of `kept` are good still."""
    if model.dtype != torch.float32 or model.device.type != "cpu" or not _have_onednn():
        return []
    found = []
    before = {other.layer: other for other in kept}
    for layer in model.modules():
        if layer in before:
            found.append(before[layer])
        elif type(layer) in _PACKED:
            found.append(StandIn(layer, Packed(layer)))
        elif (activation := _ACTIVATIONS.get(type(layer))) is not None:
            found.append(StandIn(layer, activation))
    return found


def unchanging(others: Sequence[StandIn]) -> list[StandIn]:
    """Those of layers that are not trained."""
    return [other for other in others if not any(p.requires_grad for p in other.layer.parameters())]


def _have_onednn() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available


@contextmanager
def standing_in(others: Sequence[StandIn]) -> Iterator[None]:
    """The model computes with these."""
    for other in others:
        vars(other.layer)["forward"] = other.compute
    try:
        yield
    finally:
        for other in others:
            del vars(other.layer)["forward"]
