"""The pool: groups go to whichever generator has room, in slot order, and come back as they complete.

              submit                         request (whole group)
    Harvest ─────────▶ waiting (heap) ──dispatch──▶ Generator (capacity rows)
       ▲                    ▲                            │
       │                    └── missing samples ◀── lost │ completed (one per sample)
       └── a whole group ◀── dedupe, version check ◀─────┘

All of it is plain state on one asyncio loop: no task and no lock of its own. Every event (submit, completed, lost,
a generator serving a new version) ends in `_dispatch`, which hands out what now fits. What an event costs does not grow
with the number of generators: who has room is kept by rows free (members.py), who works at a group with the group. (It
does where long completions fill caches before rows: who has rows left is asked for cache.)

Who waits for whom: a harvest's reader waits for groups; nobody else waits. What bounds the queues: `waiting` by the
prompts of the open periods; a generator's inbox by its rows, its cache and one group: a group is sent when the rows and
the cache it may need are free, or, while there is plenty for everybody, one ahead of that, so that rows are not empty
for the time of a message.
Strictly the lowest slot first: if it fits nowhere, nothing overtakes it.

When a generator dies, samples it has not delivered are sent again, from their first token, to another; samples it
delivered are kept. When it speaks twice or late, the message is dropped and counted. When it answers from another
version of the weights, that is a StaleRolloutError, and the run stops. One that leaves gets nothing new, and is let go
when it owes nothing. When none is left and none is on its way (crew.py), NoGeneratorsError.

At a period's end there may be more idle generators than groups. Then a group is shared out among them by samples; and
one that takes a generator far longer than groups take others is given to an idle one as well: both would answer the
same, so whoever is first is believed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from onbeat.admission import MIN_ROWS
from onbeat.errors import (
    InputError,
    NoGeneratorsError,
    NumbersError,
    StaleRolloutError,
    UndecodableError,
    UnverifiedWeightsError,
    WorkerError,
)
from onbeat.patience import Patience
from onbeat.protocols import Generator, Tracer, no_trace
from onbeat.rollout.members import Member, Openings
from onbeat.status import GroupStatus, WorkerStatus
from onbeat.types import Completion, GroupKey, GroupRequest, Stream

HarvestKey = tuple[Stream, int]

_FAR_LONGER = 3.0
"""Times what groups took of late: a group that old is a straggler."""
_OF_LATE = 64
"""Groups."""


@dataclass(slots=True)
class PoolCounts:
    """What was dropped or done again; part of the metrics."""

    accepted: int = 0
    """Samples that passed."""
    duplicate: int = 0
    late: int = 0
    resent: int = 0
    hedged: int = 0
    """Samples of stragglers that were asked of a second generator."""
    lost_workers: int = 0


@dataclass(slots=True)
class _Job:
    request: GroupRequest
    since_s: float
    received: dict[int, Completion] = field(default_factory=dict)
    holders: dict[str, Member] = field(default_factory=dict)
    """Who works at it, by name."""

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sample for sample in self.request.samples if sample not in self.received)


class Harvest:
    """The groups of one period (or one evaluation): submit requests, take complete groups."""

    def __init__(self, pool: Pool, stream: Stream, period: int) -> None:
        self._pool = pool
        self.stream = stream
        self.period = period
        self.ready: asyncio.Queue[tuple[Completion, ...] | Exception] = asyncio.Queue()

    def submit(self, request: GroupRequest) -> None:
        self._pool.submit(request)

    async def next(self) -> tuple[Completion, ...]:
        """The next complete group, in order of its samples. Raises what went wrong."""
        result = await self.ready.get()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Forget what is still out; answers that come later are late."""
        self._pool.close(self)


