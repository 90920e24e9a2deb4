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
from onbeat.kernels import available
from onbeat.lora import add_adapter
from onbeat.rollout import cache, invariant
from onbeat.rollout.invariant import Gated, Norm, Packed, StandIn, compiled_bits, let_through, stand_ins, standing_in
from onbeat.rollout.probe import kernels_fingerprint
from tests.fakes.models import ALL_ARCHITECTURES, tiny_model

COMPILED = {
    "llama": (5, 2),
    "qwen2": (5, 2),
    "qwen3": (9, 2),  # of queries and of keys, too
    "qwen3_moe": (9, 0),  # experts are no layers of their own
    "mistral": (5, 2),
    "smollm3": (5, 2),
    "olmo2": (9, 2),
    "phi3": (5, 0),  # gate and up are one layer
    "gemma3": (0, 0),  # its norms scale by 1 + weight, its gates are GELUs
}
"""Norms and gated layers of models of two layers."""


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
    with standing_in([StandIn(part, Packed(part)) for part in layer.children() if type(part) is torch.nn.Linear]):
        together = Gated(layer)(hidden)
        torch.testing.assert_close(together, layer(hidden), rtol=1e-4, atol=5e-5)  # sums of up to 1,536 products
        first = data.draw(st.integers(0, rows - 4))
        last = data.draw(st.integers(first + 4, rows))
        torch.set_num_threads(threads)
        assert torch.equal(Gated(layer)(hidden[:, first:last]), together[:, first:last])


@pytest.mark.parametrize("scale", [1e-30, 0.1, 10.0, 100.0, 1e30])
def test_a_gate_is_that_of_the_formula_wherever_a_number_lies(scale: float) -> None:
    gates, ups = scale * some(6, 64, seed=1), some(6, 64, seed=2)
    torch.testing.assert_close(
        let_through(gates.clone(), ups).double(), F.silu(gates.double()) * ups, rtol=1e-6, atol=1e-35
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none_and_spoils_nobody_elses_row(number: float) -> None:
    hidden = some(4, 16)
    hidden[1, 3] = number
    normed = Norm(norm_of(16))(hidden)
    assert torch.equal(normed.isfinite(), norm_of(16)(hidden).isfinite())
    passed = let_through(hidden.clone(), torch.ones_like(hidden))
    assert torch.equal(passed.isnan(), F.silu(hidden).isnan())
    assert passed[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_which_layers_of_these_models_are_compiled(architecture: str) -> None:
    others = [other.compute for other in stand_ins(tiny_model(architecture))]
    assert tuple(sum(type(other) is kind for other in others) for kind in (Norm, Gated)) == COMPILED[architecture]


def test_rows_that_threads_share_come_out_as_by_one() -> None:
    hidden, layer = some(70, 1000), norm_of(1000)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        alone = torch.cat([Norm(layer)(row) for row in hidden.split(1)])
        assert torch.equal(Norm(layer)(hidden), alone)
        gates = torch.cat([let_through(row.clone(), row) for row in hidden.split(1)])
        assert torch.equal(let_through(hidden.clone(), hidden), gates)


def test_layers_that_do_not_fill_a_vector_register_compute_as_they_did() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    mlp = gated_of(64, 100)
    model.model.layers[0].mlp, model.model.norm = mlp, norm_of(12)
    standing = {other.layer for other in stand_ins(model)}
    assert not {mlp, model.model.norm} & standing


def test_gated_layers_with_an_adapter_are_compiled_too() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    add_adapter(model, LoraSection(rank=2), seed=0)
    gated = [other for other in stand_ins(model) if isinstance(other.compute, Gated)]
    assert len(gated) == len(model.model.layers)


def test_a_layer_that_only_looks_like_one_of_these_computes_as_it_did() -> None:
    class HalfRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(hidden_states)

    class OtherMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = self.act_fn(self.gate_proj(x)).clamp(max=90.0)
            return self.down_proj(gates * self.up_proj(x))

    class PairMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    model = copy.deepcopy(tiny_model("llama"))
    model.model.norm.__class__ = HalfRMSNorm
    mlp, pair = (layer.mlp for layer in model.model.layers)
    mlp.__class__, pair.__class__ = OtherMLP, PairMLP
    standing = {other.layer for other in stand_ins(model)}
    assert model.model.norm not in standing
    assert not {mlp, pair} & standing
    assert {mlp.gate_proj, mlp.up_proj, mlp.down_proj} <= standing
    assert model.model.layers[0].input_layernorm in standing


def test_generators_whose_norms_and_gates_have_other_bits_have_other_fingerprints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(cache, "fits", lambda own: False)  # attention would be torch's anyway
    digest = kernels_fingerprint(model)
    with monkeypatch.context() as patch:
        patch.setattr(invariant, "available", lambda: False)
        assert kernels_fingerprint(model) != digest
    monkeypatch.setattr(invariant, "rms_norm", lambda hidden, *others: hidden)
    assert kernels_fingerprint(model) != digest


def test_a_fingerprint_says_nothing_of_norms_where_none_are_compiled() -> None:
    """As on an accelerator: whether its host has a compiler does not matter."""
    assert compiled_bits(tiny_model("llama"))
    assert compiled_bits(copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)) == b""
