"""The pool's generators: what each owes, and who may get work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onbeat.protocols import Generator
from onbeat.types import GroupKey, GroupRequest


@dataclass(slots=True)
class Member:
    generator: Generator
    free: int
    """Rows not promised to any group; below 0, so many are promised that are not free yet."""
    serves: int | None = None
    """The verified version it may serve."""
    leaves: bool = False
    """It gets no more work."""
    num_tokens: int = 0
    """It said it has sampled."""
    num_completed: int = 0
    """Samples."""
    silent_s: float = 0.0
    """Since it was heard of last, while it owed something."""
    outstanding: dict[GroupKey, set[int]] = field(default_factory=dict)
    began_s: dict[GroupKey, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.generator.name

    @property
    def state(self) -> str:
        if self.serves is None:
            return "has no weights yet"
        sequences = sum(map(len, self.outstanding.values()))
        doing = f"{sequences} sequences of {len(self.outstanding)} groups" if sequences else "idle"
        if self.leaves:
            doing += ", leaving"
        return f"{doing}, version {self.serves}, {self.num_tokens} tokens so far"


class Openings:
    """Who may get work, by how many rows they have free: nobody is asked in vain."""

    def __init__(self) -> None:
        self._listed: dict[str, int] = {}
        self._by_free: dict[int, dict[str, Member]] = {}
        self._idle: dict[str, Member] = {}

    def update(self, member: Member) -> None:
        """After anything about it has changed."""
        if (listed := self._listed.pop(member.name, None)) is not None:
            del self._by_free[listed][member.name]
            if not self._by_free[listed]:
                del self._by_free[listed]
        self._idle.pop(member.name, None)
        if member.serves is None or member.leaves:
            return
        self._listed[member.name] = member.free
        self._by_free.setdefault(member.free, {})[member.name] = member
        if not member.outstanding:
            self._idle[member.name] = member

    def for_request(self, request: GroupRequest, *, ahead: bool) -> Iterator[Member]:
        """Who could take it now, the most rows first; `ahead`: and who has nothing that waits for its rows."""
        rows = 0 if ahead else len(request.samples)
        for free in sorted(self._by_free, reverse=True):
            if free < rows:
                return
            yield from _able(self._by_free[free], request)

    def idle(self, request: GroupRequest) -> Iterator[Member]:
        """Who could take it now, and has nothing to do."""
        return (member for member in _able(self._idle, request) if member.free >= len(request.samples))


def _able(members: dict[str, Member], request: GroupRequest) -> Iterator[Member]:
    for member in members.values():
        if member.serves == request.period and member.generator.why_never(request) is None:
            yield member
