"""Compiled norms and gated layers compute what the model's own do, and a row of them depends on that row alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from onbeat.config import LoraSection
from onbeat.lora import add_adapter
from onbeat.rollout.fused import available, kernels
from onbeat.rollout.invariant import Gated, Norm, Packed, StandIn, stand_ins, standing_in
from onbeat.rollout.probe import kernels_fingerprint
from tests.fakes.models import tiny_model

KINDS = {
    "llama": {Norm, Gated},
    "qwen2": {Norm, Gated},
    "qwen3": {Norm, Gated},
    "mistral": {Norm, Gated},
    "phi3": {Norm},  # gate and up are one layer
    "gemma3": set(),  # its norms scale by 1 + weight, its gates are GELUs
}


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    assert available(), "kernels.c was not compiled when onbeat was installed: it needs a C compiler, and AVX2"
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def some(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def norm_of(width: int, epsilon: float = 1e-5) -> Any:
    layer = LlamaRMSNorm(width, eps=epsilon)
    layer.weight.data = 1 + some(width, seed=1)
    return layer


def gated_of(width: int, inner: int, bias: bool = False) -> Any:
    config = type(
        "Config", (), {"hidden_size": width, "intermediate_size": inner, "mlp_bias": bias, "hidden_act": "silu"}
    )
    torch.manual_seed(2)
    return LlamaMLP(config)


@given(
    rows=st.integers(1, 70),
    width=st.sampled_from([8, 16, 24, 64, 576, 1000]),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]),
    epsilon=st.sampled_from([1e-6, 1e-5]),
    threads=st.sampled_from([1, 2, 5]),
    data=st.data(),
)
@settings(max_examples=60)
def test_a_norm_is_the_models_and_a_row_of_it_stands_alone(
    rows: int, width: int, scale: float, epsilon: float, threads: int, data: st.DataObject
) -> None:
    layer, hidden = norm_of(width, epsilon), scale * some(1, rows, width, seed=rows)
    torch.set_num_threads(1)
    together = Norm(layer)(hidden)
    torch.testing.assert_close(together, layer(hidden), rtol=2e-5, atol=1e-6)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    torch.set_num_threads(threads)
    assert torch.equal(Norm(layer)(hidden[:, first:last]), together[:, first:last])


@given(
    rows=st.integers(4, 70),
    width=st.sampled_from([8, 48, 576]),
    inner=st.sampled_from([8, 40, 1536]),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
    data=st.data(),
)
@settings(max_examples=40)
@torch.no_grad()
def test_a_gated_layer_is_the_models_and_a_row_of_it_stands_alone(
    rows: int, width: int, inner: int, bias: bool, threads: int, data: st.DataObject
) -> None:
    layer, hidden = gated_of(width, inner, bias), 5 * some(1, rows, width, seed=rows)
    torch.set_num_threads(1)
    own = layer(hidden)
    with standing_in([StandIn(part, Packed(part)) for part in layer.children() if type(part) is torch.nn.Linear]):
        together = Gated(layer)(hidden)
        torch.testing.assert_close(together, own, rtol=1e-4, atol=1e-5)
        first = data.draw(st.integers(0, rows - 4))
        last = data.draw(st.integers(first + 4, rows))
        torch.set_num_threads(threads)
        assert torch.equal(Gated(layer)(hidden[:, first:last]), together[:, first:last])


@pytest.mark.parametrize("scale", [1e-30, 0.1, 10.0, 100.0, 1e30])
def test_a_gate_is_that_of_the_formula_wherever_a_number_lies(scale: float) -> None:
    gates, ups = scale * some(6, 64, seed=1), some(6, 64, seed=2)
    torch.testing.assert_close(gate(gates, ups).double(), F.silu(gates.double()) * ups, rtol=1e-6, atol=1e-35)


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    out, compiled = torch.empty_like(gates), kernels()
    assert compiled is not None
    compiled.onbeat_gate(gates.data_ptr(), ups.data_ptr(), out.data_ptr(), out.numel())
    return out


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none_and_spoils_nobody_elses_row(number: float) -> None:
    hidden = some(4, 16)
    hidden[1, 3] = number
    normed = Norm(norm_of(16))(hidden)
    assert torch.equal(normed.isfinite(), norm_of(16)(hidden).isfinite())
    let_through = gate(hidden, torch.ones_like(hidden))
    assert torch.equal(let_through.isnan(), F.silu(hidden).isnan())
    assert let_through[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("architecture", sorted(KINDS))
def test_which_layers_of_these_models_are_compiled(architecture: str) -> None:
    model = tiny_model(architecture)
    found = {type(other.compute) for other in stand_ins(model)} & {Norm, Gated}
    assert found == KINDS[architecture]


def test_gated_layers_with_an_adapter_are_compiled_too() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    add_adapter(model, LoraSection(rank=2), seed=0)
    gated = [other for other in stand_ins(model) if isinstance(other.compute, Gated)]
    assert len(gated) == len(model.model.layers)


def test_a_norm_that_only_looks_like_one_computes_as_it_did() -> None:
    class HalfRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(hidden_states)

    class OtherMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x

    model = copy.deepcopy(tiny_model("llama"))
    model.model.norm.__class__ = HalfRMSNorm
    mlp = model.model.layers[0].mlp
    mlp.__class__ = OtherMLP
    standing = {other.layer for other in stand_ins(model)}
    assert model.model.norm not in standing
    assert mlp not in standing
    assert {mlp.gate_proj, mlp.up_proj, mlp.down_proj} <= standing
    assert model.model.layers[0].input_layernorm in standing


def test_without_the_compiled_functions_a_generator_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose attention would be torch's anyway: its norms and gates have other bits."""
    model = tiny_model("llama")
    digest = kernels_fingerprint(model)
    monkeypatch.setattr("onbeat.rollout.probe.available", lambda: False)
    assert kernels_fingerprint(model) != digest
