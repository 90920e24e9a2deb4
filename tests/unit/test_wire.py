"""The wire: messages arrive whole and in order, nonsense is refused, death is noticed, no descriptor is left over."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterator
from contextlib import closing
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat import wire
from onbeat.admission import Room
from onbeat.errors import WireError
from onbeat.messages import Activated, Completed, Failed, FromGenerator, GeneratorReady, Staged
from onbeat.types import Completion
from onbeat.wire import Channel, Connection, FrameReader, frame

T = TypeVar("T")

BIG = 3 << 20
"""Bytes of a message that no socket buffer takes at once."""

WHOLE = st.integers(-(2**63), 2**63 - 1)
MESSAGES: st.SearchStrategy[Any] = st.one_of(
    st.builds(Failed, st.text()),
    st.builds(GeneratorReady, st.builds(Room, max_sequences=WHOLE, cache_tokens=WHOLE, bytes_per_token=WHOLE)),
    st.builds(Staged, WHOLE, st.text()),
    st.builds(Activated, WHOLE, st.none() | st.text()),
    st.builds(
        Completed,
        st.builds(
            Completion,
            stream=st.sampled_from(["train", "eval"]),
            period=WHOLE,
            slot=WHOLE,
            sample=WHOLE,
            version=WHOLE,
            token_ids=st.lists(WHOLE).map(tuple),
            sampler_logprobs=st.lists(st.floats(allow_nan=False)).map(tuple),
            finish_reason=st.sampled_from(["stop", "length"]),
        ),
    ),
)


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result. The limit is not measured: it turns a test that would hang into one that fails."""
    return asyncio.run(asyncio.wait_for(main, 30))


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_with(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content_of(fd: int) -> bytes:
    """Closes the descriptor."""
    content = os.pread(fd, 1000, 0)
    os.close(fd)
    return content


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def chunks(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """The data in pieces of these sizes, over and over."""
    turn = 0
    while data:
        size = sizes[turn % len(sizes)]
        yield data[:size]
        data, turn = data[size:], turn + 1


def drained(reader: FrameReader[Any]) -> Iterator[Any]:
    while (message := reader.next()) is not None:
        yield message


# Frames


@settings(deadline=None)
@given(messages=st.lists(MESSAGES), sizes=st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_whole_and_in_order_however_the_bytes_are_cut(messages: list[Any], sizes: list[int]) -> None:
    reader: FrameReader[Any] = FrameReader(FromGenerator)
    arrived: list[Any] = []
    for chunk in chunks(b"".join(map(frame, messages)), sizes):
        reader.feed(chunk, [])
        arrived += drained(reader)
    assert arrived == messages


@settings(deadline=None, max_examples=30)
@given(messages=st.lists(MESSAGES, max_size=5), sizes=st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_whole_and_in_order_through_a_socket(messages: list[Any], sizes: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Channel[Any] = Channel(ours, FromGenerator)
        arrived: list[Any] = []
        for chunk in chunks(b"".join(map(frame, messages)), sizes):
            theirs.sendall(chunk)
            while channel.poll():
                arrived.append(channel.recv())
        assert arrived == messages


@settings(deadline=None)
@given(data=st.binary(max_size=200), framed=st.booleans())
def test_garbage_is_a_wire_error_and_never_another(data: bytes, framed: bool) -> None:
    reader: FrameReader[Any] = FrameReader(FromGenerator)
    reader.feed(len(data).to_bytes(4, "little") + data if framed else data, [])
    try:
        assert list(drained(reader)) == []
    except WireError:
        return
    assert not framed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Staged", "version": "1", "digest": ""}),
        msgspec.msgpack.encode({"type": "Staged", "version": 1}),
        msgspec.msgpack.encode({"type": "Stage", "version": 1}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(Failed("x")) + b"\x00",
        b"\x91" * 100_000,
    ],
)
def test_a_frame_that_is_no_message_of_ours_is_refused(body: bytes) -> None:
    reader: FrameReader[Any] = FrameReader(FromGenerator)
    reader.feed(len(body).to_bytes(4, "little") + body, [])
    with pytest.raises(WireError, match=f"a frame of {len(body):,} bytes is no message of ours"):
        reader.next()


def test_a_frame_over_the_limit_is_refused_by_who_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", len(msgspec.msgpack.encode(Failed("x" * 100))))
    assert len(frame(Failed("x" * 100))) == 4 + wire.MAX_FRAME_BYTES
    with pytest.raises(WireError, match=r"a Failed of .* bytes exceeds"):
        frame(Failed("x" * 101))


def test_a_frame_over_the_limit_is_refused_by_who_receives_it_at_its_first_bytes() -> None:
    reader: FrameReader[Any] = FrameReader(FromGenerator)
    reader.feed(wire.MAX_FRAME_BYTES.to_bytes(4, "little"), [])
    assert reader.next() is None
    reader = FrameReader(FromGenerator)
    reader.feed((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), [])
    with pytest.raises(WireError, match="the limit is"):
        reader.next()


def test_a_descriptor_that_did_not_come_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="came without one"):
        FrameReader(FromGenerator).take_fd()


# Both ends


def echo(sock: socket.socket) -> int:
    """A child that sends back what it gets, descriptors included, until its peer is gone."""
    channel: Channel[Any] = Channel(sock, FromGenerator)
    num_messages = 0
    with sock:
        while (message := channel.recv()) is not None:
            num_messages += 1
            if isinstance(message, Staged):
                fd = channel.take_fd()
                channel.send(message, [fd])
                os.close(fd)
            else:
                channel.send(message)
    return num_messages


def test_large_messages_and_descriptors_travel_both_ways_in_order() -> None:
    sent: list[Any] = [
        Failed("small"),
        Failed("x" * BIG),
        Staged(1, "small, with a descriptor: one"),
        Staged(2, "y" * BIG + "two"),
        Staged(3, "z" * BIG + "tri"),
        *(Activated(number, None) for number in range(1000)),
    ]

    async def main() -> None:
        ours, theirs = socket.socketpair()
        child = asyncio.create_task(asyncio.to_thread(echo, theirs))
        with closing(Connection[Any](ours, FromGenerator)) as connection:
            for message in sent:
                if isinstance(message, Staged):
                    fd = memory_with(message.digest[-3:].encode())
                    connection.send(message, [fd])
                    os.close(fd)
                else:
                    connection.send(message)
            arrived = []
            async for message in connection.messages():
                arrived.append(message)
                if isinstance(message, Staged):
                    assert content_of(connection.take_fd()) == message.digest[-3:].encode()
                if len(arrived) == len(sent):
                    break
            assert arrived == sent
        assert await child == len(sent)

    before = num_open_fds()
    run(main())
    assert num_open_fds() == before


def test_sending_returns_at_once_though_nobody_reads() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with closing(Connection[Any](ours, FromGenerator)) as connection:
            for number in range(3):
                connection.send(Failed(str(number) * BIG))
            child = asyncio.create_task(asyncio.to_thread(echo, theirs))
            messages = connection.messages()
            assert [(await anext(messages)).reason[:1] for _ in range(3)] == ["0", "1", "2"]
        await child

    run(main())


def test_poll_tells_whether_recv_would_return_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    channel: Channel[Any] = Channel(ours, FromGenerator)
    assert not channel.poll()
    first, second = frame(Failed("first")), frame(Failed("second"))
    theirs.sendall(first[:7])
    assert not channel.poll()
    theirs.sendall(first[7:] + second)
    assert channel.poll()
    assert channel.poll()
    assert channel.recv() == Failed("first")
    assert channel.poll()
    assert channel.recv() == Failed("second")
    assert not channel.poll()
    theirs.close()
    assert channel.poll()
    assert channel.recv() is None


# Death


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "with our message unread"])
@pytest.mark.parametrize("tail", [b"", b"\x05", frame(Failed("half"))[:-1]], ids=["clean", "in a header", "in a body"])
def test_a_channel_reads_to_the_end_of_a_dead_peer(
    pair: tuple[socket.socket, socket.socket], unread: bool, tail: bytes
) -> None:
    ours, theirs = pair
    channel: Channel[Any] = Channel(ours, FromGenerator)
    if unread:
        channel.send(Failed("nobody reads this"))
    theirs.sendall(frame(Failed("last words")) + tail)
    theirs.close()
    assert channel.recv() == Failed("last words")
    assert channel.poll()
    assert channel.recv() is None
    assert channel.recv() is None


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "with our message unread"])
@pytest.mark.parametrize("tail", [b"", b"\x05", frame(Failed("half"))[:-1]], ids=["clean", "in a header", "in a body"])
def test_a_connection_reads_to_the_end_of_a_dead_peer(
    pair: tuple[socket.socket, socket.socket], unread: bool, tail: bytes
) -> None:
    async def main() -> list[Any]:
        ours, theirs = pair
        connection: Connection[Any] = Connection(ours, FromGenerator)
        if unread:
            connection.send(Failed("nobody reads this"))
        theirs.sendall(frame(Failed("last words")) + tail)
        theirs.close()
        arrived = [message async for message in connection.messages()]
        connection.close()
        return arrived

    assert run(main()) == [Failed("last words")]


