"""The pool's generators: what each owes, and who may get work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onbeat.admission import cache_tokens, needs
from onbeat.protocols import Generator
from onbeat.types import GroupKey, GroupRequest


@dataclass(slots=True)
class Member:
    generator: Generator
    free: int
    """Rows not promised to any group; below 0, so many are promised that are not free yet."""
    free_cache: int
    """Tokens, in the same way."""
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
    _lengths: dict[GroupKey, tuple[int, int]] = field(default_factory=dict)
    """Of a group's prompt, and of a sample at its longest."""

    @classmethod
    def of(cls, generator: Generator) -> Member:
        return cls(generator, free=generator.capacity, free_cache=generator.cache_tokens)

    def owes(self, request: GroupRequest, now_s: float) -> None:
        """From now on, beside what it owed of the group before."""
        key = request.key
        if not self.outstanding:
            self.silent_s = 0.0
        self._lengths[key] = (len(request.token_ids), request.sampling.max_new_tokens)
        self._change(key, self.outstanding.get(key, set()) | set(request.samples))
        self.began_s.setdefault(key, now_s)

    def delivered(self, key: GroupKey, sample: int) -> bool:
        """Whether it owed the sample."""
        if sample not in self.outstanding.get(key, ()):
            return False
        self._change(key, self.outstanding[key] - {sample})
        self.num_completed += 1
        return True

    def forgive(self, key: GroupKey) -> None:
        """What it still owes of the group."""
        self._change(key, set())

    def _change(self, key: GroupKey, samples: set[int]) -> None:
        before = self.outstanding.pop(key, set())
        self.free += len(before) - len(samples)
        self.free_cache += self._cache(key, before) - self._cache(key, samples)
        if samples:
            self.outstanding[key] = samples
        else:
            self._lengths.pop(key, None)

    def _cache(self, key: GroupKey, samples: set[int]) -> int:
        if not samples:
            return 0
        prompt_length, longest = self._lengths[key]
        return cache_tokens(prompt_length, len(samples), longest)

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
    """Who may get work, by how many rows they have free: nobody without is asked."""

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

    def for_request(self, request: GroupRequest) -> Iterator[Member]:
        """Who could begin it now, the most rows first."""
        return self._with(len(request.samples), needs(request), request)

    def ahead(self, request: GroupRequest) -> Iterator[Member]:
        """Who has nothing yet that waits for rows or cache."""
        return self._with(0, 0, request)

    def _with(self, rows: int, cache: int, request: GroupRequest) -> Iterator[Member]:
        for free in sorted(self._by_free, reverse=True):
            if free < rows:
                return
            yield from _able(self._by_free[free], request, cache)

    def idle(self, request: GroupRequest) -> Iterator[Member]:
        """Who could take it now, and has nothing to do."""
        return (member for member in _able(self._idle, request, 0) if member.free >= len(request.samples))


def _able(members: dict[str, Member], request: GroupRequest, cache: int) -> Iterator[Member]:
    for member in members.values():
        serves = member.serves == request.period and member.free_cache >= cache
        if serves and member.generator.why_never(request) is None:
            yield member
