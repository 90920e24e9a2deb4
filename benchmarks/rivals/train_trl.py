"""bench-trl: TRL's GRPOTrainer on the same rows, rewards, group size, loss and number of updates.

Of several updates the first is not counted.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import contender
import tasks
from grpo_trl import before_torch, grpo_config, no_logits_of_prompts

TINY = {"prompts": 1, "max_new_tokens": 1}
"""For a first update that only warms up."""


def prepare(given: dict[str, Any]) -> contender.Run:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before_torch(given)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(given["threads"])
    if given.get("compact_head"):
        no_logits_of_prompts()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """The moments at which updates ended."""

        def __init__(self) -> None:
            self.ends_s: list[float] = []
            self.began_s = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends_s.append(time.monotonic())

    def run(job: dict[str, Any]) -> dict[str, Any]:
        settings = given | (TINY | {"micro_batch": given["group_size"]} if job.get("tiny") else {})
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            config = grpo_config(
                settings, output_dir=folder, seed=job["seed"], max_steps=job["updates"], learning_rate=1e-6,
                shuffle_dataset=False,
            )  # fmt: skip
            trainer = GRPOTrainer(
                model=model, reward_funcs=getattr(tasks, settings["reward"]), args=config,
                train_dataset=Dataset.from_list(list(getattr(tasks, settings["rows"])())), callbacks=[clock],
                processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            )  # fmt: skip
            trainer.train()
            logged = [record for record in trainer.state.log_history if "completions/mean_length" in record]
        ends_s = clock.ends_s if len(clock.ends_s) > 1 else [clock.began_s, *clock.ends_s]
        logged = logged[1 - len(ends_s) :]
        return {
            "seconds": ends_s[-1] - ends_s[0],
            "periods": len(ends_s) - 1,
            "mean_length": sum(record["completions/mean_length"] for record in logged) / len(logged),
            "zero_variance_share": sum(record["frac_reward_zero_std"] for record in logged) / len(logged),
        }

    return run


if __name__ == "__main__":
    contender.main(prepare, ["trl", "torch", "transformers"])
