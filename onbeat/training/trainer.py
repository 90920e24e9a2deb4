"""The trainer: accumulate gradients group by group, step when told.

Gradients are sums over groups; the division by the update's denominator comes at the step, when it is known (R3).
Nothing here knows whether the groups came one after another or all at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from onbeat.algorithms.base import Tokens
from onbeat.algorithms.catalogue import algorithm_of
from onbeat.batch.layout import Layout
from onbeat.batch.pack import split_group
from onbeat.checkpoint import Tensor
from onbeat.config import Config, LoraSection, TrainerConfig
from onbeat.device import load_model
from onbeat.lora import add_adapter, save_model, trained_parameters
from onbeat.protocols import UpdateReport
from onbeat.training.losses import denominator, importance_weights, kl_estimate, token_weights
from onbeat.training.state import load_rank_state, rank_state
from onbeat.training.tri_model import Logprobs, TriModel
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from onbeat.weights import snapshot


@dataclass(slots=True)
class _Sums:
    """What the report of an update is made of, summed over its trained tokens."""

    loss: float = 0.0
    kl: float | None = None
    clipped: float = 0.0
    entropy: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    num_tokens: int = 0


class PolicyTrainer:
    def __init__(self, config: Config, model_dir: str) -> None:
        self._algorithm = algorithm_of(config.algorithm, loads="loss")
        self._loss_settings = config.algorithm
        self._settings = config.trainer
        self._max_new_tokens = config.sampling.max_new_tokens
        self._planned_updates = config.num_updates
        self._models = TriModel(
            model_dir,
            temperature=config.sampling.temperature,
            needs_old=config.schedule.updates_per_period > 1,
            needs_reference=config.algorithm.beta > 0,
            checkpointing=config.trainer.gradient_checkpointing,
            lora=config.lora,
            seed=config.seed,
        )
        self.model = self._models.policy
        self._parameters = trained_parameters(self.model)
        self._model_dir = model_dir
        self.why_not_shared = self._models.why_not_shared
        """Why completions are trained with a copy of the prompt each; None if they share it."""
        self._optimizer = build_optimizer(self.model, config.trainer)
        self.num_updates = 0
        """So far, those that were skipped included."""
        self._sums = _Sums()
        self._writer = snapshot.SnapshotWriter()

    def accumulate(self, microbatch: MicroBatch) -> None:
        """Forward and backward over the micro-batch; the gradient is added to what is there."""
        groups = microbatch.groups
        if self.why_not_shared is None and len(groups) == 1 and groups[0].num_tokens > self._settings.max_tokens:
            self._accumulate_in_parts(groups[0])
        else:
            layout = self._models.layout(groups)
            self._backward(layout, self._models.logprobs(layout))

    def _accumulate_in_parts(self, group: TrainGroup) -> None:
        """A group too large for one pass: the prompt once, then its completions part by part."""
        with self._models.split_prompt(group.prompt_ids) as prompt:
            for part in split_group(group, self._settings.max_tokens):
                layout = Layout.completions_only(part)
                self._backward(layout, self._models.logprobs(layout, prompt))

    def _backward(self, layout: Layout, logprobs: Logprobs) -> None:
        algorithm, settings = self._algorithm, self._loss_settings
        loss_T, clipped_T = algorithm.loss(
            Tokens(
                policy_logprobs_T=logprobs.policy_T,
                old_logprobs_T=logprobs.old_T,
                advantage_T=layout.advantage_T,
                sequence_T=layout.sequence_T,
                length_T=layout.length_T,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
        )
        if settings.importance_cap:
            loss_T = loss_T * importance_weights(logprobs.old_T, layout.sampler_logprobs_T, settings.importance_cap)
        kl_T = None
        if logprobs.ref_T is not None:
            kl_T = kl_estimate(logprobs.policy_T, logprobs.ref_T, settings.kl)
            loss_T = loss_T + settings.beta * kl_T
        loss = (loss_T * token_weights(layout.length_T, algorithm.loss_mean, self._max_new_tokens)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sums = self._sums
        gap_T = (logprobs.policy_T.detach() - layout.sampler_logprobs_T).abs()
        sums.loss += loss.item()
        sums.clipped += clipped_T.sum().item()
        sums.entropy += logprobs.entropy_T.sum().item()
        sums.gap += gap_T.sum().item()
        sums.gap_max = max(gap_T.max().item(), sums.gap_max)  # in this order a NaN stays one
        sums.num_tokens += len(gap_T)
        if kl_T is not None:
            sums.kl = (sums.kl or 0.0) + kl_T.sum().item()

    @torch.no_grad()
    def step(self, totals: UpdateTotals) -> UpdateReport:
        """Divide, clip, move the weights. Every parameter has a gradient, zero if need be: AdamW skips None."""
        divisor = denominator(totals, self._algorithm.loss_mean)
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad /= divisor
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm).item()
        rate = learning_rate(self.num_updates, self._planned_updates, self._settings)
        finite = math.isfinite(norm) and math.isfinite(self._sums.loss)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._models.before_step()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)  # the memory is wanted again in a moment
        self.num_updates += 1
        report = self._report(divisor, norm, rate, stepped=finite)
        self._sums = _Sums()
        return report

    def _report(self, divisor: int, norm: float, rate: float, *, stepped: bool) -> UpdateReport:
        sums = self._sums

        def mean(value: float | None) -> float | None:
            return value / sums.num_tokens if value is not None and sums.num_tokens else None

        return UpdateReport(
            loss=sums.loss / divisor if sums.num_tokens else None,
            grad_norm=norm,
            learning_rate=rate,
            stepped=stepped,
            entropy=mean(sums.entropy),
            kl=mean(sums.kl),
            clip_share=mean(sums.clipped),
            gap_mean=mean(sums.gap),
            gap_max=sums.gap_max if sums.num_tokens else None,
            num_trained_tokens=sums.num_tokens,
        )

    def snapshot(self) -> tuple[int, int, str]:
        """The weights in sealed memory: (descriptor, size, digest). Opens a period."""
        self._models.open_period()
        return self._writer.write(self._parameters.items())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this rank. Views: they change with the next step."""
        return rank_state(self.model, self._optimizer, self.num_updates)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint's part."""
        self.num_updates = load_rank_state(self.model, self._optimizer, checkpoint / "rank-0.safetensors")

    def export(self, directory: Path) -> None:
        """The model in Hugging Face format."""
        save_model(self.model, self._model_dir, directory)


def model_snapshot(model_dir: str, lora: LoraSection, seed: int) -> tuple[int, int, str]:
    """The weights of a model as they are on the disk, in sealed memory: (descriptor, size, digest)."""
    model = load_model(model_dir)
    add_adapter(model, lora, seed)
    return snapshot.write(trained_parameters(model).items())


def build_optimizer(model: torch.nn.Module, settings: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone."""
    parameters = list(trained_parameters(model).values())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def learning_rate(update: int, num_updates: int, settings: TrainerConfig) -> float:
    """Of the update-th optimizer step, counted from 0: linear warm-up, then the schedule down to 0 at the end."""
    peak, warmup = settings.learning_rate, settings.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = (update - warmup) / max(1, num_updates - warmup)
    match settings.lr_schedule:
        case "constant":
            return peak
        case "linear":
            return peak * max(0.0, 1.0 - progress)
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
