"""What each part is worth: everything onbeat does to be fast, switched off in turn.

    make bench-ablation
    python benchmarks/ablation.py --workloads long-prompt --switches "shared prompt"

One period at a time over warm workers, with a learning rate of nothing in float32: all find the same model and, by the
seed, the same prompts. Each switch is a cell of its own, in which the default, `periodic`, takes turns with the others.

    overlap                     sync and periodic, both on all cores; periodic in order of completion
    overlap, separated          the same with generator and trainer on a core each, as if they were devices of their own
    generators                  1, 2 and 3 processes
    shared prompt               every completion is trained with its own copy of the prompt, by the model's own forward,
                                as a model is that cannot share
    groups without advantage    are trained, too (at beta 0; otherwise they always are)
    three models                old policy and reference run over every micro-batch, whether they can matter or not
    products                    those of training by torch (MKL) instead of oneDNN
    engine                      transformers' `generate` instead of the embedded engine
    everything                  sync, without any of the savings
    sequences at once, tokens   defaults that were found by measurement (generator.max_sequences, trainer.pack_tokens;
    of a pack, cores            who computes with how many threads), with less and with more

The bound of a period is max(generate, train): what the slower side takes alone, by the sync run of the same round. How
far a period is from it, and what each side waits, stands beside its seconds. Where both sides share the cores even a
perfect overlap cannot reach the bound. Writes docs/bench-ablation.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import Contender, Figures, Results, parser, smollm2, summary, take_turns, times_as_fast
from overlap import ONE_CORE_EACH, WARM_UP_GROUPS, whole_period
from workloads import WORKLOADS, Workload

SCHEDULE = ("overlap", "overlap, separated", "generators", "shared prompt", "groups without advantage")
"""The paper's ablation, on a period of many groups, some of whose answers are ten times as long as others. (On
`balanced`, whose answers are short: overlap.py.)"""
MANY_GROUPS = "unequal"
DEFAULTS = ("sequences at once", "tokens of a pack", "cores")
"""What a recipe need not say, on `balanced`."""
CORES = len(os.sched_getaffinity(0))
NAMES = (MANY_GROUPS, "balanced", "short", "short, beta 0", "chat", "long-prompt", "long-answer")
USUAL = (MANY_GROUPS, "short", "short, beta 0", "long-prompt", "balanced")
PERIODIC = {"mode": "periodic", "order": "dispatch", "generators": 1}
SYNC = PERIODIC | {"mode": "sync"}
DEFAULT: tuple[dict[str, Any], dict[str, Any]] = ({}, PERIODIC)


def _threads(number: int) -> dict[str, int]:
    return {"generator.threads": number, "trainer.threads": number}


SWITCHES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "overlap": {
        "periodic": DEFAULT,
        "sync": ({}, SYNC),
        "periodic, completion order": ({}, PERIODIC | {"order": "completion"}),
    },
    "overlap, separated": {
        "periodic": ({"keys": ONE_CORE_EACH}, PERIODIC),
        "sync": ({"keys": ONE_CORE_EACH}, SYNC),
    },
    "generators": {
        "periodic": DEFAULT,
        "2 generators": ({}, PERIODIC | {"generators": 2}),
        "3 generators": ({}, PERIODIC | {"generators": 3}),
    },
    "sequences at once": {
        "periodic": DEFAULT,
        "32": ({"keys": {"generator.max_sequences": 32}}, PERIODIC),
        "128": ({"keys": {"generator.max_sequences": 128}}, PERIODIC),
    },
    "tokens of a pack": {
        "periodic": DEFAULT,
        "512": ({"keys": {"trainer.pack_tokens": 512}}, PERIODIC),
        "1536": ({"keys": {"trainer.pack_tokens": 1536}}, PERIODIC),
    },
    "cores": {
        "periodic": DEFAULT,
        "each side all, always": ({"keys": _threads(CORES)}, PERIODIC),
        "each side half, always": ({"keys": _threads(max(1, CORES // 2))}, PERIODIC),
    },
    "shared prompt": {"periodic": DEFAULT, "prompt copied": ({"trainer": "prompt_copied"}, PERIODIC)},
    "groups without advantage": {"periodic": DEFAULT, "all groups trained": ({}, PERIODIC | {"elide": False})},
    "three models": {"periodic": DEFAULT, "all three run": ({"trainer": "nothing_elided"}, PERIODIC)},
    "products": {"periodic": DEFAULT, "by torch": ({"trainer": "by_torch"}, PERIODIC)},
    "engine": {"periodic": DEFAULT, "transformers": ({"generator": "transformers"}, PERIODIC)},
    "everything": {
        "periodic": DEFAULT,
        "none of it": ({"trainer": "all_of_it", "generator": "transformers"}, SYNC | {"elide": False}),
    },
}
"""By switch and way: settings of the workers, and of the period."""


def main() -> None:
    flags = parser(repeats=3)
    flags.add_argument("--workloads", nargs="*", choices=NAMES, default=USUAL)
    flags.add_argument("--switches", nargs="*", choices=SWITCHES, help="instead of those that fit the workload")
    flags.add_argument("--prompts", type=int, help="of a period, instead of the workload's own")
    arguments = flags.parse_args()
    model = smollm2()
    results = Results(arguments.to / "bench-ablation.json", arguments.again)
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            for switch in arguments.switches or fitting(name):
                extra = {"num_prompts": arguments.prompts} if arguments.prompts else {}
                jobs = [{"seed": seed, **extra} for seed in range(1, arguments.repeats + 1)]
                warm_up = {"seed": 0, "num_prompts": min(WARM_UP_GROUPS, workload.prompts)}
                cell = {"workload": name, "switch": switch}
                chosen = contenders(model, workload, switch)
                take_turns(
                    results, cell, chosen, jobs, warm_up, Path(folder), lambda _, extra=extra: whole_period() | extra
                )
                report(results, cell)


def fitting(name: str) -> list[str]:
    """The schedule is tried where there are many groups; on the others, what makes them faster than with TRL."""
    if name == "balanced":
        return list(DEFAULTS)
    if name == MANY_GROUPS:
        return list(SCHEDULE)
    unfit = {
        "overlap, separated",
        "generators",
        *DEFAULTS,
        *(["groups without advantage"] if WORKLOADS[name].beta > 0 else []),
    }
    return [switch for switch in SWITCHES if switch not in unfit]


def contenders(model: str, workload: Workload, switch: str) -> list[Contender]:
    return [
        Contender(
            way,
            "periods_onbeat.py",
            {"model": model, **workload.task, **workers, "keys": workload.keys | workers.get("keys", {})},
            job=job,
        )
        for way, (workers, job) in SWITCHES[switch].items()
    ]


def sides(run: Figures) -> tuple[float, float]:
    """Seconds at work: generators, trainer."""
    whole = run["seconds"] - run["publish_s"]
    return whole - run["generators_waiting_s"], whole - run["trainer_waiting_s"]


def report(results: Results, cell: dict[str, str]) -> None:
    print(f"{cell['workload']}: {cell['switch']}")
    runs = {way: results.runs(cell, way) for way in SWITCHES[cell["switch"]]}
    for way, found in runs.items():
        waits = " / ".join(summary([run[f"{side}_waiting_s"] for run in found]) for side in ("generators", "trainer"))
        ratios = times_as_fast(runs["periodic"], found)
        print(
            f"  {way:28} {summary([run['seconds'] for run in found]):24} s, {statistics.median(ratios):.2f} times "
            f"periodic; generators / trainer wait {waits}"
        )
    if "sync" in runs:
        bounds = [max(sides(run)) + run["publish_s"] for run in runs["sync"]]
        print(f"  {'max(generate, train)':28} {summary(bounds):24} s")
    print(end="", flush=True)


if __name__ == "__main__":
    main()