class Pool:
    def __init__(self, trace: Tracer = no_trace, warn: Callable[[str], None] = lambda sentence: None) -> None:
        self._members: dict[str, Member] = {}
        self._openings = Openings()
        self._jobs: dict[GroupKey, _Job] = {}
        self._waiting: list[tuple[int, int, int, GroupRequest]] = []
        self._harvests: dict[HarvestKey, Harvest] = {}
        self._trace = trace
        self._warn = warn
        self._trainer_works = False
        self._durations_s: deque[float] = deque(maxlen=_OF_LATE)
        self._served = asyncio.Event()
        """Set whenever somebody begins to serve, or nobody ever will."""
        self._failure: Exception | None = None
        self.patience = Patience()
        self.counts = PoolCounts()
        self.last_loss: Exception | None = None
        self.help_is_coming: Callable[[], bool] = lambda: False
        """Whether generators are on their way."""
        self.on_gone: Callable[[str, Exception | None, bool], None] = lambda name, error, served: None
        """Told of every generator that was lost, with the reason, or has left; and whether it had done anything."""
        self.on_work: Callable[[int], None] = lambda num_generators: None
        """Told how many generators of this machine are at work, whenever that changes."""
        self._at_work: set[str] = set()
        """Those, by name."""

    # -- generators ------------------------------------------------------------------------------------------

    @property
    def generators(self) -> list[Generator]:
        return [member.generator for member in self._members.values()]

    def groups(self, now_s: float) -> list[GroupStatus]:
        """What is wanted and not complete."""
        return [
            GroupStatus(
                stream=job.request.stream,
                slot=job.request.slot,
                state="generating" if job.holders else "waiting",
                worker=next(reversed(job.holders), None),
                num_done=len(job.received),
                num_samples=len(job.request.samples),
                age_s=now_s - job.since_s,
            )
            for job in self._jobs.values()
        ]

    def workers(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(name=name, pid=getattr(member.generator, "pid", 0), state=member.state)
            for name, member in self._members.items()
        ]

    @property
    def has_served(self) -> bool:
        """Whether some generator has ever been able to."""
        return self.counts.accepted > 0 or any(member.serves is not None for member in self._members.values())

    def size(self) -> int:
        """How many there are, without those that leave."""
        return sum(not member.leaves for member in self._members.values())

    def add(self, generator: Generator) -> None:
        """A generator joins. It gets no work before `serves` says what it may serve."""
        self._members[generator.name] = Member.of(generator)
        generator.attach(self)
        self._share_cores()

    def trainer_works(self, works: bool) -> None:
        """It has begun to work, or waits again."""
        self._trainer_works = works
        self._share_cores()

    def _share_cores(self) -> None:
        here = [member.generator for member in self._members.values() if member.generator.local]
        for generator in here:
            generator.share_cores(len(here), self._trainer_works)

    def _works(self, member: Member) -> None:
        """It owes something now, or nothing any more."""
        if not member.generator.local:
            return
        before = len(self._at_work)
        (self._at_work.add if member.outstanding else self._at_work.discard)(member.name)
        if len(self._at_work) != before:
            self.on_work(len(self._at_work))

    def serves(self, worker: str, version: int) -> None:
        """The generator has loaded and verified `version` (R4)."""
        if member := self._members.get(worker):
            member.serves = version
            self._openings.update(member)
            self._served.set()
            self._dispatch()

    async def until_served(self, version: int) -> None:
        """Until some generator serves the version. Raises if none ever will."""
        while not any(member.serves == version for member in self._members.values()):
            if self._failure is not None:
                raise self._failure
            if not self._members and not self.help_is_coming():
                raise NoGeneratorsError(f"no generator is left; the last one: {self.last_loss}")
            self._served.clear()
            await self._served.wait()

    def leaving(self, worker: str) -> None:
        self.retire(worker)

    def retire(self, worker: str) -> None:
        """It gets no more work, and is let go when it owes nothing."""
        if member := self._members.get(worker):
            member.leaves = True
            self._openings.update(member)
            self._let_go(member)

    def _let_go(self, member: Member) -> None:
        if member.leaves and not member.outstanding:
            del self._members[member.name]
            member.generator.stop()
            self._share_cores()
            self.on_gone(member.name, None, member.num_completed > 0)
            self.check_who_is_left()

    def tick(self, elapsed_s: float) -> None:
        """So much time has passed: give up who owes something and is silent for too long; help stragglers."""
        for name, member in list(self._members.items()):
            if member.outstanding:
                member.silent_s += elapsed_s
                if member.silent_s > self.patience.limit_s:
                    error = WorkerError(f"{name} has been silent for {member.silent_s:.0f} s while it had work to do")
                    member.generator.kill()
                    self.lost(name, error)
        self._hedge()

    def _heard(self, worker: str) -> None:
        if member := self._members.get(worker):
            if member.outstanding:
                self.patience.paused(member.silent_s)
            member.silent_s = 0.0

    def lost(self, worker: str, error: Exception) -> None:
        """The generator is gone: what it owes is sent to others. (Not if what it computed is the same everywhere.)"""
        member = self._members.pop(worker, None)
        if member is None:
            return
        member.leaves = True
        self._openings.update(member)
        for key in member.outstanding:
            if job := self._jobs.get(key):
                job.holders.pop(worker, None)
        if isinstance(error, NumbersError) or (isinstance(error, UndecodableError) and not self.has_served):
            self.fail(error)
            return
        if worker in self._at_work:
            self._at_work.discard(worker)
            self.on_work(len(self._at_work))
        self.counts.lost_workers += 1
        self.last_loss = error
        self._share_cores()
        for key, owed in member.outstanding.items():
            if job := self._jobs.get(key):
                elsewhere = {sample for other in job.holders.values() for sample in other.outstanding[key]}
                samples = tuple(sample for sample in job.missing if sample in owed - elsewhere)
                if samples:
                    self.counts.resent += len(samples)
                    self._queue(msgspec.structs.replace(job.request, samples=samples))
        self._dispatch()
        self._warn(f"{error}\n{len(member.outstanding)} of its groups go to others; {len(self._members)} are left")
        self.on_gone(worker, error, member.num_completed > 0)
        self.check_who_is_left()

    def check_who_is_left(self) -> None:
        """After somebody has come or gone, if nobody else is on the way: could these do all that is still wanted?"""
        if self._failure is not None or self.help_is_coming():
            return
        if not self._members:
            self.fail(NoGeneratorsError(f"no generator is left; the last one: {self.last_loss}"))
        for key, job in self._jobs.items():
            if (reason := self.why_never(msgspec.structs.replace(job.request, samples=job.missing))) is not None:
                self._harvests[key[:2]].ready.put_nowait(InputError(reason))

    def fail(self, error: Exception) -> None:
        """Nothing that is still wanted will come: whoever waits is told why."""
        self._failure = error
        self._served.set()
        for harvest in self._harvests.values():
            harvest.ready.put_nowait(error)

    # -- work ------------------------------------------------------------------------------------------------

    def open(self, stream: Stream, period: int) -> Harvest:
        """Begin a period. Some generator must hold its weights."""
        if self._failure is not None:
            raise self._failure
        serving = any(member.serves == period for member in self._members.values())
        if not serving and not self.help_is_coming():
            if not self._members:
                raise NoGeneratorsError(f"no generator is left; the last one: {self.last_loss}")
            holding = {name: member.serves for name, member in self._members.items()}
            raise UnverifiedWeightsError(f"no generator serves version {period}; they serve {holding}", period=period)
        harvest = Harvest(self, stream, period)
        self._harvests[stream, period] = harvest
        return harvest

    def close(self, harvest: Harvest) -> None:
        """Forget what is still wanted of it, here and at the generators."""
        name = (harvest.stream, harvest.period)
        self._harvests.pop(name, None)
        self._jobs = {key: job for key, job in self._jobs.items() if key[:2] != name}
        for member in list(self._members.values()):
            for key in [key for key in member.outstanding if key[:2] == name]:
                self._cancel(member, key)
        self._dispatch()

    def _cancel(self, member: Member, key: GroupKey) -> None:
        member.forgive(key)
        del member.began_s[key]
        self._openings.update(member)
        self._works(member)
        member.generator.cancel(key)
        self._let_go(member)

    def submit(self, request: GroupRequest) -> None:
        """Want a group. It is refused if no generator could ever serve it."""
        if (reason := self.why_never(request)) is not None:
            raise InputError(reason)
        self._jobs[request.key] = _Job(request, asyncio.get_running_loop().time())
        self._queue(request)
        self._dispatch()

    def why_never(self, request: GroupRequest) -> str | None:
        """Why none of the generators could ever serve the group; None if one could, or if there is none to ask."""
        first = None
        for member in self._members.values():
            if (reason := member.generator.why_never(request)) is None:
                return None
            first = first or reason
        return first

    def completed(self, worker: str, completion: Completion) -> None:
        """The pool's edge: each sample passes once, for an open period, in the right version."""
        self._heard(worker)
        if member := self._members.get(worker):
            self._settle(member, completion.key, completion.sample)
        self._accept(worker, completion)
        self._dispatch()

    def first_token(self, worker: str, version: int, after_s: float) -> None:
        """How long after loading a version the generator had its first token."""
        self._heard(worker)
        now_s = asyncio.get_running_loop().time()
        self._trace("first token", f"{worker} version {version}", now_s - after_s, now_s)

    def progress(self, worker: str, num_tokens: int) -> None:
        self._heard(worker)
        if member := self._members.get(worker):
            member.num_tokens = num_tokens

    def _accept(self, worker: str, completion: Completion) -> None:
        key = completion.key
        harvest = self._harvests.get(key[:2])
        job = self._jobs.get(key)
        if harvest is None:
            self.counts.late += 1
        elif job is None or completion.sample in job.received or completion.sample not in job.request.samples:
            self.counts.duplicate += 1
        elif completion.version != completion.period:
            harvest.ready.put_nowait(
                StaleRolloutError(
                    f"sample {completion.sample} was sampled from version {completion.version}",
                    period=completion.period,
                    slot=completion.slot,
                    worker=worker,
                )
            )
        else:
            job.received[completion.sample] = completion
            self.counts.accepted += 1
            if len(job.received) == len(job.request.samples):
                del self._jobs[key]
                for member in job.holders.values():
                    self._cancel(member, key)  # it was asked of two, and the other was first
                harvest.ready.put_nowait(tuple(job.received[sample] for sample in sorted(job.received)))

    def _settle(self, member: Member, key: GroupKey, sample: int) -> None:
        """The generator has a row free again."""
        if not member.delivered(key, sample):
            return
        if key not in member.outstanding:
            if job := self._jobs.get(key):
                job.holders.pop(member.name, None)
            stream, period, slot = key
            name, now_s = f"{stream} {period}.{slot}", asyncio.get_running_loop().time()
            self._durations_s.append(now_s - member.began_s[key])
            self._trace(member.name, name, member.began_s.pop(key), now_s)
            self._works(member)
        self._openings.update(member)
        self._let_go(member)

    def _queue(self, request: GroupRequest) -> None:
        """Training before evaluation, then the order of slots."""
        heapq.heappush(self._waiting, (request.stream != "train", request.slot, id(request), request))

    def _dispatch(self) -> None:
        while self._waiting:
            request = self._waiting[0][-1]
            if request.key not in self._jobs:  # its period closed, or somebody thought dead answered after all
                heapq.heappop(self._waiting)
                continue
            plenty = len(self._waiting) >= len(self._members)
            candidate = next(self._openings.for_request(request), None)
            if candidate is None and plenty:
                candidate = next(self._openings.ahead(request), None)
            if candidate is None:
                return
            heapq.heappop(self._waiting)
            max_parts, others = len(request.samples) // MIN_ROWS, len(self._waiting)
            idle = list(itertools.islice(self._openings.idle(request), max_parts + others)) if max_parts > 1 else []
            num_parts = len(idle) - others
            if num_parts < 2:
                self._send(request, candidate)
            else:
                for part, member in enumerate(idle[:num_parts]):
                    self._send(msgspec.structs.replace(request, samples=request.samples[part::num_parts]), member)

    def _send(self, request: GroupRequest, member: Member) -> None:
        self._jobs[request.key].holders[member.name] = member
        member.owes(request, asyncio.get_running_loop().time())
        self._works(member)
        self._openings.update(member)
        member.generator.submit(request)

    def _hedge(self) -> None:
        """Ask an idle generator, too, for what is left of a straggler: whoever answers first is believed."""
        if self._waiting or not self._durations_s:
            return
        too_old_s = asyncio.get_running_loop().time() - _FAR_LONGER * statistics.median(self._durations_s)
        for key, job in self._jobs.items():
            if len(job.holders) != 1:
                continue
            (holder,) = job.holders.values()
            if holder.began_s[key] > too_old_s or not holder.generator.repeatable:
                continue
            request = msgspec.structs.replace(job.request, samples=job.missing)
            if (idle := next(self._openings.idle(request), None)) is not None:
                self.counts.hedged += len(request.samples)
                self._send(request, idle)
