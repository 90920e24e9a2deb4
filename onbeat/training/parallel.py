"""The trainer's ranks: how they meet, how a model is spread over them, what they tell each other.

    rank 0                      controller                      rank 1 …
      listens ── Listening(address) ──▶│
      │◀──────────── Meet(address) ────┤──── Meet(address) ─────▶│
      └───────────────── process group (gloo, NCCL, HCCL) ───────┘

Ranks form a grid (boxes.py): teams of `tensor_parallel` ranks compute a micro-batch together, by the model's own plan
in transformers; `data_parallel` teams compute at a time. Rows of what a rank of a team has may be spread over the teams
as well (`shard`, FSDP2): then a layer's weights are gathered for the time of its forward and backward, and its
gradients are summed in backward, so all teams run the same sequence of passes. Without, each team accumulates on its
own, and gradients are summed once, at the step.

Who waits for whom: in a collective, everyone for the last one, at most `PATIENCE`. If a rank dies, the others' next
collective fails, or the controller, which sees the death first, ends them.
"""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from onbeat.boxes import Grid, Sharding
from onbeat.config import TrainerConfig
from onbeat.device import HOST, collective_backend, device, listen_at, local_part
from onbeat.errors import InputError
from onbeat.lora import trained_parameters

PATIENCE = timedelta(minutes=30)
_BUCKET_BYTES = 32 << 20
"""Of gradients summed at a time."""


