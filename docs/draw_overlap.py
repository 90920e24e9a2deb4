"""Draws docs/overlap.png: a period of SmolLM2-135M, step by step and periodic, from the traces of real runs.

    make picture

The workload `balanced` of benchmarks/workloads.py, three ways: step by step on a core each, as if generator and trainer
were devices of their own; step by step, each phase on all cores; periodic. Everything else is as by default. Of each
run the last period is drawn: in the first one processes warm up.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

import onbeat

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from harness import ROOT
from overlap import ONE_CORE_EACH
from workloads import WORKLOADS

WORKLOAD = WORKLOADS["balanced"]
TASKS = ROOT / "benchmarks" / "rivals" / "tasks.py"
SETTINGS = WORKLOAD.keys | {
    "model.path": f"{ROOT / 'recipes' / 'smollm2.py'}:make_model",
    "data.path": f"{TASKS}:{WORKLOAD.rows}",
    "reward.functions": [{"path": f"{TASKS}:{WORKLOAD.reward}"}],
    "schedule.periods": 2,
}
WAYS = {
    "step by step, generator and trainer on a core each": {"schedule.mode": "sync"} | ONE_CORE_EACH,
    "step by step, each on both cores in turn": {"schedule.mode": "sync"},
    "periodic (the default)": {"schedule.mode": "periodic"},
}
LANES = {"generator-0": "#2a6f97", "trainer-0": "#c8553d"}
"""Publishing and scoring would be too thin to be seen."""


class Span(NamedTuple):
    lane: str
    row: int
    name: str
    began_s: float
    ended_s: float


def run(keys: dict[str, object]) -> list[Span]:
    """What generator and trainer did in a real run's last period, whose publish is at time 0."""
    with tempfile.TemporaryDirectory(prefix="onbeat-picture-") as folder:
        onbeat.train(overrides=SETTINGS | keys | {"run.dir": f"{folder}/run"})
        events = json.loads(Path(folder, "run", "trace.json").read_text())
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [
        Span(lanes[e["pid"]], e["tid"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]
    opened_s = max(span.began_s for span in spans if span.lane == "publish")
    return [
        span._replace(began_s=span.began_s - opened_s, ended_s=span.ended_s - opened_s)
        for span in spans
        if opened_s <= span.began_s and span.lane in LANES
    ]


def length_s(spans: list[Span]) -> float:
    return max(span.ended_s for span in spans)


def draw(axis: plt.Axes, spans: list[Span], title: str) -> None:
    for place, (lane, colour) in enumerate(LANES.items()):
        mine = [span for span in spans if span.lane == lane]
        rows = 1 + max((span.row for span in mine), default=0)
        for span in mine:
            axis.barh(
                place - 0.4 + 0.8 * (span.row + 0.5) / rows,
                span.ended_s - span.began_s,
                left=span.began_s,
                height=0.8 / rows,
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )
    axis.set_yticks(range(len(LANES)), LANES)
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    periods = {way: run(keys) for way, keys in WAYS.items()}
    figure, axes = plt.subplots(len(WAYS), 1, figsize=(9, 4.6), sharex=True, layout="constrained")
    for axis, (way, spans) in zip(axes, periods.items(), strict=True):
        draw(axis, spans, f"{way}: {length_s(spans):.1f} s")
    axes[-1].set_xlabel("seconds since the period opened; each bar is a group (of the trainer: a micro-batch)")
    figure.savefig(ROOT / "docs" / "overlap.png", dpi=130)


if __name__ == "__main__":
    main()
