"""How cost grows: a period's seconds with all that makes it larger, and the loop's own work with the number of workers.

    make bench-scaling

    periods     SmolLM2-135M on all cores, the default configuration at beta 0: 8 prompts of 64 tokens in groups of 8,
                exactly 16 new tokens, 1 generator, every reward different; then one of these at a time grows. The
                slope is the exponent of the power law that fits best (1: linear); beside it, seconds for each one more.
    overhead    the real loop, loader, pool, channel and ledger over the fakes of the tests, on a clock that jumps:
                nobody computes, nobody waits, and what is left is the loop's own work, in milliseconds of processor
                time per group of 8, for 1 to 1,000 workers and 10,000 groups. --profile tells where it goes.

Writes docs/bench-scaling.json and docs/bench-overhead.json.
"""

from __future__ import annotations

import asyncio
import cProfile
import math
import pstats
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, Contender, Figures, Results, parser, smollm2, summary, take_turns

sys.path.insert(0, str(ROOT))

from onbeat.admission import Room
from onbeat.algorithms.catalogue import algorithm_of
from onbeat.config import AlgorithmConfig
from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings
from onbeat.types import Completion, GroupRequest
from tests.fakes.roles import SAMPLING, FakeGenerator, run_fake_loop
from tests.fakes.virtual_time import run_virtual

BASE = {"num_prompts": 8, "group_size": 8, "prompt_tokens": 64, "new_tokens": 16, "generators": 1}
AXES: dict[str, tuple[int, ...]] = {
    "num_prompts": (2, 4, 8, 16, 32),
    "group_size": (4, 8, 16, 32),
    "prompt_tokens": (32, 64, 128, 256, 512),
    "new_tokens": (8, 16, 32, 64, 128),
    "generators": (1, 2, 3),
}
WORKERS = (1, 10, 100, 1000)
NUM_GROUPS = (1_000, 3_000, 10_000)
GROUP_SIZE = 8
ROWS = 32
"""Of a fake worker."""


def main() -> None:
    flags = parser(repeats=3)
    flags.add_argument("--only", choices=("periods", "overhead"))
    flags.add_argument("--axes", nargs="*", choices=AXES, default=tuple(AXES))
    flags.add_argument("--points", type=int, help="of each axis, from the smallest; the others another time")
    flags.add_argument("--profile", action="store_true", help="of the overhead, for the most workers")
    arguments = flags.parse_args()
    if arguments.profile:
        profile()
        return
    if arguments.only != "periods":
        overhead(Results(arguments.to / "bench-overhead.json", arguments.again), arguments.repeats)
    if arguments.only != "overhead":
        results = Results(arguments.to / "bench-scaling.json", arguments.again)
        periods(results, arguments.axes, arguments.repeats, arguments.points)


def periods(results: Results, axes: list[str], repeats: int, points: int | None) -> None:
    keys = {
        "schedule.prompts_per_period": BASE["num_prompts"], "algorithm.beta": 0.0,
        "sampling.max_new_tokens": max(AXES["new_tokens"]),
    }  # fmt: skip
    settings = {"model": smollm2(), "rows": "sums", "reward": "vowels", "keys": keys}
    jobs = [{"seed": seed} for seed in range(1, repeats + 1)]
    way = {"mode": "periodic", "order": "dispatch"}
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        for axis in axes:
            grown = [(value, BASE | {axis: value}) for value in AXES[axis][:points]]
            contenders = [Contender(str(value), "periods_onbeat.py", settings, job=way | job) for value, job in grown]
            warm_up = {"seed": 0, "num_prompts": 2}
            take_turns(results, {"axis": axis}, contenders, jobs, warm_up, Path(folder))
            report(results, axis)


def report(results: Results, axis: str) -> None:
    medians: dict[int, float] = {}
    for value in AXES[axis]:
        if runs := results.runs({"axis": axis}, str(value)):
            medians[value] = statistics.median(run["seconds"] for run in runs)
            print(f"{axis} {value:4}: {summary([run['seconds'] for run in runs])} s")
    if len(medians) > 1:
        exponent, each = slopes(medians)
        print(f"{axis}: grows with the power {exponent:.2f}; {each:.3g} s for each one more", flush=True)


def slopes(seconds: dict[int, float]) -> tuple[float, float]:
    """The exponent of the power law, and the slope of the line, that fit best."""
    return (
        _slope([math.log(value) for value in seconds], [math.log(each) for each in seconds.values()]),
        _slope(list(map(float, seconds)), list(seconds.values())),
    )


def _slope(xs: list[float], ys: list[float]) -> float:
    return statistics.linear_regression(xs, ys).slope


class Worker(FakeGenerator):
    """A fake that costs next to nothing: its room is known, as a real one's is, and its tokens are always the same."""

    room = Room(max_sequences=ROWS, cache_tokens=1000, bytes_per_token=1 << 20)

    def why_never(self, request: GroupRequest) -> str | None:
        return self.room.why_never(request)

    def submit(self, request: GroupRequest) -> None:
        assert self.events is not None
        loop = asyncio.get_running_loop()
        for sample in request.samples:
            completion = Completion(
                stream=request.stream, period=request.period, slot=request.slot, sample=sample, version=self.version,
                token_ids=(1 + sample, 2, 3, 4), sampler_logprobs=(-1.0,) * 4, finish_reason="length",
            )  # fmt: skip
            loop.call_later(self.rng.uniform(0.1, 20.0), self.events.completed, self.name, completion)


def run_fakes(num_workers: int, num_groups: int) -> Figures:
    """One period; processor time of everything but making the workers."""
    settings = LoaderSettings(
        mode="periodic", order="dispatch", group_size=GROUP_SIZE, sampling=SAMPLING, elide=True,
        algorithm=algorithm_of(AlgorithmConfig(), loads="advantage"),
    )  # fmt: skip
    workers = [Worker(f"generator-{n}", ROWS, random.Random(n), local=False) for n in range(num_workers)]
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        began_s = time.process_time()
        run = run_fake_loop(settings, list(workers), num_prompts=num_groups, num_periods=1, ledger=ledger)
        _, pool, _ = run_virtual(run)
        seconds = time.process_time() - began_s
    assert pool.counts.accepted == num_groups * GROUP_SIZE
    return {"seconds": seconds, "ms_per_group": 1000 * seconds / num_groups}


def overhead(results: Results, repeats: int) -> None:
    cells = [(workers, max(NUM_GROUPS)) for workers in WORKERS] + [(max(WORKERS), groups) for groups in NUM_GROUPS[:-1]]
    me = Contender("the loop", "contender.py", {"group_size": GROUP_SIZE, "rows": ROWS})
    for num_workers, num_groups in cells:
        cell = {"workers": num_workers, "groups": num_groups}
        for _ in range(len(results.expect(cell, me)["runs"]), repeats):
            results.add(cell, me.name, {}, run_fakes(num_workers, num_groups))
        per_group = [run["ms_per_group"] for run in results.runs(cell, me.name)]
        print(f"{num_workers:5} workers, {num_groups:6} groups: {summary(per_group)} ms per group", flush=True)


def profile() -> None:
    profiler = cProfile.Profile()
    profiler.runcall(run_fakes, max(WORKERS), max(NUM_GROUPS))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
