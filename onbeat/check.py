"""`onbeat check MODEL`: can this model be trusted here? Run it before a new architecture.

Compares the ways onbeat trains (groups that share their prompt, several in a pack whose prompts begin alike, a group
in parts, one longer than the model's window, one whose prompt is not copied) with the model's own forward and
autograd's own backward over every completion: log-probabilities and gradients, on random groups; or the plain form, if
the model cannot share prompts. Tests whether generation is batch-invariant, and times the shared against the plain
form.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.admission import positions
from onbeat.batch.layout import Layout
from onbeat.batch.pack import split_group
from onbeat.device import load_model
from onbeat.errors import InputError
from onbeat.rollout.engine import probe_invariance
from onbeat.training.forward import completion_logprobs, share_prompts, split_prompt, why_not_shared
from onbeat.training.merged import LONG_PROMPT
from onbeat.types import TrainGroup

LOGPROB_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-4
"""Of the gradient's norm, in float32."""
NUM_GROUPS = 3
MOST_TOKENS = 40
"""Of a completion."""
PREFIX_TOKENS = 20
"""With which the prompts of the pack begin."""
PART_TOKENS = 60
"""Of a group computed in parts."""
LONGEST = 2048
"""Tokens of a prompt: no window is tried that is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    why_not_shared: str | None
    """Then it is the plain form that is compared."""
    logprob_gap: float
    """Largest difference of a log-probability from the model's own."""
    gradient_gap: float
    """Norm of the difference over the norm of the gradient, of the worst group."""
    speedup: float | None
    """By sharing the prompt."""
    row_variance: str | None
    why_not_decoded: str | None = None
    """Then nothing is known of its rows."""

    @property
    def agrees(self) -> bool:
        return self.logprob_gap <= LOGPROB_TOLERANCE and self.gradient_gap <= GRADIENT_TOLERANCE

    def lines(self) -> list[str]:
        found = []
        if self.why_not_shared is not None:
            found.append(f"shared prompt      no: {self.why_not_shared}; it is trained plain")
        found += [
            f"log-probabilities  largest difference {self.logprob_gap:.2e} (limit {LOGPROB_TOLERANCE:.0e})",
            f"gradients          {self.gradient_gap:.2e} of the norm (limit {GRADIENT_TOLERANCE:.0e})",
        ]
        if self.speedup is not None:
            found.append(f"speed-up           {self.speedup:.2f} by sharing the prompt, on these groups")
        if self.why_not_decoded is not None:
            found.append(f"generation         not by the embedded generator: {self.why_not_decoded}")
        else:
            invariant = "yes: every bit is the same, alone and together"
            found.append(f"batch invariance   {invariant if self.row_variance is None else 'no: ' + self.row_variance}")
        found.append("agrees" if self.agrees else "DISAGREES: do not train this model with onbeat")
        return found


