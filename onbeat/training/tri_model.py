"""Policy, old policy and reference: three sets of weights, one architecture, one layout, one place.

Each runs over the micro-batch right after the other, and only if it can matter:
- old ≡ stop-gradient(policy) while the weights have not moved since the period opened: no forward at all. Its
  weights exist only if a period has several updates, and are copied just before the first of them moves the policy.
- the reference exists only if the KL has a weight, and is the policy itself until the first update: no forward either.
With LoRA neither has weights of its own: both are the policy with another adapter (lora.py).
(A group without advantage and without another loss term that has a gradient does not even get here: the loader elides
it.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.batch.layout import Layout
from onbeat.config import LoraSection, TrainerConfig
from onbeat.device import brought_to, computing_in, device, load_into_host_memory, local_part
from onbeat.lora import add_adapter, no_addition, trained_parameters, values, with_values
from onbeat.training.forward import (
    PromptState,
    checkpoint_layers,
    completion_logprobs,
    prompt_state,
    share_prompts,
    split_prompt,
    why_not_shared,
)
from onbeat.training.parallel import ALONE, Ranks, check, shardings, spread_over_team, spread_over_teams
from onbeat.types import TrainGroup

NO_LORA = LoraSection()
PLAIN = TrainerConfig()


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
        self,
        model_dir: str,
        *,
        temperature: float,
        needs_old: bool,
        needs_reference: bool,
        checkpointing: bool,
        lora: LoraSection = NO_LORA,
        seed: int = 0,
        ranks: Ranks = ALONE,
        settings: TrainerConfig = PLAIN,
    ) -> None:
        """`settings` say how the models are spread over the ranks, and in which precision they compute."""
        self.policy = load_into_host_memory(model_dir)
        add_adapter(self.policy, lora, seed)
        self.partial = spread_over_team(self.policy, ranks)
        """Trained parameters of which each rank of a team has a part of the gradient."""
        self.policy.to(device())
        if checkpointing:
            checkpoint_layers(self.policy)
        self.why_not_shared = why_not_shared(self.policy)
        self._has_adapter = lora.rank > 0
        self._at_home = settings.offload and not settings.shards
        """Old and reference lie in host memory."""
        self.old = self._frozen(model_dir, ranks) if needs_old and not self._has_adapter else None
        self.reference = self._frozen(model_dir, ranks) if needs_reference and not self._has_adapter else None
        models = [model for model in (self.policy, self.old, self.reference) if model is not None]
        if self.why_not_shared is None:
            for model in models:
                share_prompts(model)
        self.shardings = shardings(self.policy, over_teams=settings.shards)
        """How what is trained is spread over the ranks."""
        self._doors = {id(model): model for model in models}
        """Through which each is called."""
        if settings.shards:
            self._doors = {id(model): spread_over_teams(model, ranks, settings) for model in models}
        check(trained_parameters(self.policy), self.shardings, ranks)
        self._old_values = values(self.policy) if needs_old and self._has_adapter else None
        self._reference_values = no_addition(self.policy) if needs_reference and self._has_adapter else None
        self._temperature = temperature
        self._precision = settings.precision
        self._moved = False
        self.at_start = True
        """No update has been made: the policy is what was loaded, which is the reference."""

    def _frozen(self, model_dir: str, ranks: Ranks) -> Any:
        model = load_into_host_memory(model_dir).requires_grad_(False)
        spread_over_team(model, ranks)
        return model if self._at_home else model.to(device())

    def open_period(self) -> None:
        """The policy as it is now is the old policy of the coming period."""
        self._moved = False

    @torch.no_grad()
    def before_step(self) -> None:
        """The optimizer is about to move the policy: keep what it was, if the period goes on after this."""
        if not self._moved and self.old is not None:
            for old, policy in zip(self.old.parameters(), self.policy.parameters(), strict=True):
                local_part(old).copy_(local_part(policy))
        if not self._moved and self._old_values is not None:
            for name, parameter in trained_parameters(self.policy).items():
                self._old_values[name].copy_(local_part(parameter))
        self._moved = True

    @contextmanager
    def _as_old(self) -> Iterator[Any]:
        """The old policy: a model of its own, or the policy with the adapter it had."""
        with self._policy_with(self._old_values), self._called_from_home(self.old):
            yield self._door(self.old or self.policy)

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        with self._policy_with(self._reference_values), self._called_from_home(self.reference):
            yield self._door(self.reference or self.policy)

    def _policy_with(self, adapter: dict[str, torch.Tensor] | None) -> AbstractContextManager[Any]:
        return with_values(self.policy, adapter) if adapter is not None else nullcontext()

    def _called_from_home(self, frozen: Any) -> AbstractContextManager[Any]:
        return brought_to(device(), frozen) if self._at_home and frozen is not None else nullcontext()

    def _door(self, model: Any) -> Any:
        return self._doors[id(model)]

    @property
    def _has_reference(self) -> bool:
        return self.reference is not None or self._reference_values is not None

    @property
    def _runs_reference(self) -> bool:
        return self._has_reference and not self.at_start

    def layout(self, groups: tuple[TrainGroup, ...]) -> Layout:
        return Layout.shared(groups) if self.why_not_shared is None else Layout.plain(groups)

    def logprobs(self, layout: Layout, prompt: TriPrompt | None = None) -> Logprobs:
        """Of the layout's completion tokens; `prompt` if it is a part of a split group."""
        with computing_in(self._precision):
            return self._logprobs(layout, prompt)

    def _logprobs(self, layout: Layout, prompt: TriPrompt | None) -> Logprobs:
        policy_T, entropy_T = completion_logprobs(
            self._door(self.policy), layout, self._temperature, prompt.policy if prompt else None
        )
        with torch.no_grad():
            old_T = policy_T.detach()
            if self._moved:
                with self._as_old() as old:
                    old_T, _ = completion_logprobs(old, layout, self._temperature, prompt.old if prompt else None)
            ref_T = policy_T.detach() if self._has_reference else None
            if self._runs_reference:
                before = prompt.reference if prompt else None
                with self._as_reference() as reference:
                    ref_T, _ = completion_logprobs(reference, layout, self._temperature, before)
        return Logprobs(policy_T=policy_T, old_T=old_T, ref_T=ref_T, entropy_T=entropy_T)

    @contextmanager
    def split_prompt(self, prompt_ids: tuple[int, ...]) -> Iterator[TriPrompt]:
        """The prompt of a group whose completions come in parts, under each model that runs (see forward.py)."""
        with computing_in(self._precision), torch.no_grad():
            old = reference = None
            if self._moved:
                with self._as_old() as model:
                    old = prompt_state(model, prompt_ids)
            if self._runs_reference:
                with self._as_reference() as model:
                    reference = prompt_state(model, prompt_ids)
        with split_prompt(self._door(self.policy), prompt_ids, computing_in(self._precision)) as policy:
            yield TriPrompt(policy=policy, old=old, reference=reference)
