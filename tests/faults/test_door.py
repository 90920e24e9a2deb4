"""The run's door: who may ask, who is refused, and that nonsense costs nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat import control
from onbeat.control import (
    Answer,
    AskStatus,
    Door,
    Join,
    Request,
    Scale,
    ask_status,
    ask_to_scale,
    connect_there,
    listening,
    serving,
    split_address,
)
from onbeat.errors import ConfigError
from onbeat.secret import Challenge, Proof, Proven, is_proof, is_proven, new_nonce, prove, prove_back, read_token
from onbeat.status import Status
from onbeat.wire import Connection, FrameReader, frame

T = TypeVar("T")
TOKEN = b"a token of the run's owner"
STATUS = Status(
    run_dir="runs/x", pid=1, phase="training", period=0, num_periods=1, version=0, num_groups_done=0, num_groups=1,
    groups=[], workers=[], waiting_for="nothing", reward_means=[], accuracy=None, elapsed_s=0.0, left_s=None,
)  # fmt: skip


class Run:
    """A door that remembers who came through."""

    def __init__(self) -> None:
        self.scaled: list[int] = []
        self.joined: list[tuple[Join, bool]] = []
        self.num_asked = 0

    def door(self) -> Door:
        def status() -> Status:
            self.num_asked += 1
            return STATUS

        def scale(what: str, generators: int) -> Answer:
            assert what == "generators"
            self.scaled.append(generators)
            return Answer(f"{generators} generators", done=True)

        def join(connection: Connection[Request], join: Join, local: bool) -> None:
            self.joined.append((join, local))
            connection.close()

        return Door(status, scale, join)

    @property
    def nobody_came(self) -> bool:
        return (self.num_asked, self.scaled, self.joined) == (0, [], [])


@asynccontextmanager
async def open_run() -> AsyncIterator[tuple[Run, str]]:
    run = Run()
    async with listening("127.0.0.1:0", TOKEN, run.door()) as place:
        yield run, place


def in_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def send_raw(place: str, data: bytes) -> bytes:
    """Whatever comes back to these bytes, sent at once; ours is the first to close its end."""
    with socket.create_connection(split_address(place, "test"), 10) as sock:
        sock.settimeout(10)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := sock.recv(4096):
                received += chunk
        except OSError:  # it was refused before it had said all
            return b""
        return received


def test_the_owner_asks_and_scales_on_this_machine(tmp_path: Path) -> None:
    async def main() -> Run:
        run = Run()
        async with serving(tmp_path, run.door()):
            assert await in_thread(ask_status, tmp_path) == STATUS
            assert await in_thread(ask_to_scale, tmp_path, "generators", 3) == Answer("3 generators", done=True)
        assert await in_thread(ask_status, tmp_path) is None
        return run

    run = asyncio.run(main())
    assert run.scaled == [3]


def test_another_user_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Run:
        run = Run()
        async with serving(tmp_path, run.door()):
            monkeypatch.setattr(control, "is_ours", lambda sock: threading.current_thread() is not main_thread)
            assert await in_thread(ask_status, tmp_path) is None
        return run

    main_thread = threading.current_thread()
    assert asyncio.run(main()).nobody_came


def test_who_knows_the_token_joins_from_elsewhere_and_the_run_proves_that_it_knows_it_too() -> None:
    def join(place: str) -> bytes:
        with connect_there(place, TOKEN) as sock:
            sock.sendall(frame(Join("elsewhere", 7)))
            return sock.recv(1)

    async def main() -> Run:
        async with open_run() as (run, place):
            assert await in_thread(join, place) == b""
        return run

    assert asyncio.run(main()).joined == [(Join("elsewhere", 7), False)]


def test_a_wrong_token_is_refused_on_both_sides() -> None:
    async def main() -> Run:
        async with open_run() as (run, place):
            with pytest.raises(ConfigError, match="does not know this token, or is no run"):
                await in_thread(connect_there, place, b"some other token, as long")
        return run

    assert asyncio.run(main()).nobody_came


def test_a_run_that_only_pretends_to_know_the_token_is_not_served() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(frame(Challenge(new_nonce())))
            sock.recv(4096)
            sock.sendall(frame(Proven(b"x" * 32)))
            sock.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ConfigError, match="does not know this token"):
        connect_there(f"127.0.0.1:{server.getsockname()[1]}", TOKEN)
    thread.join()
    server.close()


def test_what_was_overheard_proves_nothing_later() -> None:
    challenge = Challenge(new_nonce())
    proof = prove(TOKEN, challenge)
    assert is_proof(TOKEN, challenge, proof)
    assert not is_proof(TOKEN, Challenge(new_nonce()), proof)
    proven = prove_back(TOKEN, challenge, proof)
    assert is_proven(TOKEN, challenge, proof, proven)
    assert not is_proven(TOKEN, challenge, prove(TOKEN, challenge), proven)
    assert not is_proof(TOKEN, challenge, Proof(proof.nonce, proven.mac))  # one's word is not the other's


def strangers_words(rng: random.Random) -> bytes:
    """Nonsense, requests without a proof, wrong proofs, frames cut off, frames that claim too much."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return b"".join(
            frame(rng.choice([AskStatus(), Scale("generators", rng.randrange(9)), Join("h", 1)])) for _ in range(3)
        )
    if kind == 2:
        return frame(Proof(rng.randbytes(32), rng.randbytes(32))) + frame(AskStatus())
    if kind == 3:
        return frame(prove(rng.randbytes(20), Challenge(rng.randbytes(32)))) + frame(Scale("trainer", 1))
    if kind == 4:
        return rng.choice([2**31, 5000, 2**32 - 1]).to_bytes(4, "little") + rng.randbytes(50)
    whole = frame(Proof(rng.randbytes(32), rng.randbytes(32)))
    return whole[: rng.randrange(len(whole))]


