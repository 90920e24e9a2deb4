"""A whole training step, against TRL's GRPOTrainer.

    make bench-trl

`short`: SmolLM2-135M, 8 prompts of about 45 tokens in groups of 8, up to 16 new tokens, beta 0.02, the same rows,
rewards and number of updates. Seconds per update up to the end of the last one: TRL's from the moment its trainer
begins to train, onbeat's from the moment the generators hold their first weights. TRL's micro-batch is the whole batch
of 64: with 8 it took longer (69 s an update against 64). Writes docs/bench-trl.json.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, Contender, Results, parser, smollm2, summary, take_turns

UPDATES = 3
CELL: dict[str, Any] = {"workload": "short"}
KEYS = {
    "schedule.periods": UPDATES,
    "schedule.prompts_per_period": 8,
    "algorithm.group_size": 8,
    "algorithm.beta": 0.02,
    "sampling.max_new_tokens": 16,
}
TINY = {"schedule.periods": 1, "schedule.prompts_per_period": 1, "sampling.max_new_tokens": 1}


def main() -> None:
    arguments = parser(repeats=3).parse_args()
    model = smollm2()
    trl = {
        "model": model, "reward": "right_sum", "threads": 2, "prompts": 8, "group_size": 8, "max_new_tokens": 16,
        "beta": 0.02,
    }  # fmt: skip
    contenders = [
        Contender("onbeat", "train_onbeat.py", {"model": model, "reward": "right_sum", "keys": KEYS}),
        Contender("TRL", "train_trl.py", trl | {"micro_batch": 64}, environment="trl"),
    ]
    results = Results(ROOT / "docs" / "bench-trl.json", arguments.again)
    jobs = [{"seed": seed, "updates": UPDATES} for seed in range(1, arguments.repeats + 1)]
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        take_turns(results, CELL, contenders, jobs, {"seed": 0, "updates": 1, "keys": TINY}, Path(folder))
    seconds = {
        contender.name: [run["seconds"] / run["periods"] for run in results.of(CELL, contender.name)["runs"]]
        for contender in contenders
    }
    for name, values in seconds.items():
        print(f"{name:8} {summary(values)} s per update")
    print(f"onbeat is {statistics.median(seconds['TRL']) / statistics.median(seconds['onbeat']):.2f} times as fast")


if __name__ == "__main__":
    main()