class MeetingPoint:
    """Where ranks find each other: a store in rank 0, which listens at one address and nowhere else."""

    def __init__(self, host: str, num_ranks: int, patience: timedelta = PATIENCE) -> None:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self.store = TCPStore(
            host, port, num_ranks, is_master=True, wait_for_workers=False, timeout=patience,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


ONE = Grid()


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the trainer's ranks."""

    rank: int = 0
    grid: Grid = ONE
    mesh: DeviceMesh | None = None
    """("data", "tensor"); None if it is the only one."""

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    @property
    def alone(self) -> bool:
        return self.mesh is None

    def sum_over_teams(self, tensors: Sequence[torch.Tensor]) -> None:
        """In place, the same bits on every team."""
        if self.mesh is not None and self.grid.data > 1:
            _sum_in_buckets(tensors, self.mesh.get_group("data"))

    def sum_over_team(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.mesh is not None and self.grid.tensor > 1:
            _sum_in_buckets(tensors, self.mesh.get_group("tensor"))

    def gathered(self, values: Sequence[float]) -> torch.Tensor:
        """Everyone's values, [ranks, values], on every rank."""
        mine = torch.tensor([values], dtype=torch.float64, device=HOST)
        if self.mesh is None:
            return mine
        everyones = torch.empty(self.num_ranks, len(values), dtype=torch.float64, device=HOST)
        dist.all_gather([everyones[rank : rank + 1] for rank in range(self.num_ranks)], mine)
        return everyones

    # What the snapshot needs (weights/spread.py): tensors in host memory.

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 to all."""
        dist.broadcast(tensor, src=0)

    def send(self, tensor: torch.Tensor) -> None:
        """To rank 0."""
        dist.send(tensor, dst=0)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        dist.recv(tensor, src=rank)


ALONE = Ranks()


def join(
    rank: int,
    settings: TrainerConfig,
    host: str,
    address: str,
    point: MeetingPoint | None,
    patience: timedelta = PATIENCE,
) -> Ranks:
    """Meet the other ranks at the address. `point` is rank 0's own."""
    num_ranks = settings.ranks
    listen_at(host)
    at, _, port = address.rpartition(":")
    store = point.store if point else TCPStore(at, int(port), num_ranks, is_master=False, timeout=patience)
    dist.init_process_group(
        collective_backend(), store=store, rank=rank, world_size=num_ranks, timeout=patience,
        device_id=None if device() == HOST else device(),
    )  # fmt: skip
    return arranged(rank, settings)


def arranged(rank: int, settings: TrainerConfig) -> Ranks:
    """Ranks that have met, in the grid that the settings say."""
    grid = Grid(settings.data_parallel, settings.tensor_parallel)
    mesh = init_device_mesh(device().type, (grid.data, grid.tensor), mesh_dim_names=("data", "tensor"))
    return Ranks(rank, grid, mesh)


def _sum_in_buckets(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Of one type each, in order, of about _BUCKET_BYTES: the same on every rank."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and (
            sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


# A model over the ranks of a team


_PARTIAL = "replicated_with_grad_allreduce"
"""The style of a weight that every rank has and sees a part of the gradient of. What transformers does about it sums
what was summed before once more with every micro-batch; here it is summed once, at the step."""
_CUT_OUTPUT = {"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"}
_CUT_INPUT = {"rowwise", "rowwise_rep", "rowwise_split_input"}


def spread_over_team(model: Any, ranks: Ranks) -> frozenset[str]:
    """Cut the model's matrices over the team by its own plan. Names the parameters that every rank has and sees a part
    of the gradient of."""
    if ranks.mesh is None or ranks.grid.tensor == 1:
        return frozenset()
    plan = _plan(model, ranks.grid.tensor)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    partial = {module for module, style in plan.items() if style == _PARTIAL}
    names = frozenset(
        name for name, _ in model.named_parameters()
        if replace_layer_number_by_wildcard(name.rpartition(".")[0]) in partial
    )  # fmt: skip
    rest = {module: style for module, style in plan.items() if style != _PARTIAL}
    apply_tensor_parallelism(model, ranks.mesh["tensor"], rest)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):  # a view would keep the whole in memory
            parameter._local_tensor = parameter._local_tensor.clone(memory_format=torch.contiguous_format)
    return names


def _plan(model: Any, team: int) -> dict[str, str]:
    name, config = type(model).__name__, model.config.get_text_config()
    plan = dict(model.tp_plan)
    if not any(style in _CUT_INPUT for style in plan.values()):
        raise InputError(
            f"trainer.tensor_parallel = {team}: transformers has no plan to spread {name} over ranks; set it to 1, and "
            "trainer.shard = true if the model is too large for one"
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if heads and heads % team and any(re.search(r"\.[kqv]_proj$", m) and s == "colwise" for m, s in plan.items()):
            raise InputError(f"trainer.tensor_parallel = {team} does not divide the {heads} {what} of {name}")
    embedding, head = (_name_of(model, one) for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    if config.vocab_size % team:
        plan.pop(head, None)
    elif head in plan and model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        plan[embedding] = "embedding_rowwise"  # one weight, cut one way
    return _with_adapter(model, plan)


def _name_of(model: Any, wanted: torch.nn.Module) -> str:
    names: dict[torch.nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[wanted]


def _with_adapter(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """The plan of a model in which LoRA has wrapped layers: B is cut as the output is, or A as the input."""
    from_wildcard = {replace_layer_number_by_wildcard(name) for name, _ in model.named_modules()}
    adapted = {}
    for module, style in plan.items():
        if f"{module}.base_layer" not in from_wildcard:
            adapted[module] = style
            continue
        if style not in _CUT_OUTPUT | _CUT_INPUT:
            raise InputError(f"LoRA on {module} cannot be spread over ranks (its plan is {style!r}); leave it out of "
                             "lora.targets, or set trainer.tensor_parallel = 1")  # fmt: skip
        adapted[f"{module}.base_layer"] = style
        adapted[f"{module}.{'lora_B' if style in _CUT_OUTPUT else 'lora_A'}.default"] = style
    return adapted


# A model over teams


class ShardRoot(torch.nn.Module):
    """A sharded model's door: weights outside its layers (embedding, last norm, head) are there for the time of a call,
    so whatever needs them is called through it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


def spread_over_teams(model: Any, ranks: Ranks, settings: TrainerConfig) -> ShardRoot:
    """Cut the rows of what this rank has over the teams (FSDP2): layer by layer, and the rest as one."""
    assert ranks.mesh is not None
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nothing changes it in place
    on_device = device() != HOST
    precision = torch.bfloat16 if settings.precision == "bfloat16" else None
    options: dict[str, Any] = {
        "mesh": ranks.mesh["data"],
        "reshard_after_forward": True,
        # Casting inputs would copy what goes in beside tensors, and lose what a forward keeps there.
        "mp_policy": MixedPrecisionPolicy(precision, precision and torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_device) if settings.offload else OffloadPolicy(),
    }  # fmt: skip
    for layer in _layers(model):
        fully_shard(layer, **options)
    root = ShardRoot(model)
    fully_shard(root, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum, not a mean
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(root, FSDPModule)
    root.set_reduce_scatter_unused_params(True)  # an expert that only some ranks used
    return root


def _layers(model: Any) -> list[torch.nn.Module]:
    """As the model's own plan names them; else those that it says must stay in one piece."""
    plan = {name for name in (model.fsdp_plan or {}) if "*" in name}
    whole = set(getattr(model, "_no_split_modules", None) or ())
    named = [(replace_layer_number_by_wildcard(name), module) for name, module in model.named_modules()]
    planned = [module for name, module in named if name in plan]
    return planned or [module for _, module in named if type(module).__name__ in whole]


def shardings(model: torch.nn.Module, *, over_teams: bool) -> dict[str, Sharding]:
    """How each trained parameter is spread. Asked before the model is spread over teams, for when it is."""
    return {
        name: _sharding(parameter, number, over_teams)
        for number, (name, parameter) in enumerate(trained_parameters(model).items())
    }


def _sharding(parameter: torch.Tensor, number: int, over_teams: bool) -> Sharding:
    axis, fused = None, 1
    if isinstance(parameter, DTensor) and not (placement := parameter.placements[0]).is_replicate():
        axis, fused = placement.dim % parameter.ndim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]
    return Sharding(tuple(parameter.shape), axis, fused, over_teams, number)


def check(parameters: dict[str, torch.nn.Parameter], spread: dict[str, Sharding], ranks: Ranks) -> None:
    """What this rank holds has the sizes it should have."""
    for name, parameter in parameters.items():
        held = spread[name].held_by(ranks.rank, ranks.grid)
        assert sum(one.box.size for one in held) == local_part(parameter).numel(), name
