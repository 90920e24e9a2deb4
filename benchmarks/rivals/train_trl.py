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

TINY = {"prompts": 1, "max_new_tokens": 1}
"""For a first update that only warms up."""


def prepare(given: dict[str, Any]) -> contender.Run:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(given["threads"])

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
            config = GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, fp16=False, report_to="none", save_strategy="no",
                logging_steps=1, disable_tqdm=True, seed=job["seed"], max_steps=job["updates"],
                per_device_train_batch_size=settings["micro_batch"],
                gradient_accumulation_steps=settings["prompts"] * settings["group_size"] // settings["micro_batch"],
                num_generations=settings["group_size"], max_completion_length=settings["max_new_tokens"],
                beta=settings["beta"], temperature=1.0, top_p=1.0, top_k=0, learning_rate=1e-6, shuffle_dataset=False,
                loss_type="grpo", adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="constant",
                use_transformers_continuous_batching=settings.get("continuous_batching", False),
                gradient_checkpointing=False, dataloader_pin_memory=False,
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
