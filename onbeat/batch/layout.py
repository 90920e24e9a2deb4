"""A micro-batch as tensors.

Axes: S sequences of L tokens go through the model; T completion tokens, of all groups in a row, are trained on.

    plain    S = completions, each with its own copy of the prompt, padded on the right (causal: no mask needed)
    shared   S = 1: for each group [prompt | completion | completion | …], no padding anywhere. Every completion sees
             the prompt and itself, and its positions go on from the prompt's end. The prompt is computed once; so is
             what all prompts of a pack begin with (a system message): [prefix | rest of prompt | completion …]

In both, the prediction of a completion's first token stands at the prompt's last position. In the shared form the
completions of a group stand in order of their length, so that those of similar length are one `Block`: for attention
alone it is seen as [C, R], a plain view if all are of one length, else with a few tokens repeated at the ends.

A group too large for one pass is split: first its prompt by itself (`prompt_only`), then its completions in parts
(`completions_only`), which see the prompt through keys and values kept from the first pass (training/attention.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onbeat.types import TrainGroup

MIN_PREFIX = 8
"""Tokens: fewer are not worth a step of their own."""
PAIRS_PER_TOKEN = 6000
"""A token's way through a layer, in pairs of query and key: of a prompt without prefix attention computes half of all
pairs, of one with a prefix all of its own. So it is in SmolLM2-135M; in a larger model a token is worth more pairs."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """C completions of similar lengths, shortest first, at `start` of the sequence; R tokens has the longest."""

    start: int
    lengths: tuple[int, ...]
    padded_CR: torch.Tensor | None
    """Which token of the block stands where in [C, R], row after row; a place after a completion's end repeats its last
    token. None if all are of one length: then the block is a view."""
    unpadded_T: torch.Tensor | None
    """Where each token of the block stands in [C, R]."""

    @classmethod
    def of(cls, start: int, lengths: tuple[int, ...]) -> Block:
        longest = lengths[-1]
        if lengths[0] == longest:
            return cls(start, lengths, None, None)
        starts = [0, *itertools.accumulate(lengths)]
        padded = [s + min(at, length - 1) for s, length in zip(starts, lengths, strict=False) for at in range(longest)]
        unpadded = [row * longest + at for row, length in enumerate(lengths) for at in range(length)]
        return cls(start, lengths, torch.tensor(padded), torch.tensor(unpadded))

    @property
    def num_completions(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def end(self) -> int:
        return self.start + sum(self.lengths)

    def as_batch(self, rows: torch.Tensor) -> torch.Tensor:
        """Its rows, [1, heads, tokens, d], as [C, heads, R, d]."""
        mine = rows.squeeze(0).transpose(0, 1)
        if self.padded_CR is not None:
            mine = mine.index_select(0, self.padded_CR)
        return mine.view(self.num_completions, self.longest, *mine.shape[1:]).transpose(1, 2)

    def as_rows(self, batch: torch.Tensor) -> torch.Tensor:
        """Back: [1, tokens, heads, d]. What stands at padded places is dropped: nothing flows back to it."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        if self.unpadded_T is not None:
            rows = rows.index_select(0, self.unpadded_T)
        return rows[None]


