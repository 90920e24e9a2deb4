"""Draws docs/overlap.png: one period of the arithmetic recipe, step by step and periodic, from the traces of real runs.

make picture
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

import onbeat

ROOT = Path(__file__).parents[1]
PERIOD = 6
SETTINGS = {
    "schedule.periods": 8,
    "schedule.prompts_per_period": 16,
    "generator.max_sequences": 16,
    "trainer.pack_tokens": 1,
}
LANES = {"publish": "#8d99ae", "generator-0": "#2a6f97", "scorer": "#e9c46a", "trainer-0": "#c8553d"}


class Span(NamedTuple):
    lane: str
    row: int
    name: str
    began_ms: float
    ended_ms: float


def run(mode: str, folder: Path) -> list[Span]:
    """The spans of one period of a real run, its publish at time 0."""
    run_dir = folder / mode
    overrides = {**SETTINGS, "schedule.mode": mode, "run.dir": str(run_dir)}
    onbeat.train(str(ROOT / "recipes" / "arithmetic.toml"), overrides=overrides)
    events = json.loads((run_dir / "trace.json").read_text())
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [
        Span(lanes[e["pid"]], e["tid"], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
        for e in events
        if e["ph"] == "X"
    ]
    opens = {span.name: span.began_ms for span in spans if span.lane == "publish"}
    first, last = opens[f"version {PERIOD}"], opens[f"version {PERIOD + 1}"]
    return [
        span._replace(began_ms=span.began_ms - first, ended_ms=span.ended_ms - first)
        for span in spans
        if first <= span.began_ms < last
    ]


def draw(axis: plt.Axes, spans: list[Span], title: str) -> None:
    for place, (lane, colour) in enumerate(LANES.items()):
        mine = [span for span in spans if span.lane == lane]
        rows = 1 + max((span.row for span in mine), default=0)
        for span in mine:
            axis.barh(
                place - 0.4 + 0.8 * (span.row + 0.5) / rows,
                span.ended_ms - span.began_ms,
                left=span.began_ms,
                height=0.8 / rows,
                color=colour,
                edgecolor="white",
                linewidth=0.6,
            )
    axis.set_yticks(range(len(LANES)), LANES)
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="onbeat-picture-"))
    try:
        periods = {mode: run(mode, folder) for mode in ("sync", "periodic")}
    finally:
        shutil.rmtree(folder)
    figure, axes = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, layout="constrained")
    for axis, (mode, spans) in zip(axes, periods.items(), strict=True):
        length_ms = max(span.ended_ms for span in spans)
        draw(axis, spans, f'schedule.mode = "{mode}": {length_ms:.0f} ms')
    axes[-1].set_xlabel("ms since the period opened; each bar is one group (in training: one micro-batch)")
    figure.savefig(ROOT / "docs" / "overlap.png", dpi=130)


if __name__ == "__main__":
    main()
