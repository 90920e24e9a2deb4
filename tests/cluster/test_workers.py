"""Trainer workers as a controller sees them: several processes, each behind its own socket, that answer as one."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from onbeat import device
from onbeat.config import Config
from onbeat.messages import (
    Accumulate,
    Accumulated,
    Export,
    Exported,
    Failed,
    FromTrainer,
    Listening,
    Meet,
    PartSaved,
    SavePart,
    SnapshotTaken,
    Step,
    Stepped,
    TakeSnapshot,
    TrainerReady,
    WorkerSettings,
)
from onbeat.training.worker import main
from onbeat.types import MicroBatch
from onbeat.weights.snapshot import Mapped
from onbeat.wire import Channel
from tests.cluster import jobs
from tests.cluster.test_ranks import LAYOUTS, UPDATES, alone, make_config
from tests.fakes.models import tiny_model

pytestmark = pytest.mark.cluster

_context = multiprocessing.get_context("forkserver")


class Workers:
    """Ranks that have met, and what is asked of all of them."""

    def __init__(self, config: Config, num_ranks: int, checkpoint: str | None = None, host: str = "127.0.0.1") -> None:
        self.config = config
        self.channels: list[Channel[FromTrainer]] = []
        self._sockets: list[socket.socket] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(num_ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(120)
            settings = WorkerSettings(
                config=config.model_dump_json(), model_dir=config.model.path, name=f"trainer-{rank}",
                checkpoint=checkpoint, rank=rank, num_ranks=num_ranks, host=host,
            )  # fmt: skip
            process = _context.Process(target=main, args=(theirs, msgspec.msgpack.encode(settings)), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._sockets.append(ours)
            self.channels.append(Channel(ours, FromTrainer))

    def meet(self) -> None:
        if len(self.channels) > 1:
            listening = self.channels[0].recv()
            assert isinstance(listening, Listening), listening
            self.address = listening.address
            self.tell(Meet(listening.address))

    def tell(self, order: Any) -> None:
        for channel in self.channels:
            channel.send(order)

    def answers(self, kind: type[Any]) -> list[Any]:
        found = [channel.recv() for channel in self.channels]
        assert all(isinstance(answer, kind) for answer in found), found
        return found

    def update(self, packs: jobs.Packs) -> list[Stepped]:
        settings = self.config.trainer
        for microbatches, parts in jobs.rounds(packs, self.config):
            busy = []
            for rank, channel in enumerate(self.channels):
                mine: MicroBatch = microbatches[rank // settings.tensor_parallel]
                if mine.groups or settings.shards:
                    channel.send(Accumulate(mine, parts))
                    busy.append(channel)
            assert all(isinstance(channel.recv(), Accumulated) for channel in busy)
        self.tell(Step(jobs.totals(packs)))
        return self.answers(Stepped)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        for process in self.processes:
            process.join(20)
            assert process.exitcode == 0, "a rank ends by itself when the controller is gone"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(directory)
    return str(directory)


@pytest.fixture
def started() -> Iterator[list[Workers]]:
    workers: list[Workers] = []
    yield workers
    for each in workers:
        for process in each.processes:
            process.kill()
            process.join()


def listening_at(pid: int) -> set[str]:
    """Addresses at which the process accepts TCP connections."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.parametrize("layout", ["replicated", "sharded", "tensor"])
def test_workers_meet_train_publish_save_export_and_end(
    model_dir: str, tmp_path: Path, started: list[Workers], layout: str
) -> None:
    config = make_config(model_dir, LAYOUTS[layout], trainer={"threads": 1})
    workers = Workers(config, 2)
    started.append(workers)
    workers.meet()
    ready = workers.answers(TrainerReady)
    assert {answer.num_parameters for answer in ready} == {sum(p.numel() for p in tiny_model("llama").parameters())}
    for process in workers.processes:
        assert process.pid is not None
        assert listening_at(process.pid) <= {"0100007F"}, "nothing listens off loopback"
    workers.tell(TakeSnapshot(0))
    workers.answers(SnapshotTaken)
    os.close(workers.channels[0].take_fd())
    reports = [[stepped.report for stepped in workers.update(packs)] for packs in UPDATES]
    expected = alone(config, model_dir, UPDATES)
    for ours, theirs in zip(reports, expected.updates, strict=True):
        assert ours[0] == ours[1]
        assert ours[0].grad_norm == pytest.approx(theirs.report.grad_norm, rel=1e-3)
    workers.tell(TakeSnapshot(1))
    taken = workers.answers(SnapshotTaken)
    assert [answer.digest == "" for answer in taken] == [False, True]
    mapped = Mapped(workers.channels[0].take_fd(), taken[0].num_bytes)
    assert mapped.digest() == taken[0].digest
    published = {name: tensor.clone() for name, tensor in mapped.tensors().items()}
    workers.tell(SavePart(str(tmp_path), 2))
    workers.tell(Export(str(tmp_path / "model")))
    answers = [[channel.recv(), channel.recv()] for channel in workers.channels]
    saved = [answer for pair in answers for answer in pair if isinstance(answer, PartSaved)]
    assert [answer.part and answer.part.name for answer in saved] == ["rank-0.safetensors", "rank-1.safetensors"]
    assert [answer for pair in answers for answer in pair if isinstance(answer, Exported)] == [Exported(None)] * 2
    exported = dict(device.load_into_host_memory(str(tmp_path / "model")).named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.items())
    workers.close()

    again = Workers(config, 1, checkpoint=str(tmp_path))  # fewer than the recipe says
    started.append(again)
    if layout == "tensor":
        assert isinstance(failed := again.channels[0].recv(), Failed)
        assert "trainer.tensor_parallel = 2 does not divide trainer.ranks = 1" in failed.reason
        return
    again.answers(TrainerReady)
    again.tell(TakeSnapshot(1))
    (one,) = again.answers(SnapshotTaken)
    os.close(again.channels[0].take_fd())
    assert one.digest == taken[0].digest
    again.close()


def test_ranks_meet_at_the_address_they_are_given(model_dir: str, started: list[Workers]) -> None:
    workers = Workers(make_config(model_dir, LAYOUTS["replicated"]), 2, host="127.0.0.2")
    started.append(workers)
    workers.meet()
    assert workers.address.startswith("127.0.0.2:")
    workers.answers(TrainerReady)
    assert "0200007F" in listening_at(workers.processes[0].pid or 0)
    workers.close()


def test_a_part_is_refused_if_the_weights_have_moved(model_dir: str, tmp_path: Path, started: list[Workers]) -> None:
    workers = Workers(make_config(model_dir, LAYOUTS["replicated"]), 2)
    started.append(workers)
    workers.meet()
    workers.answers(TrainerReady)
    workers.update(UPDATES[0])
    workers.tell(SavePart(str(tmp_path), 0))
    assert [answer.part for answer in workers.answers(PartSaved)] == [None, None]
    workers.close()
