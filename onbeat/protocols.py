"""The roles, as the loop sees them. Each is small enough to be faked in ten lines of a test.

The controller owns one of each kind of handle; behind a handle there is a process, a server, an actor or a fake.
Nothing here says where the work is done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from onbeat.checkpoint import Part
from onbeat.pieces import WHOLE, Share
from onbeat.types import Completion, Group, GroupKey, GroupRequest, MicroBatch, Prompt, Rollout, UpdateTotals

M_co = TypeVar("M_co", covariant=True)


class Snapshot(Struct, frozen=True, kw_only=True):
    """One version of the weights, written once and never changed: what every generator of a period loads."""

    version: int
    digest: str
    num_bytes: int
    handle: Any
    """How to reach the bytes: a file descriptor for the memory channel; other channels put their own here."""


class Tracer(Protocol):
    """Told what was done when. Times are seconds of the machine's monotonic clock, which all processes share."""

    def __call__(self, lane: str, name: str, began_s: float, ended_s: float) -> None: ...


def no_trace(lane: str, name: str, began_s: float, ended_s: float) -> None:
    """A tracer that forgets."""


class GeneratorEvents(Protocol):
    """Where a generator handle reports to (the pool). Called on the controller's loop; must not block."""

    def completed(self, worker: str, completion: Completion) -> None: ...
    def first_token(self, worker: str, version: int, after_s: float) -> None: ...
    def progress(self, worker: str, num_tokens: int) -> None:
        """It lives, and has sampled so many tokens since it started."""
        ...

    def leaving(self, worker: str) -> None:
        """It finishes what it has, and wants to go then."""
        ...

    def lost(self, worker: str, error: Exception) -> None: ...


class Generator(Protocol):
    """Samples completions. Takes whole groups while it has rows free; reports each completion as it finishes."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int:
        """How many sequences it decodes at once."""
        ...

    @property
    def cache_tokens(self) -> int:
        """How many tokens its groups may take, as `admission.cache_tokens` counts."""
        ...

    def why_never(self, request: GroupRequest) -> str | None:
        """Why it could never serve the group, however idle; None if it can."""
        ...

    @property
    def repeatable(self) -> bool:
        """Asked for the same samples again, it, or another of its kind, answers the same."""
        ...

    @property
    def local(self) -> bool:
        """It works on the machine of the run."""
        ...

    def attach(self, events: GeneratorEvents) -> None: ...
    def kill(self) -> None:
        """It is given up; what it may still say counts for nothing."""
        ...

    def stop(self) -> None:
        """It owes nothing and is wanted no more: let it end. Its end is no news."""
        ...

    async def ended(self) -> None:
        """Until it has ended after `stop`."""
        ...

    def submit(self, request: GroupRequest) -> None: ...
    def cancel(self, key: GroupKey) -> None:
        """Forget what is left of a group."""
        ...

    def share_cores(self, num_generators: int, trainer_works: bool) -> None:
        """So many generators share the machine, with a trainer that works now or waits."""
        ...

    async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
        """Take the snapshot and verify its digest, or a share of it; serve the old version still. Raises if it does
        not verify."""
        ...

    async def activate(self, version: int) -> None:
        """Serve the staged version from now on."""
        ...


class GeneratorPool(Protocol):
    """The generators of a run, as a weight channel sees them."""

    @property
    def generators(self) -> list[Generator]: ...
    def serves(self, worker: str, version: int) -> None: ...
    async def until_served(self, version: int) -> None:
        """Until some generator serves the version. Raises if none ever will."""
        ...

    def lost(self, worker: str, error: Exception) -> None: ...


class Evaluated(Struct, frozen=True, kw_only=True):
    """Held-out prompts, completed by one version."""

    greedy: list[Group]
    """One completion each."""
    sampled: list[Group]
    """Some completions each, sampled as in training; none if nobody asked."""


class Scorer(Protocol):
    """Rewards of one group's completions. Never raises for a bad reward: that makes an unscorable rollout."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Rollout, ...]: ...


class UpdateReport(Struct, frozen=True, kw_only=True):
    """What one optimizer step was. A mean over nothing is None, never 0."""

    loss: float | None
    grad_norm: float
    learning_rate: float
    stepped: bool
    """False if a loss or a gradient was not finite: the step was skipped."""
    entropy: float | None
    kl: float | None
    clip_share: float | None
    gap_mean: float | None
    """Mean |sampler - policy| log-probability over the trained tokens."""
    gap_max: float | None
    num_trained_tokens: int


class Trainer(Protocol):
    """Accumulates gradients and steps. Both may return before the work is done; `step` reports when it is."""

    async def accumulate(self, microbatch: MicroBatch) -> None: ...
    async def step(self, totals: UpdateTotals) -> UpdateReport: ...
    async def snapshot(self, version: int) -> Snapshot:
        """Write the weights once, as `version`. Whoever holds the snapshot may read it at any time."""
        ...

    async def export(self, directory: str) -> None:
        """Write the model in Hugging Face format."""
        ...


class SavedParts(NamedTuple):
    """What became of a checkpoint's parts: all of them, or the problem of one."""

    num_updates: int
    """Optimizer steps in the weights."""
    parts: tuple[Part, ...]
    problem: str | None = None


class WeightChannel(Protocol):
    """Brings a version to every generator, in two phases: stage and verify everywhere, then activate."""

    async def publish(self, snapshot: Snapshot) -> None: ...


class Connection(Protocol[M_co]):
    """Typed messages to and from one worker (see wire.py)."""

    def send(self, message: Struct, fds: list[int] | None = None) -> None: ...
    async def drained(self) -> None:
        """Until the kernel has taken everything that was sent."""
        ...

    def messages(self) -> AsyncIterator[M_co]: ...
    def take_fd(self) -> int: ...
    def close(self) -> None: ...


class Courier(Protocol):
    """Brings weights to one generator on another host by a way of its own (weights/nccl.py, ray_launcher.py)."""

    def sending(self, snapshot: Snapshot) -> AbstractAsyncContextManager[str]:
        """Inside, the generator is told to stage it from what this gives (messages.Stage.group)."""
        ...

    def stop(self) -> None: ...


class Child(Protocol[M_co]):
    """A worker process, seen from the controller."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def connection(self) -> Connection[M_co]: ...

    @property
    def shares_memory(self) -> bool:
        """Whether descriptors reach it."""
        ...

    @property
    def courier(self) -> Courier | None:
        """For weights, where memory is not shared; None: they go over the connection."""
        ...

    def kill(self) -> None:
        """Kill it and everything it started; returns at once."""
        ...

    async def exited(self) -> int:
        """The exit status, once it has ended: the code, or minus the signal."""
        ...

    def log_tail(self) -> str:
        """The last lines it wrote."""
        ...


class Launcher(Protocol):
    """Starts workers somewhere: processes of this machine (cluster/local.py), actors of a cluster (ray_launcher.py)."""

    def prepare(self, *, uses_torch: bool) -> None:
        """Workers of this kind will be wanted soon."""
        ...

    async def spawn(self, *, name: str, entry: str, settings: Struct, receives: object, uses_torch: bool) -> Child[Any]:
        """A worker running `entry` ("module:function"). `receives` is the union of messages it may send us."""
        ...

    async def close(self) -> None:
        """End every worker and wait until they are gone."""
        ...
