"""Groups into micro-batches. A function of slots and lengths alone, never of time or arrival (R1).

A pack is closed when another group like its last one would take it over `max_tokens`, or when the next one does; a
group larger than that goes alone. Closing early matters: a pack that waits for one more group is a trainer that waits.

Tokens are counted as if every group had its prompt to itself; what prompts of a pack begin with may be computed once.

A group larger than one pass may be (trainer.max_tokens) is split: its prompt once, then its completions in parts. Where
prompts cannot be shared, the completions alone, each with its prompt (`plain_parts`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from onbeat.types import MicroBatch, TrainGroup


class Packer:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._open: list[TrainGroup] = []
        self._num_tokens = 0

    def add(self, group: TrainGroup) -> list[tuple[TrainGroup, ...]]:
        """Take the next group; return the packs that are now closed (none, one or two)."""
        closed = []
        if self._open and self._num_tokens + group.num_tokens > self._max_tokens:
            closed.append(self.flush())
        self._open.append(group)
        self._num_tokens += group.num_tokens
        if self._num_tokens + group.num_tokens > self._max_tokens:
            closed.append(self.flush())
        return closed

    def flush(self) -> tuple[TrainGroup, ...]:
        """What is open, possibly nothing; the next pack starts empty."""
        pack = tuple(self._open)
        self._open, self._num_tokens = [], 0
        return pack


def num_parts(microbatch: MicroBatch, max_tokens: int) -> int:
    """In how many parts a trainer computes the micro-batch; 0: it is not split."""
    groups = microbatch.groups
    if len(groups) != 1 or groups[0].num_tokens <= max_tokens:
        return 0
    return len(split_group(groups[0], max_tokens))


def split_group(group: TrainGroup, max_tokens: int) -> list[TrainGroup]:
    """The group's completions in parts that take, with the prompt, at most `max_tokens` tokens; without it half as
    many, if it is longer than that. As few as there can be in their order, the largest of them as small as it can be
    then. A longer completion goes alone.

    Longest first, so that equal lengths stay together; a function of the group alone (R1).
    """
    order = _longest_first(group)
    lengths = [len(group.completion_ids[index]) for index in order]
    room = max(max_tokens - len(group.prompt_ids), max_tokens // 2)
    fewest = len(_filled(lengths, room))
    smallest = bisect_left(range(room), -fewest, key=lambda limit: -len(_filled(lengths, limit)))
    parts, begin = [], 0
    for count in _filled(lengths, smallest):
        parts.append(_part(group, order[begin : begin + count]))
        begin += count
    return parts


def _filled(lengths: Sequence[int], limit: int) -> list[int]:
    """How many go into each part, if every part is filled as far as it goes."""
    counts: list[int] = []
    room = 0
    for length in lengths:
        if not counts or length > room:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= length
    return counts


def plain_parts(groups: tuple[TrainGroup, ...], max_tokens: int) -> list[tuple[TrainGroup, ...]]:
    """What a trainer that cannot share prompts computes in one pass each: all at once, or, if that is more than
    `max_tokens` tokens with prompts and padding, the completions of each group in batches of at most as many."""
    longest = max(len(group.prompt_ids) + max(map(len, group.completion_ids)) for group in groups)
    if longest * sum(len(group.completion_ids) for group in groups) <= max_tokens:
        return [groups]
    parts: list[tuple[TrainGroup, ...]] = []
    for group in groups:
        order = _longest_first(group)
        while order:
            count = max(1, max_tokens // (len(group.prompt_ids) + len(group.completion_ids[order[0]])))
            parts.append((_part(group, order[:count]),))
            order = order[count:]
    return parts


def _longest_first(group: TrainGroup) -> list[int]:
    return sorted(range(len(group.completion_ids)), key=lambda index: -len(group.completion_ids[index]))


def _part(group: TrainGroup, completions: list[int]) -> TrainGroup:
    return TrainGroup(
        slot=group.slot,
        prompt_ids=group.prompt_ids,
        completion_ids=tuple(group.completion_ids[index] for index in completions),
        sampler_logprobs=tuple(group.sampler_logprobs[index] for index in completions),
        advantages=tuple(group.advantages[index] for index in completions),
    )
