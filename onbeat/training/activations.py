"""SiLU as a trainer computes it: a number's bits depend on that number alone.

torch computes what does not fill a vector register by another function, which rounds differently: the end of each
thread's share, wherever that falls. So its bits tell the number of threads, which a trainer changes (threads.py). Where
kernels.c was compiled, SiLU and its gradient are computed by it, the same as in the generator, and in less time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from onbeat.kernels import kernels


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,), grad, compiled = ctx.saved_tensors, gradients[0].contiguous(), kernels()
        assert compiled is not None
        out = torch.empty_like(grad)
        compiled.onbeat_silu_backward(x.data_ptr(), grad.data_ptr(), out.data_ptr(), x.numel())
        return out


def silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """In place of torch.nn.functional.silu."""
    if inplace or not by_kernels(input):
        return F.silu(input, inplace=inplace)
    x = input.contiguous()
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _silu(x)
    out: torch.Tensor = _Silu.apply(x)  # type: ignore[no-untyped-call]
    return out


def _silu(x: torch.Tensor) -> torch.Tensor:
    out, compiled = torch.empty_like(x), kernels()
    assert compiled is not None
    compiled.onbeat_silu(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def ramp() -> torch.Tensor:
    """SiLU of numbers in a row, and its gradient: whose arithmetic has other bits has others of these."""
    x = torch.linspace(-9.0, 9.0, 250, requires_grad=True)
    out = silu(x)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return torch.cat([out.detach(), x.grad])


def by_kernels(x: torch.Tensor) -> bool:
    plain = type(x) is torch.Tensor and x.dtype == torch.float32 and x.device.type == "cpu"
    return plain and kernels() is not None
