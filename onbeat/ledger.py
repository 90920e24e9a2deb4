"""What was trained, per (period, slot); and the guard that nothing is trained twice, stale, or not at all (R2).

One line of JSON per slot, in slot order, written when the period closes: prompt_id, outcome, and a digest of the
trained tokens and rewards. No times and no worker names: two runs that trained the same have equal ledgers, byte for
byte, however their groups arrived.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from onbeat.errors import MissingSlotsError, StaleRolloutError, TrainedTwiceError
from onbeat.types import Group

Outcome = Literal["trained", "elided", "replaced"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    period: int
    slot: int
    prompt_id: str
    outcome: Outcome
    digest: str


def digest(group: Group) -> str:
    """Of everything about the group that the gradient may depend on."""
    content = [
        (rollout.completion.sample, rollout.completion.token_ids, rollout.completion.sampler_logprobs, rollout.reward)
        for rollout in group.rollouts
    ]
    return hashlib.sha256(msgspec.msgpack.encode((group.prompt.token_ids, content))).hexdigest()[:32]


class Ledger:
    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._open: dict[int, Entry] = {}
        self._period: int | None = None

    def open(self, period: int) -> None:
        """Begin a period. The one before must have been closed."""
        if self._period is not None:
            raise MissingSlotsError(f"period {period} was opened before this one was closed", period=self._period)
        self._period = period
        self._open = {}

    def record(self, group: Group, outcome: Outcome) -> Entry:
        """The group leaves for the trainer (or is elided): the last check before it counts."""
        assert self._period is not None, "record() outside of a period"
        if group.slot in self._open:
            raise TrainedTwiceError("the slot was handed to the trainer before", period=self._period, slot=group.slot)
        for rollout in group.rollouts:
            if (completion := rollout.completion).version != self._period:
                raise StaleRolloutError(
                    f"sample {completion.sample} was sampled from version {completion.version}",
                    period=self._period,
                    slot=group.slot,
                )
        entry = Entry(
            period=self._period,
            slot=group.slot,
            prompt_id=group.prompt.prompt_id,
            outcome=outcome,
            digest=digest(group),
        )
        self._open[group.slot] = entry
        return entry

    def close(self, num_slots: int) -> list[Entry]:
        """End the period: every slot 0 … num_slots-1 must be there, and no other."""
        assert self._period is not None, "close() outside of a period"
        assert all(slot < num_slots for slot in self._open), "a slot was trained that was never sent"
        missing = sorted(set(range(num_slots)) - self._open.keys())
        if missing:
            raise MissingSlotsError(
                f"{len(missing)} of {num_slots} groups were never trained: slots {missing[:8]}",
                period=self._period,
                slot=missing[0],
            )
        entries = [self._open[slot] for slot in range(num_slots)]
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
        self._period = None
        return entries
