"""A generator process: an engine, a channel, and the two-phase loading of weights.

The loop waits for messages only when the engine has nothing to do; between two decode steps it takes what has come.
A group asked for in a version that is not the active one is refused: the process says so and ends (R4). It ends, too,
when the controller is gone, whatever it is doing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from onbeat.arithmetic import fingerprint
from onbeat.config import Config
from onbeat.cores import Threads, generator_threads
from onbeat.device import load_model, prepare_process
from onbeat.errors import InputError, NumbersError, UndecodableError
from onbeat.functions import raised
from onbeat.lora import add_adapter, trained_parameters
from onbeat.messages import (
    Activate,
    Activated,
    Cancel,
    Completed,
    Failed,
    FirstToken,
    GeneratorReady,
    Leaving,
    Progress,
    Refused,
    ShareCores,
    Stage,
    Staged,
    Submit,
    ToGenerator,
    WeightBytes,
    WorkerSettings,
)
from onbeat.pieces import WHOLE, Share
from onbeat.rollout.arriving import DELIVERED, Arriving, delivered
from onbeat.rollout.engine import Engine
from onbeat.rollout.probe import kernels_fingerprint, probe_invariance
from onbeat.rollout.stop import Decode, no_text
from onbeat.weights.snapshot import Blocks, Mapped
from onbeat.wire import Channel

PROGRESS_S = 1.0
"""Between two words about progress."""


class GeneratorWorker:
    def __init__(
        self,
        channel: Channel[ToGenerator],
        model: Any,
        capacity: int,
        cache_bytes: int,
        decode: Decode = no_text,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[int], Threads] | None = None,
    ) -> None:
        """`threads`: by how many generators share the machine."""
        self._channel = channel
        self._model = model
        self._targets = trained_parameters(model)
        self._engine = Engine(model, capacity, cache_bytes, decode)
        self._clock = clock
        now = torch.get_num_threads()
        self._threads = threads or (lambda num_generators: Threads(now, now))
        self._num_generators, self._trainer_works = 1, False
        self._may_change_threads = True
        self._wants_to_leave = self._waits = False
        self._activated_s: float | None = None
        """Set until the first token of the active version."""
        self._tokens_before = 0
        self._told_s = -PROGRESS_S
        self.room = self._engine.room
        self._blocks = Blocks()
        self._staged: tuple[int, Mapped] | None = None
        self._arriving: Arriving | None = None
        self._row_variance: str | None = None
        self._probed = False

    @property
    def version(self) -> int:
        return self._engine.version

    def run(self) -> None:
        while True:
            while self._engine.idle or self._channel.poll():
                self._waits = True
                self._tell_that_we_leave()
                message = self._channel.recv()
                self._waits = False
                if message is None:
                    return
                self._handle(message)
            self._tell_that_we_leave()
            for completion in self._engine.step():
                self._channel.send(Completed(completion))
            self._tell()

    def leave(self) -> None:
        """From a signal handler: say so at once if nothing else is being said."""
        self._wants_to_leave = True
        if self._waits:
            self._tell_that_we_leave()

    def _tell_that_we_leave(self) -> None:
        if self._wants_to_leave:
            self._wants_to_leave = False
            self._channel.send(Leaving())

    def _tell(self) -> None:
        """That there is a first token; now and then, how many there are."""
        now_s = self._clock()
        if self._activated_s is not None and self._engine.num_tokens > self._tokens_before:
            self._channel.send(FirstToken(self._engine.version, now_s - self._activated_s))
            self._activated_s = None
        if now_s - self._told_s >= PROGRESS_S or self._engine.idle:
            self._channel.send(Progress(self._engine.num_tokens))
            self._told_s = now_s

    def _handle(self, message: ToGenerator) -> None:
        match message:
            case Submit(request=request):
                if request.period != self._engine.version:
                    raise RuntimeError(f"asked for version {request.period} while serving {self._engine.version}")
                self._engine.add(request)
            case Cancel(key=key):
                self._engine.cancel(key)
            case Stage(version=version, num_bytes=num_bytes, attached=True, share=share):
                self._stage(version, self._blocks.mapped(self._channel.take_fd(), num_bytes), share)
            case Stage(version=version, group=str(group)) if group == DELIVERED:
                self._stage(version, Mapped.over(delivered(version)))
            case Stage(version=version, num_bytes=num_bytes):
                self._arriving = Arriving(version, num_bytes)
            case WeightBytes(data=data):
                arriving = self._arriving
                if arriving is not None and arriving.take(data):
                    self._arriving = None
                    self._stage(arriving.version, Mapped(arriving.fd, arriving.num_bytes))
            case ShareCores(num_generators=num_generators, trainer_works=trainer_works):
                self._num_generators, self._trainer_works = num_generators, trainer_works
                self._share_cores()
            case Refused(reason=reason):
                raise InputError(f"the run refuses this worker: {reason}")
            case Activate(version=version):
                self._activate(version)
                self._channel.send(Activated(version, self._row_variance))

    def _stage(self, version: int, mapped: Mapped, share: Share = WHOLE) -> None:
        self._staged = (version, mapped)
        self._channel.send(Staged(version, mapped.digest(share), share))

    def _share_cores(self) -> None:
        if self._may_change_threads:
            threads = self._threads(self._num_generators)
            torch.set_num_threads(threads.beside_trainer if self._trainer_works else threads.alone)

    @torch.no_grad()
    def _activate(self, version: int) -> None:
        if self._staged is None or self._staged[0] != version:
            raise RuntimeError(f"asked to activate version {version}, which is not staged")
        if self._probed:
            self._staged[1].lend_to(self._targets)
        else:  # the probe may take so long that the memory is written again
            self._staged[1].load_into(self._targets)
        self._staged = None
        self._engine.version = version
        if not self._probed:
            alone = self._threads(1).alone
            torch.set_num_threads(alone)
            others = {count for shared in range(1, alone + 1) for count in self._threads(shared)} - {alone}
            invariance = probe_invariance(self._model, sorted(others), self._engine.stand_ins())
            self._row_variance = invariance.rows
            self._may_change_threads = invariance.threads is None
            self._share_cores()
            self._probed = True
        self._activated_s, self._tokens_before = self._clock(), self._engine.num_tokens


def _decoder(model_dir: str) -> Decode:
    """Tokens to text, as the rewards will see it."""
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    return decode


def _number(name: str) -> int:
    """Of a generator: devices that the trainer's ranks leave are taken in turn."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def main(
    sock: socket.socket, settings_bytes: bytes, started: Callable[[GeneratorWorker], None] = lambda worker: None
) -> None:
    """`started` is given the worker before it begins to serve."""
    settings = msgspec.msgpack.decode(settings_bytes, type=WorkerSettings)
    channel: Channel[ToGenerator] = Channel(sock, ToGenerator)
    try:
        config = Config.model_validate_json(settings.config)
        cores = len(os.sched_getaffinity(0))

        def threads(num_generators: int) -> Threads:
            return generator_threads(config.generator.threads, num_generators, cores)

        prepare_process(threads(1).alone, config.trainer.ranks + _number(settings.name))
        capacity = max(config.generator.max_sequences, config.algorithm.group_size)
        cache_bytes = int(config.generator.cache_gib * 2**30)
        model = load_model(settings.model_dir, weights_follow=True)
        add_adapter(model, config.lora, config.seed)
        worker = GeneratorWorker(channel, model, capacity, cache_bytes, _decoder(settings.model_dir), threads=threads)
        started(worker)
        channel.send(GeneratorReady(worker.room, f"{fingerprint()} {kernels_fingerprint(model)}"))
        worker.run()
    except NumbersError:
        with suppress(OSError):
            channel.send(Failed(f"version {worker.version}: the model's logits are not finite", diverged=True))
        raise
    except Exception as error:
        with suppress(OSError):  # the run may be gone
            reason = str(error) if isinstance(error, InputError) else raised(error)
            channel.send(Failed(reason, undecodable=isinstance(error, UndecodableError)))
        raise
