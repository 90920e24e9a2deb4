"""What the ranks of a test are asked to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from onbeat.batch.pack import num_parts
from onbeat.checkpoint import write_part
from onbeat.config import Config
from onbeat.lora import save_model
from onbeat.protocols import UpdateReport
from onbeat.training import head, merged
from onbeat.training.parallel import Ranks
from onbeat.training.trainer import PolicyTrainer
from onbeat.types import MicroBatch, TrainGroup, UpdateTotals
from onbeat.weights.snapshot import Mapped
from onbeat.weights.spread import SpreadWriter

Packs = Sequence[tuple[TrainGroup, ...]]


class Piece(NamedTuple):
    """What a rank has of a tensor."""

    shape: tuple[int, ...]
    held: list[Any]
    local: torch.Tensor


class Update(NamedTuple):
    gradients: dict[str, Piece]
    """Of the update, divided, before clipping."""
    report: UpdateReport


class Trained(NamedTuple):
    updates: list[Update]
    weights: dict[str, Piece]
    snapshot: bytes | None
    """Of the weights after all updates; rank 0 has it."""
    digest: str


class Recording(PolicyTrainer):
    recorded: dict[str, torch.Tensor]

    def _clip(self, gradients: dict[str, torch.Tensor]) -> float:
        self.recorded = {name: gradient.clone() for name, gradient in gradients.items()}
        return super()._clip(gradients)

    def pieces(self, tensors: dict[str, torch.Tensor]) -> dict[str, Piece]:
        rank, grid = self._ranks.rank, self._ranks.grid
        shardings = {name: each.sharding for name, each in self._parameters.items()}
        return {n: Piece(shardings[n].shape, shardings[n].held_by(rank, grid), t) for n, t in tensors.items()}

    def weights(self) -> dict[str, Piece]:
        return self.pieces({name: each.leaf.detach().clone() for name, each in self._parameters.items()})

    def moments(self) -> dict[str, Piece]:
        found = {}
        for key in ("exp_avg", "exp_avg_sq"):
            states = {name: self._optimizer.state[each.leaf][key].clone() for name, each in self._parameters.items()}
            found |= {f"{key}.{name}": piece for name, piece in self.pieces(states).items()}
        return found


def rounds(packs: Packs, config: Config) -> list[tuple[list[MicroBatch], int]]:
    """The micro-batches of an update, team by team, as a controller would send them; and the parts of the round."""
    teams, settings = config.trainer.data_parallel, config.trainer
    found = []
    for start in range(0, len(packs), teams):
        mine = [
            MicroBatch(period=0, update=0, index=start + team, rank=team, groups=tuple(pack))
            for team, pack in enumerate([*packs[start : start + teams], *[()] * teams][:teams])
        ]
        parts = max(num_parts(microbatch, settings.max_tokens) for microbatch in mine) if settings.shards else 0
        found.append((mine, parts))
    return found


def totals(packs: Packs) -> UpdateTotals:
    groups = [group for pack in packs for group in pack]
    completions = [completion for group in groups for completion in group.completion_ids]
    return UpdateTotals(
        num_groups=len(groups), num_sequences=len(completions), num_tokens=sum(map(len, completions))
    )  # fmt: skip


def run_update(trainer: Recording, ranks: Ranks, config: Config, packs: Packs) -> Update:
    team = ranks.rank // ranks.grid.tensor
    for microbatches, parts in rounds(packs, config):
        if microbatches[team].groups or config.trainer.shards:
            trainer.accumulate(microbatches[team], parts)
    report = trainer.step(totals(packs))
    return Update(trainer.pieces(trainer.recorded), report)


def train(ranks: Ranks, config: Config, model_dir: str, updates: Sequence[Packs], start: str | None = None) -> Trained:
    """One period of these updates."""
    trainer = Recording(config, model_dir, ranks)
    if start is not None:
        trainer.restore(Path(start))
    close(trainer.snapshot())
    done = [run_update(trainer, ranks, config, packs) for packs in updates]
    fd, size, digest = trainer.snapshot()
    content = None
    if fd is not None:
        content = os.pread(fd, size, 0)
        mapped = Mapped(fd, size)
        assert mapped.digest() == digest
        mapped.close()
    return Trained(done, trainer.weights(), content, digest)


def train_as_if_large(ranks: Ranks, config: Config, model_dir: str, updates: Sequence[Packs]) -> Trained:
    """No prompt is so short that its keys would be copied for each completion; the head has many blocks of words."""
    with mock.patch.object(merged, "LONG_PROMPT", 1), mock.patch.object(head, "BLOCK_WORDS", 7):
        return train(ranks, config, model_dir, updates)


class Published(NamedTuple):
    weights: dict[str, Piece]
    near: list[tuple[bytes, str] | None]
    """Content and digest of three snapshots, one after another; rank 0 has them."""
    far: list[tuple[bytes, str] | None]
    far_ranks: tuple[int, ...]


def train_and_publish(ranks: Ranks, config: Config, model_dir: str, updates: Sequence[Packs]) -> Published:
    """Through memory that the ranks share, and as if each were on a host of its own."""
    trainer = Recording(config, model_dir, ranks)
    for packs in updates:
        run_update(trainer, ranks, config, packs)
    near = [published(trainer) for _ in range(3)]
    assert trainer._spread_writer._blocks[-1][1].far_ranks == ()
    trainer._spread_writer = SpreadWriter(ranks, one_host=False)
    far = [published(trainer) for _ in range(3)]
    return Published(trainer.weights(), near, far, trainer._spread_writer._blocks[-1][1].far_ranks)


def published(trainer: PolicyTrainer) -> tuple[bytes, str] | None:
    """As the trainer's process does it."""
    fd, size, digest = trainer.snapshot()
    trainer.snapshot_taken()
    if fd is None:
        return None
    try:
        return os.pread(fd, size, 0), digest
    finally:
        os.close(fd)


