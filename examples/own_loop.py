"""GRPO in a training loop of your own: onbeat generates and scores the next groups while this script trains.

    python examples/own_loop.py recipes/arithmetic.toml runs/own --schedule.periods 10

The loop, the model, the loss and the optimizer are this script's. What onbeat hands over does not depend on timing, so
with the arithmetic of `onbeat train` the weights come out as its do, to the last bit (a test compares them).
"""

import os
import sys

import onbeat

onbeat.prepare_environment()  # before torch is imported: bits depend on it

import torch
from transformers import AutoModelForCausalLM

from onbeat.batch.layout import Layout
from onbeat.cli import parse_overrides
from onbeat.training.forward import completion_logprobs, share_prompts


def policy_loss(model: torch.nn.Module, layout: Layout, temperature: float) -> torch.Tensor:
    """Sum over sequences of the mean token loss; divided by the number of sequences when the update closes."""
    logprobs, _ = completion_logprobs(model, layout, temperature)
    ratio = torch.exp(logprobs - logprobs.detach())
    return (-ratio * layout.advantage_T / layout.length_T).sum()


def main(recipe: str, run_dir: str, *flags: str) -> None:
    with onbeat.open_loader(recipe, overrides={**parse_overrides(flags), "run.dir": run_dir}) as loader:
        config = loader.config
        torch.set_num_threads(config.trainer.threads or len(os.sched_getaffinity(0)))
        model = AutoModelForCausalLM.from_pretrained(loader.model_dir, dtype=torch.float32).train()
        share_prompts(model)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.trainer.learning_rate, betas=config.trainer.betas, weight_decay=0, fused=True
        )
        for version in range(config.schedule.periods):
            loader.publish(version, model.named_parameters())
            for microbatch in loader.period(version, loader.take_prompts()):
                if microbatch.groups:
                    policy_loss(model, Layout.shared(microbatch.groups), config.sampling.temperature).backward()
                if microbatch.closes is not None:
                    for parameter in model.parameters():
                        if parameter.grad is None:  # every group was elided; AdamW steps all the same
                            parameter.grad = torch.zeros_like(parameter)
                        parameter.grad /= max(1, microbatch.closes.num_sequences)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
            print(f"period {version + 1}/{config.schedule.periods}", flush=True)
        print(f"exact: {loader.why_not_exact() or 'yes'}")
        model.save_pretrained(f"{run_dir}/model")


if __name__ == "__main__":
    main(*sys.argv[1:])
