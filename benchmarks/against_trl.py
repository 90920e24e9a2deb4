"""Whole updates, against TRL's GRPOTrainer: completions trained per second.

    make bench-trl                                          all workloads (workloads.py)
    python benchmarks/against_trl.py --workloads short      some of them; the others another time
    python benchmarks/against_trl.py --tune                 first: TRL's best settings on this machine

The same model, rows in the same order, rewards, group size, number of completions and updates, temperature and loss.
Contenders take turns, run by run; a run is a trainer of its own, over three updates, or two where they take minutes.
The clock runs from the end of an update that is not counted to the end of the last one. (In the first one memory is new
to everybody, and policy and reference are the same, of which onbeat makes use.)
onbeat is as it is by default, bit-exact; completion order, which is not, stands beside it.

TRL's settings are tried by --tune, one update each, and the fastest found is used (without --tune: micro-batches of 8):
micro-batches of 2, 4, 8, 16 … sequences up to the whole batch; transformers' continuous batching and its static cache
instead of `generate` as it is; Intel's OpenMP, which onbeat uses. As many threads as cores, the allocator settings that
onbeat gives its own processes (a third faster than without), no gradient checkpointing. Two more ways are measured for
the record, and not used: bfloat16, which is another arithmetic than onbeat's, and a TRL with a line of it changed: on a
CPU its head computes the logits of prompts too, on a GPU only those of completions.

TRL's AsyncGRPOTrainer cannot run without a GPU: its attention is a FlashAttention 3 kernel, it generates by a vLLM
server, and its weights get there by NCCL. vLLM within GRPOTrainer (use_vllm) cannot either: its server is given weights
by NCCL too, and a vLLM in the trainer's process by copying into parameters, which on a CPU are packed by then.

Writes docs/bench-trl.json and docs/bench-trl-tune.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, Contender, EndedError, Figures, Results, parser, smollm2, summary, take_turns, times_as_fast
from workloads import AGAINST_TRL, WORKLOADS, Workload

TINY = {"schedule.periods": 1, "schedule.prompts_per_period": 1, "sampling.max_new_tokens": 1}
WARM_UP: Figures = {"seed": 0, "updates": 1, "tiny": True, "keys": TINY}
NOT_COUNTED = 1
UNTRIED = 8
"""Sequences of TRL's micro-batches, if no settings were tried: within a few per cent of the best wherever some were."""
SIZES = {f"TRL, micro-batches of {size}": {"micro_batch": size} for size in (2, 4, 8, 16, 32, 64)}
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "TRL, continuous batching": {"continuous_batching": True},
    "TRL, static cache": {"cache_implementation": "static"},
    "TRL, Intel's OpenMP": {"openmp": str(Path(sys.prefix) / "lib" / "libiomp5.so")},
}
FOR_THE_RECORD: dict[str, dict[str, Any]] = {
    "TRL, bfloat16 (not used)": {"bf16": True},
    "TRL changed, no logits of prompts (not used)": {"compact_head": True},
}
TUNED = ROOT / "docs" / "bench-trl-tune.json"
WAYS = tuple(SIZES | OTHER_WAYS | FOR_THE_RECORD)
OURS = ("onbeat", "onbeat, completion order")
BFLOAT16 = ("onbeat, bfloat16", "TRL, bfloat16")
IN_BFLOAT16 = "short"
"""The workload both are measured on in bfloat16, for the record: neither is exact."""


def main() -> None:
    flags = parser(repeats=3)
    flags.add_argument("--workloads", nargs="*", choices=AGAINST_TRL, default=AGAINST_TRL)
    flags.add_argument("--tune", action="store_true", help="look for TRL's best settings instead")
    flags.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help="with --tune: some of them")
    flags.add_argument("--updates", type=int, help="of a run, instead of the workload's own")
    flags.add_argument("--tiny", action="store_true", help="one token for one prompt: only to see that everything runs")
    arguments = flags.parse_args()
    tuned = Results(TUNED, again=False)
    model = smollm2()
    results = Results(arguments.to / ("bench-trl-tune.json" if arguments.tune else "bench-trl.json"), arguments.again)
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            updates = arguments.updates or (1 if arguments.tune else workload.updates)
            seeds = range(1, 2 if arguments.tune else arguments.repeats + 1)
            total = updates if arguments.tune else updates + NOT_COUNTED
            job = WARM_UP if arguments.tiny else {"updates": total, "keys": {"schedule.periods": total}}
            jobs = [job | {"seed": seed} for seed in seeds]
            if arguments.tune:
                contenders = [way for way in tried(model, workload) if way.name in arguments.ways]
            else:
                contenders = opponents(model, name, workload, tuned)
            for together in [[each] for each in contenders] if arguments.tune else [contenders]:
                play(results, name, together, jobs, Path(folder))
            report(results, name, contenders, workload)


