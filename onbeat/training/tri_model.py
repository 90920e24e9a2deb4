"""Policy, old policy and reference: three sets of weights, one architecture, one layout, one place.

Each runs over the micro-batch right after the other, and only if it can matter:
- old ≡ stop-gradient(policy) while the weights have not moved since the period opened: no forward at all. Its
  weights exist only if a period has several updates, and are copied just before the first of them moves the policy.
- the reference exists only if the KL has a weight.
(A group without advantage and without another loss term does not even get here: the loader elides it.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.batch.layout import Layout
from onbeat.device import load_model
from onbeat.training.forward import (
    PromptState,
    checkpoint_layers,
    completion_logprobs,
    prompt_state,
    share_prompts,
    split_prompt,
    why_not_shared,
)
from onbeat.types import TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of the completion tokens of one micro-batch, [T], at the sampling temperature."""

    policy_T: torch.Tensor
    old_T: torch.Tensor
    ref_T: torch.Tensor | None
    entropy_T: torch.Tensor
    """Of the policy's distribution; no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriPrompt:
    """A split group's prompt under each model that runs."""

    policy: PromptState
    old: PromptState | None
    reference: PromptState | None


class TriModel:
    def __init__(
        self, model_dir: str, *, temperature: float, needs_old: bool, needs_reference: bool, checkpointing: bool
    ) -> None:
        self.policy = load_model(model_dir).train()
        if checkpointing:
            checkpoint_layers(self.policy)
        self.why_not_shared = why_not_shared(self.policy)
        self.old = _frozen(model_dir) if needs_old else None
        self.reference = _frozen(model_dir) if needs_reference else None
        if self.why_not_shared is None:
            for model in (self.policy, self.old, self.reference):
                if model is not None:
                    share_prompts(model)
        self._temperature = temperature
        self._moved = False

    def open_period(self) -> None:
        """The policy as it is now is the old policy of the coming period."""
        self._moved = False

    @torch.no_grad()
    def before_step(self) -> None:
        """The optimizer is about to move the policy: keep what it was, if the period goes on after this."""
        if not self._moved and self.old is not None:
            for old, policy in zip(self.old.parameters(), self.policy.parameters(), strict=True):
                old.copy_(policy)
        self._moved = True

    def layout(self, groups: tuple[TrainGroup, ...]) -> Layout:
        return Layout.shared(groups) if self.why_not_shared is None else Layout.plain(groups)

    def logprobs(self, layout: Layout, prompt: TriPrompt | None = None) -> Logprobs:
        """Of the layout's completion tokens; `prompt` if it is a part of a split group."""
        policy_T, entropy_T = completion_logprobs(
            self.policy, layout, self._temperature, prompt.policy if prompt else None
        )
        with torch.no_grad():
            old_T = policy_T.detach()
            if self._moved:
                old_T, _ = completion_logprobs(self.old, layout, self._temperature, prompt.old if prompt else None)
            ref_T = None
            if self.reference is not None:
                before = prompt.reference if prompt else None
                ref_T, _ = completion_logprobs(self.reference, layout, self._temperature, before)
        return Logprobs(policy_T=policy_T, old_T=old_T, ref_T=ref_T, entropy_T=entropy_T)

    @contextmanager
    def split_prompt(self, prompt_ids: tuple[int, ...]) -> Iterator[TriPrompt]:
        """The prompt of a group whose completions come in parts, under each model that runs (see forward.py)."""
        with torch.no_grad():
            old = prompt_state(self.old, prompt_ids) if self._moved else None
            reference = prompt_state(self.reference, prompt_ids) if self.reference is not None else None
        with split_prompt(self.policy, prompt_ids) as policy:
            yield TriPrompt(policy=policy, old=old, reference=reference)


def _frozen(model_dir: str) -> Any:
    return load_model(model_dir).eval().requires_grad_(False)
