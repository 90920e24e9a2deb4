"""Everything a run writes about itself while it runs: metrics.jsonl, trace.json, environment.json, lines for people."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import msgspec

from onbeat.errors import InputError
from onbeat.observe.metrics import Record, accuracy, group_metrics, update_metrics
from onbeat.observe.trace import Trace
from onbeat.protocols import UpdateReport
from onbeat.types import Group

Say = Callable[[str], None]


class Recorder:
    """The Observer of a run (period.py)."""

    def __init__(self, run_dir: Path, *, accuracy_threshold: float, num_periods: int, say: Say, warn: Say) -> None:
        self._dir = run_dir
        self._threshold = accuracy_threshold
        self._num_periods = num_periods
        self._say = say
        self._warn = warn
        self._metrics = (run_dir / "metrics.jsonl").open("wb")
        self._boundary_s = time.monotonic()
        self._publish_began_s = self._boundary_s
        self._publish_s = 0.0
        self._trace = Trace(run_dir / "trace.json", zero_s=self._boundary_s)
        self.span = self._trace.span
        self.records: list[Record] = []
        self.counters: Callable[[], Record] = dict
        """What else goes into every record: counts kept elsewhere, of the run so far."""
        self._problems: set[str] = set()
        self.on_first_publish: Callable[[], None] | None = None
        """Called when the generators hold their first weights."""
        self.evaluations: dict[int, float | None] = {}

    def publishing(self, version: int) -> None:
        self._publish_began_s = time.monotonic()
        if not self.records:
            self._boundary_s = self._publish_began_s  # what came before was starting up

    def published(self, version: int) -> None:
        now_s = time.monotonic()
        self._publish_s = now_s - self._publish_began_s
        self._trace.span("publish", f"version {version}", self._publish_began_s, now_s)
        if self.on_first_publish is not None:
            self.on_first_publish()
            self.on_first_publish = None

    def period_closed(
        self, version: int, groups: Sequence[Group], num_elided: int, reports: list[UpdateReport]
    ) -> None:
        now_s = time.monotonic()
        record: Record = {
            "period": version,
            **group_metrics(groups, self._threshold),
            **update_metrics(reports),
            "num_groups": len(groups),
            "num_elided_groups": num_elided,
            **self.counters(),
            "publish_s": self._publish_s,
            "period_s": now_s - self._boundary_s,
        }
        self._boundary_s = now_s
        self.records.append(record)
        self._metrics.write(msgspec.json.encode(record) + b"\n")
        self._metrics.flush()
        self._say(self._line(record))
        self._tell_problems(version, groups, reports)

    def _tell_problems(self, version: int, groups: Sequence[Group], reports: list[UpdateReport]) -> None:
        """Each kind of problem once; a period of nothing but problems stops the run."""
        if any(not report.stepped for report in reports):
            self._warn(f"period {version + 1}: a gradient was not finite; the optimizer step was skipped")
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            if rollout.problem is not None and rollout.problem not in self._problems and len(self._problems) < 20:
                self._problems.add(rollout.problem)
                self._warn(f"period {version + 1}: unscorable: {rollout.problem}")
        if rollouts and not any(rollout.scorable for rollout in rollouts):
            raise InputError(
                f"period {version + 1}: not one of {len(rollouts)} completions could be scored, so there is nothing to "
                f"learn from: {rollouts[0].problem}"
            )

    def evaluated(self, version: int, groups: Sequence[Group]) -> None:
        share = accuracy(groups, self._threshold)
        self.evaluations[version] = share
        self._boundary_s = time.monotonic()
        self._say(f"version {version}: held-out accuracy {percent(share)} over {len(groups)} prompts")

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
        (self._dir / "environment.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
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
        self._trace.close()
        self._metrics.close()


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
