"""Weights to a vLLM server on another host, from GPU to GPU, by vLLM's own weight-transfer engine (NCCL).

    controller ── Send + fd ──▶ courier: a process beside the trainer, rank 0
        │◀───── Minted(id) ────────┤
        │── Stage(group=id) ──▶ worker there ── /init_weight_transfer_engine ──▶ vLLM's workers, ranks 1 …
        │                          ├══════════ the snapshot, a piece at a time ═════════▶│ (extension: onbeat_receive)
        │◀────── Sent ─────────────┘                    worker's memory ◀────────────────┘

Only the way of the bytes differs from that over onbeat's connection: the worker checks the digest, and vLLM loads and
is verified as ever (rollout/vllm/worker.py). What travels is the period's snapshot, never the live weights.

A group lives for one transfer, so nobody who has died is in it. If one end dies, NCCL lets the other wait for ever:
the channel's patience ends that, and the courier is killed with its generator. One courier per generator, one
transfer at a time.

Not run: it takes GPUs on two hosts. Tested: both loops against each other, over a group of another kind, and what
the server is told, by vLLM's own classes.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct

from onbeat.errors import WorkerError
from onbeat.protocols import Child, Launcher, Snapshot
from onbeat.wire import Connection

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 256 << 20


class CourierSettings(Struct, frozen=True):
    num_ranks: int
    """Of the group: the server's, and the courier."""


class Send(Struct, frozen=True, tag=True):
    """The snapshot whose descriptor comes along."""

    num_bytes: int


class Minted(Struct, frozen=True, tag=True):
    group: str
    """By which its members find each other."""


class Sent(Struct, frozen=True, tag=True):
    pass


FromCourier = Minted | Sent
A = TypeVar("A", Minted, Sent)


class Courier:
    """The controller's handle of the process. No torch on this side."""

    def __init__(self, child: Child[FromCourier]) -> None:
        self._child = child

    @classmethod
    async def start(cls, launcher: Launcher, name: str, num_ranks: int) -> Courier:
        return cls(
            await launcher.spawn(
                name=name,
                entry="onbeat.weights.nccl:main",
                settings=CourierSettings(num_ranks),
                receives=FromCourier,
                uses_torch=True,
            )
        )

    @asynccontextmanager
    async def sending(self, snapshot: Snapshot) -> AsyncIterator[str]:
        """Give the group to the receiver inside. Whatever goes wrong there ends the courier, too."""
        try:
            self._child.connection.send(Send(snapshot.num_bytes), [snapshot.handle])
            yield (await self._next(Minted)).group
            await self._next(Sent)
        except BaseException:
            self._child.kill()
            raise

    async def _next(self, kind: type[A]) -> A:
        async for message in self._child.connection.messages():
            if isinstance(message, kind):
                return message
        raise WorkerError(f"{self._child.name} died (status {await self._child.exited()})", self._child.log_tail())

    def stop(self) -> None:
        self._child.kill()


class Group(Protocol):
    def broadcast(self, piece: torch.Tensor) -> None:
        """From rank 0 to all others."""
        ...


class NcclGroup:
    """Of torch's own NCCL: no process group of torch.distributed is needed, or touched."""

    def __init__(self, unique_id: Any, num_ranks: int) -> None:
        import torch

        self._nccl: Any = torch.cuda.nccl
        self._communicator = self._nccl.init_rank(num_ranks, unique_id, 0)
        self._nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[self._communicator])  # as vLLM does to begin with
        torch.cuda.synchronize()

    def broadcast(self, piece: torch.Tensor) -> None:
        self._nccl.broadcast([piece], root=0, comms=[self._communicator])


def send(group: Group, fd: int, num_bytes: int, device: str, piece_bytes: int = PIECE_BYTES) -> None:
    """Every byte that the descriptor holds, in order."""
    import torch

    for offset in range(0, num_bytes, piece_bytes):
        content = bytearray(os.pread(fd, min(piece_bytes, num_bytes - offset), offset))
        group.broadcast(torch.frombuffer(content, dtype=torch.uint8).to(device))


def main(sock: socket.socket, settings_bytes: bytes) -> None:
    import msgspec
    import torch

    nccl: Any = torch.cuda.nccl
    num_ranks = msgspec.msgpack.decode(settings_bytes, type=CourierSettings).num_ranks

    async def serve() -> None:
        connection: Connection[Send] = Connection(sock, Send)
        async for order in connection.messages():
            fd = connection.take_fd()
            unique_id = nccl.unique_id()
            connection.send(Minted(base64.b64encode(unique_id).decode()))
            await connection.drained()
            send(NcclGroup(unique_id, num_ranks), fd, order.num_bytes, "cuda")
            torch.cuda.synchronize()
            os.close(fd)
            connection.send(Sent())

    asyncio.run(serve())
