"""R4 on the real ends of the wire: who read other bytes, or is asked for another version, serves nothing."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from onbeat import pieces
from onbeat.admission import Room
from onbeat.cores import Threads
from onbeat.errors import UnverifiedWeightsError, WorkerError
from onbeat.messages import (
    Activate,
    Activated,
    Completed,
    FirstToken,
    FromGenerator,
    GeneratorReady,
    Progress,
    ShareCores,
    Stage,
    Staged,
    Submit,
    ToGenerator,
)
from onbeat.pieces import WHOLE, Share
from onbeat.protocols import Snapshot
from onbeat.rollout.client import GeneratorProcess
from onbeat.rollout.pool import Pool
from onbeat.rollout.probe import Invariance
from onbeat.rollout.worker import GeneratorWorker
from onbeat.weights import snapshot
from onbeat.weights.memory import MemoryChannel
from onbeat.wire import Channel, Connection
from tests.fakes.models import request, sampling, tiny_model
from tests.fakes.roles import FakeGenerator, fake_completion

ROOM = Room(max_sequences=8, cache_tokens=1000, bytes_per_token=1)


class SocketChild:
    """A child whose process is a thread of this one, talking over a real socket."""

    name = "generator-0"
    pid = 0

    def __init__(self, behave: Callable[[Channel[ToGenerator]], None]) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[FromGenerator] = Connection(ours, FromGenerator)
        self._thread = threading.Thread(target=behave, args=(Channel(theirs, ToGenerator),), daemon=True)
        self._thread.start()

    shares_memory = True
    courier = None

    def kill(self) -> None: ...

    async def exited(self) -> int:
        return 0

    def log_tail(self) -> str:
        return ""


def publish_to(behave: Callable[[Channel[ToGenerator]], None], version: int) -> Pool:
    async def main() -> Pool:
        pool = Pool()
        generator = GeneratorProcess(SocketChild(behave), GeneratorReady(ROOM, "arithmetic"))
        pool.add(generator)
        channel = MemoryChannel(pool)
        fd, num_bytes, digest = snapshot.write(tiny_model("llama").named_parameters())
        try:
            await channel.publish(Snapshot(version=version, digest=digest, num_bytes=num_bytes, handle=fd))
        finally:
            channel.close()
            generator.stop()
        return pool

    return asyncio.run(main())


def answering(staged: Callable[[int, str], Staged], activated: Callable[[int], Activated]) -> Any:
    """A generator that reads the bytes and answers as it is told to."""

    def behave(channel: Channel[ToGenerator]) -> None:
        while (message := channel.recv()) is not None:
            match message:
                case Stage(version=version, num_bytes=num_bytes):
                    mapped = snapshot.Mapped(channel.take_fd(), num_bytes)
                    channel.send(staged(version, mapped.digest()))
                case Activate(version=version):
                    channel.send(activated(version))
                case ShareCores():
                    pass
                case _:
                    return

    return behave


def test_an_honest_generator_is_believed() -> None:
    pool = publish_to(answering(Staged, lambda version: Activated(version, None)), 3)

    async def open_period(version: int) -> None:
        pool.open("train", version)

    asyncio.run(open_period(3))
    with pytest.raises(UnverifiedWeightsError, match=r"they serve \{'generator-0': 3\}"):
        asyncio.run(open_period(2))


@pytest.mark.parametrize(
    ("staged", "activated", "complaint"),
    [
        (lambda v, d: Staged(v, d[::-1]), lambda v: Activated(v, None), "arrived with digest"),
        (lambda v, d: Staged(v + 1, d), lambda v: Activated(v, None), "a Staged of version 4"),
        (Staged, lambda v: Activated(v + 1, None), "a Activated of version 4"),
    ],
    ids=["other bytes", "other version staged", "other version activated"],
)
def test_a_generator_with_other_weights_stops_the_run(staged: Any, activated: Any, complaint: str) -> None:
    with pytest.raises(UnverifiedWeightsError, match=complaint) as caught:
        publish_to(answering(staged, activated), 3)
    assert (caught.value.period, caught.value.worker) == (3, "generator-0")


def test_a_generator_that_is_gone_is_not_waited_for() -> None:
    """It died between its two answers, while slower ones were at the first."""

    def behave(channel: Channel[ToGenerator]) -> None:
        while not isinstance(message := channel.recv(), Stage):
            pass
        mapped = snapshot.Mapped(channel.take_fd(), message.num_bytes)
        channel.send(Staged(message.version, mapped.digest()))
        channel._sock.close()

    async def main() -> None:
        gone = asyncio.Event()
        pool = Pool()
        pool.on_gone = lambda name, error, served: gone.set()
        generator = GeneratorProcess(SocketChild(behave), GeneratorReady(ROOM, "arithmetic"))
        pool.add(generator)
        fd, num_bytes, digest = snapshot.write(tiny_model("llama").named_parameters())
        await generator.stage(Snapshot(version=0, digest=digest, num_bytes=num_bytes, handle=fd))
        await gone.wait()
        with pytest.raises(WorkerError, match="generator-0 died"):
            await generator.activate(0)
        os.close(fd)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_answer_that_comes_twice_is_not_taken_for_that_of_another_share() -> None:
    def behave(channel: Channel[ToGenerator]) -> None:
        before: list[Staged] = []
        while (message := channel.recv()) is not None:
            if isinstance(message, Stage):
                mapped = snapshot.Mapped(channel.take_fd(), message.num_bytes)
                for answer in before:
                    channel.send(answer)
                before.append(Staged(message.version, mapped.digest(message.share), message.share))
                channel.send(before[-1])

    async def main() -> None:
        pool = Pool()
        generator = GeneratorProcess(SocketChild(behave), GeneratorReady(ROOM, "arithmetic"))
        pool.add(generator)
        many_pieces = torch.arange(3 * pieces._SMALLEST_BYTES, dtype=torch.uint8)
        fd, num_bytes, digest = snapshot.write([("weights", many_pieces)])
        published = Snapshot(version=0, digest=digest, num_bytes=num_bytes, handle=fd)
        for share in ((1, 3), (1, 2), WHOLE):
            await generator.stage(published, share)  # raises if the digest is not that of the share
        assert pool.generators == [generator]
        generator.stop()
        os.close(fd)

    asyncio.run(asyncio.wait_for(main(), 30))


def own_model() -> Any:
    """Which nobody else computes with: a worker's weights come to be memory of others, where nothing can be written."""
    return copy.deepcopy(tiny_model("llama"))


