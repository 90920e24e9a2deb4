"""`onbeat check MODEL`: can this model be trusted here? Run it before a new architecture.

Compares the ways onbeat trains (groups that share their prompt, several in a pack whose prompts begin alike, a group
in parts, one longer than the model's window, one whose prompt is not copied) with the model's own forward and
autograd's own backward over every completion: log-probabilities and gradients, on random groups; or the plain form, if
the model cannot share prompts. Tests whether generation is batch-invariant, and times the shared against the plain
form. Takes the memory of the model and two gradients, twice that in float64.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.admission import positions
from onbeat.batch.layout import Layout
from onbeat.batch.pack import split_group
from onbeat.device import HOST, device, load_model, prepare_process, synchronize
from onbeat.errors import InputError
from onbeat.rollout.probe import probe_invariance
from onbeat.training.forward import completion_logprobs, share_prompts, split_prompt, why_not_shared
from onbeat.training.merged import LONG_PROMPT
from onbeat.types import TrainGroup

Way = Callable[[Any, list[TrainGroup]], torch.Tensor]
"""Forward and backward; → log-probabilities."""

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


@dataclass(frozen=True, slots=True)
class Gap:
    """Between one form and the model's own forward and backward."""

    form: str
    logprobs: float
    """The largest difference."""
    gradient: float
    """Norm of the difference over the norm of the gradient."""
    worst: str
    """The parameter with the largest share in it."""

    @property
    def agrees(self) -> bool:
        return self.logprobs <= LOGPROB_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE  # NaN does not

    def line(self) -> str:
        verdict = "" if self.agrees else f"  DISAGREES, most of all in {self.worst}"
        return f"  {self.form:30} log-probabilities {self.logprobs:.2e}  gradients {self.gradient:.2e}{verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    why_not_shared: str | None
    """Then it is the plain form that is compared."""
    gaps: tuple[Gap, ...]
    speedup: float | None
    """By sharing the prompt."""
    row_variance: str | None
    why_not_decoded: str | None = None
    """Then nothing is known of its rows."""

    @property
    def agrees(self) -> bool:
        return all(gap.agrees for gap in self.gaps)

    def lines(self) -> list[str]:
        found = []
        if self.why_not_shared is not None:
            found.append(f"shared prompt      no: {self.why_not_shared}; it is trained plain")
        logprobs, gradient = (largest(getattr(gap, name) for gap in self.gaps) for name in ("logprobs", "gradient"))
        found += [gap.line() for gap in self.gaps]
        found += [
            f"log-probabilities  largest difference {logprobs:.2e} (limit {LOGPROB_TOLERANCE:.0e})",
            f"gradients          {gradient:.2e} of the norm (limit {GRADIENT_TOLERANCE:.0e})",
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


def largest(values: Iterable[float]) -> float:
    """NaN, if one of them is."""
    return float(torch.tensor(list(values)).max())


def check_model(directory: str, say: Callable[[str], None]) -> CheckReport:
    prepare_process(0)
    model = load_model(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{type(model).__name__}, {parameters / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")
    own_attention = model.config._attn_implementation
    row_variance = why_not_decoded = None
    try:
        row_variance = probe_invariance(model).rows
    except (InputError, NotImplementedError) as error:
        why_not_decoded = str(error)
    model.set_attn_implementation(own_attention)
    reason = why_not_shared(model)
    if model._can_set_experts_implementation():
        say(
            "a mixture of experts is compared in float64, by the plain form of its experts: in float32 rounding "
            "decides now and then which expert it is"
        )
        model.set_experts_implementation("eager")  # the others know no float64
        model.double()
    rng, forms = random.Random(0), Forms(model)
    speedup = None
    if reason is None:
        speedup = compare_shared(forms, rng, say)
    else:
        compare_plain(forms, rng)
    return CheckReport(
        why_not_shared=reason,
        gaps=tuple(forms.gaps),
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


class Forms:
    """Runs some groups in the model's own form, then in others, and keeps how far each is from the model's own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gaps: list[Gap] = []
        self.seconds: list[tuple[float, float]] = []
        """Own, other."""
        self._own_attention = model.config._attn_implementation

    def compare(self, groups: list[TrainGroup], others: Mapping[str, Way]) -> None:
        logprobs, own_s = self.timed(own_logprobs, groups)
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        for form, way in others.items():
            found, other_s = self.timed(way, groups)
            self.gaps.append(self._gap(form, (found - logprobs).abs().max().item(), gradients))
            self.model.zero_grad(set_to_none=True)
            self.seconds.append((own_s, other_s))

    def timed(self, way: Way, groups: list[TrainGroup]) -> tuple[torch.Tensor, float]:
        if way in (shared_logprobs, split_logprobs):
            share_prompts(self.model)
        began = time.perf_counter()
        try:
            found = way(self.model, groups)
            synchronize()
            return found, time.perf_counter() - began
        finally:
            self.model.set_attn_implementation(self._own_attention)

    def _gap(self, form: str, logprobs: float, expected: Mapping[str, torch.Tensor | None]) -> Gap:
        away: dict[str, float] = {}
        total = 0.0
        for name, parameter in self.model.named_parameters():
            own, other = (gradient if gradient is not None else torch.zeros_like(parameter)
                          for gradient in (expected[name], parameter.grad))  # fmt: skip
            away[name] = (other - own).norm().item() ** 2
            total += own.norm().item() ** 2
        gradient = math.sqrt(sum(away.values()) / total) if total else math.nan
        worst = max(away, key=lambda name: math.inf if math.isnan(away[name]) else away[name])
        return Gap(form, logprobs, gradient, worst)


def compare_shared(forms: Forms, rng: random.Random, say: Callable[[str], None]) -> float:
    """Own time over shared time, of the groups alone."""
    config = forms.model.config.get_text_config()

    def group(prompt_length: int, prefix: tuple[int, ...] = ()) -> TrainGroup:
        prompt_ids = prefix + _tokens(rng, config.vocab_size, prompt_length)
        return random_group(rng, config.vocab_size, prompt_ids)

    prefix = _tokens(rng, config.vocab_size, PREFIX_TOKENS)
    alone = [[group(rng.randint(30, 90))] for _ in range(NUM_GROUPS)]
    together = [group(rng.randint(10, 30), prefix) for _ in range(NUM_GROUPS)]
    for way in (own_logprobs, shared_logprobs):  # warm up
        forms.timed(way, alone[0])
        forms.model.zero_grad(set_to_none=True)
    for number, groups in enumerate(alone):
        forms.compare(groups, {f"group {number}": shared_logprobs})
    speedup = sum(own for own, _ in forms.seconds) / sum(shared for _, shared in forms.seconds)
    forms.compare(alone[0], {"group 0 in parts": split_logprobs})
    forms.compare(together, {"pack with a common prefix": shared_logprobs})
    window = getattr(config, "sliding_window", None)
    if window and window + 8 <= LONGEST:
        forms.compare([group(window + 8)], {f"longer than the window of {window}": shared_logprobs})
    elif window:
        say(f"the window of {window} tokens is longer than any group tried here: what it does was not seen")
    most = positions(config.to_dict())
    if device() == HOST and (most is None or most >= LONG_PROMPT + MOST_TOKENS):
        ways = {"prompt not copied": shared_logprobs, "prompt not copied, in parts": split_logprobs}
        forms.compare([group(LONG_PROMPT)], ways)
    return speedup


def compare_plain(forms: Forms, rng: random.Random) -> None:
    """What is trained where prompts cannot be shared."""
    vocabulary = forms.model.config.get_text_config().vocab_size
    for number in range(NUM_GROUPS):
        group = random_group(rng, vocabulary, _tokens(rng, vocabulary, rng.randint(10, 60)))
        forms.compare([group], {f"group {number}, plain": plain_logprobs})


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
        logits = model(layout.tokens_S_L, use_cache=False, logits_to_keep=wanted).logits[:, -len(wanted) :]
        logprobs = torch.log_softmax(logits, dim=-1)
        rows = zip(logprobs, group.completion_ids, strict=True)
        mine = torch.cat([row[: len(ids)].gather(1, torch.tensor(ids)[:, None])[:, 0] for row, ids in rows])
        found.append(backward(mine, layout))
    return torch.cat(found)


def shared_logprobs(model: Any, groups: list[TrainGroup]) -> torch.Tensor:
    layout = Layout.shared(groups)
    return backward(completion_logprobs(model, layout, 1.0)[0], layout)


def split_logprobs(model: Any, groups: list[TrainGroup]) -> torch.Tensor:
    (group,) = groups
    found = []
    with split_prompt(model, group.prompt_ids) as prompt:
        for part in split_group(group, PART_TOKENS):
            layout = Layout.completions_only(part)
            found.append(backward(completion_logprobs(model, layout, 1.0, prompt)[0], layout))
    return torch.cat(found[::-1])
