"""The settings of TRL's GRPOTrainer by which it computes what onbeat does: one place for everything that runs it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

ON_A_CPU: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "fp16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "gradient_checkpointing": False, "dataloader_pin_memory": False,
}  # fmt: skip
THE_SAME: dict[str, Any] = {
    "top_p": 1.0, "top_k": 0, "use_bias_correction_kl": False, "lr_scheduler_type": "constant", "weight_decay": 0.0,
}  # fmt: skip
"""Sampling and loss. TRL's own correction of the KL changes its gradient; onbeat's is the one of the GRPO paper."""


def before_torch(settings: dict[str, Any]) -> None:
    """Intel's OpenMP, if it is to be used, as onbeat loads it for itself."""
    if settings.get("openmp"):
        ctypes.CDLL(settings["openmp"], mode=os.RTLD_GLOBAL)


def no_logits_of_prompts() -> None:
    """On a GPU its head is given the positions that count. Elsewhere it is given all of them, for the sake of devices
    that compile for every shape, which a CPU is none of."""
    from trl.trainer import utils

    utils._use_triton = lambda device: True


def grpo_config(settings: dict[str, Any], **more: Any) -> Any:
    """For whole updates: `settings` are those of the contender."""
    from trl import GRPOConfig

    completions = settings["prompts"] * settings["group_size"]
    return GRPOConfig(
        **ON_A_CPU | {"bf16": settings.get("bf16", False)}, **THE_SAME, logging_steps=1, loss_type="grpo",
        scale_rewards="group", temperature=1.0,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, warmup_steps=0, beta=settings["beta"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=completions // settings["micro_batch"],
        num_generations=settings["group_size"], max_completion_length=settings["max_new_tokens"],
        use_transformers_continuous_batching=settings.get("continuous_batching", False),
        cache_implementation=settings.get("cache_implementation"), **more,
    )  # fmt: skip
