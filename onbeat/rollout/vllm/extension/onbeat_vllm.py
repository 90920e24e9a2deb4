"""Loaded into each worker of a vLLM server (--worker-extension-cls onbeat_vllm.Extension): takes a snapshot of onbeat's
(weights/snapshot.py) and says of every tensor which bytes it handed to the model. Imports nothing of onbeat or vLLM.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from typing import Any

import torch

_ALIGN = 64
_LENGTH_BYTES = 8


class Extension:
    """Becomes a base class of vLLM's worker."""

    def onbeat_describe(self) -> dict[str, Any]:
        """What the server serves, and how."""
        worker: Any = self
        model = worker.vllm_config.model_config
        config = model.hf_text_config
        return {
            "architectures": list(model.hf_config.architectures or ()),
            "sizes": {name: getattr(config, name, None) for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "logprobs_mode": model.logprobs_mode,
            "max_model_len": model.max_model_len,
            "max_num_seqs": worker.vllm_config.scheduler_config.max_num_seqs,
            "max_lora_rank": getattr(worker.vllm_config.lora_config, "max_lora_rank", 0),
        }

    def onbeat_load(self, path: str) -> dict[str, str]:
        """Load the snapshot; returns the checksum of every tensor as it went into the model."""
        worker: Any = self
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        model = worker.model_runner.get_model()
        before = _outputs(model)
        checksums: dict[str, str] = {}
        worker.reload_weights(weights_iterator=_tensors(memory, checksums))
        _process_tied(model)
        last: dict[str, str] = getattr(self, "_onbeat_last", {})
        changed = {name for name, checksum in checksums.items() if last.get(name, checksum) != checksum}
        if stale := stale_layers(before, _outputs(model), changed, getattr(model, "packed_modules_mapping", {})):
            raise RuntimeError(f"{len(stale)} layers still compute with the weights before: {stale[:3]}")
        if different := _different(model, _tensors(memory)):
            raise RuntimeError(f"{len(different)} parameters are not what was loaded: {different[:3]}")
        self._onbeat_last = checksums
        return checksums

    def onbeat_receive(self, path: str, num_bytes: int, piece_bytes: int) -> None:
        """Take a snapshot from rank 0 of the weight-transfer engine's group; the first worker writes it to `path`."""
        worker: Any = self
        group = worker.weight_transfer_engine.model_update_group
        room = torch.empty(min(piece_bytes, num_bytes), dtype=torch.uint8, device=worker.device)
        with open(path, "r+b") as file:
            for offset in range(0, num_bytes, piece_bytes):
                piece = room[: num_bytes - offset]
                group.broadcast(piece, src=0)
                if worker.rank == 0:
                    file.write(piece.cpu().numpy().tobytes())

    def onbeat_adapter(self, path: str) -> dict[str, str]:
        """The checksum of every tensor of the adapter that is about to be loaded, as this worker reads it."""
        from safetensors.torch import load_file

        tensors = load_file(f"{path}/adapter_model.safetensors")
        return {name: _checksum(memoryview(tensor.numpy()).cast("B")) for name, tensor in tensors.items()}


def _outputs(model: torch.nn.Module) -> dict[str, bytes]:
    """What each linear layer, the head among them, makes of a fixed input, to the last bit: whatever it computes with,
    be it a packed copy of its weights."""
    found = {}
    for name, layer in model.named_modules():
        width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None)
        method: Any = getattr(layer, "quant_method", None)
        weight = getattr(layer, "weight", None)
        if isinstance(width, int) and hasattr(method, "apply") and isinstance(weight, torch.Tensor):
            fixed = torch.linspace(-1.0, 1.0, 4 * width).sin().view(4, width).to(weight.device, weight.dtype)
            with torch.inference_mode():
                found[name] = method.apply(layer, fixed).float().cpu().numpy().tobytes()
    return found


def stale_layers(
    before: dict[str, bytes], after: dict[str, bytes], changed: set[str], packed: dict[str, list[str]]
) -> list[str]:
    """Layers whose tensors were changed by the load, while what they compute was not. `packed`: which tensors of a
    checkpoint become one layer. A head without a tensor of its own has the embedding's."""
    embedding = {name for name in changed if name.endswith("embed_tokens.weight")}
    stale = []
    for name, output in after.items():
        folder, _, leaf = name.rpartition(".")
        sources = {f"{folder}.{part}.weight".lstrip(".") for part in packed.get(leaf, [leaf])}
        if leaf == "lm_head" and not sources & changed:
            sources = embedding
        if sources & changed and before.get(name) == output:
            stale.append(name)
    return stale


def _different(model: torch.nn.Module, loaded: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Of the parameters that vLLM keeps as they were loaded (norms, embeddings, biases): those that differ."""
    parameters = dict(model.named_parameters())
    different = []
    for name, tensor in loaded:
        found = parameters.get(name)
        if found is None or found.shape != tensor.shape or not found.dtype.is_floating_point:
            continue
        if not torch.equal(found.detach().cpu(), tensor.to(found.dtype)):
            different.append(name)
    return different


def _process_tied(model: torch.nn.Module) -> None:
    """A head that is the embedding has no weights of its own to be loaded, so vLLM keeps what it made of the old ones:
    on a CPU, a packed copy."""
    by_place: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.numel() and hasattr(layer, "quant_method"):
            by_place.setdefault(weight.data_ptr(), []).append(layer)
    for layers in by_place.values():
        if len(layers) > 1:
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)


def _checksum(content: memoryview) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _tensors(memory: mmap.mmap, checksums: dict[str, str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a snapshot; their checksums are written down on the way."""
    length = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    table = json.loads(memory[_LENGTH_BYTES : _LENGTH_BYTES + length])
    start = -(-(_LENGTH_BYTES + length) // _ALIGN) * _ALIGN
    for name, place in table.items():
        dtype: torch.dtype = getattr(torch, place["dtype"])
        first = start + place["offset"]
        if checksums is not None:
            with memoryview(memory)[first : first + place["num_bytes"]] as view:
                checksums[name] = _checksum(view)
        flat = torch.frombuffer(memory, dtype=dtype, count=place["num_bytes"] // dtype.itemsize, offset=first)
        yield name, flat.view(place["shape"])
