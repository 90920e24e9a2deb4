"""Everything a run writes about itself while it runs, and what it says to people.

metrics.jsonl        a record per period
evaluations.jsonl    a record per evaluation
rollouts/            some groups of each period, to be read
trace.json           what was done when
environment.json     what the numbers rest on
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import IO, Any

import msgspec

from onbeat.observe.health import Health
from onbeat.observe.intervals import Span, length, of_lane, overlap
from onbeat.observe.metrics import Record, evaluation_metrics, group_metrics, rates, update_metrics
from onbeat.observe.trace import Trace
from onbeat.observe.trackers import Trackers
from onbeat.protocols import Evaluated, UpdateReport
from onbeat.run_dir import RunDir
from onbeat.types import Group, Rollout

Say = Callable[[str], None]


class Recorder:
    """The Observer of a run (period.py)."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        accuracy_threshold: float,
        num_periods: int,
        rollout_groups: int,
        trackers: Trackers,
        say: Say,
        warn: Say,
    ) -> None:
        self._run_dir = run_dir
        self._threshold = accuracy_threshold
        self._num_periods = num_periods
        self._rollout_groups = rollout_groups
        self._trackers = trackers
        self._say = say
        self._health = Health(warn)
        self.records: list[Record] = read_records(run_dir.path / "metrics.jsonl")
        self.evaluations: list[Record] = read_records(run_dir.path / "evaluations.jsonl")
        self._metrics = (run_dir.path / "metrics.jsonl").open("ab")
        self._evaluations = (run_dir.path / "evaluations.jsonl").open("ab")
        self._boundary_s = time.monotonic()
        self._publish_began_s = self._boundary_s
        self._publish_s = 0.0
        self._trace = Trace(run_dir.path / "trace.json", zero_s=self._boundary_s)
        self._spans: list[Span] = []
        self.counters: Callable[[], Record] = dict
        """What else goes into every record: counts kept elsewhere, of the run so far."""
        self.on_first_publish: Callable[[], None] | None = None
        """Called when the generators hold their first weights."""
        self.on_period: Callable[[Record], None] = lambda record: None
        """Called with each period's record."""
        self._began = False
        self.phase = "starting"
        self.version = run_dir.checkpoint.manifest.version if run_dir.checkpoint else 0

    def span(self, lane: str, name: str, began_s: float, ended_s: float) -> None:
        """Something was done in `lane`: into the trace, and into the period's account of time."""
        self._trace.span(lane, name, began_s, ended_s)
        self._spans.append((lane, began_s, ended_s))

    def publishing(self, version: int) -> None:
        self._publish_began_s = time.monotonic()
        self.phase, self.version = "publishing", version
        if not self._began:
            self._boundary_s = self._publish_began_s  # what came before was starting up
            self._began = True

    def published(self, version: int) -> None:
        now_s = time.monotonic()
        self._publish_s = now_s - self._publish_began_s
        self.phase = "evaluating" if version == self._num_periods else "training"
        self.span("publish", f"version {version}", self._publish_began_s, now_s)
        if self.on_first_publish is not None:
            self.on_first_publish()
            self.on_first_publish = None

    def period_closed(
        self,
        version: int,
        groups: Sequence[Group],
        num_elided: int,
        reports: list[UpdateReport],
        num_replaced: int = 0,
    ) -> None:
        now_s = time.monotonic()
        record: Record = {
            "period": version,
            **group_metrics(groups, self._threshold),
            **update_metrics(reports),
            "num_groups": len(groups),
            "num_elided_groups": num_elided,
            "num_replaced_groups": num_replaced,
            **self.counters(),
            **self._times(now_s),
        }
        record |= rates(record)
        self._boundary_s = now_s
        self._spans = [span for span in self._spans if span[2] > now_s]
        self.records.append(record)
        _append(self._metrics, record)
        self._write_rollouts(version, groups)
        self._trackers.log(record, version)
        self._say(self._line(record))
        self._health.check(record, groups, reports)
        self.on_period(record)

    def _times(self, now_s: float) -> Record:
        """Where the period's seconds went."""
        generating = of_lane(self._spans, "generator", self._boundary_s, now_s)
        training = of_lane(self._spans, "trainer", self._boundary_s, now_s)
        lanes = {lane for lane, _, _ in self._spans if lane.startswith("generator")}
        busy = [length(of_lane(self._spans, lane, self._boundary_s, now_s)) for lane in lanes]
        period_s, training_s = now_s - self._boundary_s, length(training)
        return {
            "num_generators": len(busy),
            "generators_busy_s": sum(busy) / len(busy) if busy else 0.0,
            "training_s": training_s,
            "trainer_waiting_s": max(0.0, period_s - self._publish_s - training_s),
            "overlap_s": overlap(generating, training),
            "publish_s": self._publish_s,
            "period_s": period_s,
        }

    def _write_rollouts(self, version: int, groups: Sequence[Group]) -> None:
        if self._rollout_groups:
            with self._run_dir.rollouts(version).open("wb") as file:
                for group in groups[: self._rollout_groups]:
                    for rollout in group.rollouts:
                        _append(file, rollout_record(group, rollout))

    def decided(self, sentence: str) -> None:
        """Something about the run has been changed, and why: a line, and a mark in the trace."""
        now_s = time.monotonic()
        self._say(sentence)
        self._trace.span("decisions", sentence, now_s, now_s)

    def evaluated(self, version: int, evaluated: Evaluated) -> None:
        record: Record = {"version": version, **evaluation_metrics(evaluated, self._threshold)}
        self.evaluations.append(record)
        _append(self._evaluations, record)
        self._trackers.log({f"eval/{name}": value for name, value in record.items()}, version)
        self._boundary_s = time.monotonic()
        passed = "".join(f", {name} {percent(record[name])}" for name in record if name.startswith("pass@"))
        self._say(
            f"version {version}: held-out accuracy {percent(record['accuracy'])}{passed} over "
            f"{record['num_prompts']} prompts"
        )

    def accuracy_of(self, version: int) -> float | None:
        """Held-out accuracy of a version, if it was evaluated."""
        found = [record["accuracy"] for record in self.evaluations if record["version"] == version]
        return found[-1] if found else None

    def best_of(self, versions: Sequence[int]) -> int | None:
        return best_version(self.evaluations, versions)

    def environment(self, *, exact: bool, why_not_exact: str | None, **facts: Any) -> None:
        """Write environment.json, and say whether the run is exact."""
        record = {
            "exact": exact,
            "why_not_exact": why_not_exact,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "packages": {name: installed_version(name) for name in ("onbeat", "torch", "transformers")},
            **facts,
        }
        path = self._run_dir.path / "environment.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        self._say(
            "exact: the result does not depend on schedule or workers" if exact else f"not exact: {why_not_exact}"
        )

    def _line(self, record: Record) -> str:
        gradient = "no gradient" if not record["num_trained_tokens"] else f"|grad| {record['grad_norm']:.3f}"
        return (
            f"period {record['period'] + 1}/{self._num_periods}  reward {number(record['reward_mean'])}  "
            f"accuracy {percent(record['accuracy'])}  length {number(record['completion_tokens_mean'], 1)}  "
            f"elided {record['num_elided_groups']}/{record['num_groups']}  {gradient}  {record['period_s']:.2f} s"
            + (f"  unscorable {percent(record['unscorable_share'])}" if record["unscorable_share"] else "")
        )

    def close(self) -> None:
        self._trackers.close()
        self._trace.close()
        self._metrics.close()
        self._evaluations.close()


def rollout_record(group: Group, rollout: Rollout) -> Record:
    """One completion as a person reads it."""
    return {
        "slot": group.slot,
        "prompt_id": group.prompt.prompt_id,
        "sample": rollout.completion.sample,
        "prompt": group.prompt.source,
        "completion": rollout.text,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "problem": rollout.problem,
        "num_tokens": len(rollout.completion.token_ids),
        "finish_reason": rollout.completion.finish_reason,
    }


def best_version(evaluations: Sequence[Record], versions: Sequence[int]) -> int | None:
    """The one of these that evaluated best, the earliest of several."""
    known = [record for record in evaluations if record["accuracy"] is not None and record["version"] in versions]
    return max(known, key=lambda record: record["accuracy"])["version"] if known else None


def read_records(path: Path) -> list[Record]:
    """What a run has written before; a last line that is torn, by a kill or a full disk, is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]


def _append(file: IO[bytes], record: Record) -> None:
    file.write(msgspec.json.encode(record) + b"\n")
    file.flush()


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