def train_and_export(
    ranks: Ranks, config: Config, model_dir: str, updates: Sequence[Packs], directory: str
) -> dict[str, Piece]:
    trainer = Recording(config, model_dir, ranks)
    for packs in updates:
        run_update(trainer, ranks, config, packs)
    model = trainer.whole_model()
    assert (model is not None) == (ranks.rank == 0)
    if model is not None:
        save_model(model, model_dir, Path(directory))
    return trainer.weights()


def close(snapshot: tuple[int | None, int, str]) -> None:
    if snapshot[0] is not None:
        os.close(snapshot[0])


def train_and_save(
    ranks: Ranks, config: Config, model_dir: str, updates: Sequence[Packs], directory: str
) -> dict[str, Piece]:
    trainer = Recording(config, model_dir, ranks)
    for packs in updates:
        run_update(trainer, ranks, config, packs)
    write_part(Path(directory), f"rank-{ranks.rank}.safetensors", trainer.state())
    return trainer.weights() | trainer.moments()


def load_and_save(
    ranks: Ranks, config: Config, model_dir: str, source: str, directory: str
) -> tuple[int, dict[str, Piece]]:
    trainer = Recording(config, model_dir, ranks)
    trainer.restore(Path(source))
    write_part(Path(directory), f"rank-{ranks.rank}.safetensors", trainer.state())
    return trainer.num_updates, trainer.weights() | trainer.moments()


def state_during_reference(ranks: Ranks, config: Config, model_dir: str, updates: Sequence[Packs]) -> bool:
    """Whether a state that was taken before is the same during it."""
    trainer = Recording(config, model_dir, ranks)
    for packs in updates:
        run_update(trainer, ranks, config, packs)
    state = trainer.state()
    before = {name: bytes(tensor.data) for name, tensor in state.items()}
    weights = {name: each.leaf.detach().clone() for name, each in trainer._parameters.items()}
    with trainer._models._as_reference():
        exchanged = {name: each.leaf for name, each in trainer._parameters.items() if "lora_B" in name}
        assert all(not value.any() for value in exchanged.values())
        same = all(bytes(tensor.data) == before[name] for name, tensor in state.items())
    assert all(torch.equal(each.leaf, weights[name]) for name, each in trainer._parameters.items())
    return same


def whole(pieces: Sequence[dict[str, Piece]]) -> dict[str, torch.Tensor]:
    """The tensors from what the ranks have of them; whoever has the same must have the same bits."""
    found = {}
    for name, first in pieces[0].items():
        tensor = torch.zeros(first.shape, dtype=first.local.dtype)
        seen = torch.zeros(first.shape, dtype=torch.bool)
        for mine in pieces:
            _, held, local = mine[name]
            for box, at in held:
                before, here = tensor[box.slices], local[at.slices]
                assert torch.equal(before[seen[box.slices]], here[seen[box.slices]]), f"{name} differs between ranks"
                before.copy_(here)
                seen[box.slices] = True
        assert seen.all(), f"nobody has some of {name}"
        found[name] = tensor
    return found
