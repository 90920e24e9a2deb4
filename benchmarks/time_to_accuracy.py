"""Seconds until a real model is right: SmolLM2-135M on recipes/smollm2-arithmetic.toml, onbeat and TRL.

    make bench-accuracy

From the untrained model to 90 % of the held-out pairs, by greedy answers, for three seeds; and beyond it, so that all
have made as many updates at the end. After every update the clock stops, the weights are evaluated, and the clock goes
on: on both sides alike. (In `onbeat train` evaluation runs beside training and hardly costs time.)

    onbeat              as the recipe says: periodic, exact
    onbeat, sync        the same weights, update by update: their digests are compared
    TRL                 GRPOTrainer with the same loss, optimizer, rows and rewards; settings as found by
                        against_trl.py --tune for `short, beta 0`
    one period stale    periodic, but every period's groups come from the weights of the period before, as if they had
                        been generated while that one was trained; tokens are weighted by the importance of policy to
                        sampler, capped at 2 (algorithm.importance_cap). Its curve is by updates; its seconds mean
                        nothing

Writes docs/bench-accuracy.json.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from against_trl import TUNED, best_found
from harness import ROOT, Contender, Figures, Results, parser, rounds, smollm2, summary, take_turns
from workloads import WORKLOADS

from onbeat.recipe import load

RECIPE = ROOT / "recipes" / "smollm2-arithmetic.toml"
TASK = ROOT / "recipes" / "smollm2_arithmetic.py"
TARGET = 0.9
CELL = {"workload": RECIPE.stem}
TUNED_ON = "short, beta 0"


def main() -> None:
    flags = parser(repeats=3)
    flags.add_argument("--updates", type=int, default=20)
    arguments = flags.parse_args()
    tuned = best_found(Results(TUNED, again=False), TUNED_ON, WORKLOADS[TUNED_ON])
    chosen = contenders(arguments.updates, tuned)
    results = Results(arguments.to / "bench-accuracy.json", arguments.again)
    jobs = [{"seed": seed} for seed in range(1, arguments.repeats + 1)]
    warm_up = {"seed": 0, "warm_up": True}
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        take_turns(results, CELL, chosen, jobs, warm_up, Path(folder))
    report(results, chosen)


def contenders(updates: int, tuned: dict[str, Any]) -> list[Contender]:
    config = load([str(RECIPE)], {})
    ours = {"updates": updates, "recipe": str(RECIPE)}
    trl = tuned | {
        "updates": updates, "model": smollm2(), "task": str(TASK), "threads": len(os.sched_getaffinity(0)),
        "prompts": config.schedule.prompts_per_period, "group_size": config.algorithm.group_size,
        "max_new_tokens": config.sampling.max_new_tokens, "beta": config.algorithm.beta,
        "learning_rate": config.trainer.learning_rate,
    }  # fmt: skip
    stale = ours | {"stale": True, "keys": {"algorithm.importance_cap": 2.0}}
    return [
        Contender("onbeat", "learn_onbeat.py", ours | {"keys": {}}),
        Contender("onbeat, sync", "learn_onbeat.py", ours | {"keys": {"schedule.mode": "sync"}}),
        Contender("TRL", "learn_trl.py", trl, environment="trl"),
        Contender("one period stale", "learn_onbeat.py", stale),
    ]


def reached(run: Figures) -> Figures | None:
    """The first record at the target."""
    return next((record for record in run["curve"] if record["accuracy"] >= TARGET), None)


def seconds_to_target(run: Figures) -> float:
    """Infinite, if it never got there."""
    record = reached(run)
    return math.inf if record is None else record["seconds"]


def times_sooner(ours: list[Figures], theirs: list[Figures]) -> list[float]:
    """Seed by seed, of the seeds both have had."""
    return [seconds_to_target(b) / seconds_to_target(a) for a, b in rounds(ours, theirs)]


def report(results: Results, chosen: list[Contender]) -> None:
    found = {contender.name: results.runs(CELL, contender.name) for contender in chosen}
    for name, runs in found.items():
        there = [record for run in runs if (record := reached(run)) is not None]
        seconds = summary([seconds_to_target(run) for run in runs])
        ends = [summary([run["curve"][place]["accuracy"] for run in runs]) for place in (0, -1)]
        print(f"{name:18} {len(there)} of {len(runs)} at {TARGET:.0%}: {seconds} s; accuracy {' -> '.join(ends)}")
    print(f"onbeat is there {summary(times_sooner(found['onbeat'], found['TRL']))} times sooner, seed by seed")
    same = [a["digest"] == b["digest"] for a, b in rounds(found["onbeat"], found["onbeat, sync"])]
    print(f"sync and periodic end with the same weights in {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()
