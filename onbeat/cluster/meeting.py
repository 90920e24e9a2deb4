"""How a worker that was started elsewhere finds its controller, and each makes sure of the other.

    controller: Meeting                                actor: meet()
      abstract Unix socket (same user, SO_PEERCRED) ◀── first try: there only on the same host
      TCP port at this node's address in the cluster ◀── else
      Challenge ─▶ ◀─ Proof, Proven ─▶                   each knows the run's token (secret.py)
      ◀─ Arrived(ticket, pid, host, log …)               who it is
      Work(entry, settings, files) ─▶                    what to do; from now on the worker's own conversation

On the same host (the same machine and network namespace) descriptors pass, so memory is shared; elsewhere it is not.
The token is made for the run, handed over as an argument of the actor, and never in a log or a command line.

Who waits for whom: a spawn waits for its ticket to arrive (`expect`), as long as it likes. A stranger is heard for so
many seconds and bytes, so many of them at once. A worker that was expected and comes twice is refused.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from msgspec import Struct

from onbeat.control import PATIENCE_S, is_ours, keep_alive, split_address
from onbeat.errors import WireError, WorkerError
from onbeat.secret import Challenge, Proof, Proven, is_proof, is_proven, new_nonce, prove, prove_back
from onbeat.wire import Connection, FrameReader, frame

_MAX_STRANGERS = 64
"""Heard at a time, beside those that are expected."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before who was not heard comes again."""
_MAX_WORD_BYTES = 4096
A = TypeVar("A")


class Invitation(Struct, frozen=True, kw_only=True):
    """What an actor is started with."""

    ticket: str
    """By which the controller knows whom it expects."""
    name: str
    here: str
    """The Unix socket's name, without the leading zero byte."""
    there: str
    """HOST:PORT; empty if nobody may come from elsewhere."""
    token: bytes
    log: str
    """Where to write, on the controller's host."""


class Arrived(Struct, frozen=True, kw_only=True, tag=True):
    ticket: str
    pid: int
    host: str
    """Its node's address in the cluster."""
    node: str
    """Its node's name in the cluster."""
    log: str
    """Where it writes, on its host."""
    code: str
    """Digest of the onbeat it runs."""


