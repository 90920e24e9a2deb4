"""The nouns of a run: immutable values that cross every room and every process.

One period, one group, with G = 2:

    Prompt(prompt_id="sum/17", token_ids=(5, 9, 2), source="3+4=", columns={"answer": "7"})
    GroupRequest(stream="train", period=12, slot=3, samples=(0, 1), token_ids=(5, 9, 2), ...)
    Completion(stream="train", period=12, slot=3, sample=0, version=12, token_ids=(7, 1), ...)
    Rollout(completion=…, text="7", reward=1.0, rewards=(1.0,), problem=None)
    Group(slot=3, prompt=…, rollouts=(Rollout(sample 0), Rollout(sample 1)))

Everything here is a msgspec struct, so what the controller holds is what the wire carries. No torch.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Stream = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]
Messages = list[dict[str, Any]]
"""A chat: `[{"role": …, "content": …}, …]`."""


GroupKey = tuple[Stream, int, int]
"""(stream, period, slot): the name of a group in flight."""


class Prompt(Struct, frozen=True, kw_only=True):
    """One row of a dataset, ready to be generated from."""

    prompt_id: str
    """Stable over runs and machines: names the row, not its place in the shuffle."""
    token_ids: tuple[int, ...]
    source: str | Messages
    """The prompt as the dataset gave it: reward functions see this form."""
    columns: dict[str, Any]
    """The row's other columns, handed to reward functions by name."""


class Sampling(Struct, frozen=True, kw_only=True):
    """The distribution to sample from. The trainer uses the same temperature."""

    temperature: float
    """0 is greedy: the most likely token, the first of them if several are."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    stop: tuple[str, ...] = ()
    """A completion also ends with the token that completes one of these, and keeps it."""


class GroupRequest(Struct, frozen=True, kw_only=True):
    """Samples wanted of one slot. `samples` is the whole group, or what a lost worker left of it."""

    stream: Stream
    period: int
    slot: int
    samples: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: Sampling

    @property
    def key(self) -> GroupKey:
        return self.stream, self.period, self.slot


class Completion(Struct, frozen=True, kw_only=True):
    """One sampled answer. (stream, period, slot, sample) repeats the request; `version` is the generator's word."""

    stream: Stream
    period: int
    slot: int
    sample: int
    version: int
    """Of the weights that every token was sampled from, stamped by the generator."""
    token_ids: tuple[int, ...]
    """The stop token included, if there was one."""
    sampler_logprobs: tuple[float, ...]
    """One per token, of the distribution sampled from (temperature applied)."""
    finish_reason: FinishReason

    @property
    def key(self) -> GroupKey:
        return self.stream, self.period, self.slot


class Rollout(Struct, frozen=True, kw_only=True):
    """A completion with its reward, or with the reason why it has none."""

    completion: Completion
    text: str
    reward: float | None
    """None: unscorable. Such a rollout has no loss and is in no baseline and no denominator."""
    rewards: tuple[float | None, ...]
    """One per reward function; None where it does not apply or failed."""
    problem: str | None = None
    """Why the rollout is unscorable."""

    @property
    def scorable(self) -> bool:
        return self.reward is not None


class Group(Struct, frozen=True, kw_only=True):
    """The G rollouts of one slot, in order of their samples."""

    slot: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]


class TrainGroup(Struct, frozen=True, kw_only=True):
    """What the trainer needs of a group: its scorable completions (C of them, ragged) and their advantages."""

    slot: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[tuple[int, ...], ...]
    sampler_logprobs: tuple[tuple[float, ...], ...]
    advantages: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.completion_ids))


class UpdateTotals(Struct, frozen=True, kw_only=True):
    """The denominators of one optimizer step: everything that counted, trained or elided."""

    num_groups: int
    num_sequences: int
    """Scorable completions."""
    num_tokens: int
    """Tokens of scorable completions."""


class MicroBatch(Struct, frozen=True, kw_only=True):
    """What one forward/backward sees on one rank: whole groups, possibly none."""

    period: int
    update: int
    """The optimizer step within the period."""
    index: int
    """Counts the micro-batches of the update, over all ranks."""
    rank: int
    groups: tuple[TrainGroup, ...]
    closes: UpdateTotals | None = None
    """Set on the last micro-batch of an update: step now, and divide by these."""
