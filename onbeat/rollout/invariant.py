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
                           what the layer does with some numbers, which is tried.

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
from onbeat.kernels import available, kernels

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
        layer = self._layer
        out: torch.Tensor = layer.down_proj(let_through(layer.gate_proj(hidden), layer.up_proj(hidden)))
        return out


class Norm:
    """A root-mean-square norm, with whatever weights it has."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self._layer.weight, self._layer.variance_epsilon)


def let_through(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(gates) * ups, in the place of the gates if they lie in a row."""
    gates, ups, compiled = gates.contiguous(), ups.contiguous(), kernels()
    assert compiled is not None
    compiled.onbeat_gate(gates.data_ptr(), ups.data_ptr(), gates.data_ptr(), gates.numel())
    return gates


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    hidden, compiled = hidden.contiguous(), kernels()
    assert compiled is not None
    out, dim = torch.empty_like(hidden), hidden.shape[-1]
    rows = hidden.numel() // dim
    compiled.onbeat_rms_norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, epsilon)
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


@dataclass(frozen=True, slots=True)
class StandIn:
    layer: torch.nn.Module
    compute: Callable[[torch.Tensor], torch.Tensor]


def stand_ins(model: Any, kept: Sequence[StandIn] = ()) -> list[StandIn]:
    """For the model's weights as they are now; those of `kept` are good still."""
    if not _stood_for(model):
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


def compiled_bits(model: Any) -> bytes:
    """What a norm and a gate make of some numbers; nothing if the model's are not compiled."""
    if not _stood_for(model) or not available():
        return b""
    some = torch.linspace(-9.0, 9.0, 256).view(4, 64)
    both = rms_norm(some, some[1], 1e-5), let_through(some.clone(), some)
    return torch.cat(both).numpy().tobytes()


def _is_gated(layer: Any) -> bool:
    if type(getattr(layer, "act_fn", None)) not in _SILU or not available():
        return False
    parts: list[Any] = [getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(hasattr(part, "in_features") and hasattr(part, "out_features") for part in parts):
        return False
    gate, up, down = ((part.in_features, part.out_features) for part in parts)
    return gate == up and gate[1] == down[0] and gate[1] % VECTOR == 0 and _gates(layer, *gate)


def _gates(layer: Any, width: int, inner: int) -> bool:
    """Tried without its weights, so that every version of them has the same answer."""
    some = torch.linspace(-100.0, 100.0, MIN_ROWS * inner).view(1, MIN_ROWS, inner)
    given = (lambda hidden: some.clone(), lambda hidden: some.flip(1), lambda hidden: hidden)
    parts = (layer.gate_proj, layer.up_proj, layer.down_proj)
    with standing_in([StandIn(part, compute) for part, compute in zip(parts, given, strict=True)]):
        return _computes_the_same(layer, Gated(layer), torch.zeros(1, MIN_ROWS, width))


def _is_norm(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    if not type(layer).__name__.endswith("RMSNorm") or weight is None or not hasattr(layer, "variance_epsilon"):
        return False
    if weight.dim() != 1 or weight.dtype != torch.float32 or len(weight) % VECTOR or not available():
        return False
    some = torch.linspace(-3.0, 3.0, MIN_ROWS * len(weight)).view(1, MIN_ROWS, len(weight))
    return _computes_the_same(layer, Norm(layer), some)


@torch.no_grad()
def _computes_the_same(layer: Any, other: Callable[[torch.Tensor], torch.Tensor], some: torch.Tensor) -> bool:
    own, ours = layer(some), other(some)
    return isinstance(own, torch.Tensor) and own.shape == ours.shape and torch.allclose(ours, own, rtol=1e-5, atol=1e-6)


def unchanging(others: Sequence[StandIn]) -> list[StandIn]:
    """Those of layers that are not trained."""
    return [other for other in others if not any(p.requires_grad for p in other.layer.parameters())]


def _stood_for(model: Any) -> bool:
    have_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return model.dtype == torch.float32 and model.device.type == "cpu" and have_onednn


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
