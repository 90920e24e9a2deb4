"""Gradients of weights, added where they are kept.

Autograd gives every weight's gradient a new matrix and then adds it to `.grad`: at a few hundred tokens per micro-batch
writing and reading those matrices is a fifth of the backward pass. Under `gradients_in_place()` a linear layer of the
model, whatever its architecture, adds its product onto `.grad` as soon as it is there, still in the cache, and an
embedding adds only the rows that occurred, instead of a matrix of the whole vocabulary. Nothing of the model is
patched: the mode sees the calls of `torch.nn.functional` that the forward makes. (SiLU is computed by our own function
there, too: activations.py.)

Who comes second finds the first's gradient, so a weight that serves as embedding and as head is no special case. The
backward may run outside the mode. Products in a lower precision than the weights' are added in the weights'. A weight
that is spread over the ranks of a team is left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from onbeat.device import product_dtype
from onbeat.training.activations import silu
from onbeat.training.products import linear, product


def add_product(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """weight.grad += left @ right"""
    if weight.grad is None:
        add(weight, product(left, right))
    else:
        add_product_to(weight.grad, left, right)


def add_product_to(gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """gradient += left @ right"""
    gradient += product(left, right)


def collected(parameter: torch.Tensor) -> torch.Tensor:
    """Its gradient, of which a part can be added to; zeros, if there is none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """parameter.grad += gradient"""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.bias = weight, bias  # themselves: what is saved comes back, under checkpointing, as a copy
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (x,), weight, bias, grad = ctx.saved_tensors, ctx.weight, ctx.bias, gradients[0]
        grad_rows = grad.reshape(-1, grad.shape[-1])
        if x is not None:
            add_product(weight, grad_rows.T, x.reshape(-1, x.shape[-1]))
        if bias is not None and bias.requires_grad:
            add(bias, grad_rows.sum(dim=0))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad_rows, weight.to(grad_rows.dtype)).view(*grad.shape[:-1], weight.shape[1])
        return grad_x, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        grad_rows = gradients[0].flatten(0, -2)
        if ctx.padding is not None:
            grad_rows = grad_rows.masked_fill((ids == ctx.padding).flatten()[:, None], 0.0)
        collected(weight).index_add_(0, ids.flatten(), grad_rows.to(weight.dtype))
        return None, None, None


class gradients_in_place(TorchFunctionMode):  # noqa: N801  # reads as what it does: `with gradients_in_place():`
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _IN_PLACE.get(function, function)(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    # The same products with gradients and without: policy and reference are to agree. A slice of a weight is torch's.
    if isinstance(weight, DTensor) or any(each is not None and not _is_whole(each) for each in (weight, bias)):
        return F.linear(input, weight, bias)
    x = input.to(product_dtype(input.dtype))
    if not torch.is_grad_enabled():
        return linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if torch.is_grad_enabled() and _collects(weight) and max_norm is None and not scale_grad_by_freq and not sparse:
        return _Embedding.apply(input, weight, padding_idx)  # type: ignore[no-untyped-call]
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def _is_whole(weight: torch.Tensor) -> bool:
    """No product of others, and no view of one."""
    return weight.is_leaf and weight._base is None


def _collects(weight: torch.Tensor) -> bool:
    """Has a `.grad` of its own to add to; a view or a product (an expert's slice) has not."""
    return weight.requires_grad and weight.is_leaf and not isinstance(weight, DTensor)


_IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding, F.silu: silu}
