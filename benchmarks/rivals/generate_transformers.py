"""bench-generate: transformers' `generate` on static batches, and its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import contender


def prepare(settings: dict[str, Any]) -> contender.Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return (static_batches if settings["how"] == "generate" else continuous)(model, settings)


def flat(job: dict[str, Any]) -> list[tuple[list[int], int]]:
    """(prompt, length) of every sequence, siblings side by side."""
    pairs = zip(job["prompts"], job["lengths"], strict=True)
    return [(prompt, length) for prompt, lengths in pairs for length in lengths]


def static_batches(model: Any, settings: dict[str, Any]) -> contender.Run:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLength(StoppingCriteria):
        def __init__(self, lengths: torch.Tensor) -> None:
            self.lengths = lengths

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return self.lengths <= input_ids.shape[1]

    def run(job: dict[str, Any]) -> dict[str, Any]:
        sequences, size = flat(job), settings["in_flight"]
        torch.manual_seed(job["seed"])
        began_s = time.perf_counter()
        for at in range(0, len(sequences), size):
            batch = sequences[at : at + size]
            prompts = torch.tensor([prompt for prompt, _ in batch])
            ends = torch.tensor([length for _, length in batch]) + prompts.shape[1]
            model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=int(ends.max()) - prompts.shape[1], pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([AtLength(ends)]),
            )  # fmt: skip
        return {"seconds": time.perf_counter() - began_s, "tokens": sum(length for _, length in sequences)}

    return run


def continuous(model: Any, settings: dict[str, Any]) -> contender.Run:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=2048, max_batch_tokens=512, max_requests_per_batch=settings["in_flight"]
    )

    def run(job: dict[str, Any]) -> dict[str, Any]:
        sequences = flat(job)
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching
        ) as manager:
            began_s = time.perf_counter()
            for prompt, length in sequences:
                manager.add_request(prompt, max_new_tokens=length)
            tokens = 0
            for _ in sequences:
                while (result := manager.get_result(timeout=1.0)) is None:
                    pass
                tokens += len(result.generated_tokens)
            seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "tokens": tokens}

    return run


if __name__ == "__main__":
    contender.main(prepare, ["torch", "transformers"])
