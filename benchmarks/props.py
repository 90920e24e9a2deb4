"""What batch invariance rests on: take each prop away, and count random schedules whose bits change.

    .venv/bin/python benchmarks/props.py

For 1, 2 and 5 threads: with everything in place; without MKL_CBWR; with torch's own kernels for all that the processor
knows (nothing new, unless it has AVX-512); without at least 4 rows in a product; with prompts cut into chunks
anywhere; with every product over a prompt's keys shared by the samples; with linear layers or activations as torch
computes them. Attention, norms and gates are by torch's operations: compiled they need no props (kernels.c). A schedule
is a handful of groups arriving at random moments, as in tests/equivalence/test_batch_invariance.py; every other one is
of a model with one head of keys and a width that fills no vector register.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from onbeat.environment import EXACT_ENVIRONMENT

ROOT = Path(__file__).parents[1]
PROPS = (
    "everything",
    "no MKL_CBWR",
    "torch's best kernels",
    "no 4 rows",
    "chunks anywhere",
    "small products shared",
    "linear layers as they are",
    "activations as they are",
)
NUM_SCHEDULES = 30


def main() -> int:
    if len(sys.argv) == 3:
        print(count_broken(sys.argv[1], int(sys.argv[2])))
        return 0
    for threads in (1, 2, 5):
        for prop in PROPS:
            without = {
                "no MKL_CBWR": {"MKL_CBWR"},
                "torch's best kernels": {"ATEN_CPU_CAPABILITY"},
            }.get(prop, set())
            environment = {key: value for key, value in (os.environ | EXACT_ENVIRONMENT).items() if key not in without}
            command = [sys.executable, __file__, prop, str(threads)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            print(
                f"{threads} thread(s), {prop}: {done.stdout.split()[-1]} of {NUM_SCHEDULES} schedules changed",
                flush=True,
            )
    return 0


def count_broken(prop: str, threads: int) -> int:
    sys.path.insert(0, str(ROOT))
    import torch

    from onbeat.rollout import cache, engine, invariant

    cache.fits = lambda own: False
    invariant.available = lambda: False

    if prop == "small products shared":
        cache._SHARED = 0
    if prop == "linear layers as they are":
        invariant._PACKED = ()
    if prop == "activations as they are":
        invariant._ACTIVATIONS.clear()
    if prop == "no 4 rows":
        cache.MIN_ROWS = engine.MIN_ROWS = 1
    if prop == "chunks anywhere":
        sizes = random.Random(1)

        def next_chunk(group: engine._Group) -> cache.Chunk:
            last = min(group.prefilled + sizes.randint(5, 40), len(group.request.token_ids))
            return cache.Chunk(group.cache, group.prefilled, last)

        engine._Group.next_chunk = next_chunk
    torch.set_num_threads(threads)
    from tests.equivalence.test_batch_invariance import Arrival, check_invariance
    from tests.fakes.models import VOCABULARY, tiny_model

    rng = random.Random(0)
    broken = 0
    for number in range(NUM_SCHEDULES):
        schedule = [
            Arrival(
                prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 300))),
                group_size=rng.randint(2, 9),
                at_step=rng.randint(0, 12),
                cancelled_at=None,
                max_new_tokens=rng.randint(1, 40),
            )
            for _ in range(rng.randint(2, 6))
        ]
        try:
            check_invariance(tiny_model(("llama", "gemma3")[number % 2]), schedule, rows=rng.randint(9, 24))
        except AssertionError:
            broken += 1
    return broken


if __name__ == "__main__":
    sys.exit(main())
