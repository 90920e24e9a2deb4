"""The run's door: its owner may ask, from another process, what the run is doing, scale it, and bring workers.

    onbeat status RUN ── AskStatus ──▶ socket named after RUN ── the controller's loop answers at once
    onbeat scale  RUN ── Scale ──────▶                        ── a sentence
    onbeat worker     ── Join ───────▶ that, or HOST:PORT     ── Welcome; then it speaks as a generator (messages.py)

One request per connection. The controller never waits for whoever asks: what it says is buffered and written by the
loop; a peer that is not done with its first words in time is dropped, and so many strangers at most are listened to at
once.

Who may ask. On this machine: the same user. The socket has a name but no file (Linux's abstract namespace), so that
nothing is left behind, whatever kills the run; it has no mode either, so both ends look at who is on the other one
(SO_PEERCRED). From elsewhere, only if the recipe opens a port: whoever proves to know the run's token (secret.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct

from onbeat.errors import ConfigError, WireError, WorkerError
from onbeat.messages import Welcome
from onbeat.secret import Challenge, Proof, Proven, is_proof, is_proven, new_nonce, prove, prove_back
from onbeat.status import Status
from onbeat.wire import Connection, FrameReader, frame

PATIENCE_S = 10.0
_MAX_STRANGERS = 64
_MAX_REQUEST_BYTES = 4096


class AskStatus(Struct, frozen=True, tag=True):
    pass


class Scale(Struct, frozen=True, tag=True):
    what: Literal["generators", "trainer"]
    count: int


class Join(Struct, frozen=True, tag=True):
    """Of a generator."""

    host: str
    pid: int


class Answer(Struct, frozen=True, tag=True):
    """To a Scale."""

    sentence: str
    done: bool


Request = AskStatus | Scale | Join
A = TypeVar("A")
"""What is answered."""


@dataclass(frozen=True, slots=True)
class Door:
    """What the run does for whoever may ask."""

    status: Callable[[], Status]
    scale: Callable[[str, int], Answer]
    """What, and to how many."""
    join: Callable[[Connection[Request], Join, bool], None]
    """Takes the connection over; the last argument tells whether it is from this machine."""


def address(run_dir: Path) -> str:
    """By the directory itself, however it is spelt."""
    found = run_dir.stat()
    name = f"{os.path.realpath(run_dir)} {found.st_dev} {found.st_ino}"
    return f"\0onbeat-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def is_ours(sock: socket.socket) -> bool:
    """Whether the process on the other end is of the same user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def keep_alive(sock: socket.socket) -> None:
    """Notice within a minute or two that the other machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@asynccontextmanager
async def serving(run_dir: Path, door: Door) -> AsyncIterator[None]:
    """Answer this machine while the block runs."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(address(run_dir))
        sock.listen()
        async with _answering(sock, door, None):
            yield


@asynccontextmanager
async def listening(place: str, token: bytes, door: Door) -> AsyncIterator[str]:
    """Answer other machines, too, while the block runs; gives HOST:PORT as it came out."""
    host, port = split_address(place, "cluster.listen")
    try:
        sock = socket.create_server((host, port), reuse_port=False)
    except OSError as error:
        raise ConfigError(f"cluster.listen = {place!r} cannot be listened at: {error.strerror}") from None
    with sock:
        async with _answering(sock, door, token):
            yield "{}:{}".format(*sock.getsockname()[:2])