def worker_and_peer() -> tuple[GeneratorWorker, Channel[Any]]:
    ours, theirs = socket.socketpair()
    worker = GeneratorWorker(Channel(theirs, ToGenerator), own_model(), capacity=8, cache_bytes=1 << 30)
    return worker, Channel(ours, FromGenerator)


def run_until_closed(worker: GeneratorWorker, peer: Channel[Any]) -> None:
    peer._sock.shutdown(socket.SHUT_WR)
    worker.run()


def test_the_worker_serves_what_it_has_activated_and_stamps_the_version() -> None:
    worker, peer = worker_and_peer()
    fd, num_bytes, digest = snapshot.write(tiny_model("llama").named_parameters())
    peer.send(Stage(0, num_bytes), [fd])
    os.close(fd)
    peer.send(Activate(0))
    peer.send(Submit(request(0, (1, 2, 3), 2, sampling(4))))
    for _ in range(3):
        worker._handle(worker._channel.recv())  # type: ignore[arg-type]
    while not worker._engine.idle:
        for completion in worker._engine.step():
            worker._channel.send(Completed(completion))
    assert peer.recv() == Staged(0, digest)
    assert peer.recv() == Activated(0, None)
    assert {peer.recv().completion.version for _ in range(2)} == {0}


def test_the_worker_tells_its_first_token_of_a_version_and_how_many_there_are() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    ticks = itertools.count()
    worker = GeneratorWorker(
        Channel(theirs, ToGenerator), own_model(), capacity=8, cache_bytes=1 << 30,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    peer: Channel[FromGenerator] = Channel(ours, FromGenerator)
    thread = threading.Thread(target=worker.run)
    thread.start()
    told: list[Any] = []
    for version in (0, 1):
        fd, num_bytes, _ = snapshot.write(tiny_model("llama").named_parameters())
        peer.send(Stage(version, num_bytes), [fd])
        os.close(fd)
        peer.send(Activate(version))
        wanted = request(0, (1, 2, 3), 2, sampling(4))
        peer.send(Submit(msgspec.structs.replace(wanted, period=version)))
        while told.count(Progress(8 * (version + 1))) == 0:
            told.append(peer.recv())
    ours.close()
    thread.join()
    firsts = [message for message in told if isinstance(message, FirstToken)]
    assert [first.version for first in firsts] == [0, 1]
    assert all(first.after_s > 0 for first in firsts)
    progress = [message.num_tokens for message in told if isinstance(message, Progress)]
    assert progress == sorted(progress)
    assert progress[-1] == 16


def test_the_worker_leaves_cores_to_a_trainer_that_works_if_its_bits_do_not_depend_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    for invariance, expected in ((Invariance(None, None), [1, 2, 1]), (Invariance(None, "bits changed"), [2, 2, 2])):
        monkeypatch.setattr("onbeat.rollout.worker.probe_invariance", lambda *_, it=invariance: it)
        ours, theirs = socket.socketpair()
        worker = GeneratorWorker(
            Channel(theirs, ToGenerator),
            own_model(),
            capacity=8,
            cache_bytes=1 << 30,
            threads=lambda num_generators: Threads(2, 1),
        )
        fd, num_bytes, _ = snapshot.write(tiny_model("llama").named_parameters())
        peer: Channel[FromGenerator] = Channel(ours, FromGenerator)
        peer.send(ShareCores(1, True))
        peer.send(Stage(0, num_bytes), [fd])
        os.close(fd)
        peer.send(Activate(0))
        for _ in range(3):
            worker._handle(worker._channel.recv())  # type: ignore[arg-type]
        found = [torch.get_num_threads()]
        for works in (False, True):
            worker._handle(ShareCores(1, works))
            found.append(torch.get_num_threads())
        assert found == expected
        ours.close()
        theirs.close()
    torch.set_num_threads(before)


def test_the_pool_tells_every_generator_when_the_trainer_works_and_who_joins_meanwhile() -> None:
    told: dict[str, tuple[int, bool]] = {}

    class Listening(FakeGenerator):
        def share_cores(self, num_generators: int, trainer_works: bool) -> None:
            told[self.name] = num_generators, trainer_works

    pool = Pool()
    pool.add(Listening("first", 8, random.Random(0)))
    pool.trainer_works(True)
    assert told == {"first": (1, True)}
    pool.add(Listening("second", 8, random.Random(0)))
    assert told == {"first": (2, True), "second": (2, True)}
    pool.progress("first", 40)
    pool.trainer_works(False)
    assert told == {"first": (2, False), "second": (2, False)}
    pool.serves("first", 0)
    assert [each.state for each in pool.workers()] == ["idle, version 0, 40 tokens so far", "has no weights yet"]


def test_the_pool_tells_how_many_generators_of_this_machine_are_at_work_whenever_that_changes() -> None:
    async def main() -> None:
        told: list[int] = []
        pool = Pool()
        pool.on_work = told.append
        here, other, elsewhere = (FakeGenerator(name, 4, random.Random(0)) for name in ("here", "other", "elsewhere"))
        elsewhere.local = False
        for generator in (here, other, elsewhere):
            generator.hang()  # it answers when the test does
            pool.add(generator)
            pool.serves(generator.name, 0)
        harvest = pool.open("train", 0)
        wanted = [request(slot, (1, 2), 4, sampling()) for slot in range(3)]
        for each in wanted:
            harvest.submit(each)
        assert told == [1, 2], "the third works on another machine"
        (slot,) = here.slots
        for sample in range(4):
            pool.completed("here", fake_completion(wanted[slot], sample, 0))
        assert told == [1, 2, 1]
        pool.lost("other", WorkerError("it died"))
        assert told[3] == 0
        pool.close(harvest)
        assert told[-1] == 0

    asyncio.run(main())


def test_a_joiner_whose_loading_is_cancelled_in_the_moment_it_answers_does_not_go_on() -> None:
    """The answer and the cancellation come in one turn of the loop: neither may swallow the other."""

    async def main() -> None:
        asked, answer = asyncio.Event(), asyncio.get_running_loop().create_future()

        class Answering(FakeGenerator):
            async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
                asked.set()
                await answer

        channel = MemoryChannel(Pool())
        channel.current = Snapshot(version=0, digest="", num_bytes=0, handle=os.open(os.devnull, os.O_RDONLY))
        bringing = asyncio.create_task(channel.bring(Answering("joiner", 8, random.Random(0))))
        await asked.wait()
        answer.set_result(None)
        await asyncio.sleep(0)
        bringing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bringing
        channel.close()

    asyncio.run(main())


def test_a_process_that_never_says_it_is_ready_is_given_up() -> None:
    killed = []

    class Mute(SocketChild):
        def __init__(self) -> None:
            super().__init__(lambda channel: channel.recv() and None)

        def kill(self) -> None:
            killed.append(self.name)

    async def main() -> None:
        child = Mute()
        try:
            await GeneratorProcess.ready(child, within_s=0.05)
        finally:
            child.connection.close()

    with pytest.raises(WorkerError, match="generator-0 was not ready within 0 s"):
        asyncio.run(main())
    assert killed == ["generator-0"]


def test_the_worker_refuses_work_for_a_version_it_does_not_serve() -> None:
    worker, peer = worker_and_peer()
    peer.send(Submit(request(0, (1, 2, 3), 2, sampling())))
    with pytest.raises(RuntimeError, match="asked for version 0 while serving -1"):
        run_until_closed(worker, peer)


def test_the_worker_refuses_to_activate_what_was_not_staged() -> None:
    worker, peer = worker_and_peer()
    peer.send(Activate(4))
    with pytest.raises(RuntimeError, match="activate version 4, which is not staged"):
        run_until_closed(worker, peer)


def test_every_byte_is_verified_once_per_host_also_when_one_who_verifies_is_lost() -> None:
    """Three of this host share it out; when one dies with its share, the other two do it all again."""
    asked: list[tuple[str, Share]] = []

    class Verifying(FakeGenerator):
        async def stage(self, snapshot: Snapshot, share: Share = WHOLE) -> None:
            asked.append((self.name, share))
            if self.name == "second":
                self.dead = True
            await super().stage(snapshot, share)

    async def main() -> None:
        pool = Pool()
        for name in ("first", "second", "third"):
            pool.add(Verifying(name, 8, random.Random(0)))
        pool.add(Verifying("far away", 8, random.Random(0), local=False))
        channel = MemoryChannel(pool)
        handle = os.open(os.devnull, os.O_RDONLY)
        await channel.publish(Snapshot(version=0, digest="", num_bytes=0, handle=handle))
        channel.close()

    asyncio.run(main())
    assert asked == [
        ("first", (0, 3)),
        ("second", (1, 3)),
        ("third", (2, 3)),
        ("far away", WHOLE),
        ("first", (0, 2)),
        ("third", (1, 2)),
    ]
