"""Generators, scorer and trainer without models: ten lines each, real protocols, faults on demand."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from onbeat.admission import Room
from onbeat.errors import UnverifiedWeightsError, WorkerError
from onbeat.keyed import sequence_key, uniform
from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings, PeriodicLoader
from onbeat.period import train
from onbeat.pieces import WHOLE, Share
from onbeat.protocols import Evaluated, GeneratorEvents, Snapshot, UpdateReport
from onbeat.rollout.pool import Pool
from onbeat.types import Completion, Group, GroupKey, GroupRequest, MicroBatch, Prompt, Rollout, Sampling, UpdateTotals
from onbeat.weights.memory import MemoryChannel

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(0,), seed=0)


def make_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"row-{n}", token_ids=tuple(range(1, 2 + n % 5)), source=f"prompt {n}", columns={})
        for n in range(count)
    ]


def fake_completion(request: GroupRequest, sample: int, version: int) -> Completion:
    """A function of the names alone, as the engine's is: whoever is asked answers the same."""
    key = sequence_key(
        seed=request.sampling.seed, stream=request.stream, version=request.period, slot=request.slot, sample=sample
    )
    length = 1 + int(uniform(key, 0) * request.sampling.max_new_tokens)
    tokens = tuple(1 + int(uniform(key, position) * 50) for position in range(1, length + 1))
    return Completion(
        stream=request.stream,
        period=request.period,
        slot=request.slot,
        sample=sample,
        version=version,
        token_ids=tokens,
        sampler_logprobs=tuple(-uniform(key, position) for position in range(length)),
        finish_reason="length",
    )


