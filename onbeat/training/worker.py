"""The trainer process: takes orders one after another and answers each."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

import msgspec

from onbeat.config import Config
from onbeat.device import prepare_process
from onbeat.errors import InputError
from onbeat.functions import raised
from onbeat.messages import (
    Accumulate,
    Accumulated,
    Export,
    Exported,
    Failed,
    SnapshotTaken,
    Step,
    Stepped,
    TakeSnapshot,
    ToTrainer,
    TrainerReady,
    WorkerSettings,
)
from onbeat.training.trainer import GrpoTrainer
from onbeat.wire import Channel


class TrainerWorker:
    def __init__(self, channel: Channel[ToTrainer], trainer: GrpoTrainer, model_dir: Path) -> None:
        self._channel = channel
        self._trainer = trainer
        self._model_dir = model_dir

    def run(self) -> None:
        while (message := self._channel.recv()) is not None:
            self._handle(message)

    def _handle(self, message: ToTrainer) -> None:
        began_s = time.monotonic()
        match message:
            case Accumulate(microbatch=microbatch):
                self._trainer.accumulate(microbatch)
                self._channel.send(Accumulated(microbatch.index, began_s, time.monotonic()))
            case Step(totals=totals):
                report = self._trainer.step(totals)
                self._channel.send(Stepped(report, began_s, time.monotonic()))
            case TakeSnapshot(version=version):
                fd, num_bytes, digest = self._trainer.snapshot()
                self._channel.send(SnapshotTaken(version, digest, num_bytes), [fd])
                os.close(fd)
            case Export(directory=directory):
                export(self._trainer, self._model_dir, Path(directory))
                self._channel.send(Exported(directory))


def export(trainer: GrpoTrainer, model_dir: Path, directory: Path) -> None:
    """Weights of the policy beside the tokenizer and templates of the model it started from."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model_dir.iterdir():
        if file.suffix in {".json", ".jinja", ".model", ".txt"} and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    trainer.export(directory)


def main(sock: socket.socket, settings_bytes: bytes) -> None:
    settings = msgspec.msgpack.decode(settings_bytes, type=WorkerSettings)
    channel: Channel[ToTrainer] = Channel(sock, ToTrainer)
    try:
        config = Config.model_validate_json(settings.config)
        prepare_process(config.trainer.threads)
        trainer = GrpoTrainer(config, settings.model_dir)
        num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        channel.send(TrainerReady(num_parameters, trainer.why_not_shared))
        TrainerWorker(channel, trainer, Path(settings.model_dir)).run()
    except Exception as error:
        channel.send(Failed(str(error) if isinstance(error, InputError) else raised(error)))
        raise