def refuse_strangers(count: int, seed: int) -> None:
    async def main() -> Run:
        rng = random.Random(seed)
        async with open_run() as (run, place):
            for _ in range(0, count, 50):
                words = [strangers_words(rng) for _ in range(50)]
                answers = await asyncio.gather(*(in_thread(send_raw, place, each) for each in words))
                for answer in answers:  # nobody hears more than the challenge
                    frames = FrameReader[Challenge](Challenge)
                    frames.feed(answer, [])
                    assert answer == b"" or (isinstance(frames.next(), Challenge) and frames.next() is None)
            assert await in_thread(send_raw, place, b"") != b""  # it still listens
        return run

    assert asyncio.run(main()).nobody_came


def test_strangers_are_refused_whatever_they_say() -> None:
    refuse_strangers(500, seed=0)


@pytest.mark.full
def test_ten_thousand_strangers_are_refused_whatever_they_say() -> None:
    refuse_strangers(10_000, seed=1)


def test_a_stranger_that_says_nothing_is_dropped_and_others_are_served_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.2)

    async def main() -> None:
        run = Run()
        async with serving(tmp_path, run.door()):
            silent = socket.socket(socket.AF_UNIX)
            silent.connect(control.address(tmp_path))
            assert await in_thread(ask_status, tmp_path) == STATUS
            silent.settimeout(10)
            assert await in_thread(silent.recv, 1) == b""
            silent.close()

    asyncio.run(main())


@pytest.mark.parametrize("place", ["7777", "host:", ":7777", "host:port", "host:70000"])
def test_a_place_that_is_none_is_refused_with_the_key(place: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.listen = .* is no HOST:PORT"):
        split_address(place, "cluster.listen")


def test_a_place_that_is_taken_is_a_sentence() -> None:
    async def main(place: str) -> None:
        async with listening(place, TOKEN, Run().door()):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot be listened at"):
        asyncio.run(main(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_a_token_that_others_may_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"--token-file = .* cannot be read: No such file"):
        read_token(str(file), "--token-file")
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 644\): chmod 600 it"):
        read_token(str(file), "--token-file")
    file.chmod(0o600)
    assert read_token(str(file), "--token-file") == TOKEN
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes; a token has at least 16"):
        read_token(str(file), "--token-file")


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_no_other_proof_than_the_right_one_is_taken(nonce: bytes, mac: bytes) -> None:
    assert not is_proof(TOKEN, Challenge(b"n" * 32), Proof(nonce, mac))


def test_nothing_is_left_of_a_run_that_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Run().door()):
            pass

    before = set(os.listdir(tmp_path))
    asyncio.run(main())
    assert set(os.listdir(tmp_path)) == before
    assert control.address(tmp_path)[1:] not in Path("/proc/net/unix").read_text()
