"""Typed messages over a Unix stream socket: the only way our processes talk.

A frame is a 4-byte little-endian length and that many bytes of msgpack; a message that carries a file descriptor
(weights in a memfd) attaches it to the frame's first byte. Frames over MAX_FRAME_BYTES are refused on both sides,
so that a peer gone mad costs a message and not the memory of the machine.

Over TCP (a worker on another host) no descriptor passes. What it stands for goes ahead of the message instead, as a
mark in place of a length, 8 bytes of size, and the bytes; the other side puts them into memory of its own, and has a
descriptor of that. Only from a peer that was told it may (`Connection.accept_copies`).

    controller: Connection (asyncio)              child: Channel (blocking)
      send(): appends to a buffer, never waits      send(): blocks until the kernel took it
      messages(): async iterator until EOF          recv(): the next message; poll(): is there one?

`Connection.send` does not wait because what we send is bounded elsewhere: a generator gets work only for rows it has
free, a rank at most two micro-batches, a reward worker one call. When the peer dies both sides see the end of the
stream: `messages()` ends and `recv()` returns None; sending to a dead peer is silently dropped by `Connection`
(the reader tells about the death, once) and raises in `Channel` (the child has nothing left to do).
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec

from onbeat.errors import WireError

MAX_FRAME_BYTES = 256 << 20
_HEADER_BYTES = 4
_CHUNK_BYTES = 1 << 18
_MAX_FDS = 8
_COPY_MARK = 0xFFFFFFFF
_COPY_SIZE_BYTES = 8

M = TypeVar("M")
"""The union of messages one side receives."""


def frame(message: msgspec.Struct) -> bytes:
    """The message as bytes for the wire."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body):,} bytes exceeds the {MAX_FRAME_BYTES:,} of a frame")
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


