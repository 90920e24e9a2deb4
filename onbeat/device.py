"""What depends on the device, in one place: today the CPU.

Precision, threads and model loading are the same for trainer and generators, so that both compute the same numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from onbeat.errors import InputError


def prepare_process(threads: int) -> None:
    """Use `threads` threads (0: every core this process may run on), and no operation whose bits depend on timing.

    Both are fixed for the process. torch then refuses an operation that has no deterministic form rather than run it.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # never read


def load_model(directory: str) -> Any:
    """A causal language model in float32 with dropout off: what is sampled from is what is trained (R2)."""
    logging.disable_progress_bar()
    try:
        if any(Path(directory).glob("*.safetensors")) or any(Path(directory).glob("*.bin")):
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        else:  # a worker that joined from another machine: its weights come with the first version
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path = {directory!r} cannot be loaded as a causal language model: {error}") from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model
