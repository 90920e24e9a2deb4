"""Where actors and controller meet: only who knows the token and has a ticket gets in, once; memory crosses whole."""

from __future__ import annotations

import asyncio
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from onbeat.cluster import meeting as meetings
from onbeat.cluster.guardian import MARK, began, descendants, end
from onbeat.cluster.meeting import Arrival, Arrived, Invitation, Meeting, Work, meet, receive_work
from onbeat.cluster.ray_cluster import Node, fits, what_there_is, written
from onbeat.errors import WireError, WorkerError
from onbeat.messages import FromTrainer, SnapshotTaken
from onbeat.wire import Channel, Connection, frame

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 60))


def come(invitation: Invitation) -> Work | None:
    """As an actor does."""
    with meet(invitation) as sock:
        who = Arrived(ticket=invitation.ticket, pid=1, host="host", node="node", log="log", code="code")
        sock.sendall(frame(who))
        return receive_work(sock)


async def received(meeting: Meeting, invitation: Invitation, work: Work) -> tuple[Arrival, Work | None]:
    coming = asyncio.create_task(asyncio.to_thread(come, invitation))
    arrival = await meeting.expect(invitation)
    arrival.connection.send(work)
    return arrival, await coming


WORK = Work(entry="module:function", settings=b"settings", files={"config.json": b"{}"}, model="", run="", folder="/")


@pytest.mark.parametrize("here", [True, False], ids=["same host", "other host"])
def test_who_has_a_ticket_and_the_token_gets_work(here: bool) -> None:
    async def main() -> None:
        meeting = Meeting()
        meeting.open("127.0.0.1")
        invitation = meeting.invite("generator-0", "log")
        if not here:
            invitation = msgspec.structs.replace(invitation, here="nobody")
        arrival, work = await received(meeting, invitation, WORK)
        assert work == WORK
        assert arrival.shares_memory == here
        assert arrival.who.ticket == invitation.ticket
        arrival.connection.close()
        await meeting.close()

    run(main())


def test_a_wrong_token_is_refused_on_both_sides() -> None:
    async def main() -> None:
        meeting = Meeting()
        meeting.open("127.0.0.1")
        invitation = meeting.invite("generator-0", "log")
        expected = asyncio.create_task(meeting.expect(invitation))
        stranger = msgspec.structs.replace(invitation, token=b"another token of some length")
        with pytest.raises(WorkerError, match="is not the run's controller"):
            await asyncio.to_thread(come, stranger)
        assert not expected.done()
        expected.cancel()
        await meeting.close()

    run(main())


def test_a_ticket_that_nobody_waits_for_and_one_that_was_used_are_refused() -> None:
    async def main() -> None:
        meeting = Meeting()
        meeting.open("127.0.0.1")
        invitation = meeting.invite("generator-0", "log")
        guessed = msgspec.structs.replace(invitation, ticket="0" * 32)
        assert await asyncio.to_thread(come, guessed) is None
        arrival, _ = await received(meeting, invitation, WORK)
        assert await asyncio.to_thread(come, invitation) is None
        arrival.connection.close()
        await meeting.close()

    run(main())


def test_noise_at_the_meeting_is_refused_and_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "PATIENCE_S", 0.2)
    rng = random.Random(0)

    def make_noise(place: str) -> bytes:
        host, _, port = place.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.settimeout(30)
            sock.sendall(rng.randbytes(rng.randrange(1, 5000)))
            heard = b""
            try:
                while data := sock.recv(4096):
                    heard += data
            except ConnectionResetError:
                pass
            return heard

    async def main() -> None:
        meeting = Meeting()
        meeting.open("127.0.0.1")
        invitation = meeting.invite("generator-0", "log")
        for _ in range(50):
            heard = await asyncio.to_thread(make_noise, invitation.there)
            assert meeting.token not in heard
        arrival, _ = await received(meeting, invitation, WORK)
        arrival.connection.close()
        await meeting.close()

    run(main())


def test_any_number_that_are_expected_are_heard_at_once_beside_strangers_who_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meetings, "_MAX_STRANGERS", 3)
    monkeypatch.setattr(meetings, "_PAUSES_S", (0.0,))

    async def main() -> None:
        meeting = Meeting()
        meeting.open("127.0.0.1")
        invitations = [meeting.invite(f"generator-{number}", "log") for number in range(12)]
        host, _, port = invitations[0].there.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
        for stranger in strangers:
            assert await asyncio.to_thread(stranger.recv, 4) != b""  # it is being heard
        away = [msgspec.structs.replace(invitation, here="nobody") for invitation in invitations]
        everyone = [await asyncio.to_thread(meet, invitation) for invitation in away]  # none has said who it is yet
        assert len(everyone) == 12
        for sock in [*everyone, *strangers]:
            sock.close()
        await meeting.close()

    run(main())