def receive_chunk(sock: socket.socket) -> tuple[bytes, list[int]]:
    """What the socket has, with the descriptors that came along. Empty bytes: the peer is gone."""
    fds = array.array("i")
    try:
        data, ancillary, _, _ = sock.recvmsg(
            _CHUNK_BYTES, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        raise
    except OSError:  # it died with messages of ours unread, or its machine is out of reach
        return b"", []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def attach(fds: list[int]) -> list[tuple[int, int, array.array[int]]]:
    """The ancillary data that carries descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


class _Copy:
    """Memory that comes over the wire."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("onbeat-copy", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self._left = num_bytes
        self._written = 0

    def take(self, buffer: bytearray) -> bool:
        """Move as much of the buffer as belongs to it; whether it is complete."""
        with memoryview(buffer) as view:
            taken = os.pwrite(self.fd, view[: self._left], self._written) if self._left and buffer else 0
        del buffer[:taken]
        self._left -= taken
        self._written += taken
        return self._left == 0


class FrameReader(Generic[M]):
    """Bytes in, messages out; keeps the descriptors in the order they came."""

    def __init__(self, expected: object, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(expected)
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._copy: _Copy | None = None
        self.accepts_copies = False

    @property
    def missing(self) -> int:
        """So many bytes more, at most, belong to the next message."""
        if len(self._buffer) < _HEADER_BYTES:
            return _HEADER_BYTES - len(self._buffer)
        return _HEADER_BYTES + int.from_bytes(self._buffer[:_HEADER_BYTES], "little") - len(self._buffer)

    def expect(self, expected: object, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder, self._max_bytes = msgspec.msgpack.Decoder(expected), max_bytes

    def feed(self, data: bytes, fds: list[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def next(self) -> M | None:
        """The next whole message, if there is one."""
        while self._takes_copy():
            pass
        if self._copy is not None or len(self._buffer) < _HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
        if size == _COPY_MARK and self.accepts_copies:
            return None  # its size is on the way
        if size > self._max_bytes:
            raise WireError(f"a frame claims {size:,} bytes; the limit is {self._max_bytes:,}")
        end = _HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER_BYTES:end])
        del self._buffer[:end]
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"a frame of {size:,} bytes is no message of ours: {error}") from error

    def _takes_copy(self) -> bool:
        """Whether something came to its end: the head of a copy, or all of it."""
        if self._copy is not None:
            if not self._copy.take(self._buffer):
                return False
            self._fds.append(self._copy.fd)
            self._copy = None
            return True
        head = _HEADER_BYTES + _COPY_SIZE_BYTES
        marked = int.from_bytes(self._buffer[:_HEADER_BYTES], "little") == _COPY_MARK
        if not (self.accepts_copies and marked and len(self._buffer) >= head):
            return False
        self._copy = _Copy(int.from_bytes(self._buffer[_HEADER_BYTES:head], "little"))
        del self._buffer[:head]
        return True

    def take_fd(self) -> int:
        """The descriptor that belongs to the message just read; the caller closes it."""
        if not self._fds:
            raise WireError("a message that carries a file descriptor came without one")
        return self._fds.popleft()

    def close(self) -> None:
        if self._copy is not None:
            os.close(self._copy.fd)
            self._copy = None
        while self._fds:
            os.close(self._fds.popleft())


class Connection(Generic[M]):
    """The controller's end. Lives on one asyncio loop."""

    def __init__(self, sock: socket.socket, expected: object, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_bytes`: of a frame, until `expect` says whom we talk to."""
        sock.setblocking(False)
        self._sock = sock
        self._reader: FrameReader[M] = FrameReader(expected, max_bytes)
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False

    def expect(self, expected: object) -> None:
        """From the next message on, the peer speaks of other things."""
        self._reader.expect(expected)

    def accept_copies(self) -> None:
        """The peer is a worker of ours on another host: what it has no descriptor for, it may send whole."""
        self._reader.accepts_copies = True

    async def drained(self) -> None:
        """Until the kernel has taken everything that was sent, or the peer is gone."""
        await self._empty.wait()

    def send(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        """Queue the message and return. Descriptors are duplicated: the caller keeps its own."""
        if self._closed:
            return
        self._outbox.append((memoryview(frame(message)), [os.dup(fd) for fd in fds or []]))
        if len(self._outbox) == 1:
            self._empty.clear()
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                sent = self._sock.sendmsg([data], attach(fds))
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self._drop_outbox()
                break
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._outbox.popleft()
            else:
                self._outbox[0] = (data[sent:], [])
        self._empty.set()
        self._loop.remove_writer(self._sock)

    def _drop_outbox(self) -> None:
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()
        self._empty.set()

    async def messages(self) -> AsyncIterator[M]:
        """Every message until the peer is gone. Raises WireError if it speaks nonsense."""
        while not self._closed:
            while (message := self._reader.next()) is not None:
                yield message
            try:
                data, fds = await self._receive()
            except OSError:
                return
            if not data:
                return
            self._reader.feed(data, fds)

    async def _receive(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                return receive_chunk(self._sock)
            except BlockingIOError:
                self._readable.clear()
                self._loop.add_reader(self._sock, self._readable.set)
                try:
                    await self._readable.wait()
                finally:
                    if not self._closed:
                        self._loop.remove_reader(self._sock)
                if self._closed:
                    return b"", []

    def take_fd(self) -> int:
        return self._reader.take_fd()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._readable.set()
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._drop_outbox()
            self._reader.close()
            self._sock.close()


class Channel(Generic[M]):
    """A child's end: plain and blocking."""

    def __init__(self, sock: socket.socket, expected: object) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader: FrameReader[M] = FrameReader(expected)
        self._ahead: M | None = None

    def send(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        data = memoryview(frame(message))
        if fds and self._sock.family != socket.AF_UNIX:
            for fd in fds:
                self._send_copy(fd)
            fds = None
        sent = self._sock.sendmsg([data], attach(fds or []))
        if sent < len(data):
            self._sock.sendall(data[sent:])

    def _send_copy(self, fd: int) -> None:
        size, offset = os.fstat(fd).st_size, 0
        header = _COPY_MARK.to_bytes(_HEADER_BYTES, "little") + size.to_bytes(_COPY_SIZE_BYTES, "little")
        self._sock.sendall(header)
        while offset < size:
            offset += os.sendfile(self._sock.fileno(), fd, offset, size - offset)

    def recv(self) -> M | None:
        """The next message; None when the controller is gone."""
        while (message := self._take()) is None:
            data, fds = receive_chunk(self._sock)
            if not data:
                return None
            self._reader.feed(data, fds)
        return message

    def poll(self) -> bool:
        """True if `recv` would return at once."""
        while self._ahead is None:
            self._ahead = self._reader.next()
            if self._ahead is not None:
                break
            readable, _, _ = select.select([self._sock], [], [], 0)
            if not readable:
                return False
            data, fds = receive_chunk(self._sock)
            if not data:
                return True
            self._reader.feed(data, fds)
        return True

    def _take(self) -> M | None:
        message, self._ahead = self._ahead, None
        return message if message is not None else self._reader.next()

    def take_fd(self) -> int:
        return self._reader.take_fd()
