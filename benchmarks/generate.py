"""Tokens per second of the embedded generator, of transformers and of vLLM, on the same work.

    make bench-generate

SmolLM2-135M in float32. Each cell: groups of 8 completions with lengths fixed beforehand, 8 to 56 tokens, unequal;
random prompt tokens; twice as many sequences as may be in flight. Time is from the first prompt to the last
token, prefill included. transformers' `generate` takes as many sequences per batch as may be in flight; continuous
batching and vLLM refill. All rehearse before, which is not counted: onbeat and vLLM with a wave of sequences,
transformers' two, which are far behind, with two groups. Then these do one job, onbeat and vLLM three, and ratios are
those of the same jobs. vLLM is compiled, with its prefix cache, threads bound to cores. None but onbeat computes
log-probabilities, which is to the others' advantage. Writes docs/bench-generate.json.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from harness import Cell, Contender, Figures, Results, parser, rounds, smollm2, summary, take_turns

GROUP_SIZE = 8
WAVES = 2
LENGTHS = (8, 56)
CELLS: list[Cell] = [
    {"threads": threads, "in_flight": in_flight, "prompt_tokens": prompt_tokens}
    for threads in (1, 2)
    for in_flight in (32, 64)
    for prompt_tokens in (45, 300)
]
NUM_PARAMETERS = 134_515_008
"""Twice as many operations a token: peak FLOPS over that are the tokens of one large matrix product."""


def main() -> None:
    flags = parser(repeats=3)
    flags.add_argument("--only", nargs="*", help="contenders, by name")
    flags.add_argument("--cells", type=int, nargs="*", help="cells, by number from 0; the others another time")
    arguments = flags.parse_args()
    model = smollm2()
    contenders = [
        Contender("onbeat", "generate_onbeat.py", {"model": model}),
        Contender("vLLM", "generate_vllm.py", {"model": model}, environment="vllm"),
        *(
            Contender(f"transformers {how}", "generate_transformers.py", {"model": model, "how": how}, "trl", repeats=1)
            for how in ("generate", "continuous")
        ),
    ]
    contenders = [c for c in contenders if not arguments.only or c.name in arguments.only]
    results = Results(arguments.to / "bench-generate.json", arguments.again)
    results.note(group_size=GROUP_SIZE)
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        for number, cell in enumerate(CELLS):
            if arguments.cells is None or number in arguments.cells:
                jobs = [workload(cell, seed) for seed in range(1, arguments.repeats + 1)]
                warm_up = {"prompts": jobs[0]["prompts"][:1], "lengths": [[1] * GROUP_SIZE], "seed": 0}

                def rehearsal(contender: Contender, cell: Cell = cell) -> Figures:
                    slow = contender.repeats == 1
                    return part_of(workload(cell, 0), 2 if slow else cell["in_flight"] // GROUP_SIZE)

                take_turns(results, cell, contenders, jobs, warm_up, Path(folder), rehearsal)
                report(results, cell, contenders)


def workload(cell: Cell, seed: int) -> Figures:
    rng = random.Random(seed)
    num_groups = WAVES * cell["in_flight"] // GROUP_SIZE
    return {
        "seed": seed,
        "prompts": [[rng.randrange(5, 40000) for _ in range(cell["prompt_tokens"])] for _ in range(num_groups)],
        "lengths": [[rng.randint(*LENGTHS) for _ in range(GROUP_SIZE)] for _ in range(num_groups)],
    }


def part_of(job: Figures, num_groups: int) -> Figures:
    return job | {name: job[name][:num_groups] for name in ("prompts", "lengths")}


def report(results: Results, cell: Cell, contenders: list[Contender]) -> None:
    rates = {}
    print(", ".join(f"{name} {value}" for name, value in cell.items()))
    for contender in contenders:
        result = results.of(cell, contender.name)
        rates[contender.name] = [run["tokens"] / run["seconds"] for run in result["runs"]]
        start = f"start to first token {result['start_s']} s" if "start_s" in result else ""
        print(f"  {contender.name:24} {summary(rates[contender.name]):24} tokens/s  {start}", flush=True)
    if "onbeat" in rates:
        limits = [run["gemm_flops"] / (2 * NUM_PARAMETERS) for run in results.runs(cell, "onbeat")]
        shares = [rate / limit for rate, limit in zip(rates["onbeat"], limits, strict=True)]
        print(f"  onbeat : GEMM limit {summary(shares)} of {statistics.median(limits):.0f} tokens/s")
        for name in [each.name for each in contenders if each.name != "onbeat"]:
            gains = rates_over(results.runs(cell, "onbeat"), results.runs(cell, name))
            print(f"  onbeat : {name} {summary(gains)}, job by job")


def rates_over(ours: list[Figures], theirs: list[Figures]) -> list[float]:
    """How many times as many tokens per second, job by job."""
    pairs = rounds(ours, theirs)
    return [(a["tokens"] / a["seconds"]) / (b["tokens"] / b["seconds"]) for a, b in pairs]


if __name__ == "__main__":
    main()
