"""Trainer ranks in real processes, which stay for many jobs: starting one takes seconds, a job a fraction of one.

A collective that somebody does not join fails after PATIENCE: a deadlock is an error.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from onbeat import device
from onbeat.config import Config, TrainerConfig
from onbeat.training import parallel

PATIENCE = timedelta(seconds=60)
HOST = "127.0.0.1"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.cluster.jobs"])


class RankError(AssertionError):
    """With the traceback of the rank."""


class RankProcesses:
    """So many processes that have met."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.closed = False
        pipes = [_context.Pipe() for _ in range(num_ranks)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            _context.Process(target=_serve, args=(rank, num_ranks, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        address = self._answer(0)
        for connection in self._ours:
            connection.send(address)
        self._answers()

    def run(self, job: Callable[..., Any], config: Config, *args: Any, float64: bool = False) -> list[Any]:
        """job(ranks, config, *args) on every rank; what each returned."""
        for connection in self._ours:
            connection.send((job, config.model_dump_json(), args, float64))
        return self._answers()

    def run_each(self, job: Callable[..., Any], config: Config, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of its own for each rank."""
        for connection, mine in zip(self._ours, args, strict=True):
            connection.send((job, config.model_dump_json(), mine, False))
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            return [self._answer(rank) for rank in range(self.num_ranks)]
        except RankError:
            self.close()
            raise

    def _answer(self, rank: int) -> Any:
        if not self._ours[rank].poll(PATIENCE.total_seconds() + 120):
            raise RankError(f"rank {rank} does not answer")
        try:
            problem, answer = self._ours[rank].recv()
        except EOFError:
            raise RankError(f"rank {rank} died") from None
        if problem:
            raise RankError(f"rank {rank}: {problem}")
        return answer

    def close(self) -> None:
        self.closed = True
        for process in self._processes:
            process.kill()
            process.join()


class Pools:
    """As many as are asked for; new ones after a failure."""

    def __init__(self) -> None:
        self._started: dict[int, RankProcesses] = {}

    def __getitem__(self, num_ranks: int) -> RankProcesses:
        if num_ranks not in self._started or self._started[num_ranks].closed:
            self._started[num_ranks] = RankProcesses(num_ranks)
        return self._started[num_ranks]

    def close(self) -> None:
        for processes in self._started.values():
            processes.close()


def _serve(rank: int, num_ranks: int, connection: Connection) -> None:
    try:
        device.prepare_process(1, rank)
        point = parallel.MeetingPoint(HOST, num_ranks, PATIENCE) if rank == 0 else None
        if point is not None:
            connection.send((None, point.address))
        parallel.join(rank, TrainerConfig(ranks=num_ranks), HOST, connection.recv(), point, PATIENCE)
        connection.send((None, None))
        while True:
            job, config_json, args, float64 = connection.recv()
            config = Config.model_validate_json(config_json)
            ranks = parallel.arranged(rank, config.trainer)
            with ExitStack() as stack:
                if float64:
                    from tests.equivalence.test_shared_prompt import all_in_float64

                    stack.enter_context(all_in_float64())
                    device.DTYPE = torch.float64
                    stack.callback(setattr, device, "DTYPE", torch.float32)
                answer = job(ranks, config, *args)
            connection.send((None, answer))
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException:
        connection.send((traceback.format_exc(), None))
