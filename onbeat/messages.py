"""Every message between the controller and its workers. Three conversations, each with its two unions.

    controller            generator              controller            trainer rank
      │── Stage(v) + fd ────▶│ verify               │── Accumulate ─────────▶│ forward, backward
      │◀─ Staged(v, digest) ─│                      │◀─ Accumulated ─────────│
      │── Activate(v) ──────▶│ load                 │── Step(totals) ───────▶│ optimizer step
      │◀─ Activated(v) ──────│                      │◀─ Stepped(report) ─────│
      │── Submit(request) ──▶│ sample               │── TakeSnapshot(v) ────▶│ write once
      │◀─ FirstToken ────────│                      │◀─ SnapshotTaken + fd ──│
      │◀─ Progress … ────────│
      │◀─ Completed ×G ──────│                      │── SavePart ───────────▶│ in a thread, while it goes on
      │◀─ Leaving ───────────│ finishes its groups  │◀─ PartSaved ───────────│ out of turn

    Of several trainer ranks, rank 0 first says Listening; then each is told to Meet there, and says TrainerReady. Every
    order goes to every rank (but Accumulate, to those that the micro-batch is for), and each answers; the memory comes
    from rank 0.

    Where memory cannot be shared (another machine), Stage is followed by WeightBytes ×n instead of a descriptor.

    controller            reward worker
      │── ScoreCall ────────▶│ user code
      │◀─ ScoreResult ───────│

A worker's first message is Ready (or Failed, with a sentence for the user). A worker answers in the order it was
asked, except a generator, whose completions come when they are done, and a trainer that has saved its part.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from onbeat.admission import Room
from onbeat.checkpoint import Part
from onbeat.pieces import WHOLE, Share
from onbeat.protocols import UpdateReport
from onbeat.types import Completion, GroupKey, GroupRequest, MicroBatch, UpdateTotals


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """What every trainer and generator starts with."""

    config: str
    """The resolved configuration, as JSON."""
    model_dir: str
    name: str
    checkpoint: str | None = None
    """The directory of the checkpoint to go on from."""
    rank: int = 0
    """Of a trainer: which of `num_ranks` it is. Those that compute a micro-batch together follow each other: the
    tensor-parallel ranks of data-parallel rank d are d · tensor_parallel + 0, 1, …"""
    num_ranks: int = 1
    host: str = "127.0.0.1"
    """The address of the worker's machine at which other ranks reach it."""


class Welcome(Struct, frozen=True, kw_only=True, tag=True):
    """To a worker that joins: who it is, and what it starts with."""

    settings: WorkerSettings
    files: dict[str, bytes]
    """The model's small files (configuration, tokenizer), for a worker that cannot see `model_dir`; else empty."""


class Failed(Struct, frozen=True, tag=True):
    """The worker cannot do its work, and why; it exits after this."""

    reason: str
    diverged: bool = False
    """It is not the worker: the weights compute nothing any more, and would not for another one."""
    undecodable: bool = False
    """It is the model: an embedded generator does not compute such a one."""


class GeneratorReady(Struct, frozen=True, tag=True):
    room: Room
    arithmetic: str
    """Digest of some arithmetic: machines of the same one compute the same bits (arithmetic.py)."""
    repeatable: bool = True
    """Asked for the same samples again, it answers the same."""


class Stage(Struct, frozen=True, tag=True):
    """Take the snapshot, and tell its digest."""

    version: int
    num_bytes: int
    attached: bool = True
    """In the memory whose descriptor came along; else in the WeightBytes that follow, or through a group."""
    share: Share = WHOLE
    """Of the pieces to verify (pieces.py): those who share a memory do it together."""
    group: str | None = None
    """Of the ranks through which vLLM's weight-transfer engine gets it (weights/nccl.py)."""


class WeightBytes(Struct, frozen=True, tag=True):
    """The next bytes of the snapshot that is being staged."""

    data: bytes


class Staged(Struct, frozen=True, tag=True):
    version: int
    digest: str
    """As the generator computed it."""
    share: Share = WHOLE
    """Of what."""


class Activate(Struct, frozen=True, tag=True):
    version: int


class Activated(Struct, frozen=True, tag=True):
    version: int
    row_variance: str | None
    """None if the model's rows do not depend on the batch; else what was seen (rollout/probe.py)."""


class Submit(Struct, frozen=True, tag=True):
    request: GroupRequest


class Cancel(Struct, frozen=True, tag=True):
    key: GroupKey


