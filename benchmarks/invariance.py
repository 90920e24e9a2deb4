"""What batch invariance costs: tokens per second of the embedded generator with its props and without.

    .venv/bin/python benchmarks/invariance.py

The work of bench-generate's cells with 32 sequences in flight and prompts of 45 tokens. Without: all libraries
choose their kernels freely, by what the processor knows, and products have as few rows as there are. Writes
docs/bench-invariance.json.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from generate import GROUP_SIZE, workload
from harness import Contender, Results, parser, smollm2, summary, take_turns

CELLS = [{"threads": threads, "in_flight": 32, "prompt_tokens": 45} for threads in (1, 2)]


def main() -> None:
    arguments = parser(repeats=5).parse_args()
    model = smollm2()
    contenders = [
        Contender("invariant", "generate_onbeat.py", {"model": model}),
        Contender("free", "generate_onbeat.py", {"model": model, "invariant": False}),
    ]
    results = Results(arguments.to / "bench-invariance.json", arguments.again)
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        for cell in CELLS:
            jobs = [workload(cell, seed) for seed in range(1, arguments.repeats + 1)]
            warm_up = {"prompts": jobs[0]["prompts"][:1], "lengths": [[1] * GROUP_SIZE], "seed": 0}
            rehearsal = workload(cell, 0)
            take_turns(results, cell, contenders, jobs, warm_up, Path(folder), lambda _, job=rehearsal: job)
            rates = {
                contender.name: [run["tokens"] / run["seconds"] for run in results.of(cell, contender.name)["runs"]]
                for contender in contenders
            }
            print(f"{cell['threads']} thread(s): " + ", ".join(f"{name} {summary(rates[name])}" for name in rates))
            pairs = zip(rates["invariant"], rates["free"], strict=True)
            print(f"  it costs {100 * (1 - statistics.median(a / b for a, b in pairs)):.1f} %", flush=True)


if __name__ == "__main__":
    main()
