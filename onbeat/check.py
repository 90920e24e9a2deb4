"""`onbeat check MODEL`: can this model be trusted here? Run it before a new architecture.

Compares the shared-prompt form of training with the model's own forward over every completion (log-probabilities and
gradients, on random groups), tests whether generation is batch-invariant, and times both forms.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.batch.layout import Layout
from onbeat.device import load_model
from onbeat.rollout.engine import probe_invariance
from onbeat.training.forward import completion_logprobs, share_prompts, why_not_shared
from onbeat.types import TrainGroup

LOGPROB_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-4
"""Of the gradient's norm, in float32."""
NUM_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    why_not_shared: str | None
    logprob_gap: float | None
    """Largest difference of a log-probability between the forms."""
    gradient_gap: float | None
    """Norm of the difference over the norm of the gradient, of the worst group."""
    speedup: float | None
    row_variance: str | None

    @property
    def agrees(self) -> bool:
        """Where prompts are shared, both forms compute the same."""
        if self.logprob_gap is None or self.gradient_gap is None:
            return True
        return self.logprob_gap <= LOGPROB_TOLERANCE and self.gradient_gap <= GRADIENT_TOLERANCE

    def lines(self) -> list[str]:
        found = []
        if self.why_not_shared is not None:
            found.append(f"shared prompt      no: {self.why_not_shared}; it will be trained plain")
        else:
            found += [
                f"log-probabilities  largest difference {self.logprob_gap:.2e} (limit {LOGPROB_TOLERANCE:.0e})",
                f"gradients          {self.gradient_gap:.2e} of the norm (limit {GRADIENT_TOLERANCE:.0e})",
                f"speed-up           {self.speedup:.2f} by sharing the prompt, on these groups",
            ]
        invariant = "yes: every bit is the same, alone and together"
        found.append(f"batch invariance   {invariant if self.row_variance is None else 'no: ' + self.row_variance}")
        found.append("agrees" if self.agrees else "DISAGREES: do not train this model with onbeat")
        return found


def check_model(directory: str, say: Callable[[str], None]) -> CheckReport:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load_model(directory).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{type(model).__name__}, {parameters / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")
    reason = why_not_shared(model)
    logprob_gap = gradient_gap = speedup = None
    if reason is None:
        rng = random.Random(0)
        groups = [random_group(rng, model.config.get_text_config().vocab_size) for _ in range(NUM_GROUPS)]
        logprob_gap, gradient_gap, speedup = compare_forms(model, groups)
    return CheckReport(
        why_not_shared=reason,
        logprob_gap=logprob_gap,
        gradient_gap=gradient_gap,
        speedup=speedup,
        row_variance=probe_invariance(model).rows,
    )


def random_group(rng: random.Random, vocabulary: int) -> TrainGroup:
    lengths = sorted([1, *(rng.randint(2, 40) for _ in range(7))])  # the order of the shared form
    completions = tuple(tuple(rng.randrange(vocabulary) for _ in range(length)) for length in lengths)
    return TrainGroup(
        slot=0,
        prompt_ids=tuple(rng.randrange(vocabulary) for _ in range(rng.randint(30, 90))),
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * len(completion) for completion in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )


def compare_forms(model: Any, groups: list[TrainGroup]) -> tuple[float, float, float]:
    """(largest log-probability gap, worst gradient gap, plain time over shared time)."""
    own_attention = model.config._attn_implementation

    def run_plain(group: TrainGroup) -> FormRun:
        model.set_attn_implementation(own_attention)
        return run_form(model, Layout.plain([group]))

    def run_shared(group: TrainGroup) -> FormRun:
        share_prompts(model)
        return run_form(model, Layout.shared([group]))

    run_plain(groups[0])  # warm up
    run_shared(groups[0])
    pairs = [(run_plain(group), run_shared(group)) for group in groups]
    model.set_attn_implementation(own_attention)
    return (
        max((plain.logprobs - shared.logprobs).abs().max().item() for plain, shared in pairs),
        max(((plain.gradient - shared.gradient).norm() / plain.gradient.norm()).item() for plain, shared in pairs),
        sum(plain.seconds for plain, _ in pairs) / sum(shared.seconds for _, shared in pairs),
    )


@dataclass(frozen=True, slots=True)
class FormRun:
    """One forward and backward over one group."""

    logprobs: torch.Tensor
    gradient: torch.Tensor
    seconds: float


def run_form(model: Any, layout: Layout) -> FormRun:
    began = time.perf_counter()
    logprobs, _ = completion_logprobs(model, layout, 1.0)
    (layout.advantage_T * logprobs / layout.length_T).sum().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return FormRun(logprobs.detach(), gradient, seconds)
