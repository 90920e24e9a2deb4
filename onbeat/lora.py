"""LoRA (arXiv 2106.09685): train a low-rank addition to some weights, and leave the weights alone.

    y = W x + (alpha / rank) · B A x          A random, B zero at the start: the model begins as it is

peft puts A and B into the model, in trainer and generators alike; here is what onbeat does with them:

- trained, published, loaded and saved is what `trained_parameters` names: A and B alone;
- old policy and reference are the same model with other values of A and B for a moment (`with_values`): those of the
  period's start, and zeros. No second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from onbeat.config import LoraSection
from onbeat.device import load_into_host_memory, local_part
from onbeat.errors import InputError

_ADAPTER = "default"


def add_adapter(model: Any, section: LoraSection, seed: int) -> None:
    """Put A and B into the model and freeze everything else; the same values for the same seed."""
    if not section.rank:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError("lora.rank needs peft: pip install 'onbeat[lora]'") from None
    settings: dict[str, Any] = {
        "r": section.rank,
        "lora_alpha": section.alpha,
        "target_modules": list(section.targets) or "all-linear",
        "task_type": "CAUSAL_LM",
    }
    before = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        inject_adapter_in_model(LoraConfig(**settings), model, _ADAPTER)
    except ValueError as error:
        raise InputError(f"lora.targets = {list(section.targets)}: {error}") from None
    finally:
        torch.random.set_rng_state(before)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What the optimizer moves: all, or A and B."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_adapters(name: str) -> bool:
    """Whether the parameter is A or B of some layer."""
    return "lora_A" in name or "lora_B" in name


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what is trained, as it is now; of what this rank has, here and below."""
    return {name: local_part(parameter).detach().clone() for name, parameter in trained_parameters(model).items()}


def no_addition(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values with which the model is what it was before: every B zero."""
    return {
        name: torch.zeros_like(local_part(parameter))
        for name, parameter in trained_parameters(model).items()
        if "lora_B" in name
    }  # fmt: skip


def some_addition(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Values with which the adapter has a say in every bit; none without an adapter."""
    return {
        name: 0.01 * torch.arange(1, 1 + value.numel()).sin().view_as(value)
        for name, value in no_addition(model).items()
    }


def shows_exchanges(parameter: torch.Tensor) -> bool:
    """Whether a view of the parameter's values shows the others while `with_values` lasts."""
    return local_part(parameter) is not parameter


@contextmanager
def with_values(model: torch.nn.Module, others: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The model with other values of what is trained. A graph that was built before may run its backward after, and a
    view of a value that was taken before (a checkpoint being written) shows the same value during it; but not of a
    parameter that is spread over ranks, whose memory is known to others (`shows_exchanges`)."""
    parameters = trained_parameters(model)

    @torch.no_grad()
    def exchange() -> None:
        for name, value in others.items():
            parameter = parameters[name]
            if shows_exchanges(parameter):
                mine = local_part(parameter)
                before = mine.clone()
                mine.copy_(value)
                value.copy_(before)
            else:
                parameter.data, value.data = value.data, parameter.data

    exchange()
    try:
        yield
    finally:
        exchange()


def save_model(model: Any, model_dir: str, directory: Path) -> None:
    """In Hugging Face format; with an adapter: merged, and the adapter beside it."""
    if not hasattr(model, "peft_config"):
        model.save_pretrained(directory)
        return
    merged = load_into_host_memory(model_dir)
    merge_into(merged, model)
    merged.save_pretrained(directory)
    save_adapter(model, directory / "adapter", model_dir)


@torch.no_grad()
def merge_into(plain: torch.nn.Module, model: Any) -> None:
    """Give a model without adapter the weights that this one comes to with its adapter."""
    from peft.tuners.lora import LoraLayer

    targets = dict(plain.named_parameters())
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        target = targets[f"{name}.weight"]
        target.add_(layer.get_delta_weight(_ADAPTER).to(target.device))


def save_adapter(model: Any, directory: Path, base: str) -> None:
    """As peft writes it: `PeftModel.from_pretrained(base_model, directory)` opens it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = model.peft_config[_ADAPTER]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory)
    weights = get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    save_file({f"base_model.model.{name}": value.contiguous() for name, value in weights.items()},
              directory / "adapter_model.safetensors")  # fmt: skip
