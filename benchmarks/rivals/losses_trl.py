"""compare-trl: one batch, two optimizer steps of TRL's GRPOTrainer by plain gradient descent; what it saw and did.

The second step is off-policy by the first, so that ratios, clipping and the KL have a say in it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import contender
from grpo_trl import ON_A_CPU, THE_SAME


def prepare(settings: dict[str, Any]) -> contender.Run:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Recording(GRPOTrainer):  # type: ignore[misc]
        """Remembers the batches it computed losses of."""

        seen: list[dict[str, Any]]

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            loss = super()._compute_loss(model, inputs)
            prompts, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"].bool()
            completions, mask = inputs["completion_ids"], inputs["completion_mask"].bool()
            self.seen.append(
                {
                    "loss": loss.item(),
                    "advantages": inputs["advantages"].tolist(),
                    "prompts": [ids[m].tolist() for ids, m in zip(prompts, prompt_mask, strict=True)],
                    "completions": [ids[m].tolist() for ids, m in zip(completions, mask, strict=True)],
                }
            )
            return loss

    class Keep(TrainerCallback):  # type: ignore[misc]
        """The weights after each step."""

        def __init__(self, directory: Path) -> None:
            self._directory = directory

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            weights = {name: value.detach().clone() for name, value in more["model"].named_parameters()}
            save_file(weights, self._directory / f"step-{state.global_step}.safetensors")

    def run(job: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(job["seed"])
        rewards: dict[str, float] = {}

        def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            values = [float(sum(ids) % 5) for ids in completion_ids]
            rewards.update({str(ids): value for ids, value in zip(completion_ids, values, strict=True)})
            return values

        with tempfile.TemporaryDirectory() as folder:
            config = GRPOConfig(
                **ON_A_CPU, **THE_SAME, output_dir=folder, seed=job["seed"], max_steps=2, num_iterations=2,
                steps_per_generation=1, per_device_train_batch_size=job["prompts"] * job["group_size"],
                gradient_accumulation_steps=1, num_generations=job["group_size"],
                max_completion_length=job["max_new_tokens"], temperature=job["temperature"], optim="sgd",
                learning_rate=job["learning_rate"], max_grad_norm=1e9, beta=job["beta"], **job["trl"],
            )  # fmt: skip
            trainer = Recording(
                model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
                reward_funcs=reward,
                args=config,
                train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(2, 42, 2) for b in (3, 38)]),
                callbacks=[Keep(Path(job["directory"]))],
                processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            )
            trainer.seen = []
            trainer.train()
        return {"seen": trainer.seen, "rewards": rewards}

    return run


if __name__ == "__main__":
    contender.main(prepare, ["trl", "torch", "transformers"])