class ShareCores(Struct, frozen=True, tag=True):
    """With so many generators on the machine, and with a trainer that works now or waits."""

    num_generators: int
    trainer_works: bool


class Refused(Struct, frozen=True, tag=True):
    """To a worker that joined: it cannot be used, and why."""

    reason: str


class Leaving(Struct, frozen=True, tag=True):
    """The worker wants to go: nothing new, please; it finishes what it has."""


class Completed(Struct, frozen=True, tag=True):
    completion: Completion


class FirstToken(Struct, frozen=True, tag=True):
    """The generator has sampled from a version for the first time."""

    version: int
    after_s: float
    """Since it was activated."""


class Progress(Struct, frozen=True, tag=True):
    """Sent about once a second while there is something to do."""

    num_tokens: int
    """Sampled since the generator started."""


class Listening(Struct, frozen=True, tag=True):
    """Rank 0's first word, if there are others: where they meet."""

    address: str
    """HOST:PORT."""


class Meet(Struct, frozen=True, tag=True):
    """The first order to every rank, rank 0 included, if there are several: join the others there."""

    address: str


class TrainerReady(Struct, frozen=True, tag=True):
    num_parameters: int
    why_not_shared: str | None
    """Why completions are trained with a copy of the prompt each; None if they share it."""
    arithmetic: str
    threads: int
    why_threads_fixed: str | None = None
    """Why it computes with all of them while generators work, too; None if it takes its share then."""


class Accumulate(Struct, frozen=True, tag=True):
    """With sharded weights every rank gets one per round, without groups if there is nothing for it."""

    microbatch: MicroBatch
    num_parts: int = 0
    """With sharded weights: if some rank of the round has a group to split, the most parts that one has
    (batch/pack.py); every rank runs so many."""


class Accumulated(Struct, frozen=True, tag=True):
    index: int
    began_s: float
    """On the machine's monotonic clock, for the trace."""
    ended_s: float


class WorkBeside(Struct, frozen=True, tag=True):
    """So many generators of the machine work now. Out of turn, and not answered."""

    num_generators: int


class Step(Struct, frozen=True, tag=True):
    totals: UpdateTotals


class Stepped(Struct, frozen=True, tag=True):
    report: UpdateReport
    began_s: float
    ended_s: float


class TakeSnapshot(Struct, frozen=True, tag=True):
    version: int


class SnapshotTaken(Struct, frozen=True, tag=True):
    """The attached memory holds the weights; of several ranks, rank 0 attaches it."""

    version: int
    digest: str
    num_bytes: int


class SavePart(Struct, frozen=True, tag=True):
    """Write this rank's part of a checkpoint into the directory, while other orders are carried out."""

    directory: str
    num_updates: int
    """Optimizer steps that must be in it; nothing is written if there are others."""


class PartSaved(Struct, frozen=True, tag=True):
    """Out of turn. `problem` instead of a part if it could not be written."""

    num_updates: int
    """Optimizer steps so far."""
    part: Part | None
    problem: str | None = None


class Export(Struct, frozen=True, tag=True):
    directory: str


class Exported(Struct, frozen=True, tag=True):
    problem: str | None


class Limits(Struct, frozen=True, kw_only=True):
    """Of each reward process (reward/sandbox.py)."""

    memory_bytes: int
    cpu_s: float
    """Per call."""
    strict: bool = False


class ScoreSettings(Struct, frozen=True, kw_only=True):
    """What a reward worker starts with."""

    paths: tuple[str, ...]
    """`file.py:function` or `package.module:function`, one per reward function."""
    limits: Limits


class ScorerReady(Struct, frozen=True, tag=True):
    pass


class ScoreCall(Struct, frozen=True, tag=True):
    """Call reward function number `function` on n completions. Every list, each column included, has n entries."""

    call: int
    function: int
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[tuple[int, ...]]
    columns: dict[str, list[Any]]


class ScoreResult(Struct, frozen=True, tag=True):
    call: int
    rewards: list[float | None]
    error: str | None = None
    """Set if the call as a whole failed: it raised, or returned something that is not n numbers."""


ToGenerator = Stage | WeightBytes | Activate | Submit | Cancel | ShareCores | Refused
FromGenerator = GeneratorReady | Failed | Staged | Activated | Completed | FirstToken | Progress | Leaving
ToTrainer = Meet | WorkBeside | Accumulate | Step | TakeSnapshot | SavePart | Export
FromTrainer = Listening | TrainerReady | Failed | Accumulated | Stepped | SnapshotTaken | PartSaved | Exported
ToScorer = ScoreCall
FromScorer = ScorerReady | Failed | ScoreResult
