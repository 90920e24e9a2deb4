"""A published adapter as files: the form in which vLLM takes one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from onbeat.config import LoraSection
from onbeat.rollout.vllm.folders import fresh_folder

_MEMORY = Path("/dev/shm")
_PREFIX = "base_model.model."


@contextmanager
def adapter_directory(tensors: Mapping[str, torch.Tensor], section: LoraSection) -> Iterator[Path]:
    """A fresh one, in memory where that is possible, as peft would have written it."""
    with fresh_folder("onbeat-adapter-", _MEMORY) as directory:
        save_file(
            {_PREFIX + re.sub(r"\.default\.", ".", name): tensor for name, tensor in tensors.items()},
            directory / "adapter_model.safetensors",
        )
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": section.rank,
            "lora_alpha": section.alpha,
            "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
            "bias": "none",
            "inference_mode": True,
        }
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        yield directory


def in_our_names(checksums: Mapping[str, str]) -> dict[str, str]:
    """Of the file's tensors, by the names they were published under."""
    return {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix(_PREFIX)): checksum
        for name, checksum in checksums.items()
    }
