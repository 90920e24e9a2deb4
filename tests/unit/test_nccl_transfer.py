"""Weights to vLLM on another host through its weight-transfer engine: everything but NCCL itself, which needs GPUs."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.admission import Room
from onbeat.errors import WorkerError
from onbeat.messages import Activate, FromGenerator, GeneratorReady, Stage, Staged
from onbeat.protocols import Snapshot
from onbeat.rollout.client import GeneratorProcess
from onbeat.weights.nccl import Courier, FromCourier, Minted, Send, Sent, send
from onbeat.wire import Channel, Connection
from tests.unit.test_vllm_server import extension


class Ranks:
    """A group whose members are threads."""

    def __init__(self, num_receivers: int) -> None:
        self.queues: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(num_receivers)]

    def broadcast(self, piece: torch.Tensor) -> None:
        for one in self.queues:
            one.put(piece)

    def receiver(self, rank: int) -> Any:
        def broadcast(piece: torch.Tensor, src: int) -> None:
            assert src == 0
            piece.copy_(self.queues[rank].get(timeout=10))

        engine = SimpleNamespace(model_update_group=SimpleNamespace(broadcast=broadcast))
        worker = extension().Extension()
        worker.__dict__ |= {"weight_transfer_engine": engine, "device": "cpu", "rank": rank}
        return worker


def memory_of(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))
    return fd


@settings(deadline=None, max_examples=20)
@given(content=st.binary(min_size=1, max_size=200), piece_bytes=st.integers(1, 64), num_ranks=st.integers(1, 3))
def test_what_the_courier_sends_is_what_the_servers_first_worker_writes_down(
    content: bytes, piece_bytes: int, num_ranks: int
) -> None:
    sent, received = memory_of(content), memory_of(bytes(len(content)))
    ranks = Ranks(num_ranks)
    path = f"/proc/{os.getpid()}/fd/{received}"
    threads = [
        threading.Thread(target=ranks.receiver(rank).onbeat_receive, args=(path, len(content), piece_bytes))
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    send(ranks, sent, len(content), "cpu", piece_bytes)
    for thread in threads:
        thread.join()
    assert os.pread(received, len(content) + 1, 0) == content
    assert all(one.empty() for one in ranks.queues)
    os.close(sent)
    os.close(received)


class Played:
    """A child process played by a thread, at the other end of its connection."""

    def __init__(self, name: str, receives: object, plays: Any) -> None:
        ours, theirs = socket.socketpair()
        self.name, self.pid, self.shares_memory, self.courier = name, 0, False, None
        self.connection: Connection[Any] = Connection(ours, receives)
        self.killed = False
        self._theirs = theirs
        threading.Thread(target=plays, args=(theirs,), daemon=True).start()

    def kill(self) -> None:
        self.killed = True
        self._theirs.close()

    async def exited(self) -> int:
        return -9

    def log_tail(self) -> str:
        return "CUDA error: out of memory"


def play_courier(sock: socket.socket) -> None:
    channel: Channel[Send] = Channel(sock, Send)
    while (order := channel.recv()) is not None:
        content = os.pread(channel.take_fd(), order.num_bytes, 0)
        channel.send(Minted(f"group of {content.decode()}"))
        channel.send(Sent())


def snapshot_of(content: bytes) -> Snapshot:
    return Snapshot(version=3, digest="d", num_bytes=len(content), handle=memory_of(content))


def test_a_generator_elsewhere_is_told_the_group_that_the_courier_has_made() -> None:
    heard: list[Stage] = []

    def play_generator(sock: socket.socket) -> None:
        channel: Channel[Stage | Activate] = Channel(sock, Stage | Activate)
        while isinstance(order := channel.recv(), Stage):
            heard.append(order)
            channel.send(Staged(order.version, "d"))

    async def main() -> None:
        child = Played("generator-far-1", FromGenerator, play_generator)
        ready = GeneratorReady(Room(max_sequences=1, cache_tokens=1, bytes_per_token=1), "vLLM", repeatable=False)
        generator = GeneratorProcess(child, ready)
        courier = Played("courier-1", FromCourier, play_courier)
        generator.courier = Courier(courier)
        generator.attach(SimpleNamespace(lost=lambda name, error: None))  # type: ignore[arg-type]
        await generator.stage(snapshot_of(b"weights"))
        await generator.stage(snapshot_of(b"others"))
        assert not courier.killed
        generator.stop()
        assert courier.killed

    asyncio.run(main())
    assert [(order.attached, order.group) for order in heard] == [
        (False, "group of weights"),
        (False, "group of others"),
    ]


def test_a_courier_that_dies_says_why_and_one_whose_receiver_fails_is_killed() -> None:
    async def dies() -> None:
        courier = Played("courier-1", FromCourier, lambda sock: sock.close())
        with pytest.raises(WorkerError, match="courier-1 died") as caught:
            async with Courier(courier).sending(snapshot_of(b"weights")):
                raise AssertionError
        assert "out of memory" in str(caught.value)

    async def receiver_fails() -> None:
        courier = Played("courier-1", FromCourier, play_courier)
        with pytest.raises(WorkerError, match="the receiver died"):
            async with Courier(courier).sending(snapshot_of(b"weights")):
                raise WorkerError("the receiver died")
        assert courier.killed

    asyncio.run(dies())
    asyncio.run(receiver_fails())
