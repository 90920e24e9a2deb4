"""time_to_accuracy: TRL's GRPOTrainer by the same recipe, evaluated on the held-out prompts after each update.

Greedily, by `generate` in one batch, with the clock stopped. It ends after so many `updates`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from typing import Any

import contender
from grpo_trl import before_torch, grpo_config


def load_task(path: str) -> Any:
    """The recipe's module: rows and reward."""
    spec = importlib.util.spec_from_file_location("task", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(settings: dict[str, Any]) -> contender.Run:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before_torch(settings)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(settings["threads"])
    task = load_task(settings["task"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    held_out = list(task.held_out_rows())

    @torch.no_grad()
    def accuracy(model: Any) -> float:
        """Of the greedy answers; the clock does not run."""
        training, _ = model.training, model.eval()
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in held_out], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip
        found = model.generate(**inputs, do_sample=False, max_new_tokens=settings["max_new_tokens"])
        model.train(training)
        ids = [until_end(row) for row in found[:, inputs["input_ids"].shape[1] :].tolist()]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = task.correct([row["prompt"] for row in held_out], texts, ids, [row["answer"] for row in held_out])
        return sum(rewards) / len(rewards)

    def until_end(ids: list[int]) -> list[int]:
        return ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Seconds of training, without those of evaluation; and the curve."""

        def __init__(self) -> None:
            self._seconds = 0.0
            self._since_s = 0.0
            self.curve: list[dict[str, Any]] = []

        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            self._record(model)
            self._since_s = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self._seconds += time.monotonic() - self._since_s
            self._record(model)
            self._since_s = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Comes right after the update's own record."""
            if logs and "reward" in logs:
                self.curve[-1] |= {"reward": logs["reward"], "length": logs["completions/mean_length"]}

        def _record(self, model: Any) -> None:
            self.curve.append({"updates": len(self.curve), "seconds": self._seconds, "accuracy": accuracy(model)})

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if job.get("warm_up"):  # every run starts from nothing, and its clock with its first update
            return {}
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            config = grpo_config(
                settings, output_dir=folder, seed=job["seed"], max_steps=settings["updates"],
                learning_rate=settings["learning_rate"],
            )  # fmt: skip
            trainer = GRPOTrainer(
                model=model, reward_funcs=task.correct, args=config, callbacks=[clock],
                train_dataset=Dataset.from_list(list(task.train_rows())), processing_class=tokenizer,
            )  # fmt: skip
            trainer.train()
        return {"curve": clock.curve}

    return run


if __name__ == "__main__":
    contender.main(prepare, ["trl", "torch", "transformers"])
