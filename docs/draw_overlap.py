"""Draws docs/overlap.png: a period of the arithmetic recipe, step by step and periodic, from the traces of real runs.

    make picture

Of each run's later periods, the one of median length: a single one may have had bad luck.
"""

from __future__ import annotations

import itertools
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
SETTLED = 5
"""Periods before this one are not drawn: processes warm up."""
SETTINGS = {
    "schedule.periods": 36,
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
    """The spans of a real run's median period, its publish at time 0."""
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
    opens = sorted(span.began_ms for span in spans if span.lane == "publish")[SETTLED:]
    periods = [
        [
            span._replace(began_ms=span.began_ms - first, ended_ms=span.ended_ms - first)
            for span in spans
            if first <= span.began_ms < last
        ]
        for first, last in itertools.pairwise(opens)
    ]
    return sorted(periods, key=length_ms)[len(periods) // 2]


def length_ms(spans: list[Span]) -> float:
    return max(span.ended_ms for span in spans)


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
        draw(axis, spans, f'schedule.mode = "{mode}": {length_ms(spans):.0f} ms')
    axes[-1].set_xlabel("ms since the period opened; each bar is one group (in training: one micro-batch)")
    figure.savefig(ROOT / "docs" / "overlap.png", dpi=130)


if __name__ == "__main__":
    main()
