"""A snapshot (snapshot.py) of weights that are spread over ranks: each writes the pieces that fall to it.

    rank 0                                        rank on its host            rank on another host
      makes a block, tells pid, descriptor ──────▶ maps it                     cannot
      seals it when all have tried                   │                           │
      writes its pieces                            writes its pieces           sends its pieces, in buckets
      receives buckets, writes them ◀────────────────┼───────────────────────────┘
      waits for all ◀────────────────────────────────┘
      digest

The bytes are those that one rank would write. No rank has more of the weights in memory of its own than its pieces and
a bucket; the block is on rank 0's host.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from onbeat.boxes import Grid, Held, Sharding
from onbeat.weights.snapshot import POPULATE_WRITE, Block, Plan, digest_of, populate

_SECRET_BYTES = 16
_BUCKET_BYTES = 64 << 20


class Others(Protocol):
    """The ranks that write a snapshot together. Every call is made by all of them."""

    @property
    def rank(self) -> int: ...

    @property
    def grid(self) -> Grid: ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0."""

    def gathered(self, values: Sequence[float]) -> torch.Tensor:
        """Everyone's values, [ranks, values]; when everyone has come."""

    def send(self, tensor: torch.Tensor) -> None:
        """To rank 0, who receives it."""

    def receive(self, tensor: torch.Tensor, rank: int) -> None: ...


class Spread(NamedTuple):
    """A tensor that is spread over ranks, as one of them sees it."""

    name: str
    local: torch.Tensor
    sharding: Sharding


class _Shared(NamedTuple):
    """A block as one of the ranks sees it."""

    memory: mmap.mmap | None
    """None: it is on another host."""
    block: Block | None
    """Rank 0 has it."""
    far_ranks: tuple[int, ...]
    """Those that cannot see it."""

    def close(self) -> None:
        if self.block is not None:
            self.block.close()
        elif self.memory is not None:
            self.memory.close()


class SpreadWriter:
    """Writes version after version, together with other ranks."""

    def __init__(self, others: Others, *, one_host: bool = True) -> None:
        """`one_host` False: as if every rank were on a host of its own."""
        self._others = others
        self._one_host = one_host
        self._blocks: deque[tuple[int, _Shared]] = deque(maxlen=2)
        """(size, block); the one to be written next comes first. The sizes are the same on every rank."""

    def write(self, tensors: Sequence[Spread]) -> tuple[int, int, str] | None:
        """(descriptor, size, digest) on rank 0; the caller closes the descriptor."""
        plan = Plan((one.name, one.local.dtype, one.sharding.shape) for one in tensors)
        shared = self._free_block(plan.size)
        mine = self._pieces(tensors, self._others.rank)
        if shared.memory is None:
            for bucket in _buckets(mine):
                self._others.send(torch.cat([_as_bytes(one.local[held.local.slices]) for one, held in bucket]))
        else:
            for one, held in mine:
                view = plan.view(shared.memory, one.name)
                view[held.box.slices].copy_(one.local[held.local.slices])
                del view
        for rank in shared.far_ranks if shared.block is not None else ():
            self._receive(plan, shared, tensors, rank)
        self._others.gathered([1.0])  # everything is written when everyone has come here
        if shared.block is None:
            return None
        plan.write_table(shared.block.memory)
        return os.dup(shared.block.fd), plan.size, digest_of(shared.block.memory)

    def make_ready(self) -> None:
        """Make the block for the second version, while nobody waits for it. Every rank calls it."""
        if len(self._blocks) == 1:
            size, _ = self._blocks[0]
            self._blocks.appendleft((size, self._shared_block(size)))

    def _pieces(self, tensors: Sequence[Spread], rank: int) -> list[tuple[Spread, Held]]:
        """What falls to a rank, in the order of the tensors."""
        return [(one, held) for one in tensors for held in one.sharding.owned_by(rank, self._others.grid)]

    def _receive(self, plan: Plan, shared: _Shared, tensors: Sequence[Spread], rank: int) -> None:
        assert shared.memory is not None
        for bucket in _buckets(self._pieces(tensors, rank)):
            sizes = [held.box.size * one.local.element_size() for one, held in bucket]
            received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            self._others.receive(received, rank)
            for (one, held), content in zip(bucket, torch.split(received, sizes), strict=True):
                view = plan.view(shared.memory, one.name)
                # A copy: a piece may begin anywhere in the bucket, and numbers of several bytes may not.
                view[held.box.slices].copy_(content.clone().view(one.local.dtype).view(held.box.shape))
                del view

    def _free_block(self, size: int) -> _Shared:
        if len(self._blocks) == 2 and self._blocks[0][0] == size:
            self._blocks.rotate(-1)
        else:
            if len(self._blocks) == 2:
                self._blocks.popleft()[1].close()
            self._blocks.append((size, self._shared_block(size)))
        return self._blocks[-1][1]

    def _shared_block(self, size: int) -> _Shared:
        """A new block: rank 0 makes it, the others of its host find it by a secret that they are told."""
        block = Block(size) if self._others.rank == 0 else None
        where = torch.zeros(2, dtype=torch.int64, device="cpu")
        secret = torch.zeros(_SECRET_BYTES, dtype=torch.uint8, device="cpu")
        if block is not None:
            where[0], where[1] = os.getpid(), block.fd
            block.memory[:_SECRET_BYTES] = content = os.urandom(_SECRET_BYTES)
            secret = torch.tensor(list(content), dtype=torch.uint8, device="cpu")
        self._others.broadcast(where)
        self._others.broadcast(secret)
        if block is not None:
            memory: mmap.mmap | None = block.memory
        else:
            pid, fd = where.tolist()
            memory = _mapped(pid, fd, size, bytes(secret.tolist())) if self._one_host else None
        sees = self._others.gathered([float(memory is not None)])[:, 0].tolist()
        if block is not None:
            block.memory[:_SECRET_BYTES] = bytes(_SECRET_BYTES)
            block.seal()
        return _Shared(memory, block, tuple(rank for rank, does in enumerate(sees) if not does))

    def close(self) -> None:
        while self._blocks:
            self._blocks.popleft()[1].close()


def _mapped(pid: int, fd: int, size: int, secret: bytes) -> mmap.mmap | None:
    """Another process's memory, to write; None if it is not on this host."""
    try:
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(mine).st_size != size or os.pread(mine, _SECRET_BYTES, 0) != secret:
            return None  # a process of the same number
        memory = mmap.mmap(mine, size)
    except OSError:
        return None
    finally:
        os.close(mine)
    populate(memory, POPULATE_WRITE)
    return memory


def _buckets(pieces: Sequence[tuple[Spread, Held]]) -> Iterator[list[tuple[Spread, Held]]]:
    """Of about _BUCKET_BYTES; a larger piece goes alone."""
    bucket: list[tuple[Spread, Held]] = []
    room = _BUCKET_BYTES
    for one, held in pieces:
        num_bytes = held.box.size * one.local.element_size()
        if bucket and num_bytes > room:
            yield bucket
            bucket, room = [], _BUCKET_BYTES
        bucket.append((one, held))
        room -= num_bytes
    if bucket:
        yield bucket


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
