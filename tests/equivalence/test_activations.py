"""SiLU of training is that of the formula, and a number of it, and of its gradient, stands alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.arithmetic import fingerprint
from onbeat.kernels import available, kernels
from onbeat.rollout.invariant import let_through
from onbeat.training.activations import ramp, silu
from onbeat.training.gradients import gradients_in_place


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    assert available(), "kernels.c was not compiled when onbeat was installed: it needs a C compiler, and AVX2"
    before = torch.get_num_threads()
    widest = ctypes.c_int64.in_dll(kernels(), "onbeat_widest")
    width = widest.value
    yield
    torch.set_num_threads(before)
    widest.value = width


def some(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def both(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The function, and what comes back through it."""
    leaf = x.detach().clone().requires_grad_()
    out = silu(leaf)
    out.backward(grad)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@given(
    count=st.integers(1, 200) | st.integers(16_000, 70_000),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 10.0, 100.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_it_is_that_of_float64_and_so_is_its_gradient(count: int, scale: float, seed: int) -> None:
    x, grad = scale * some(count, seed=seed), some(count, seed=seed + 1)
    exact = x.double().requires_grad_()
    F.silu(exact).backward(grad.double())  # type: ignore[no-untyped-call]
    found, found_grad = both(x, grad)
    assert exact.grad is not None
    torch.testing.assert_close(found.double(), F.silu(exact.detach()), rtol=1e-6, atol=1e-35)
    # Near its minimum the slope is a small difference of larger numbers.
    torch.testing.assert_close(found_grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


@given(
    count=st.integers(1, 200) | st.integers(16_000, 70_000),
    threads=st.sampled_from([1, 2, 3, 5, 8]),
    widest=st.sampled_from([8, 16]),
    data=st.data(),
)
@settings(max_examples=60)
def test_a_number_has_the_same_bits_wherever_it_lies_and_whatever_the_threads(
    count: int, threads: int, widest: int, data: st.DataObject
) -> None:
    x, grad = 5 * some(count, seed=count), some(count, seed=count + 1)
    torch.set_num_threads(1)
    together = both(x, grad)
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    torch.set_num_threads(threads)
    ctypes.c_int64.in_dll(kernels(), "onbeat_widest").value = widest
    apart = both(x[first:last], grad[first:last])
    assert all(torch.equal(one, other[first:last]) for one, other in zip(apart, together, strict=True))


def test_a_trainer_whose_silu_has_other_bits_has_another_fingerprint() -> None:
    ours, others = ramp(), ramp()
    others[7] = torch.nextafter(others[7], torch.tensor(10.0))
    assert fingerprint(ours) == fingerprint(ramp())
    assert fingerprint(ours) != fingerprint(others)


def test_it_is_the_generators() -> None:
    gates = 5 * some(6, 64)
    assert torch.equal(silu(gates), let_through(gates.clone(), torch.ones_like(gates)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_nobody_else(number: float) -> None:
    x = some(40)
    x[3] = number
    found, grad = both(x, torch.ones(40))
    assert torch.equal(found.isnan(), F.silu(x).isnan())
    assert grad.isfinite().sum() >= 39


def test_numbers_that_do_not_lie_in_a_row_are_those_of_the_row() -> None:
    """Gate and up of one layer: every second half."""
    x, grad = some(12, 64), some(12, 32)
    leaf = x.clone().requires_grad_()
    silu(leaf[:, :32]).backward(grad)  # type: ignore[no-untyped-call]
    out, expected = both(x[:, :32].contiguous(), grad)
    assert torch.equal(silu(x[:, :32]), out)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad[:, :32], expected)
    assert not leaf.grad[:, 32:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_is_torchs(dtype: torch.dtype) -> None:
    x = some(40).to(dtype)
    assert torch.equal(silu(x), F.silu(x))


def test_a_model_in_training_calls_it_and_outside_of_it_torchs() -> None:
    x, layer = 5 * some(70, 33), torch.nn.SiLU()
    assert not torch.equal(silu(x), F.silu(x)), "by their bits they could not be told apart"
    with gradients_in_place():
        assert torch.equal(layer(x), silu(x))
    assert torch.equal(layer(x), F.silu(x))
