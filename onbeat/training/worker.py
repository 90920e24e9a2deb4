"""The trainer process: takes orders one after another and answers each.

    main thread      Accumulate ─ Accumulate ─ Step ······ waits ······▶ step
    saving thread    SavePart ── writes weights and moments ──┘ PartSaved

Weights and moments move in `step` alone, which waits for the saving thread: what is written is one moment's state, and
no copy of it is made. One part is written at a time. The socket is locked per message.

While a micro-batch is computed the main thread looks, between two products, for what has come meanwhile: WorkBeside
counts at once (threads.py), everything else waits its turn.

One of several ranks meets the others first (parallel.py). They carry out the same orders in the same order, each from
its own socket, and wait for each other in the collectives.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch

from onbeat.arithmetic import fingerprint
from onbeat.checkpoint import Tensor, write_part
from onbeat.config import Config, TrainerConfig
from onbeat.cores import possible_threads
from onbeat.device import HOST, device, prepare_process, synchronize
from onbeat.errors import CheckpointError, InputError, WorkerError
from onbeat.functions import raised
from onbeat.lora import save_model
from onbeat.messages import (
    Accumulate,
    Accumulated,
    Export,
    Exported,
    Failed,
    Listening,
    Meet,
    PartSaved,
    SavePart,
    SnapshotTaken,
    Step,
    Stepped,
    TakeSnapshot,
    ToTrainer,
    TrainerReady,
    WorkBeside,
    WorkerSettings,
)
from onbeat.training.activations import ramp
from onbeat.training.export import write_model
from onbeat.training.parallel import ALONE, MeetingPoint, Ranks, join
from onbeat.training.threads import SharedCores
from onbeat.training.trainer import PolicyTrainer, model_snapshot
from onbeat.wire import Channel


class TrainerWorker:
    def __init__(
        self,
        channel: Channel[ToTrainer],
        trainer: PolicyTrainer,
        model_dir: Path,
        rank: int = 0,
        *,
        shares_cores: bool = False,
    ) -> None:
        self._channel = channel
        self._waiting: deque[ToTrainer | None] = deque()
        """What came while something was being computed."""
        self._cores = SharedCores(torch.get_num_threads(), self._listen) if shares_cores else None
        self._trainer = trainer
        self._model_dir = model_dir
        self._rank = rank
        self._saving: threading.Thread | None = None
        self._sending = threading.Lock()

    def run(self) -> None:
        while (message := self._next()) is not None:
            self._handle(message)

    def _next(self) -> ToTrainer | None:
        return self._waiting.popleft() if self._waiting else self._channel.recv()

    def _listen(self) -> None:
        while None not in self._waiting and self._channel.poll():
            message = self._channel.recv()
            if isinstance(message, WorkBeside):
                self._handle(message)
            else:
                self._waiting.append(message)

    def _handle(self, message: ToTrainer) -> None:
        began_s = time.monotonic()
        match message:
            case Accumulate(microbatch=microbatch, num_parts=num_parts):
                with self._cores.sharing() if self._cores else nullcontext():
                    self._trainer.accumulate(microbatch, num_parts)
                    synchronize()
                self._send(Accumulated(microbatch.index, began_s, time.monotonic()))
            case WorkBeside(num_generators=num_generators):
                if self._cores is not None:
                    self._cores.beside(num_generators)
            case Step(totals=totals):
                self._finish_saving()
                report = self._trainer.step(totals)
                self._send(Stepped(report, began_s, time.monotonic()))
            case TakeSnapshot(version=version):
                fd, num_bytes, digest = self._trainer.snapshot()
                self._send(SnapshotTaken(version, digest, num_bytes), None if fd is None else [fd])
                if fd is not None:
                    os.close(fd)
                self._trainer.snapshot_taken()
            case SavePart(num_updates=wanted) if wanted != self._trainer.num_updates:
                self._send(PartSaved(self._trainer.num_updates, None, "the weights have moved"))
            case SavePart(directory=directory):
                self._finish_saving()
                # Taken here: in the middle of a micro-batch the adapter is the reference's for a moment (lora.py).
                arguments = Path(directory), self._trainer.num_updates, self._trainer.state()
                self._saving = threading.Thread(target=self._save, args=arguments, name="saving")
                self._saving.start()
            case Export(directory=directory):
                self._send(Exported(self._export(Path(directory))))
            case Meet():
                raise AssertionError("it has met the other ranks")

    def _save(self, directory: Path, num_updates: int, state: dict[str, Tensor]) -> None:
        try:
            part = write_part(directory, f"rank-{self._rank}.safetensors", state)
            self._send(PartSaved(num_updates, part))
        except Exception as error:  # whatever it is, somebody waits for the answer
            problem = str(error) if isinstance(error, CheckpointError) else raised(error)
            self._send(PartSaved(num_updates, None, problem))

    def _export(self, directory: Path) -> str | None:
        model = self._trainer.whole_model()
        if model is None:
            return None  # rank 0 writes
        try:
            write_model(directory, self._model_dir, lambda hidden: save_model(model, str(self._model_dir), hidden))
        except CheckpointError as error:
            return str(error)
        return None

    def _finish_saving(self) -> None:
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _send(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        with self._sending:
            self._channel.send(message, fds)


def main(sock: socket.socket, settings_bytes: bytes) -> None:
    settings = msgspec.msgpack.decode(settings_bytes, type=WorkerSettings)
    channel: Channel[ToTrainer] = Channel(sock, ToTrainer)
    try:
        config = _with_ranks(Config.model_validate_json(settings.config), settings.num_ranks)
        prepare_process(config.trainer.threads, settings.rank)
        ranks = _meet(channel, settings, config) if settings.num_ranks > 1 else ALONE
        trainer = PolicyTrainer(config, settings.model_dir, ranks)
        if settings.checkpoint is not None:
            trainer.restore(Path(settings.checkpoint))
        num_threads = torch.get_num_threads()
        why_fixed = _why_threads_fixed(config) or trainer.why_threads_fixed(possible_threads(num_threads))
        num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        arithmetic = fingerprint(ramp())
        channel.send(TrainerReady(num_parameters, trainer.why_not_shared, arithmetic, num_threads, why_fixed))
        directory = Path(settings.model_dir)
        TrainerWorker(channel, trainer, directory, settings.rank, shares_cores=why_fixed is None).run()
    except Exception as error:
        channel.send(Failed(str(error) if isinstance(error, InputError) else raised(error)))
        raise


def _why_threads_fixed(config: Config) -> str | None:
    """None if how many threads it computes with is left to it, beside generators of the same machine."""
    return config.why_trainer_threads_fixed or (None if device() == HOST else "an accelerator computes")


def _with_ranks(config: Config, num_ranks: int) -> Config:
    """A run may go on with another number of ranks than its recipe says."""
    trainer = TrainerConfig.model_validate({**config.trainer.model_dump(), "ranks": num_ranks})
    return config.model_copy(update={"trainer": trainer})


def _meet(channel: Channel[ToTrainer], settings: WorkerSettings, config: Config) -> Ranks:
    """Join the other ranks, where rank 0 listens."""
    point = MeetingPoint(settings.host, settings.num_ranks) if settings.rank == 0 else None
    if point is not None:
        channel.send(Listening(point.address))
    if not isinstance(order := channel.recv(), Meet):
        raise WorkerError(f"{settings.name} was told {type(order).__name__} before it had met the other ranks")
    return join(settings.rank, config.trainer, settings.host, order.address, point)


def publish_model(sock: socket.socket, settings_bytes: bytes) -> None:
    """Send the model's weights as they are on the disk, and end."""
    settings = msgspec.msgpack.decode(settings_bytes, type=WorkerSettings)
    channel: Channel[ToTrainer] = Channel(sock, ToTrainer)
    try:
        config = Config.model_validate_json(settings.config)
        fd, num_bytes, digest = model_snapshot(settings.model_dir, config.lora, config.seed)
        channel.send(SnapshotTaken(0, digest, num_bytes), [fd])
    except Exception as error:
        channel.send(Failed(str(error) if isinstance(error, InputError) else raised(error)))
        raise