def test_a_connection_notices_a_death_while_it_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> list[Any]:
        ours, theirs = pair
        connection: Connection[Any] = Connection(ours, FromGenerator)
        asyncio.get_running_loop().call_soon(theirs.close)
        return [message async for message in connection.messages()]

    assert run(main()) == []


def test_closing_a_connection_ends_whoever_iterates_over_it(pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> list[Any]:
        connection: Connection[Any] = Connection(pair[0], FromGenerator)
        asyncio.get_running_loop().call_soon(connection.close)
        return [message async for message in connection.messages()]

    assert run(main()) == []


def test_garbage_from_a_live_peer_is_raised_to_whoever_iterates(pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> None:
        connection: Connection[Any] = Connection(pair[0], FromGenerator)
        pair[1].sendall(frame(Failed("fine")) + b"\xff" * 8)
        messages = connection.messages()
        assert await anext(messages) == Failed("fine")
        with pytest.raises(WireError):
            await anext(messages)
        connection.close()

    run(main())


def test_sending_to_a_dead_peer_is_dropped_by_a_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> None:
        ours, theirs = pair
        connection: Connection[Any] = Connection(ours, FromGenerator)
        theirs.close()
        before = num_open_fds()
        for message in (Failed("x"), Failed("x" * BIG), Failed("x")):
            connection.send(message, [fd := memory_with(b"")])
            os.close(fd)
        assert [message async for message in connection.messages()] == []
        assert num_open_fds() == before
        connection.close()
        connection.send(Failed("after closing"))
        connection.close()

    run(main())


def test_sending_to_a_dead_peer_raises_in_a_channel(pair: tuple[socket.socket, socket.socket]) -> None:
    channel: Channel[Any] = Channel(pair[0], FromGenerator)
    pair[1].close()
    with pytest.raises(OSError, match="Broken pipe"):
        channel.send(Failed("x"))


# Descriptors


def test_descriptors_keep_the_order_of_their_messages(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[Any] = Channel(pair[0], FromGenerator)
    receiver: Channel[Any] = Channel(pair[1], FromGenerator)
    for number in range(20):
        fd = memory_with(b"%d" % number)
        sender.send(Staged(number, ""), [fd])
        sender.send(Activated(number, None))
        os.close(fd)
    for number in range(20):
        assert receiver.recv() == Staged(number, "")
        assert content_of(receiver.take_fd()) == b"%d" % number
        assert receiver.recv() == Activated(number, None)


def test_received_descriptors_are_not_inherited_by_programs_we_start(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    fd = memory_with(b"")
    os.set_inheritable(fd, True)
    Channel[Any](pair[0], FromGenerator).send(Staged(1, ""), [fd])
    os.close(fd)
    receiver: Channel[Any] = Channel(pair[1], FromGenerator)
    receiver.recv()
    fd = receiver.take_fd()
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_closing_a_connection_closes_the_descriptors_nobody_took_and_those_not_sent_yet() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        connection: Connection[Any] = Connection(ours, FromGenerator)
        fd = memory_with(b"")
        Channel[Any](theirs, FromGenerator).send(Staged(1, "nobody takes it"), [fd])
        assert await anext(connection.messages()) == Staged(1, "nobody takes it")
        connection.send(Failed("x" * BIG), [fd])
        connection.send(Failed("this one waits behind it"), [fd])
        os.close(fd)
        connection.close()
        theirs.close()

    before = num_open_fds()
    run(main())
    assert num_open_fds() == before
