"""The matrix products of training.

float32 on a CPU goes to oneDNN, which uses all that the processor knows; MKL is kept to AVX2 for the sake of its bits
(environment.py), and on some processors keeps itself to it (docs/benchmarks.md). oneDNN's bits are a function of sizes,
not of where in memory something lies. Everything else is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [M, K] @ right [K, N]; no gradient flows back where oneDNN computes."""
    _before()
    return _onednn(left, right.T, None) if _by_onednn(left, right) else torch.mm(left, right)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] @ weight [N, K]ᵀ + bias; no gradient flows back where oneDNN computes."""
    _before()
    return _onednn(x, weight, bias) if _by_onednn(x, weight, bias) else F.linear(x, weight, bias)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _by_onednn(*tensors: torch.Tensor | None) -> bool:
    return _HAVE_ONEDNN and all(
        type(each) in _PLAIN and each.dtype == torch.float32 and each.device.type == "cpu" and each.numel() > 0
        for each in tensors
        if each is not None
    )


_HAVE_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _nothing() -> None:
    pass


_before: Callable[[], None] = _nothing


@contextmanager
def before_each(function: Callable[[], None]) -> Iterator[None]:
    """It is called before every product of this process: the moments at which a long computation can be told something
    (threads.py)."""
    global _before
    others, _before = _before, function
    try:
        yield
    finally:
        _before = others
