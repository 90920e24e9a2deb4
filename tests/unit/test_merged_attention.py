"""Attention over one copy of the prompt's keys against attention over a copy for each completion."""

from __future__ import annotations

import random
from typing import Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.batch.layout import Layout
from onbeat.device import computing_in
from onbeat.training import merged
from onbeat.training.attention import SharedPrompt
from onbeat.types import TrainGroup

HEADS, KEY_HEADS, WIDTH = 6, 2, 8
SCALE = 0.3


def group(prompt: int, lengths: list[int]) -> TrainGroup:
    rng = random.Random(prompt)
    completions = tuple((1,) * length for length in lengths)
    return TrainGroup(
        slot=0,
        prompt_ids=tuple(rng.randrange(1000) for _ in range(prompt)),
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * length for length in lengths),
        advantages=(0.0,) * len(completions),
    )


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    size=st.sampled_from([1.0, 30.0]),
)
@settings(max_examples=40)
def test_merged_and_copied_give_the_same_outputs_and_gradients(
    prompts: list[int], lengths: list[int], size: float
) -> None:
    """Also of queries whose weight is on a single key, in the prompt or not."""
    layout = Layout.shared([group(prompt, lengths) for prompt in prompts])
    assert layout.segments is not None
    num_rows = layout.tokens_S_L.shape[1]
    torch.manual_seed(sum(prompts))
    given_ = [
        torch.randn(1, num_rows, heads, WIDTH, dtype=torch.float64).mul_(size).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    upstream = torch.randn(1, num_rows, HEADS, WIDTH, dtype=torch.float64)
    found = {}
    for long in (1, 1000):
        with mock.patch.object(merged, "LONG_PROMPT", long):
            output = SharedPrompt(layout.segments, layout.prefix_length).attend(0, *given_, SCALE, None)
        found[long] = (output.detach(), *torch.autograd.grad(output, given_, upstream))
    for one, other in zip(found[1], found[1000], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * size)


@pytest.mark.parametrize("sink", [0.0, 5.0, 8.0])
def test_in_bfloat16_it_is_as_near_to_the_truth_as_with_copies(sink: float) -> None:
    """Under autocast, from queries and keys in float32 (rotated) and values in bfloat16. A prompt may get almost all
    of the weight and have next to nothing to say: what the completion itself says must not drown."""
    prompt = 40
    layout = Layout.shared([group(prompt, [3, 9, 11, 11, 25])])
    assert layout.segments is not None
    num_rows = layout.tokens_S_L.shape[1]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, num_rows, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    query[..., 0], key[..., 0] = 1.0, 0.0
    key[:, 0, :, 0] = sink / SCALE
    if sink:
        value[:, :prompt] *= 1e-3
    upstream = torch.randn(1, num_rows, HEADS, WIDTH)
    upstream[:, :prompt] = 0.0

    def run(
        long: int, dtypes: tuple[torch.dtype, ...], precision: Literal["float32", "bfloat16"]
    ) -> list[torch.Tensor]:
        tensors = [
            tensor.bfloat16().to(dtype).transpose(1, 2).requires_grad_()
            for tensor, dtype in zip((query, key, value), dtypes, strict=True)
        ]
        assert layout.segments is not None
        with mock.patch.object(merged, "LONG_PROMPT", long), computing_in(precision):
            output = SharedPrompt(layout.segments).attend(0, *tensors, SCALE, None)
        gradients = torch.autograd.grad(output, tensors, upstream.to(output.dtype))
        return [output.detach()[:, prompt:].double(), *(gradient.double() for gradient in gradients)]

    truth = run(1000, (torch.float64,) * 3, "float32")
    mixed = torch.float32, torch.float32, torch.bfloat16
    for exact, one_copy, copied in zip(truth, run(1, mixed, "bfloat16"), run(1000, mixed, "bfloat16"), strict=True):
        assert (one_copy - exact).norm() < 2 * (copied - exact).norm() + 2**-8 * exact.norm()  # one rounding more
