"""Policy, old policy and reference: three sets of weights, one architecture, one layout, one place.

Each runs over the micro-batch right after the other, and only if it can matter:
- old ≡ stop-gradient(policy) while the weights have not moved since the period opened: no forward at all. Its
  weights exist only if a period has several updates, and are copied just before the first of them moves the policy.
- the reference exists only if the KL has a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from onbeat.batch.layout import PlainLayout
from onbeat.device import load_model
from onbeat.training.logprobs import completion_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of the completion tokens of one micro-batch, [T], at the sampling temperature."""

    policy_T: torch.Tensor
    old_T: torch.Tensor
    ref_T: torch.Tensor | None
    entropy_T: torch.Tensor
    """Of the policy's distribution; no gradient."""


class TriModel:
    def __init__(
        self, model_dir: str, *, temperature: float, needs_old: bool, needs_reference: bool, checkpointing: bool
    ) -> None:
        self.policy = load_model(model_dir).train()
        if checkpointing:
            self.policy.gradient_checkpointing_enable({"use_reentrant": False})
        self._old = _frozen(model_dir) if needs_old else None
        self._reference = _frozen(model_dir) if needs_reference else None
        self._temperature = temperature
        self._moved = False

    def open_period(self) -> None:
        """The policy as it is now is the old policy of the coming period."""
        self._moved = False

    @torch.no_grad()
    def before_step(self) -> None:
        """The optimizer is about to move the policy: keep what it was, if the period goes on after this."""
        if not self._moved and self._old is not None:
            for old, policy in zip(self._old.parameters(), self.policy.parameters(), strict=True):
                old.copy_(policy)
        self._moved = True

    def logprobs(self, layout: PlainLayout) -> Logprobs:
        policy_T, entropy_T = self._logprobs(self.policy, layout)
        with torch.no_grad():
            old_T = self._logprobs(self._old, layout)[0] if self._moved else policy_T.detach()
            ref_T = self._logprobs(self._reference, layout)[0] if self._reference is not None else None
        return Logprobs(policy_T=policy_T, old_T=old_T, ref_T=ref_T, entropy_T=entropy_T)

    def _logprobs(self, model: Any, layout: PlainLayout) -> tuple[torch.Tensor, torch.Tensor]:
        return completion_logprobs(model, layout, self._temperature)


def _frozen(model_dir: str) -> Any:
    return load_model(model_dir).eval().requires_grad_(False)