@dataclass(frozen=True, slots=True)
class Segment:
    """One group in the shared sequence: its prompt from the prefix on, and its completions."""

    own_prompt_length: int
    """Tokens of its prompt after the prefix, at least one; 0 if its prompt was computed before."""
    prompt_length: int
    blocks: tuple[Block, ...]

    @property
    def lengths(self) -> list[int]:
        """Of its parts as they stand in the sequence: the prompt, if it is there, then all completions."""
        prompt = [self.own_prompt_length] if self.own_prompt_length else []
        return [*prompt, sum(block.end - block.start for block in self.blocks)] if self.blocks else prompt

    @property
    def longest(self) -> int:
        """Tokens of its longest completion."""
        return max(block.longest for block in self.blocks)

    def by_block(self, *tensors: torch.Tensor) -> list[tuple[Block, tuple[torch.Tensor, ...]]]:
        """Each block with its rows of the tensors, which are [1, heads, tokens of all completions, d]."""
        lengths = [block.end - block.start for block in self.blocks]
        rows = zip(*(torch.split(tensor, lengths, dim=2) for tensor in tensors), strict=True)
        return list(zip(self.blocks, rows, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    tokens_S_L: torch.Tensor
    positions_S_L: torch.Tensor
    segments: tuple[Segment, ...] | None
    """Of the shared form; None: plain causal sequences."""
    prefix_length: int
    """Tokens at the sequence's beginning with which the prompts of all its groups begin."""
    prediction_T: torch.Tensor
    """Where the token's prediction stands: an index into the S·L rows; with `completions_only`, 0 is the prompt's last
    position and the rows count from 1."""
    target_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    advantage_T: torch.Tensor
    length_T: torch.Tensor
    """Tokens of the completion it belongs to."""
    sequence_T: torch.Tensor
    """Which completion that is: 0, 1, 2 …"""

    @classmethod
    def plain(cls, groups: Sequence[TrainGroup]) -> Layout:
        rows = [_Row(group, index) for group in groups for index in range(len(group.completion_ids))]
        longest = max(row.prompt_length + row.length for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            tokens[number, : row.prompt_length + row.length] = torch.tensor(row.group.prompt_ids + row.token_ids)
        starts = [number * longest + row.prompt_length for number, row in enumerate(rows)]
        predictions = [torch.arange(start - 1, start - 1 + row.length) for start, row in zip(starts, rows, strict=True)]
        positions = torch.arange(longest).expand(len(rows), -1)
        return cls._of(tokens, positions, None, rows, predictions)

    @classmethod
    def shared(cls, groups: Sequence[TrainGroup]) -> Layout:
        prefix = _prefix_length(groups)
        tokens = list(groups[0].prompt_ids[:prefix])
        positions = list(range(prefix))
        segments, rows, predictions = [], [], []
        for group in groups:
            prompt_length = len(group.prompt_ids)
            tokens += group.prompt_ids[prefix:]
            positions += range(prefix, prompt_length)
            last = torch.tensor([len(tokens) - 1])
            mine = _by_length(group)
            starts = _append(tokens, positions, mine)
            segments.append(Segment(prompt_length - prefix, prompt_length, _blocks(mine, starts)))
            rows += mine
            predictions += [
                torch.cat([last, torch.arange(start, start + row.length - 1)])
                for start, row in zip(starts, mine, strict=True)
            ]
        return cls._of(torch.tensor([tokens]), torch.tensor([positions]), tuple(segments), rows, predictions, prefix)

    @classmethod
    def prompt_only(cls, prompt_ids: Sequence[int]) -> Layout:
        """The prompt of a split group. Nothing is predicted here: the first tokens belong to the parts."""
        segments = (Segment(len(prompt_ids), len(prompt_ids), ()),)
        return cls._of(torch.tensor([prompt_ids]), torch.arange(len(prompt_ids))[None], segments, [], [])

    @classmethod
    def completions_only(cls, part: TrainGroup) -> Layout:
        """Completions of a split group whose prompt has been computed."""
        rows = _by_length(part)
        tokens: list[int] = []
        positions: list[int] = []
        starts = _append(tokens, positions, rows)
        segments = (Segment(0, len(part.prompt_ids), _blocks(rows, starts)),)
        predictions = [
            torch.cat([torch.tensor([0]), torch.arange(start + 1, start + row.length)])
            for start, row in zip(starts, rows, strict=True)
        ]
        return cls._of(torch.tensor([tokens]), torch.tensor([positions]), segments, rows, predictions)

    @classmethod
    def _of(
        cls,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: tuple[Segment, ...] | None,
        rows: list[_Row],
        predictions: list[torch.Tensor],
        prefix_length: int = 0,
    ) -> Layout:
        lengths = torch.tensor([row.length for row in rows], dtype=torch.long)
        advantages = torch.tensor([row.advantage for row in rows])
        logprobs = [logprob for row in rows for logprob in row.sampler_logprobs]
        return cls(
            tokens_S_L=tokens,
            positions_S_L=positions,
            segments=segments,
            prefix_length=prefix_length,
            prediction_T=torch.cat(predictions) if predictions else torch.zeros(0, dtype=torch.long),
            target_T=torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.long),
            sampler_logprobs_T=torch.tensor(logprobs, dtype=torch.float32),
            advantage_T=advantages.repeat_interleave(lengths),
            length_T=lengths.repeat_interleave(lengths),
            sequence_T=torch.arange(len(rows)).repeat_interleave(lengths),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One completion of a group."""

    group: TrainGroup
    index: int

    @property
    def prompt_length(self) -> int:
        return len(self.group.prompt_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.group.completion_ids[self.index]

    @property
    def sampler_logprobs(self) -> tuple[float, ...]:
        return self.group.sampler_logprobs[self.index]

    @property
    def advantage(self) -> float:
        return self.group.advantages[self.index]

    @property
    def length(self) -> int:
        return len(self.token_ids)


def _prefix_length(groups: Sequence[TrainGroup]) -> int:
    """With how many tokens the prompts of all groups begin alike; every prompt keeps one of its own. 0 if computing
    them once gains nothing."""
    prompts = [group.prompt_ids for group in groups]
    if len(prompts) == 1:
        return 0
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    length = min(sum(1 for _ in alike), *(len(prompt) - 1 for prompt in prompts))
    saved = PAIRS_PER_TOKEN * (len(prompts) - 1) * length
    pays = length >= MIN_PREFIX and saved >= sum((len(prompt) - length) ** 2 for prompt in prompts)
    return length if pays else 0


def _by_length(group: TrainGroup) -> list[_Row]:
    return sorted((_Row(group, index) for index in range(len(group.completion_ids))), key=lambda row: row.length)


def _append(tokens: list[int], positions: list[int], rows: list[_Row]) -> list[int]:
    """Put the completions at the end of the sequence; where each of them starts."""
    starts = []
    for row in rows:
        starts.append(len(tokens))
        tokens += row.token_ids
        positions += range(row.prompt_length, row.prompt_length + row.length)
    return starts


def _blocks(rows: list[_Row], starts: list[int]) -> tuple[Block, ...]:
    """Completions, shortest first, in blocks in which attention pads little: a few tokens, or a quarter."""
    blocks: list[Block] = []
    lengths: list[int] = []
    for row in rows:
        if lengths and row.length > max(lengths[0] + 8, lengths[0] * 5 // 4):
            blocks.append(Block.of(starts[0], tuple(lengths)))
            starts, lengths = starts[len(lengths) :], []
        lengths.append(row.length)
    return (*blocks, Block.of(starts[0], tuple(lengths)))