def check_model(directory: str, say: Callable[[str], None]) -> CheckReport:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load_model(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{type(model).__name__}, {parameters / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")
    reason = why_not_shared(model)
    if reason is None:
        logprob_gap, gradient_gap, speedup = compare_forms(model, random.Random(0), say)
    else:
        logprob_gap, gradient_gap, speedup = *compare_plain(model, random.Random(0)), None
    row_variance = why_not_decoded = None
    try:
        row_variance = probe_invariance(model).rows
    except (InputError, NotImplementedError) as error:
        why_not_decoded = str(error)
    return CheckReport(
        why_not_shared=reason,
        logprob_gap=logprob_gap,
        gradient_gap=gradient_gap,
        speedup=speedup,
        row_variance=row_variance,
        why_not_decoded=why_not_decoded,
    )


def random_group(rng: random.Random, vocabulary: int, prompt_ids: tuple[int, ...]) -> TrainGroup:
    lengths = [1, *sorted(rng.sample(range(2, MOST_TOKENS + 1), 7))]  # the order of the shared form, whole and in parts
    completions = tuple(_tokens(rng, vocabulary, length) for length in lengths)
    return TrainGroup(
        slot=0,
        prompt_ids=prompt_ids,
        completion_ids=completions,
        sampler_logprobs=tuple((0.0,) * len(completion) for completion in completions),
        advantages=tuple(rng.gauss(0, 1) for _ in completions),
    )


def _tokens(rng: random.Random, vocabulary: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary) for _ in range(count))


def compare_forms(model: Any, rng: random.Random, say: Callable[[str], None]) -> tuple[float, float, float]:
    """(largest log-probability gap, worst gradient gap, plain time over shared time)."""
    own_attention = model.config._attn_implementation
    config = model.config.get_text_config()

    def group(prompt_length: int, prefix: tuple[int, ...] = ()) -> TrainGroup:
        prompt_ids = prefix + _tokens(rng, config.vocab_size, prompt_length)
        return random_group(rng, config.vocab_size, prompt_ids)

    prefix = _tokens(rng, config.vocab_size, PREFIX_TOKENS)
    alone = [[group(rng.randint(30, 90))] for _ in range(NUM_GROUPS)]
    together = [group(rng.randint(10, 30), prefix) for _ in range(NUM_GROUPS)]
    window = getattr(config, "sliding_window", None)
    beyond = [group(window + 8)] if window and window + 8 <= LONGEST else []
    if window and not beyond:
        say(f"the window of {window} tokens is longer than any group tried here: what it does was not seen")

    most = positions(config.to_dict())
    long = [group(LONG_PROMPT)] if most is None or most >= LONG_PROMPT + MOST_TOKENS else []

    def run_plain(groups: list[TrainGroup]) -> FormRun:
        model.set_attn_implementation(own_attention)
        return measured(model, lambda: own_logprobs(model, groups))

    def run_shared(groups: list[TrainGroup]) -> FormRun:
        share_prompts(model)
        return measured(model, lambda: shared_logprobs(model, groups))

    def run_in_parts(groups: list[TrainGroup]) -> FormRun:
        share_prompts(model)
        return measured(model, lambda: split_logprobs(model, groups[0]))

    run_plain(alone[0])  # warm up
    run_shared(alone[0])
    pairs = [(run_plain(groups), run_shared(groups)) for groups in alone]
    speedup = sum(plain.seconds for plain, _ in pairs) / sum(shared.seconds for _, shared in pairs)
    pairs += [(run_plain(groups), run_shared(groups)) for groups in (together, beyond) if groups]
    pairs.append((pairs[0][0], run_in_parts(alone[0])))
    if long:
        plain = run_plain(long)
        pairs += [(plain, run_shared(long)), (plain, run_in_parts(long))]
    model.set_attn_implementation(own_attention)
    return *_gaps(pairs), speedup


def compare_plain(model: Any, rng: random.Random) -> tuple[float, float]:
    """(largest log-probability gap, worst gradient gap) of what is trained where prompts cannot be shared."""
    vocabulary = model.config.get_text_config().vocab_size
    groups = [random_group(rng, vocabulary, _tokens(rng, vocabulary, rng.randint(10, 60))) for _ in range(NUM_GROUPS)]
    ways = [functools.partial(way, model, [group]) for group in groups for way in (own_logprobs, plain_logprobs)]
    runs = [measured(model, way) for way in ways]
    return _gaps(list(zip(runs[::2], runs[1::2], strict=True)))


def _gaps(pairs: list[tuple[FormRun, FormRun]]) -> tuple[float, float]:
    return (
        _largest((own.logprobs - other.logprobs).abs().max().item() for own, other in pairs),
        _largest(((own.gradient - other.gradient).norm() / own.gradient.norm()).item() for own, other in pairs),
    )


def _largest(gaps: Iterable[float]) -> float:
    """NaN, if one of them is."""
    return float(torch.tensor(list(gaps)).max())


@dataclass(frozen=True, slots=True)
class FormRun:
    """Forwards and backwards over some groups."""

    logprobs: torch.Tensor
    gradient: torch.Tensor
    seconds: float


def measured(model: Any, run: Callable[[], torch.Tensor]) -> FormRun:
    began = time.perf_counter()
    logprobs = run()
    seconds = time.perf_counter() - began
    gradient = torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()]
    )
    model.zero_grad(set_to_none=True)
    return FormRun(logprobs, gradient, seconds)


def backward(logprobs: torch.Tensor, layout: Layout) -> torch.Tensor:
    (layout.advantage_T * logprobs / layout.length_T).sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach()


def plain_logprobs(model: Any, groups: list[TrainGroup]) -> torch.Tensor:
    layout = Layout.plain(groups)
    return backward(completion_logprobs(model, layout, 1.0)[0], layout)


def own_logprobs(model: Any, groups: list[TrainGroup]) -> torch.Tensor:
    """The model's own forward over a group's completions, each with its prompt; nothing of onbeat's but the padding."""
    found = []
    for group in groups:
        layout = Layout.plain([group])
        wanted = torch.arange(len(group.prompt_ids) - 1, layout.tokens_S_L.shape[1])
        logits = model(layout.tokens_S_L, use_cache=False, logits_to_keep=wanted).logits[:, -len(wanted) :].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        rows = zip(logprobs, group.completion_ids, strict=True)
        mine = torch.cat([row[: len(ids)].gather(1, torch.tensor(ids)[:, None])[:, 0] for row, ids in rows])
        found.append(backward(mine, layout))
    return torch.cat(found)


def shared_logprobs(model: Any, groups: list[TrainGroup]) -> torch.Tensor:
    layout = Layout.shared(groups)
    return backward(completion_logprobs(model, layout, 1.0)[0], layout)


def split_logprobs(model: Any, group: TrainGroup) -> torch.Tensor:
    found = []
    with split_prompt(model, group.prompt_ids) as prompt:
        for part in split_group(group, PART_TOKENS):
            layout = Layout.completions_only(part)
            found.append(backward(completion_logprobs(model, layout, 1.0, prompt)[0], layout))
    return torch.cat(found[::-1])
