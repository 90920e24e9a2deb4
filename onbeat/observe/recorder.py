"""Everything a run writes about itself while it runs: metrics.jsonl, trace.json, environment.json, lines for people."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import msgspec

from onbeat.observe.metrics import Record, accuracy, group_metrics, update_metrics
from onbeat.observe.trace import Trace
from onbeat.protocols import UpdateReport
from onbeat.types import Group

Say = Callable[[str], None]


class Recorder:
    """The Observer of a run (period.py)."""

    def __init__(self, run_dir: Path, *, accuracy_threshold: float, num_periods: int, say: Say) -> None:
        self._dir = run_dir
        self._threshold = accuracy_threshold
        self._num_periods = num_periods
        self._say = say
        self._metrics = (run_dir / "metrics.jsonl").open("ab")
        self._boundary_s = time.monotonic()
        self._publish_began_s = self._boundary_s
        self._publish_s = 0.0
        self._trace = Trace(run_dir / "trace.json", zero_s=self._boundary_s)
        self.span = self._trace.span
        self.records: list[Record] = []
        self.on_first_publish: Callable[[], None] | None = None
        """Called when the generators hold their first weights."""
        self.evaluations: dict[int, float | None] = {}

    def publishing(self, version: int) -> None:
        self._publish_began_s = time.monotonic()

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
            "publish_s": self._publish_s,
            "period_s": now_s - self._boundary_s,
        }
        self._boundary_s = now_s
        self.records.append(record)
        self._metrics.write(msgspec.json.encode(record) + b"\n")
        self._metrics.flush()
        self._say(self._line(record))

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
        )

    def close(self) -> None:
        self._trace.close()
        self._metrics.close()


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
