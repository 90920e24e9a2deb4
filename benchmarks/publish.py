"""Publishing on one host: a version of SmolLM2-135M from the trainer to 1, 2 and 4 generators, beside a plain copy.

    make bench-publish

A publish is all of it: the trainer writes its weights into the shared block, every generator verifies them (stage)
and takes them (activate), with real processes and nobody else at work. The plain copy is of the same number of bytes,
from memory to memory that has been touched before, by one thread, just after each publish: the machine is not equally
fast in every minute. The first two publishes of a run are not counted: blocks are made and mapped, generators are
probed. Writes docs/bench-publish.json.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import ROOT, code, machine, smollm2, summary

from onbeat.protocols import no_trace
from onbeat.recipe import load
from onbeat.session import open_session
from onbeat.training.ranks import TrainerRanks

COUNTS = (1, 2, 4)
REPEATS = 15
NOT_COUNTED = 2


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--repeats", type=int, default=REPEATS)
    repeats = flags.parse_args().repeats
    results = []
    for count in COUNTS:
        num_bytes, runs, copies = asyncio.run(publish(count, repeats))
        results.append({"generators": count, "num_bytes": num_bytes, "publish_s": runs, "copy_s": copies})
        print(f"{count} generators: {summary(totals(runs))} s; a plain copy {summary(copies)} s", flush=True)
    report(results)
    found = {"machine": machine(), "code": code(), "results": results}
    (ROOT / "docs" / "bench-publish.json").write_text(json.dumps(found, indent=1) + "\n")


def totals(runs: list[dict[str, float]]) -> list[float]:
    return [sum(run.values()) for run in runs]


def report(results: list[dict[str, Any]]) -> None:
    by_count = [median(totals(result["publish_s"])) for result in results]
    print(f"4 generators take {by_count[-1] / by_count[0]:.2f} times as long as 1; ", end="")
    for result in results:
        pairs = zip(totals(result["publish_s"]), result["copy_s"], strict=True)
        print(f"{result['generators']}: {median(total / copy_s for total, copy_s in pairs):.2f}", end=" ")
    print("times a plain copy")


async def publish(count: int, repeats: int) -> tuple[int, list[dict[str, float]], list[float]]:
    """The snapshot's size, the seconds of the phases of each publish, and of a plain copy after it."""
    with tempfile.TemporaryDirectory() as folder:
        config = load([str(ROOT / "recipes" / "arithmetic.toml")], settings(count, folder))
        runs: list[dict[str, float]] = []
        copies: list[float] = []
        async with open_session(config, Path(folder), no_trace, print, print) as session:
            trainer = TrainerRanks(config, session.launcher, session.worker_settings, no_trace)
            session.closing.callback(trainer.close)
            await trainer.start(None)
            for version in range(NOT_COUNTED + repeats):
                began_s = time.perf_counter()
                snapshot = await trainer.snapshot(version)
                written_s = time.perf_counter()
                await session.channel.publish(snapshot)
                ended_s = time.perf_counter()
                phases = {"write": written_s - began_s, "stage and activate": ended_s - written_s}
                runs.append({name: round(seconds, 4) for name, seconds in phases.items()})
                copies.append(plain_copy_s(snapshot.num_bytes))
        return snapshot.num_bytes, runs[NOT_COUNTED:], copies[NOT_COUNTED:]


def settings(count: int, folder: str) -> dict[str, Any]:
    rows = Path(folder) / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}) + "\n")
    return {
        "model.path": smollm2(),
        "data.path": str(rows),
        "data.eval_path": None,
        "reward.functions": [{"path": "exact_match"}],
        "generator.count": count,
        "generator.threads": 1,
        "generator.cache_gib": 0.5,
    }


@functools.cache
def buffers(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)


def plain_copy_s(num_bytes: int) -> float:
    source, target = buffers(num_bytes)
    began_s = time.perf_counter()
    np.copyto(target, source)
    return round(time.perf_counter() - began_s, 4)


if __name__ == "__main__":
    main()