def split_address(place: str, key: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{key} = {place!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


@asynccontextmanager
async def _answering(server: socket.socket, door: Door, token: bytes | None) -> AsyncIterator[None]:
    server.setblocking(False)
    strangers: set[asyncio.Task[None]] = set()

    async def accept() -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError:  # it hung up already, or there are no descriptors left
                await asyncio.sleep(0.1)
                continue
            if len(strangers) >= _MAX_STRANGERS:
                sock.close()
                continue
            task = asyncio.create_task(_answer(sock, door, token))
            strangers.add(task)
            task.add_done_callback(strangers.discard)

    accepting = asyncio.create_task(accept())
    try:
        yield
    finally:
        for task in (accepting, *strangers):
            task.cancel()
        await asyncio.gather(accepting, *strangers, return_exceptions=True)


async def _answer(sock: socket.socket, door: Door, token: bytes | None) -> None:
    connection: Connection[Proof | Request] = Connection(sock, Proof | Request, _MAX_REQUEST_BYTES)
    handed_over = False
    try:
        async with asyncio.timeout(PATIENCE_S):
            words = connection.messages()
            if token is None:
                admitted = is_ours(sock)
            else:
                keep_alive(sock)
                admitted = await _knows(token, connection, words)
            if admitted:
                handed_over = await _serve(connection, words, door, token is None)
    except (OSError, TimeoutError, WireError, StopAsyncIteration):
        pass  # it is not one of ours, or has gone
    finally:
        if not handed_over:
            connection.close()


async def _knows(token: bytes, connection: Connection[Proof | Request], words: AsyncIterator[Proof | Request]) -> bool:
    challenge = Challenge(new_nonce())
    connection.send(challenge)
    proof = await anext(words)
    if not isinstance(proof, Proof) or not is_proof(token, challenge, proof):
        return False
    connection.send(prove_back(token, challenge, proof))
    return True


async def _serve(
    connection: Connection[Proof | Request], words: AsyncIterator[Proof | Request], door: Door, local: bool
) -> bool:
    """Whether somebody else has the connection now."""
    match await anext(words):
        case AskStatus():
            connection.send(door.status())
        case Scale(what=what, count=count):
            connection.send(door.scale(what, count))
        case Join() as join:
            door.join(connection, join, local)  # type: ignore[arg-type]
            return True
    await connection.drained()
    return False


# The other end: whoever asks. Plain and blocking.


def ask_status(run_dir: Path) -> Status | None:
    """What the run in that directory is doing; None if none is going there."""
    return _ask(run_dir, AskStatus(), Status)


def ask_to_scale(run_dir: Path, what: Literal["generators", "trainer"], count: int) -> Answer | None:
    return _ask(run_dir, Scale(what, count), Answer)


def _ask(run_dir: Path, request: Request, answer: type[A]) -> A | None:
    try:
        return _answer_of(run_dir, request, answer)
    except TimeoutError:
        raise WorkerError(
            f"the run in {run_dir} is going, but has not answered for {PATIENCE_S:.0f} s: it is busy; try again"
        ) from None


def _answer_of(run_dir: Path, request: Request, answer: type[A]) -> A | None:
    with suppress(FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        sock = connect_here(run_dir)
        if sock is None:
            return None
        with sock:
            sock.sendall(frame(request))
            return _receive(sock, FrameReader(answer))
    return None


def connect_here(run_dir: Path) -> socket.socket | None:
    """To the run in that directory; None if none is going there."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    try:
        sock.connect(address(run_dir))
        if is_ours(sock):
            return sock
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    sock.close()
    return None


def connect_there(place: str, token: bytes) -> socket.socket:
    """To the run that listens at HOST:PORT, once each has proved to the other that it knows the token."""
    try:
        sock = socket.create_connection(split_address(place, "--join"), PATIENCE_S)
    except OSError as error:
        raise ConfigError(f"--join {place}: no run answers there: {error}") from None
    keep_alive(sock)
    try:
        challenge = _receive(sock, FrameReader[Challenge](Challenge, _MAX_REQUEST_BYTES))
        if challenge is not None:
            proof = prove(token, challenge)
            sock.sendall(frame(proof))
            proven = _receive(sock, FrameReader[Proven](Proven, _MAX_REQUEST_BYTES))
            if proven is not None and is_proven(token, challenge, proof, proven):
                return sock
    except (OSError, WireError):
        pass
    sock.close()
    raise ConfigError(f"--join {place}: the run there does not know this token, or is no run of onbeat's")


def ask_to_join(sock: socket.socket) -> Welcome | None:
    """None if the run does not want us."""
    sock.sendall(frame(Join(socket.gethostname(), os.getpid())))
    return _receive(sock, FrameReader[Welcome](Welcome))


def _receive(sock: socket.socket, frames: FrameReader[A]) -> A | None:
    while (answer := frames.next()) is None:
        data = sock.recv(1 << 16)
        if not data:
            return None
        frames.feed(data, [])
    return answer