def test_who_was_not_heard_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "_MAX_STRANGERS", 0)
    pauses: list[float] = []

    async def main() -> None:
        meeting = Meeting()
        meeting.open("127.0.0.1")
        invitation = msgspec.structs.replace(meeting.invite("generator-0", "log"), here="nobody")
        expected = meeting._expected.copy()
        meeting._expected.clear()  # nobody is heard

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            meeting._expected.update(expected)

        monkeypatch.setattr(meetings.time, "sleep", pause)
        (await asyncio.to_thread(meet, invitation)).close()
        await meeting.close()

    run(main())
    assert pauses == [meetings._PAUSES_S[0]]


def test_without_an_address_nothing_listens_beyond_this_host() -> None:
    async def main() -> None:
        meeting = Meeting()
        meeting.open(None)
        invitation = meeting.invite("generator-0", "log")
        assert invitation.there == ""
        with pytest.raises(WorkerError, match="not on this host, and expects nobody"):
            await asyncio.to_thread(come, msgspec.structs.replace(invitation, here="nobody"))
        await meeting.close()

    run(main())


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_over_tcp_a_descriptor_arrives_as_a_copy_of_its_memory(size: int) -> None:
    content = random.Random(size).randbytes(size)
    fd = os.memfd_create("test")
    os.write(fd, content)

    async def main() -> list[tuple[Any, bytes]]:
        here, there = tcp_pair()
        channel: Channel[Any] = Channel(here, Any)
        connection: Connection[FromTrainer] = Connection(there, FromTrainer)
        connection.accept_copies()

        def send() -> None:
            for version in range(3):
                channel.send(SnapshotTaken(version, "digest", size), [fd])
            here.close()

        sending = asyncio.create_task(asyncio.to_thread(send))
        found = []
        async for message in connection.messages():
            copy = connection.take_fd()
            found.append((message, os.pread(copy, size + 1, 0)))
            os.close(copy)
        await sending
        connection.close()
        return found

    assert run(main()) == [(SnapshotTaken(version, "digest", size), content) for version in range(3)]
    os.close(fd)


def test_memory_from_a_peer_that_may_not_send_it_is_refused() -> None:
    fd = os.memfd_create("test")
    os.write(fd, b"content")

    async def main() -> None:
        here, there = tcp_pair()
        Channel(here, Any).send(SnapshotTaken(0, "digest", 7), [fd])
        connection: Connection[FromTrainer] = Connection(there, FromTrainer)
        with pytest.raises(WireError, match="claims"):
            await anext(connection.messages())
        connection.close()
        here.close()

    run(main())
    os.close(fd)


GRANDCHILD = (
    "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(os.getpid(), flush=True); time.sleep(600)"
)
"""In a session of its own, and ignores what it can."""
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {GRANDCHILD!r}]).wait()"


def start_family(worker: str, environment: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """The worker, and a handle of its grandchild."""
    command = [sys.executable, "-c", f"{worker}; {CHILD}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        return process, os.pidfd_open(int(process.stdout.readline()))


def is_gone(handle: int) -> bool:
    gone = bool(select.select([handle], [], [], 60)[0])
    os.close(handle)
    return gone


def test_what_a_killed_worker_started_does_not_outlive_it() -> None:
    mark = f"a mark of {os.getpid()}"
    worker = f"from onbeat.cluster.guardian import guard; guard({mark!r})"
    process, grandchild = start_family(worker, {**os.environ, MARK: f"{mark}.and-more"})
    process.kill()
    process.wait()
    assert is_gone(grandchild)


def test_who_has_lost_its_mark_is_known_by_its_descent() -> None:
    process, grandchild = start_family("pass", dict(os.environ))
    known = descendants({process.pid})
    assert len(known) == 1
    process.kill()
    process.wait()
    end({(pid, began(pid)) for pid in known}, "nobody has this mark")
    assert is_gone(grandchild)


def test_what_is_asked_and_what_there_is_are_told_as_in_a_recipe() -> None:
    nodes = [
        Node("a", "10.0.0.1", {"CPU": 8.0, "memory": 1e9, "node:10.0.0.1": 1.0}),
        Node("b", "10.0.0.2", {"GPU": 4.0}),
    ]
    assert what_there_is(nodes) == "10.0.0.1 has { CPU = 8 }; 10.0.0.2 has { GPU = 4 }"
    assert written({"NPU": 0.5, "CPU": 1}) == "{ CPU = 1, NPU = 0.5 }"
    assert fits({"CPU": 8}, nodes[0].resources)
    assert not fits({"CPU": 1, "GPU": 1}, nodes[0].resources)
