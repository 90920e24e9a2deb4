"""What both attentions rest on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from onbeat.attention import attend, causal_mask, each_head


def tensors(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(2, 6, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)]
    query, key, value = (torch.randn(size).to(device) for size in sizes)
    return query, key, value


def test_keys_given_to_each_head_give_what_keys_shared_by_heads_give() -> None:
    query, key, value = tensors("cpu")
    mask = causal_mask(4, 5, window=None)
    shared = attend(query, key, value, mask, 0.3)
    torch.testing.assert_close(attend(query, each_head(key, 6), each_head(value, 6), mask, 0.3), shared)


@pytest.mark.parametrize(("device", "masked", "kv_heads"), [("cpu", True, 2), ("meta", True, 6), ("meta", False, 2)])
def test_off_the_cpu_no_mask_meets_keys_that_heads_share(device: str, masked: bool, kv_heads: int) -> None:
    query, key, value = tensors(device)
    mask = causal_mask(4, 5, window=None).to(device) if masked else None
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as kernel:
        assert attend(query, key, value, mask, 0.3).shape == query.shape
    _, given_key, given_value = kernel.call_args.args
    assert given_key.shape[1] == given_value.shape[1] == kv_heads
