"""Log-probabilities of completion tokens under a model: the forward pass of training."""

from __future__ import annotations

from typing import Any

import torch

from onbeat.batch.layout import PlainLayout


def completion_logprobs(model: Any, layout: PlainLayout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Per completion token, [T]: its log-probability, and the entropy (without gradient) of its prediction.

    The head runs from the first prediction of the shortest prompt on; nothing before it is needed.
    """
    first = int(layout.position_T.min())
    kept = torch.arange(first, layout.tokens_S_L.shape[1])
    output = model(input_ids=layout.tokens_S_L, use_cache=False, logits_to_keep=kept)
    logits_T_V = output.logits[layout.sequence_T, layout.position_T - first].float() / temperature
    logprobs_T_V = torch.log_softmax(logits_T_V, dim=-1)
    with torch.no_grad():
        entropy_T = -(logprobs_T_V.exp() * logprobs_T_V).sum(dim=-1)
    return logprobs_T_V.gather(1, layout.target_T[:, None])[:, 0], entropy_T
