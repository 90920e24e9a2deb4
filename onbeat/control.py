"""The run's control socket: its owner may ask, from another process, what the run is doing.

    onbeat status RUN ── Ask ──▶ socket named after RUN ── the controller's loop answers at once
                      ◀─ Status ─┘

One question per connection. The controller never waits for whoever asks: an answer is made in one go and written by
asyncio; a peer that sends nothing is dropped after a while. The socket has a name but no file (Linux's abstract
namespace), so that nothing is left behind, whatever kills the run. Such a socket has no mode either: both ends look at
who is on the other one (SO_PEERCRED), and talk to the same user alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import Struct

from onbeat.errors import WireError
from onbeat.status import Status
from onbeat.wire import FrameReader, frame

_PATIENCE_S = 10.0


class AskStatus(Struct, frozen=True, tag=True):
    pass


Request = AskStatus


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


@asynccontextmanager
async def serving(run_dir: Path, status: Callable[[], Status]) -> AsyncIterator[None]:
    """Answer questions while the block runs."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, WireError, asyncio.CancelledError):
            if is_ours(writer.get_extra_info("socket")) and await _asked(reader):
                writer.write(frame(status()))
                await asyncio.wait_for(writer.drain(), _PATIENCE_S)
        writer.close()

    server = await asyncio.start_unix_server(answer, address(run_dir))
    try:
        yield
    finally:
        server.close()


async def _asked(reader: asyncio.StreamReader) -> bool:
    frames: FrameReader[Request] = FrameReader(Request)
    while frames.next() is None:
        data = await asyncio.wait_for(reader.read(4096), _PATIENCE_S)
        if not data:
            return False
        frames.feed(data, [])
    return True


def ask_status(run_dir: Path) -> Status | None:
    """What the run in that directory is doing; None if none is going there."""
    frames: FrameReader[Status] = FrameReader(Status)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PATIENCE_S)
        try:
            sock.connect(address(run_dir))
            if not is_ours(sock):
                return None
            sock.sendall(frame(AskStatus()))
            while (status := frames.next()) is None:
                data = sock.recv(1 << 16)
                if not data:
                    return None
                frames.feed(data, [])
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            return None
    return status
