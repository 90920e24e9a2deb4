"""When a run is saved: at period boundaries, in the background; at the end; and when it is interrupted.

    boundary v ──▶ mark: cursor, lengths of the files ──▶ due? ──▶ task: trainer's part ─▶ manifest ─▶ rename
    boundary v+1 … go on meanwhile; a save that is due waits for the one before

Between two boundaries the trainer's weights are those of the first until its next step, so an interrupted run can
still be saved as of its last boundary. Whether they are is the trainer's word: a part tells the number of updates in
it. A save that fails is told and tried again at the next occasion; at the end it is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onbeat.checkpoint import CheckpointStore, Manifest
from onbeat.errors import CheckpointError, WorkerError
from onbeat.protocols import SavedParts, Tracer, no_trace


class SavesParts(Protocol):
    """A trainer, as the saver sees it."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps it was asked for since it started."""

    async def save_parts(self, directory: str, num_updates: int) -> SavedParts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What must be remembered of a boundary the moment it is passed."""

    cursor: int
    lengths: dict[str, int]


class Saver:
    def __init__(
        self,
        store: CheckpointStore,
        trainer: SavesParts,
        *,
        every: int,
        last_version: int,
        updates_per_period: int,
        config: dict[str, Any],
        inputs: dict[str, str] | None = None,
        mark: Callable[[], Mark],
        seal: Callable[[dict[str, int]], dict[str, str]] = lambda lengths: {},
        warn: Callable[[str], None],
        ends: Callable[[], bool] = lambda: False,
        trace: Tracer = no_trace,
        resumed: int | None = None,
    ) -> None:
        """`seal` brings the marked files to the disk and digests them; `ends` tells whether the run should end at the
        next boundary; `resumed` is the version the run goes on from, which is on the disk already."""
        self._store = store
        self._trainer = trainer
        self._every = every
        self._last_version = last_version
        self._updates_per_period = updates_per_period
        self._config = config
        self.inputs = inputs or {}
        """What the run's bits rest on, from now on (inputs.py)."""
        self._mark = mark
        self._seal = seal
        self._warn = warn
        self._ends = ends
        self._trace = trace
        self._steps_then = 0
        self.saving: int | None = None
        """The version that is being written."""
        self.holds_up: int | None = None
        """The version that is being written while nothing else goes on."""
        self._boundary: tuple[int, Mark] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: CheckpointError | WorkerError | None = None
        self._saved = resumed

    async def boundary(self, version: int) -> None:
        """Nothing is in flight. Returns when the weights of this version are being saved, or need not be."""
        self._boundary, self._steps_then = (version, self._mark()), self._trainer.num_steps
        if self._ends():
            raise asyncio.CancelledError
        is_due = version == self._last_version or (self._every > 0 and version > 0 and version % self._every == 0)
        if is_due and version != self._saved:
            await self.finish()
            self._begin_saving(*self._boundary)

    async def save_now(self) -> Path:
        """The boundary that has just been passed, due or not. CheckpointError if it cannot be had, WorkerError if the
        trainer is gone."""
        assert self._boundary is not None, "before the first boundary"
        version = self._boundary[0]
        await self.finish()
        if self._saved != version:
            self._begin_saving(*self._boundary)
            await self.finish()
        if self._saved != version:
            raise self._failure or CheckpointError(f"version {version} could not be saved")
        return self._store.path(version)

    def _begin_saving(self, version: int, mark: Mark) -> None:
        self.saving = version
        self._task = asyncio.create_task(self._save(version, mark))

    def why_not_now(self) -> str | None:
        """Why an interrupted run had better go on to its next boundary."""
        if self._trainer.num_steps == self._steps_then:
            return None
        return "interrupted: the period has moved the weights and is finished first, then saved; once more ends it now"

    async def finish(self) -> None:
        """Until nothing is being saved. Who is interrupted while waiting leaves the save to itself."""
        if self._task is not None:
            self.holds_up = self.saving
            try:
                await asyncio.shield(self._task)
            finally:
                self.holds_up = None
            self._task = None

    async def end(self) -> None:
        """The run is over: if it could not be saved, that is an error now."""
        await self.finish()
        if self._failure is not None:
            raise self._failure
        await asyncio.to_thread(self._store.prune)  # the last version has been evaluated since

    async def interrupted(self) -> Path | None:
        """Save the last boundary, if the weights are still those; the newest checkpoint, if there is one."""
        await self.finish()
        if self._boundary is not None and self._boundary[0] > 0 and self._boundary[0] != self._saved:
            self._begin_saving(*self._boundary)
            await self.finish()
        versions = self._store.versions()
        return self._store.path(versions[-1]) if versions else None

    def _sealed(self, lengths: dict[str, int]) -> dict[str, str]:
        try:
            return self._seal(lengths)
        except OSError as error:
            raise CheckpointError(f"cannot bring {error.filename} to the disk: {error.strerror}") from error

    async def _save(self, version: int, mark: Mark) -> None:
        began_s, num_updates = asyncio.get_running_loop().time(), version * self._updates_per_period
        self._failure = None
        try:
            directory = await asyncio.to_thread(self._store.begin, version)
            saved = await self._trainer.save_parts(str(directory), num_updates)
            if saved.num_updates != num_updates:
                return  # ended at once in the middle of a period: no boundary any more
            if saved.problem is not None:
                raise CheckpointError(saved.problem)
            digests = await asyncio.to_thread(self._sealed, mark.lengths)
            manifest = Manifest(
                version=version,
                num_updates=saved.num_updates,
                cursor=mark.cursor,
                parts=saved.parts,
                lengths=mark.lengths,
                digests=digests,
                inputs=self.inputs,
                config=self._config,
            )
            await asyncio.to_thread(self._store.commit, manifest)
            self._saved = version
        except WorkerError as error:
            self._failure = error  # the trainer is gone, which the loop hears from its own calls if it makes any
            return
        except CheckpointError as error:
            self._failure = error
            self._warn(f"version {version} was not saved: {error}")
        finally:
            self.saving = None
        self._trace("checkpoint", f"version {version}", began_s, asyncio.get_running_loop().time())
