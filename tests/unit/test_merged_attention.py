"""Attention over one copy of the prompt's keys against attention over a copy for each completion."""

from __future__ import annotations

import random
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.batch.layout import Layout
from onbeat.device import computing_in
from onbeat.training import merged
from onbeat.training.attention import SharedPrompt
from onbeat.types import TrainGroup

HEADS, KEY_HEADS, WIDTH = 6, 2, 8


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
            output = SharedPrompt(layout.segments, layout.prefix_length).attend(0, *given_, 0.3, None)
        found[long] = (output.detach(), *torch.autograd.grad(output, given_, upstream))
    for one, other in zip(found[1], found[1000], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * size)


def test_in_bfloat16_both_round_alike() -> None:
    """Under autocast, from queries and keys in float32 (rotated) and values in bfloat16."""
    layout = Layout.shared([group(40, [3, 9, 11, 11, 25])])
    assert layout.segments is not None
    num_rows = layout.tokens_S_L.shape[1]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, num_rows, heads, WIDTH).transpose(1, 2).to(dtype).requires_grad_()
        for heads, dtype in ((HEADS, torch.float32), (KEY_HEADS, torch.float32), (KEY_HEADS, torch.bfloat16))
    )
    upstream = torch.randn(1, num_rows, HEADS, WIDTH).bfloat16()
    found = {}
    for long in (1, 1000):
        with mock.patch.object(merged, "LONG_PROMPT", long), computing_in("bfloat16"):
            output = SharedPrompt(layout.segments).attend(0, query, key, value, 0.3, None)
        assert output.dtype == torch.bfloat16
        found[long] = (output.detach(), *torch.autograd.grad(output, (query, key, value), upstream))
    for one, other in zip(found[1], found[1000], strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()