@dataclass
class FakeGenerator:
    """Answers after random times. `dies_after` completions it is lost; it may repeat itself, soon or late."""

    name: str
    capacity: int
    rng: random.Random
    duplicate_share: float = 0.0
    late_share: float = 0.0
    cache_tokens: int = 1000
    dies_after: int | None = None
    talks_after_death: bool = False
    version: int = -1
    staged: int = -1
    dead: bool = False
    num_completed: int = 0
    num_repeated: int = 0
    served: list[tuple[int, int]] = field(default_factory=list)
    """(version active, version asked for) of every request."""
    slots: list[int] = field(default_factory=list)
    """It was asked for."""
    slowness: float = 1.0
    hangs: bool = False
    stopped: bool = False
    local: bool = True
    owed: dict[GroupKey, int] = field(default_factory=dict)
    asked: list[asyncio.Future[None]] = field(default_factory=list)
    """What it has not answered yet."""
    events: GeneratorEvents | None = None

    def attach(self, events: GeneratorEvents) -> None:
        self.events = events

    def why_never(self, request: GroupRequest) -> str | None:
        room = Room(max_sequences=self.capacity, cache_tokens=self.cache_tokens, bytes_per_token=1 << 20)
        return room.why_never(request)

    @property
    def repeatable(self) -> bool:
        return True

    def share_cores(self, num_generators: int, trainer_works: bool) -> None: ...

    def kill(self) -> None:
        self.dead = True

    def stop(self) -> None:
        assert not any(self.owed.values()), "it was let go with work to do"
        self.stopped = True
        for asked in self.asked:
            asked.cancel()

    async def ended(self) -> None: ...

    def die(self) -> None:
        """As by SIGKILL."""
        if not self.dead and not self.stopped:
            self.dead = True
            if self.events is not None:
                self.events.lost(self.name, WorkerError(f"{self.name} was told to die"))

    def hang(self) -> None:
        """As by SIGSTOP: it says nothing any more."""
        self.hangs = True

    async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
        await self._working()
        self.staged = snapshot.version

    async def _working(self) -> None:
        """On what it was asked for; for ever, if it hangs."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.append(over)
        if not self.hangs:
            asyncio.get_running_loop().call_later(self.rng.random(), lambda: over.done() or over.set_result(None))
        try:
            await over
        except asyncio.CancelledError:
            if self.stopped:
                raise WorkerError(f"{self.name} has left") from None
            raise
        finally:
            self.asked.remove(over)
        if self.dead:
            raise WorkerError(f"{self.name} is dead")

    async def activate(self, version: int) -> None:
        await self._working()
        if self.staged != version:
            raise UnverifiedWeightsError("not staged", period=version, worker=self.name)
        self.version = version

    def submit(self, request: GroupRequest) -> None:
        assert not self.stopped
        key = request.stream, request.period, request.slot
        self.owed[key] = self.owed.get(key, 0) + len(request.samples)
        self.served.append((self.version, request.period))
        self.slots.append(request.slot)
        loop = asyncio.get_running_loop()
        for sample in request.samples:
            delay_s = self.slowness * self.rng.uniform(0.1, 20.0)
            loop.call_later(delay_s, self._complete, fake_completion(request, sample, self.version))

    def cancel(self, key: GroupKey) -> None:
        self.owed.pop(key, None)

    def _complete(self, completion: Completion) -> None:
        assert self.events is not None
        if (key := (completion.stream, completion.period, completion.slot)) in self.owed:
            self.owed[key] -= 1
        if self.hangs or self.stopped or (self.dead and not self.talks_after_death):
            return
        self.num_completed += 1
        self.events.completed(self.name, completion)
        if self.rng.random() < self.duplicate_share:
            self.num_repeated += 1
            self.events.completed(self.name, completion)
        if self.rng.random() < self.late_share:
            self.num_repeated += 1
            asyncio.get_running_loop().call_later(self.rng.uniform(0, 500), self._again, completion)
        if self.dies_after is not None and self.num_completed >= self.dies_after and not self.dead:
            self.dead = True
            self.events.lost(self.name, WorkerError(f"{self.name} was told to die"))

    def _again(self, completion: Completion) -> None:
        assert self.events is not None
        self.events.completed(self.name, completion)


@dataclass
class FakeScorer:
    """Rewards in {0, 0.5, 1} from the tokens; some groups are all equal. `unscorable` names (slot, sample) pairs."""

    rng: random.Random
    unscorable: frozenset[tuple[int, int]] = frozenset()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Rollout, ...]:
        await asyncio.sleep(self.rng.uniform(0.0, 5.0))
        return tuple(self._rollout(completion) for completion in completions)

    def _rollout(self, completion: Completion) -> Rollout:
        if (completion.slot, completion.sample) in self.unscorable:
            return Rollout(completion=completion, text="", reward=None, rewards=(None,), problem="told to fail")
        reward = 1.0 if completion.slot % 3 == 0 else sum(completion.token_ids) % 3 / 2
        return Rollout(completion=completion, text="", reward=reward, rewards=(reward,))


@dataclass
class FakeTrainer:
    """Writes down what it is handed."""

    rng: random.Random
    log: list[MicroBatch | UpdateTotals] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)

    async def accumulate(self, microbatch: MicroBatch) -> None:
        self.log.append(microbatch)
        self.began_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.rng.uniform(0.0, 10.0))

    async def step(self, totals: UpdateTotals) -> UpdateReport:
        self.log.append(totals)
        return UpdateReport(
            loss=None, grad_norm=0.0, learning_rate=0.0, stepped=True, entropy=None, kl=None, clip_share=None,
            gap_mean=None, gap_max=None, num_trained_tokens=0,
        )  # fmt: skip

    async def snapshot(self, version: int) -> Snapshot:
        return Snapshot(version=version, digest="", num_bytes=0, handle=os.open(os.devnull, os.O_RDONLY))

    async def export(self, directory: str) -> None: ...

    def slots(self, period: int) -> list[int]:
        batches = [item for item in self.log if isinstance(item, MicroBatch) and item.period == period]
        return [group.slot for batch in batches for group in batch.groups]


class NoEvaluation:
    def due(self, version: int) -> bool:
        return False

    async def run(self, version: int) -> Evaluated:
        raise AssertionError("not due")


class Silent:
    """An observer that only keeps the groups."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Group]] = {}

    def publishing(self, version: int) -> None: ...
    def published(self, version: int) -> None: ...
    def evaluated(self, version: int, evaluated: Evaluated) -> None: ...
    async def boundary(self, version: int) -> None: ...

    def period_closed(
        self, version: int, groups: list[Group], num_elided: int, reports: list[UpdateReport], num_replaced: int = 0
    ) -> None:
        self.groups[version] = groups


class PromptList:
    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def take(self, num_prompts: int) -> list[Prompt]:
        return list(self._prompts[:num_prompts])


async def run_fake_loop(
    settings: LoaderSettings,
    generators: list[FakeGenerator],
    *,
    num_prompts: int,
    num_periods: int,
    ledger: Ledger,
    seed: int = 0,
    unscorable: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[FakeTrainer, Pool, Silent]:
    """The real loop, loader, pool, ledger and channel over fake roles."""
    pool = Pool()
    for generator in generators:
        pool.add(generator)
    trainer = FakeTrainer(random.Random(seed))
    loader = PeriodicLoader(settings, pool, FakeScorer(random.Random(seed + 1), unscorable), ledger)
    channel = MemoryChannel(pool)
    observer = Silent()
    try:
        await train(
            num_periods=num_periods,
            prompts_per_period=num_prompts,
            prompts=PromptList(make_prompts(num_prompts)),
            loader=loader,
            trainer=trainer,
            channel=channel,
            evaluation=NoEvaluation(),
            observer=observer,
            saver=observer,
        )
    finally:
        channel.close()
    return trainer, pool, observer
