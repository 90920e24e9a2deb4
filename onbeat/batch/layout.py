"""A micro-batch as tensors, plain form: every completion with its own copy of the prompt, padded on the right.

Axes: S sequences of the micro-batch, L tokens of the longest, T completion tokens of all sequences in a row.
Causal attention never looks right, so padding needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onbeat.types import TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLayout:
    tokens_S_L: torch.Tensor
    sequence_T: torch.Tensor
    """Which sequence the token belongs to."""
    position_T: torch.Tensor
    """Where its prediction stands: one left of the token itself."""
    target_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    advantage_T: torch.Tensor
    length_T: torch.Tensor
    """Tokens of the completion it belongs to."""

    @classmethod
    def of(cls, groups: tuple[TrainGroup, ...]) -> PlainLayout:
        rows = [(group.prompt_ids, completion) for group in groups for completion in group.completion_ids]
        tokens = torch.zeros(len(rows), max(len(p) + len(c) for p, c in rows), dtype=torch.long)
        for row, (prompt, completion) in enumerate(rows):
            tokens[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        lengths = torch.tensor([len(completion) for _, completion in rows])
        sequence = torch.arange(len(rows)).repeat_interleave(lengths)
        position = torch.cat([torch.arange(len(p) - 1, len(p) - 1 + len(c)) for p, c in rows])
        logprobs = [x for group in groups for row in group.sampler_logprobs for x in row]
        advantages = torch.tensor([advantage for group in groups for advantage in group.advantages])
        return cls(
            tokens_S_L=tokens,
            sequence_T=sequence,
            position_T=position,
            target_T=tokens[sequence, position + 1],
            sampler_logprobs_T=torch.tensor(logprobs, dtype=torch.float32),
            advantage_T=advantages.repeat_interleave(lengths),
            length_T=lengths.repeat_interleave(lengths),
        )
