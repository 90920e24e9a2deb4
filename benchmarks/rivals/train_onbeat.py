"""bench-trl: `onbeat train` with the keys of a cell, and where the time of its periods went."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import contender

import onbeat
from onbeat.observe.intervals import Span, length, of_lane

TASKS = Path(__file__).with_name("tasks.py")


def prepare(settings: dict[str, Any]) -> contender.Run:
    def run(job: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
            overrides = {
                "seed": job["seed"],
                "run.dir": f"{folder}/run",
                "model.path": settings["model"],
                "data.path": f"{TASKS}:{settings['rows']}",
                "reward.functions": [{"path": f"{TASKS}:{settings['reward']}"}],
                **settings["keys"],
                **job["keys"],
                **job.get("more_keys", {}),
            }
            onbeat.train(overrides=overrides)
            return figures(Path(folder) / "run")

    return run


def figures(run_dir: Path) -> dict[str, Any]:
    """From the end of the first update, when its weights begin to be published, to the end of the last one; of a single
    update, from the moment its weights were published."""
    events = json.loads((run_dir / "trace.json").read_text())
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans: list[Span] = [(lanes[e["pid"]], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    published = sorted((begin, end) for lane, begin, end in spans if lane == "publish")
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    began_s = published[0][1]
    if len(metrics) > 1:
        began_s, metrics = published[1][0], metrics[1:]
    ended_s = max(end for lane, _, end in spans if lane.startswith("trainer"))
    seconds = ended_s - began_s
    return {
        "seconds": seconds,
        "periods": len(metrics),
        "generated_tokens": sum(record["num_generated_tokens"] for record in metrics),
        "trained_tokens": sum(record["num_trained_tokens"] for record in metrics),
        "zero_variance_share": sum(record["zero_variance_share"] for record in metrics) / len(metrics),
        "generators_waiting_s": seconds - length(of_lane(spans, "generator", began_s, ended_s)),
        "trainer_waiting_s": seconds - length(of_lane(spans, "trainer", began_s, ended_s)),
        "publishing_s": sum(end - begin for begin, end in published if began_s <= begin < ended_s),
    }


if __name__ == "__main__":
    contender.main(prepare, ["onbeat", "torch", "transformers"])
