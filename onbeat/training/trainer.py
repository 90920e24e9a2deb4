"""The trainer: accumulate gradients group by group, step when told.

Gradients are sums over groups; the division by the update's denominator comes at the step, when it is known (R3).
Nothing here knows whether the groups came one after another or all at once.

Of several ranks (parallel.py), each accumulates what it is given. If each has all the weights, gradients are summed
over ranks at the step. If the weights are spread over them, every pass of one rank is a pass of all, so each round of
micro-batches is the same sequence of passes everywhere: who has nothing, or a group in fewer parts, fills up with
passes over `_NOTHING`, which count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import structs

from onbeat.algorithms.base import Tokens
from onbeat.algorithms.catalogue import algorithm_of
from onbeat.batch.layout import Layout
from onbeat.batch.pack import num_parts, plain_parts, split_group
from onbeat.checkpoint import Tensor
from onbeat.config import Config, LoraSection, TrainerConfig
from onbeat.device import load_into_host_memory, local_part
from onbeat.lora import add_adapter, trained_parameters
from onbeat.protocols import UpdateReport
from onbeat.training.losses import denominator, importance_weights, kl_estimate, token_weights
from onbeat.training.parallel import ALONE, Ranks
from onbeat.training.state import Trained, load_rank_state, rank_state, trained
from onbeat.training.threads import why_fixed
from onbeat.training.tri_model import Logprobs, TriModel, TriPrompt
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from onbeat.weights import snapshot, spread

_NOTHING = TrainGroup(
    slot=-1, prompt_ids=(0,), completion_ids=((0,),), sampler_logprobs=((0.0,),), advantages=(0.0,)
)  # fmt: skip
"""The smallest group there is."""


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

    def over(self, ranks: Ranks) -> _Sums:
        """Of all ranks; those of a team have the same."""
        if ranks.alone:
            return self
        mine = [self.loss, self.kl or 0.0, self.clipped, self.entropy, self.gap, float(self.num_tokens)]
        everyones = ranks.gathered([*mine, self.gap_max, float(self.kl is not None)])[:: ranks.grid.tensor]
        loss, kl, clipped, entropy, gap, num_tokens, _, has_kl = everyones.sum(dim=0).tolist()
        return _Sums(
            loss=loss, kl=kl if has_kl else None, clipped=clipped, entropy=entropy, gap=gap,
            gap_max=everyones[:, -2].amax().item(), num_tokens=int(num_tokens),
        )  # fmt: skip


class PolicyTrainer:
    def __init__(self, config: Config, model_dir: str, ranks: Ranks = ALONE) -> None:
        """Every rank makes one; each call is made by all of them, but `accumulate` without sharded weights."""
        self._ranks = ranks
        self._lora, self._seed = config.lora, config.seed
        self._algorithm = algorithm_of(config.algorithm, loads="loss")
        self._loss_settings = config.algorithm
        self._settings = config.trainer
        self._max_new_tokens = config.sampling.max_new_tokens
        self._planned_updates = config.num_updates
        self._updates_per_period = config.schedule.updates_per_period
        self._models = TriModel(
            model_dir,
            temperature=config.sampling.temperature,
            needs_old=config.schedule.updates_per_period > 1,
            needs_reference=config.algorithm.beta > 0,
            checkpointing=config.trainer.gradient_checkpointing,
            lora=config.lora,
            seed=config.seed,
            ranks=ranks,
            settings=config.trainer,
        )
        self.model = self._models.policy
        self._parameters = trained(self.model, self._models.shardings)
        self._model_dir = model_dir
        self.why_not_shared = self._models.why_not_shared
        """Why completions are trained with a copy of the prompt each; None if they share it."""
        self._optimizer = build_optimizer([each.leaf for each in self._parameters.values()], config.trainer)
        self.num_updates = 0
        """So far, those that were skipped included."""
        self._sums = _Sums()
        self._writer = snapshot.SnapshotWriter()
        self._spread_writer = spread.SpreadWriter(ranks)

    def why_threads_fixed(self, counts: Sequence[int]) -> str | None:
        """None if a micro-batch comes out the same with each of these numbers of threads, and there is a choice."""
        if len(counts) < 2:
            return "there is one core"
        if self.why_not_shared is not None:
            return "prompts are not shared"
        return why_fixed(self._models, sorted({self._settings.pack_tokens, self._settings.max_tokens}), counts)

    def accumulate(self, microbatch: MicroBatch, parts_of_round: int = 0) -> None:
        """Forward and backward over the micro-batch; the gradient is added to what is there. `parts_of_round`: with
        sharded weights, the most parts in which a rank of this round computes its micro-batch."""
        groups, parts = microbatch.groups, 0
        if self.why_not_shared is None:
            parts = max(parts_of_round, num_parts(microbatch, self._settings.max_tokens))
        if parts:
            self._accumulate_in_parts(microbatch, parts)
        elif groups and self.why_not_shared is not None and not self._settings.shards:
            for part in plain_parts(groups, self._settings.max_tokens):
                layout = Layout.plain(part)
                self._backward(layout, self._models.logprobs(layout))
        elif groups:
            layout = self._models.layout(groups)
            self._backward(layout, self._models.logprobs(layout))
        elif self._settings.shards:
            layout = self._models.layout((_NOTHING,))
            self._backward(layout, self._models.logprobs(layout), counts=False)

    def _accumulate_in_parts(self, microbatch: MicroBatch, parts: int) -> None:
        """A group too large for one pass: the prompt once, then its completions part by part. A micro-batch that is not
        split, in a round in which others' are, is one part."""
        groups, max_tokens = microbatch.groups, self._settings.max_tokens
        is_split = num_parts(microbatch, max_tokens) > 0
        prompt_ids = groups[0].prompt_ids if is_split else _NOTHING.prompt_ids
        with self._models.split_prompt(prompt_ids) as prompt:
            done = 0
            for part in split_group(groups[0], max_tokens) if is_split else ():
                self._backward_part(part, prompt)
                done += 1
            if groups and not is_split:
                layout = self._models.layout(groups)
                self._backward(layout, self._models.logprobs(layout))
                done += 1
            for _ in range(parts - done):
                self._backward_part(structs.replace(_NOTHING, prompt_ids=prompt_ids), prompt, counts=False)

    def _backward_part(self, part: TrainGroup, prompt: TriPrompt, *, counts: bool = True) -> None:
        layout = Layout.completions_only(part)
        self._backward(layout, self._models.logprobs(layout, prompt), counts=counts)

    def _backward(self, layout: Layout, logprobs: Logprobs, *, counts: bool = True) -> None:
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
        if not counts:
            (0.0 * loss).backward()  # type: ignore[no-untyped-call]
            return
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
        gradients = self._take_gradients()
        for gradient in gradients.values():
            gradient /= divisor
        norm = self._clip(gradients)
        rate = learning_rate(self.num_updates, self._planned_updates, self._settings)
        self._sums = self._sums.over(self._ranks)
        finite = math.isfinite(norm) and math.isfinite(self._sums.loss)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._models.before_step()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)  # the memory is wanted again in a moment
        self.num_updates += 1
        self._models.at_start = False
        report = self._report(divisor, norm, rate, stepped=finite)
        self._sums = _Sums()
        return report

    def _take_gradients(self) -> dict[str, torch.Tensor]:
        """Of what this rank has, summed over ranks; where the optimizer looks for them."""
        gradients = {}
        for name, (parameter, leaf, _) in self._parameters.items():
            if parameter.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            elif leaf is not parameter:
                leaf.grad = local_part(parameter.grad)
            assert leaf.grad is not None
            assert leaf.data_ptr() == local_part(parameter).data_ptr(), (
                "the optimizer moves what the model computes with"
            )
            gradients[name] = leaf.grad
        self._ranks.sum_over_team([gradients[name] for name in gradients if name in self._models.partial])
        if not self._settings.shards:
            self._ranks.sum_over_teams(list(gradients.values()))
        return gradients

    def _clip(self, gradients: dict[str, torch.Tensor]) -> float:
        """Scale the gradients so that their norm is at most the limit. Returns the norm before that."""
        limit = self._settings.max_grad_norm
        if self._ranks.alone:
            return torch.nn.utils.clip_grad_norm_([each.leaf for each in self._parameters.values()], limit).item()
        rank, grid = self._ranks.rank, self._ranks.grid
        mine = [gradients[n] for n, each in self._parameters.items() if each.sharding.owned_by(rank, grid)]
        square = torch.stack([gradient.norm().double().square() for gradient in mine]).sum().item() if mine else 0.0
        norm = math.sqrt(self._ranks.gathered([square]).sum().item())
        for gradient in gradients.values():
            gradient *= min(1.0, limit / (norm + 1e-6))
        return norm

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

    def snapshot(self) -> tuple[int | None, int, str]:
        """The weights in sealed memory: (descriptor, size, digest); of several ranks, rank 0 has them and the others
        (None, 0, ""). Opens a period."""
        self._models.open_period()
        if self._ranks.alone:
            return self._writer.write((name, each.leaf) for name, each in self._parameters.items())
        return self._spread_writer.write(_spread(self._parameters)) or (None, 0, "")

    def snapshot_taken(self) -> None:
        """Make memory for the next period's, which costs several times the copy when it is new: now nobody waits."""
        if self.num_updates + self._updates_per_period < self._planned_updates:
            (self._writer if self._ranks.alone else self._spread_writer).make_ready()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this rank. Views: they change with the next step."""
        return rank_state(self._parameters, self._optimizer, self.num_updates, self._ranks.rank, self._ranks.grid)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks wrote it."""
        ranks = self._ranks
        self.num_updates = load_rank_state(self._parameters, self._optimizer, checkpoint, ranks.rank, ranks.grid)
        self._models.at_start = self.num_updates == 0

    def whole_model(self) -> torch.nn.Module | None:
        """The model in one piece, to be written in Hugging Face format; of several ranks, rank 0 gets it, in host
        memory."""
        if self._ranks.alone:
            policy: torch.nn.Module = self.model
            return policy
        writer = spread.SpreadWriter(self._ranks)
        written = writer.write(_spread(self._parameters))
        model = None
        if written is not None:
            model = load_into_host_memory(self._model_dir)
            add_adapter(model, self._lora, self._seed)
            mapped = snapshot.Mapped(written[0], written[1])
            with torch.no_grad():
                mapped.load_into(trained_parameters(model))
            mapped.close()
        writer.close()
        return model


def _spread(parameters: dict[str, Trained]) -> list[spread.Spread]:
    return [spread.Spread(name, each.leaf.detach(), each.sharding) for name, each in parameters.items()]


def model_snapshot(model_dir: str, lora: LoraSection, seed: int) -> tuple[int, int, str]:
    """The weights of a model as they are on the disk, in sealed memory: (descriptor, size, digest)."""
    model = load_into_host_memory(model_dir)
    add_adapter(model, lora, seed)
    return snapshot.write(trained_parameters(model).items())


def build_optimizer(parameters: Sequence[torch.nn.Parameter], settings: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone."""
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
