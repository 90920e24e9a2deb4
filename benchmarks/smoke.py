"""What works on this machine, in about five minutes: for owners of a GPU, an NPU, or a processor nobody has tried.

    make smoke

Every line is a real run of a small model, in processes of its own: training, sync against periodic, a resumed run,
precision, LoRA, the forms of a trainer of several ranks. What fails is told with the end of its output; the others go
on. Ends with 1 if something failed. Several ranks need a device each: with a single GPU or NPU they are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / "recipes" / "arithmetic.toml")
SHORT = ["--schedule.periods=4", "--checkpoint.every=2"]
LIMIT_S = 300
WHERE = (
    "from onbeat.device import device, collective_backend, prepare_process; import torch; prepare_process(0); "
    "print(device(), 'torch', torch.__version__, 'collectives', collective_backend())"
)
DEVICES = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 'host')"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="onbeat-smoke-") as folder:
        runs = Path(folder)

        def train(name: str, *flags: str) -> Callable[[], str]:
            return lambda: trained(runs / name, *flags)

        steps: dict[str, Callable[[], str]] = {
            "device": lambda: last_line(ran(sys.executable, "-c", WHERE)),
            "training": train("one"),
            "sync": train("sync", "--schedule.mode=sync"),
            "the same bits as periodic": lambda: same(runs / "one", runs / "sync"),
            "resumed after it": lambda: resumed(runs / "one"),
            "the model it made": lambda: last_line(onbeat("check", str(runs / "one" / "model"))),
            "bfloat16": train("bfloat16", "--trainer.precision=bfloat16"),
            "LoRA": train("lora", "--lora.rank=8"),
        }
        if last_line(ran(sys.executable, "-c", DEVICES)) != "1":
            steps |= {
                "2 ranks, replicated": train("replicated", "--trainer.ranks=2"),
                "2 ranks, sharded": train("sharded", "--trainer.ranks=2", "--trainer.shard=true"),
                "2 ranks, tensor parallel": train("tensor", "--trainer.ranks=2", "--trainer.tensor_parallel=2"),
            }
        return 1 if sum(not tried(name, step) for name, step in steps.items()) else 0


def tried(name: str, step: Callable[[], str]) -> bool:
    began_s = time.monotonic()
    try:
        told, works = step(), True
    except Exception as error:  # whatever it is: the others are to be tried as well
        told, works = f"{type(error).__name__}: {error}", False
    print(f"{'works' if works else 'FAILS':6} {name:28} {time.monotonic() - began_s:5.1f} s  {told}", flush=True)
    return works


def ran(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stderr or done.stdout).strip()[-2000:]
    return done.stdout


def onbeat(*words: str) -> str:
    return ran(sys.executable, "-m", "onbeat.cli", *words)


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def trained(run_dir: Path, *flags: str) -> str:
    onbeat("train", RECIPE, *SHORT, f"--run.dir={run_dir}", *flags)
    environment = json.loads((run_dir / "environment.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    exact = "exact" if environment["exact"] else f"not exact: {environment['why_not_exact']}"
    rewards = f"reward {metrics[0]['reward_mean']:.2f} to {metrics[-1]['reward_mean']:.2f}"
    return f"{exact}; {rewards}; sampler and trainer apart by {metrics[-1]['gap_mean']:.1e}"


def same(one: Path, other: Path) -> str:
    first, second = ((run / "model" / "model.safetensors").read_bytes() for run in (one, other))
    if first == second:
        return "yes"
    exact = json.loads((one / "environment.json").read_text())["exact"]
    assert not exact, "the run said that it is exact"
    return "no, as the run said"


def resumed(run_dir: Path) -> str:
    output = onbeat("train", RECIPE, "--schedule.periods=6", f"--run.dir={run_dir}", "--resume", "--checkpoint.every=2")
    return next(line for line in output.splitlines() if line.startswith("resuming from")).rpartition("/")[2]


if __name__ == "__main__":
    sys.exit(main())
