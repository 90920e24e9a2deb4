"""A trainer rank's state as tensors with names: weights, optimizer moments, the number of updates.

    model.NAME               a trained parameter
    optimizer.KEY.NAME       what AdamW keeps for it: exp_avg, exp_avg_sq, step
    num_updates              optimizer steps so far, those that were skipped included

Written as views of the live tensors, without a copy; read back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from onbeat.checkpoint import Tensor
from onbeat.errors import CheckpointError
from onbeat.lora import trained_parameters

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


def rank_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_updates: int) -> dict[str, Tensor]:
    named = dict(_tensors(model, optimizer)) | {"num_updates": torch.tensor(num_updates)}
    return {name: _as_bytes(tensor) for name, tensor in named.items()}


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in trained_parameters(model).items():
        yield f"model.{name}", parameter.detach()
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"optimizer.{key}.{name}", torch.as_tensor(value)


def _as_bytes(tensor: torch.Tensor) -> Tensor:
    flat = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    return Tensor(_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(flat.numpy().data))


def load_rank_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Put the state back; returns the number of updates. The model must be the one it was taken from."""
    load_weights(model, path)
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, parameter in trained_parameters(model).items():
            keys = ("exp_avg", "exp_avg_sq", "step")
            kept = {key: file.get_tensor(full).clone() for key in keys if (full := f"optimizer.{key}.{name}") in names}
            if kept:
                optimizer.state[parameter] = kept
        return int(file.get_tensor("num_updates"))


@torch.no_grad()
def load_weights(model: torch.nn.Module, path: Path) -> None:
    """The weights alone."""
    with safe_open(path, framework="pt") as file:
        parameters = trained_parameters(model)
        if {f"model.{name}" for name in parameters} != {name for name in file.keys() if name.startswith("model.")}:  # noqa: SIM118
            raise CheckpointError(f"{path} holds another model than {type(model).__name__} of this recipe")
        for name, parameter in parameters.items():
            saved = file.get_tensor(f"model.{name}")
            if (saved.shape, saved.dtype) != (parameter.shape, parameter.dtype):
                raise CheckpointError(f"{path}: {name} is {saved.dtype} {tuple(saved.shape)}, "
                                      f"in the model {parameter.dtype} {tuple(parameter.shape)}")  # fmt: skip
            parameter.copy_(saved)
