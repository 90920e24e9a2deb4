"""What depends on the device, in one place. No other file names one, but weights/nccl.py, which speaks vLLM's protocol.

    accelerator     the one that torch finds (CUDA; an NPU through torch_npu, which registers itself); else the CPU
    collectives     what torch knows for it (NCCL, HCCL), beside gloo for what lies in host memory

Precision, threads and model loading are the same for trainer and generators, so that both compute the same numbers.
Only the CPU has been run here; what others need is kept to a few lines.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from onbeat.errors import InputError

DTYPE = torch.float32
"""Of weights, everywhere."""
HOST = torch.device("cpu")


def prepare_process(threads: int, rank: int = 0) -> None:
    """Use `threads` threads (0: every core this process may run on), and no operation whose bits depend on timing.

    A generator, and a trainer beside generators, may change the number later; torch refuses an operation that has no
    deterministic form rather than run it. Several ranks on a machine take its devices in turn.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # never read
    if (accelerator := _accelerator()) is not None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS has no deterministic products
        index = rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        torch.set_default_device(torch.device(accelerator.type, index))


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def device() -> torch.device:
    """Where this process computes."""
    return torch.get_default_device()


def synchronize() -> None:
    """Until everything asked of the device is done."""
    if device() != HOST:
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Give back what the device's allocator keeps for later."""
    if device() != HOST:
        torch.accelerator.empty_cache()


def peak_bytes() -> int:
    """The most memory of the device that this process has held so far; on the CPU, of the machine."""
    if device() != HOST:
        return int(torch.accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def computing_in(precision: Literal["float32", "bfloat16"]) -> AbstractContextManager[Any]:
    """Matrix products in this precision, whatever the weights have."""
    if precision == "float32":
        return nullcontext()
    # No cache: an adapter's values are exchanged in between (lora.py).
    return torch.autocast(device().type, dtype=torch.bfloat16, cache_enabled=False)


def as_given() -> AbstractContextManager[Any]:
    """Every operation in the precision of its tensors."""
    return torch.autocast(device().type, enabled=False)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a product of such tensors is computed now."""
    kind = device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


def collective_backend() -> str:
    """For tensors of the device, and for those in host memory."""
    if device() == HOST:
        return "gloo"
    return f"cpu:gloo,{device().type}:{torch.distributed.get_default_backend_for_device(device())}"


def listen_at(host: str) -> None:
    """Collectives of this process listen on the interface that has this address, and on no other."""
    interface = _interface_of(socket.gethostbyname(host))
    for backend in ("GLOO", "NCCL", "HCCL"):
        os.environ[f"{backend}_SOCKET_IFNAME"] = interface


def _interface_of(address: str) -> str:
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    if address.startswith("127."):
        return "lo"
    raise InputError(f"no network interface of this machine has the address {address}, at which ranks are to meet")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is spread over ranks, without a copy; else the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def in_host_memory() -> AbstractContextManager[Any]:
    """New tensors lie there."""
    return nullcontext() if device() == HOST else HOST


@contextmanager
def brought_to(place: torch.device, model: torch.nn.Module) -> Iterator[None]:
    """A model that lies in host memory and is not trained: on a device, for as long as it is wanted there. Nothing is
    copied back."""
    there: dict[int, torch.Tensor] = {}  # tied weights come once

    def bring(tensors: dict[str, Any]) -> dict[str, Any]:
        here = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        for tensor in here.values():
            if id(tensor) not in there:
                there[id(tensor)] = tensor.detach().to(place)
        return {name: there[id(tensor)] for name, tensor in here.items()}

    holders: list[Any] = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    at_home = [(held, dict(held)) for held in holders]
    try:
        for held, tensors in at_home:
            held.update(bring(tensors))
        yield
    finally:
        for held, tensors in at_home:
            held.update(tensors)


def load_model(directory: str, *, weights_follow: bool = False) -> Any:
    """A causal language model in float32 with dropout off: what is sampled from is what is trained (R2).
    `weights_follow`: the directory need not have any."""
    return load_into_host_memory(directory, weights_follow=weights_follow).to(device())


def load_into_host_memory(directory: str, *, weights_follow: bool = False) -> Any:
    """The same, before it comes to the device."""
    logging.disable_progress_bar()
    try:
        with in_host_memory():
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            how: dict[str, Any] = {"dtype": DTYPE}
            if getattr(config.get_text_config(), "attn_logit_softcapping", None):
                how["attn_implementation"] = "eager"  # the others of transformers leave the cap out
            if any(Path(directory).glob("*.safetensors")) or any(Path(directory).glob("*.bin")):
                model = AutoModelForCausalLM.from_pretrained(directory, **how, local_files_only=True)
            elif not weights_follow:
                raise InputError(f"model.path = {directory!r} has no weights: no *.safetensors, and no *.bin")
            else:
                model = AutoModelForCausalLM.from_config(config, **how)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path = {directory!r} cannot be loaded as a causal language model: {error}") from error
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)  # a layer that is computed again in backward is in training mode
    return model.eval()
