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
    norms, gated layers    to be faster, where kernels.c was compiled: a norm is one pass instead of six operations, and
                           so is what lies between the products of a gated layer; 4 % together. Only if they compute
                           what the layer does, which is tried once for every kind of layer.

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

from onbeat.admission import MIN_ROWS
from onbeat.compiled import VECTOR
from onbeat.rollout.fused import available, kernels

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


class Gated:
    """A layer of gate, up and down, whatever computes these."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gates, ups = self._layer.gate_proj(hidden).contiguous(), self._layer.up_proj(hidden).contiguous()
        compiled = kernels()
        assert compiled is not None
        compiled.onbeat_gate(gates.data_ptr(), ups.data_ptr(), gates.data_ptr(), gates.numel())
        out: torch.Tensor = self._layer.down_proj(gates)
        return out


class Norm:
    """A root-mean-square norm."""

    def __init__(self, layer: Any) -> None:
        self._weight: torch.Tensor = layer.weight
        self._epsilon: float = layer.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        compiled, dim = kernels(), hidden.shape[-1]
        assert compiled is not None
        compiled.onbeat_rms_norm(
            hidden.data_ptr(), self._weight.data_ptr(), out.data_ptr(), hidden.numel() // dim, dim, self._epsilon
        )
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


_SILU = (torch.nn.SiLU, activations.SiLUActivation)
_tried: dict[type[torch.nn.Module], bool] = {}
"""Kinds of layers: whether what would stand in computes the same."""


@dataclass(frozen=True, slots=True)
class StandIn:
    layer: torch.nn.Module
    compute: Callable[[torch.Tensor], torch.Tensor]


def stand_ins(model: Any, kept: Sequence[StandIn] = ()) -> list[StandIn]:
    """For the model's weights as they are now; those of `kept` are good still."""
    if model.dtype != torch.float32 or model.device.type != "cpu" or not _have_onednn():
        return []
    found: list[StandIn] = []
    before = {other.layer: other for other in kept}
    for layer in model.modules():
        if layer in before:
            found.append(before[layer])
        elif _is_gated(layer):
            found.append(StandIn(layer, Gated(layer)))
        elif _is_norm(layer):
            found.append(StandIn(layer, Norm(layer)))
        elif type(layer) in _PACKED:
            found.append(StandIn(layer, Packed(layer)))
        elif (activation := _ACTIVATIONS.get(type(layer))) is not None:
            found.append(StandIn(layer, activation))
    return found


def _is_gated(layer: Any) -> bool:
    if type(getattr(layer, "act_fn", None)) not in _SILU:
        return False
    parts: list[Any] = [getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(hasattr(part, "in_features") and hasattr(part, "out_features") for part in parts):
        return False
    gate, up, down = ((part.in_features, part.out_features) for part in parts)
    fits = gate == up and gate[1] == down[0] and gate[1] % VECTOR == 0
    return fits and _computes_the_same(layer, Gated, gate[0])


def _is_norm(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    if not type(layer).__name__.endswith("RMSNorm") or weight is None or not hasattr(layer, "variance_epsilon"):
        return False
    fits = weight.dim() == 1 and weight.dtype == torch.float32 and len(weight) % VECTOR == 0
    return fits and _computes_the_same(layer, Norm, len(weight))


@torch.no_grad()
def _computes_the_same(layer: torch.nn.Module, other: Callable[[Any], Any], width: int) -> bool:
    if not available():
        return False
    kind = type(layer)
    if kind not in _tried:
        some = torch.linspace(-3.0, 3.0, MIN_ROWS * width).view(1, MIN_ROWS, width)
        _tried[kind] = torch.allclose(other(layer)(some), layer(some), rtol=1e-4, atol=1e-5)
    return _tried[kind]


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
