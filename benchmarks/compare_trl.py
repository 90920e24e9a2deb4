"""Losses and gradients of GRPO, Dr. GRPO and DAPO beside TRL's own trainer.

    make compare-trl

TRL's GRPOTrainer generates a batch and takes two optimizer steps on it, by plain gradient descent so that a step is the
gradient; onbeat's trainer takes the same two steps from the same completions and rewards. What must agree: the
advantages, both losses (relative to the mean size of an advantage: their terms cancel), and the movement of the weights
in both steps (relative to its norm). Exits with 1 if they do not.

One choice of TRL is off: it multiplies the KL by the ratio (use_bias_correction_kl), which is not in the papers of
these algorithms. DAPO's dynamic sampling and overlong shaping are not part of a loss, and not of this.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Contender
from safetensors.torch import load_file

from onbeat.algorithms.catalogue import ALGORITHMS
from onbeat.model_source import make_model, model_directory
from onbeat.recipe import load
from onbeat.training.trainer import PolicyTrainer
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals

JOB = {
    "prompts": 6,
    "group_size": 8,
    "max_new_tokens": 8,
    "temperature": 3.0,  # for completions of several lengths: the means differ
    "beta": 0.05,
    "learning_rate": 0.2,  # large enough that the second step clips
}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.28},
}
TOLERANCE = 1e-4


def our_steps(name: str, model: Path, seen: dict[str, Any], rewards: dict[str, float]) -> tuple[Any, ...]:
    """(advantages, losses, weights after each step), in TRL's order."""
    keys = {
        "algorithm.name": name, "algorithm.beta": JOB["beta"], "schedule.updates_per_period": 2,
        "trainer.learning_rate": JOB["learning_rate"], "trainer.max_grad_norm": 1e9, "trainer.weight_decay": 0.0,
        "sampling.max_new_tokens": JOB["max_new_tokens"], "sampling.temperature": JOB["temperature"],
        "model.path": str(model),
    }  # fmt: skip
    trainer = PolicyTrainer(load([ROOT / "recipes" / "arithmetic.toml"], keys), str(model))
    trainer._optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)  # the rate comes with the step
    advantages = [0.0] * len(seen["completions"])
    groups = []
    for slot, rows in enumerate(rows_by_prompt(seen["prompts"])):
        completions = [seen["completions"][row] for row in rows]
        found = ALGORITHMS[name].advantages([rewards[str(ids)] for ids in completions])
        for row, advantage in zip(rows, found, strict=True):
            advantages[row] = advantage
        groups.append(
            TrainGroup(
                slot=slot,
                prompt_ids=tuple(seen["prompts"][rows[0]]),
                completion_ids=tuple(map(tuple, completions)),
                sampler_logprobs=tuple((0.0,) * len(ids) for ids in completions),
                advantages=found,
            )
        )
    num_tokens = sum(map(len, seen["completions"]))
    totals = UpdateTotals(num_groups=len(groups), num_sequences=len(advantages), num_tokens=num_tokens)
    trainer.snapshot()  # opens a period
    losses, weights = [], []
    for update in (0, 1):
        trainer.accumulate(MicroBatch(period=0, update=update, index=0, rank=0, groups=tuple(groups), closes=totals))
        report = trainer.step(totals)
        assert (report.clip_share or 0.0) > 0.0 or update == 0, "nothing was clipped: the comparison says too little"
        losses.append(report.loss)
        weights.append({name: value.detach().clone() for name, value in trainer.model.named_parameters()})
    return advantages, losses, weights


def rows_by_prompt(prompts: list[list[int]]) -> list[list[int]]:
    """TRL shuffles the completions of a batch; their prompts tell which belong together."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).append(row)
    assert {len(siblings) for siblings in rows.values()} == {JOB["group_size"]}, "a prompt came twice"
    return list(rows.values())


def movement_gap(before: Any, ours: Any, theirs: Any) -> float:
    """Norm of the difference of two steps over the norm of the step."""
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    step = torch.cat([(theirs[name] - before[name]).flatten() for name in theirs])
    return (difference.norm() / step.norm()).item()


def main() -> None:
    source = f"{ROOT}/recipes/arithmetic.py:make_model"
    model = model_directory(source)
    if not (model / "config.json").is_file():
        make_model(source, model)
    start = load_file(model / "model.safetensors")
    agrees = True
    with tempfile.TemporaryDirectory(prefix="onbeat-compare-") as folder:
        trl = Contender("TRL", "losses_trl.py", {"model": str(model)}, environment="trl").start(
            {}, Path(folder) / "log"
        )
        try:
            for name, settings in TRL_SETTINGS.items():
                answer = trl.run(JOB | {"seed": 1, "directory": folder, "trl": settings})
                seen, rewards = answer["seen"], answer["rewards"]
                theirs = [load_file(Path(folder) / f"step-{step}.safetensors") for step in (1, 2)]
                advantages, losses, ours = our_steps(name, model, seen[0], rewards)
                size = statistics.fmean(map(abs, advantages))
                gaps = {
                    "advantages": max(abs(a - b) for a, b in zip(advantages, seen[0]["advantages"], strict=True))
                    / size,
                    "loss of step 1": abs(losses[0] - seen[0]["loss"]) / size,
                    "loss of step 2": abs(losses[1] - seen[1]["loss"]) / size,
                    "gradient of step 1": movement_gap(start, ours[0], theirs[0]),
                    "gradient of step 2": movement_gap(theirs[0], ours[1], theirs[1]),
                }
                assert seen[1]["completions"] == seen[0]["completions"], "not two steps on one batch"
                assert len(set(map(len, seen[0]["completions"]))) > 1, "all of one length: the means are the same"
                agrees &= max(gaps.values()) <= TOLERANCE
                print(f"{name:8}", json.dumps({key: float(f"{gap:.1e}") for key, gap in gaps.items()}), flush=True)
        finally:
            trl.close()
    print("agrees" if agrees else f"DISAGREES by more than {TOLERANCE}")
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
