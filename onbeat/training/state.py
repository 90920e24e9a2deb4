"""A trainer rank's state as tensors with names: weights, optimizer moments, the number of updates.

    model.NAME               a trained parameter
    optimizer.KEY.NAME       what AdamW keeps for it: exp_avg, exp_avg_sq, step
    num_updates              optimizer steps so far, those that were skipped included

Of several ranks, each writes the pieces that fall to it (boxes.py); of what several have, one. The metadata of its file
say what is a piece of which tensor. Reading takes what a rank needs from all files that are there, whatever number of
ranks wrote them, and however the weights were spread over those.

Written as views of the live tensors, without a copy; read back bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open

from onbeat.boxes import Box, Grid, Held, Sharding
from onbeat.checkpoint import PIECES, Piece, Tensor
from onbeat.device import HOST, local_part
from onbeat.errors import CheckpointError
from onbeat.lora import is_adapters, shows_exchanges, trained_parameters

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_KEYS = ("exp_avg", "exp_avg_sq", "step")


class Trained(NamedTuple):
    """A parameter as a rank sees it."""

    parameter: torch.nn.Parameter
    leaf: torch.nn.Parameter
    """What the rank has of it: what the optimizer moves. The parameter itself, if it is not spread over ranks."""
    sharding: Sharding


def trained(model: torch.nn.Module, shardings: Mapping[str, Sharding]) -> dict[str, Trained]:
    return {
        name: Trained(parameter, _leaf(parameter), shardings[name])
        for name, parameter in trained_parameters(model).items()
    }


def _leaf(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    local = local_part(parameter)
    return parameter if local is parameter else torch.nn.Parameter(local.detach())


def rank_state(
    parameters: Mapping[str, Trained], optimizer: torch.optim.Optimizer, num_updates: int, rank: int, grid: Grid
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor, sharding in _tensors(parameters, optimizer):
        for held in sharding.owned_by(rank, grid):
            whole = held.box == Box.whole(sharding.shape)
            key = name if whole else f"{name}[{','.join(f'{s.start}:{s.stop}' for s in held.box.slices)}]"
            piece = None if whole else Piece(name, sharding.shape, held.box.offset)
            found[key] = _as_bytes(tensor[held.local.slices], piece)
    if rank == 0:
        found["num_updates"] = _as_bytes(torch.tensor(num_updates, device=HOST))
    return found


def _tensors(
    parameters: Mapping[str, Trained], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor, Sharding]]:
    for name, (parameter, leaf, sharding) in parameters.items():
        values = leaf.detach()
        if is_adapters(name) and shows_exchanges(parameter):
            values = values.clone()  # the file is written while training goes on, which exchanges them for a moment
        yield f"model.{name}", values, sharding
        for key, value in sorted(optimizer.state.get(leaf, {}).items()):
            tensor = torch.as_tensor(value)
            yield f"optimizer.{key}.{name}", tensor, sharding if tensor.ndim else Sharding((), number=sharding.number)


def _as_bytes(tensor: torch.Tensor, piece: Piece | None = None) -> Tensor:
    flat = tensor.contiguous().to(HOST).reshape(-1).view(torch.uint8)
    return Tensor(_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(flat.numpy().data), piece)


def load_rank_state(
    parameters: Mapping[str, Trained], optimizer: torch.optim.Optimizer, directory: Path, rank: int, grid: Grid
) -> int:
    """Put the state back; returns the number of updates. The model must be the one it was taken from."""
    with ExitStack() as stack:
        parts = _Parts(directory, stack)
        _load_weights(parameters, parts, rank, grid)
        for name, (_, leaf, sharding) in parameters.items():
            kept = {}
            for key in _KEYS:
                if (full := f"optimizer.{key}.{name}") in parts.places:
                    kept[key] = _scalar(leaf) if key == "step" else torch.empty_like(leaf)
                    parts.read(full, kept[key], Sharding(()) if key == "step" else sharding, rank, grid)
            if kept:
                optimizer.state[leaf] = kept
        num_updates = torch.empty((), dtype=torch.int64, device=HOST)
        parts.read("num_updates", num_updates, Sharding(()), rank, grid)
        return int(num_updates)


def _scalar(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.float32, device=leaf.device)


def load_weights(model: torch.nn.Module, directory: Path) -> None:
    """The weights alone, all of them."""
    shardings = {name: Sharding(tuple(parameter.shape)) for name, parameter in trained_parameters(model).items()}
    with ExitStack() as stack:
        _load_weights(trained(model, shardings), _Parts(directory, stack), 0, Grid())


def _load_weights(parameters: Mapping[str, Trained], parts: _Parts, rank: int, grid: Grid) -> None:
    if {f"model.{name}" for name in parameters} != {name for name in parts.places if name.startswith("model.")}:
        raise CheckpointError(f"{parts.directory} holds another model than that of this recipe")
    for name, (_, leaf, sharding) in parameters.items():
        parts.read(f"model.{name}", leaf, sharding, rank, grid)


class _Place(NamedTuple):
    """Where a piece of a tensor is kept."""

    box: Box
    file: Any
    key: str


class _Parts:
    """All the parts of a checkpoint, open for reading."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.places: defaultdict[str, list[_Place]] = defaultdict(list)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(directory.glob("rank-*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            pieces = msgspec.json.decode((file.metadata() or {}).get(PIECES, "{}"), type=dict[str, Piece])
            for key in file.keys():  # noqa: SIM118  # no dictionary
                shape = tuple(file.get_slice(key).get_shape())
                piece = pieces.get(key, Piece(key, shape, (0,) * len(shape)))
                self.places[piece.name].append(_Place(Box(piece.offset, shape), file, key))
                self._shapes[piece.name] = piece.shape

    @torch.no_grad()
    def read(self, name: str, into: torch.Tensor, sharding: Sharding, rank: int, grid: Grid) -> None:
        """What this rank has of a tensor, from wherever it is."""
        if self._shapes.get(name) != sharding.shape:
            raise CheckpointError(
                f"{self.directory}: {name} is {self._shapes.get(name)}, in the model {sharding.shape}"
            )
        for held in sharding.held_by(rank, grid):
            filled = sum(self._fill(into, held, place) for place in self.places[name])
            if filled != held.box.size:
                raise CheckpointError(f"{self.directory}: of {name}, {filled} of {held.box.size} numbers are there")

    def _fill(self, into: torch.Tensor, held: Held, place: _Place) -> int:
        """Copy what the place has of the box; how many numbers that was."""
        if (common := held.box.intersection(place.box)) is None:
            return 0
        saved = place.file.get_slice(place.key)[common.moved(place.box.offset).slices] if common.shape else \
            place.file.get_tensor(place.key)  # fmt: skip
        if saved.dtype != into.dtype:
            raise CheckpointError(f"{self.directory}: {place.key} is {saved.dtype}, in the model {into.dtype}")
        at = common.moved(held.box.offset).moved(tuple(-start for start in held.local.offset))
        into[at.slices].copy_(saved)
        return common.size