class Work(Struct, frozen=True, kw_only=True, tag=True):
    entry: str
    settings: bytes
    files: dict[str, bytes]
    """The model's small files, for who does not need the large ones; else empty."""
    model: str
    """Digest of the model's directory, for who must see it; else empty."""
    run: str
    """The run's directory, for who writes there; else empty."""
    folder: str
    """The controller's working directory: relative paths start there, if the host has it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    connection: Connection[Work]
    who: Arrived
    shares_memory: bool


class Meeting:
    def __init__(self) -> None:
        self.token = secrets.token_bytes(32)
        self._expected: dict[str, asyncio.Future[Arrival]] = {}
        self._here = f"onbeat-{os.getuid()}-{secrets.token_hex(16)}"
        self._there = ""
        self._servers: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_heard = 0
        """Connections that have not said who they are yet."""

    def open(self, host: str | None) -> None:
        """Listen on this host, and at that address of it if there are others."""
        here = socket.socket(socket.AF_UNIX)
        here.bind(f"\0{self._here}")
        here.listen()
        self._serve(here)
        if host is not None:
            there = socket.create_server((host, 0))
            self._there = "{}:{}".format(*there.getsockname()[:2])
            self._serve(there)

    def invite(self, name: str, log: str) -> Invitation:
        ticket = secrets.token_hex(16)
        self._expected[ticket] = asyncio.get_running_loop().create_future()
        return Invitation(ticket=ticket, name=name, here=self._here, there=self._there, token=self.token, log=log)

    async def expect(self, invitation: Invitation) -> Arrival:
        """Until it is there. Whoever stops waiting expects it no more."""
        try:
            return await self._expected[invitation.ticket]
        finally:
            del self._expected[invitation.ticket]

    def _serve(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._servers.append(server)
        self._spawn(self._accept(server))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError:  # it hung up already, or there are no descriptors left
                await asyncio.sleep(0.1)
                continue
            if self._num_heard >= _MAX_STRANGERS + len(self._expected):
                sock.close()
            else:
                self._spawn(self._receive(sock))

    async def _receive(self, sock: socket.socket) -> None:
        connection: Connection[Proof | Arrived] = Connection(sock, Proof | Arrived, _MAX_WORD_BYTES)
        shares_memory = sock.family == socket.AF_UNIX
        taken = False
        self._num_heard += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                words = connection.messages()
                if not shares_memory:
                    keep_alive(sock)
                elif not is_ours(sock):
                    return
                who = await self._who(connection, words)
            waiting = self._expected.get(who.ticket) if who is not None else None
            if who is not None and waiting is not None and not waiting.done():
                waiting.set_result(Arrival(connection, who, shares_memory))  # type: ignore[arg-type]
                taken = True
        except (OSError, TimeoutError, WireError, StopAsyncIteration):
            pass  # it is not one of ours, or has gone
        finally:
            self._num_heard -= 1
            if not taken:
                connection.close()

    async def _who(
        self, connection: Connection[Proof | Arrived], words: AsyncIterator[Proof | Arrived]
    ) -> Arrived | None:
        challenge = Challenge(new_nonce())
        connection.send(challenge)
        proof = await anext(words)
        if not isinstance(proof, Proof) or not is_proof(self.token, challenge, proof):
            return None
        connection.send(prove_back(self.token, challenge, proof))
        who = await anext(words)
        return who if isinstance(who, Arrived) else None

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            server.close()
        self._servers.clear()


# The other end: the actor. Plain and blocking.


def meet(invitation: Invitation) -> socket.socket:
    """A connection to the controller, once each has proved to the other that it knows the token."""
    here = _here(invitation)
    if here is not None and _proved(here, invitation.token) is _Proved.YES:
        return here
    if not invitation.there:
        raise WorkerError(f"{invitation.name}: the controller is not on this host, and expects nobody from another")
    for pause_s in _PAUSES_S:
        there = _there(invitation)
        proved = _proved(there, invitation.token)
        if proved is _Proved.YES:
            return there
        if proved is _Proved.NO:
            break
        time.sleep(pause_s)
    raise WorkerError(f"{invitation.name}: whoever listens at {invitation.there} is not the run's controller")


def receive_work(sock: socket.socket) -> Work | None:
    """What the controller wants of us; None if it hung up."""
    sock.settimeout(None)
    return _receive(sock, FrameReader[Work](Work))


def _here(invitation: Invitation) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    try:
        sock.connect(f"\0{invitation.here}")
        if is_ours(sock):
            return sock
    except OSError:  # nobody of that name: another host
        pass
    sock.close()
    return None


def _there(invitation: Invitation) -> socket.socket:
    try:
        sock = socket.create_connection(split_address(invitation.there, "the controller's address"), PATIENCE_S)
    except OSError as error:
        raise WorkerError(
            f"{invitation.name}: {socket.gethostname()} does not reach the controller at {invitation.there}: {error}; "
            "hosts of the cluster must reach each other at every port (docs/cluster.md)"
        ) from None
    keep_alive(sock)
    return sock


class _Proved(Enum):
    YES = "it knows the token"
    NO = "it does not"
    NOT_HEARD = "it hung up before a word: it hears only so many at a time"


def _proved(sock: socket.socket, token: bytes) -> _Proved:
    """Whether it is the controller. If not, the connection is closed."""
    found = _Proved.NOT_HEARD
    with suppress(OSError, WireError):
        challenge = _receive(sock, FrameReader[Challenge](Challenge, _MAX_WORD_BYTES))
        if challenge is not None:
            found = _Proved.NO
            proof = prove(token, challenge)
            sock.sendall(frame(proof))
            proven = _receive(sock, FrameReader[Proven](Proven, _MAX_WORD_BYTES))
            if proven is not None and is_proven(token, challenge, proof, proven):
                return _Proved.YES
    sock.close()
    return found


def _receive(sock: socket.socket, frames: FrameReader[A]) -> A | None:
    """One message, and not a byte of the next: those are the worker's."""
    while (message := frames.next()) is None:
        data = sock.recv(frames.missing)
        if not data:
            return None
        frames.feed(data, [])
    return message
