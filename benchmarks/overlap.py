"""What overlapping generation and training gains, on one machine whose cores both sides share.

    make bench-overlap

SmolLM2-135M, groups of 8, prompts of about 45 tokens, up to 16 new ones.

    balanced    96 groups; half of the rewards' groups are without advantage, and generation and training take about as
                long
    short       8 groups, a KL to the reference

The same period three ways: sync, each phase with all cores; sync, generator and trainer on a core each, as if they were
devices of their own; periodic, as it is by default. And periodic in order of completion, which dispatch order must not
be far from. A period is from the publish to the end of the update, over workers that have already run one, off the
record; the learning rate is nothing in float32, so that all periods find the same model. What was sampled, and the norm
of the gradient, are compared: the three that are exact must have the same bits. Writes docs/bench-overlap.json.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import Contender, Figures, Results, parser, rounds, smollm2, summary, take_turns
from workloads import WORKLOADS

NAMES = ("balanced", "short")
ONE_CORE_EACH = {"generator.threads": 1, "trainer.threads": 1}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sync, all cores": ({}, {"mode": "sync", "order": "dispatch"}),
    "sync, separated": (ONE_CORE_EACH, {"mode": "sync", "order": "dispatch"}),
    "periodic": ({}, {"mode": "periodic", "order": "dispatch"}),
    "periodic, completion order": ({}, {"mode": "periodic", "order": "completion"}),
}
"""Keys of the workers, and the way of the period."""
EXACT = ("periodic", "sync, all cores", "sync, separated")
WARM_UP_GROUPS = 4


def main() -> None:
    flags = parser(repeats=5)
    flags.add_argument("--workloads", nargs="*", choices=NAMES, default=NAMES)
    arguments = flags.parse_args()
    model = smollm2()
    results = Results(arguments.to / "bench-overlap.json", arguments.again)
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            contenders = [
                Contender(
                    f"onbeat {way}",
                    "periods_onbeat.py",
                    {"model": model, **workload.task, "keys": workload.keys | keys},
                    job=job,
                )
                for way, (keys, job) in WAYS.items()
            ]
            jobs = [{"seed": seed} for seed in range(1, arguments.repeats + 1)]
            warm_up = {"seed": 0, "num_prompts": WARM_UP_GROUPS}
            take_turns(results, {"workload": name}, contenders, jobs, warm_up, Path(folder), lambda _: whole_period())
            report(results, name)


def whole_period() -> Figures:
    """A rehearsal: the first one of a process is slower, and it would always be the same way's."""
    return {"seed": 0}


def same_bits(turn: Iterable[Figures]) -> bool:
    """Whether all ways of a round sampled the same, with the same log-probabilities, and trained the same on it."""
    return len({(run["sampled"], *run["grad_norms"]) for run in turn}) == 1


def fastest_first(turns: Iterable[Sequence[Figures]]) -> int:
    """In how many rounds the first of them, periodic, was the fastest."""
    return sum(min(run["seconds"] for run in turn) == turn[0]["seconds"] for turn in turns)


def report(results: Results, workload: str) -> None:
    runs = {way: results.of({"workload": workload}, f"onbeat {way}")["runs"] for way in WAYS}
    print(workload)
    for way, found in runs.items():
        waits = [
            f"{side} waiting {summary([run[f'{side}_waiting_s'] for run in found])}"
            for side in ("generators", "trainer")
        ]
        print(f"  {way:28} {summary([run['seconds'] for run in found]):22} s, {', '.join(waits)}")
    median = {way: statistics.median(run["seconds"] for run in found) for way, found in runs.items()}
    turns = rounds(*(runs[way] for way in EXACT))
    print(f"  periodic fastest in {fastest_first(turns)} of {len(turns)}")
    for way in EXACT[1:]:
        print(f"  periodic is {median[way] / median['periodic']:.2f} times as fast as {way}")
    same = [same_bits(turn) for turn in turns]
    print(f"  the same tokens, log-probabilities and norm of the gradient in {sum(same)} of {len(same)}")
    late = median["periodic"] / median["periodic, completion order"] - 1
    print(f"  dispatch order takes {100 * late:+.0f} % of the time in completion order", flush=True)


if __name__ == "__main__":
    main()
