"""Puts the run's state together for whoever asks: `onbeat status`, the display on a terminal. Reads, never writes."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

from onbeat.config import Config
from onbeat.observe.recorder import Recorder, read_records
from onbeat.recipe import load
from onbeat.rescale import Rescaling
from onbeat.run_dir import RunDir
from onbeat.saver import Saver
from onbeat.session import Session
from onbeat.status import GroupStatus, Status, WorkerStatus
from onbeat.training.ranks import TrainerRanks

_RECENT = 5
"""Periods whose pace is taken for the next ones'."""
_TREND = 40


class Watch:
    def __init__(self, config: Config, run_dir: RunDir, recorder: Recorder) -> None:
        self._config = config
        self._run_dir = run_dir
        self._recorder = recorder
        self._began_s = time.monotonic()
        self.session: Session | None = None
        self.trainer: TrainerRanks | None = None
        self.saver: Saver | None = None
        self.rescaling: Rescaling | None = None
        """None until they have started."""

    def status(self) -> Status:
        recorder, num_periods = self._recorder, self._config.schedule.periods
        groups = self._groups()
        period = min(recorder.version, num_periods - 1)
        rewards = [record["reward_mean"] for record in recorder.records if record["reward_mean"] is not None]
        return Status(
            run_dir=str(self._run_dir.path),
            pid=os.getpid(),
            phase=recorder.phase,
            period=period,
            num_periods=num_periods,
            version=recorder.version,
            num_groups_done=self._num_done(),
            num_groups=self._config.schedule.prompts_per_period,
            groups=groups,
            workers=self._workers(),
            waiting_for=self._waiting_for(groups),
            reward_means=rewards[-_TREND:],
            accuracy=recorder.evaluations[-1]["accuracy"] if recorder.evaluations else None,
            elapsed_s=time.monotonic() - self._began_s,
            left_s=self._left_s(num_periods),
        )

    def _num_done(self) -> int:
        period = self.session.loader.current if self.session is not None else None
        return len(period.groups) if period is not None else 0

    def _groups(self) -> list[GroupStatus]:
        if self.session is None:
            return []
        now_s = asyncio.get_running_loop().time()
        found = [*self.session.pool.groups(now_s), *self.session.loader.scoring(now_s)]
        return sorted(found, key=lambda group: -group.age_s)

    def _workers(self) -> list[WorkerStatus]:
        found = []
        if self.trainer is not None:
            found += [WorkerStatus(name=rank.name, pid=rank.pid, state=rank.doing) for rank in self.trainer.ranks]
        if self.session is not None:
            found += self.session.pool.workers()
            found += [
                WorkerStatus(name=name, pid=pid, state=state) for name, pid, state in self.session.scorer.workers()
            ]
        return found

    def _waiting_for(self, groups: list[GroupStatus]) -> str:
        """The one thing that must happen next."""
        if self._recorder.phase in ("starting", "publishing", "ending"):
            return {
                "starting": "the workers to start",
                "ending": "the model and the last checkpoint to be written",
            }.get(self._recorder.phase, f"version {self._recorder.version} to be loaded by every generator")
        if self.saver is not None and self.saver.holds_up is not None:
            return f"version {self.saver.holds_up} to be written to the disk"
        if self.trainer is not None and self.trainer.doing != "waiting":
            rank = next(rank for rank in self.trainer.ranks if rank.doing != "waiting")
            return f"{rank.name}: {rank.doing}"
        in_order = [group for group in groups if group.stream == "train"] or groups
        if not in_order:
            return "the next period to open"
        group = min(in_order, key=lambda group: group.slot)
        where = f" at {group.worker}" if group.worker else ""
        return (
            f"the group of slot {group.slot}: {group.state}{where}, {group.num_done} of {group.num_samples} "
            f"completions after {group.age_s:.1f} s"
        )

    def _left_s(self, num_periods: int) -> float | None:
        recent = [record["period_s"] for record in self._recorder.records[-_RECENT:]]
        return statistics.median(recent) * (num_periods - len(self._recorder.records)) if recent else None


def status_at_rest(run_dir: Path) -> Status:
    """Of a run that is not going: what its files say."""
    config = load([run_dir / "config.toml"])
    records = read_records(run_dir / "metrics.jsonl")
    evaluations = read_records(run_dir / "evaluations.jsonl")
    done = len(records) == config.schedule.periods and (run_dir / "model").exists()
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").glob("version-*"))
    newest = f"checkpoints/{checkpoints[-1]}" if checkpoints else "no checkpoint"
    return Status(
        run_dir=str(run_dir),
        pid=None,
        phase="not running",
        period=len(records),
        num_periods=config.schedule.periods,
        version=len(records),
        num_groups_done=0,
        num_groups=config.schedule.prompts_per_period,
        groups=[],
        workers=[],
        waiting_for=f"finished: {run_dir / 'model'}" if done else f"--resume goes on from {newest}",
        reward_means=[record["reward_mean"] for record in records[-_TREND:] if record["reward_mean"] is not None],
        accuracy=evaluations[-1]["accuracy"] if evaluations else None,
        elapsed_s=sum(record["period_s"] for record in records),
        left_s=None,
    )