def play(results: Results, name: str, contenders: list[Contender], jobs: list[Figures], folder: Path) -> None:
    try:
        take_turns(results, {"workload": name}, contenders, jobs, WARM_UP, folder)
    except EndedError as error:
        if len(contenders) > 1:
            raise
        why = str(error).splitlines()[0]
        results.of({"workload": name}, contenders[0].name)["ended"] = why
        results.write()
        print(f"{name}: {contenders[0].name} does not run here: {why}", flush=True)


def opponents(model: str, name: str, workload: Workload, tuned: Results) -> list[Contender]:
    ours = {"model": model, **workload.task, "keys": workload.keys}
    best = best_found(tuned, name, workload)
    chosen = [
        Contender("onbeat", "train_onbeat.py", ours),
        Contender(OURS[1], "train_onbeat.py", ours, job={"more_keys": {"schedule.order": "completion"}}),
        trl("TRL", model, workload, **best),
    ]
    if name == IN_BFLOAT16:
        keys = {"trainer.precision": "bfloat16"}
        chosen += [
            Contender(BFLOAT16[0], "train_onbeat.py", ours, job={"more_keys": keys}),
            trl(BFLOAT16[1], model, workload, bf16=True, **best),
        ]
    return chosen


def trl(name: str, model: str, workload: Workload, **how: Any) -> Contender:
    settings = {
        "model": model, **workload.task, "threads": len(os.sched_getaffinity(0)), "prompts": workload.prompts,
        "group_size": workload.group_size, "max_new_tokens": workload.max_new_tokens, "beta": workload.beta,
    }  # fmt: skip
    return Contender(name, "train_trl.py", settings | how, environment="trl")


def tried(model: str, workload: Workload) -> list[Contender]:
    """Ways to run TRL, each in a process of its own."""
    sizes = {name: how for name, how in SIZES.items() if how["micro_batch"] <= workload.completions}
    others = {name: {"micro_batch": UNTRIED} | how for name, how in (OTHER_WAYS | FOR_THE_RECORD).items()}
    return [trl(name, model, workload, **how) for name, how in (sizes | others).items()]


def best_found(tuned: Results, name: str, workload: Workload) -> dict[str, Any]:
    cell = {"workload": name}
    ways = {way.name: way.settings for way in tried("", workload) if way.name not in FOR_THE_RECORD}
    found = {way: runs for way in ways if (runs := tuned.runs(cell, way)) and tuned.is_of_this_machine(cell, way)}
    if not found:
        print(f"{name}: TRL's settings have not been tried on this machine (--tune): micro-batches of {UNTRIED}")
        return {"micro_batch": UNTRIED}
    best = min(found, key=lambda way: found[way][0]["seconds"])
    chosen = {"micro_batch", *(key for how in OTHER_WAYS.values() for key in how)}
    return {key: value for key, value in ways[best].items() if key in chosen}


def rates(runs: list[Figures], workload: Workload) -> list[float]:
    """Completions trained per second, of each run."""
    return [run["periods"] * workload.completions / run["seconds"] for run in runs]


def report(results: Results, name: str, contenders: list[Contender], workload: Workload) -> None:
    cell = {"workload": name}
    print(name)
    for contender in contenders:
        runs = results.runs(cell, contender.name)
        if not runs:
            continue
        seconds = summary([run["seconds"] / run["periods"] for run in runs])
        print(f"  {contender.name:26} {summary(rates(runs, workload)):26} completions/s, {seconds} s an update")
    if "TRL" in (contender.name for contender in contenders):
        for ours, rival in (*((ours, "TRL") for ours in OURS), BFLOAT16):
            if ratios := times_as_fast(results.runs(cell, ours), results.runs(cell, rival)):
                middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                print(f"  {ours} is {middle} times as fast as {rival}")
    print(end="", flush=True)


if __name__ == "__main__":
    main()
