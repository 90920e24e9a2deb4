"""Workers as processes of this machine, forked from a preloaded server (see forkserver.py).

    LocalLauncher ─┬─ fork server "torch"  ── trainer ranks, generators
                   └─ fork server "plain"  ── reward workers (no torch in them)

Each server is started on first use; several spawns may wait for it. What bounds the waiting: a server that dies
while starting ends every waiting spawn with the tail of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from onbeat.cluster.forkserver import Exited, Kill, Spawn, Spawned, SpawnFailed
from onbeat.environment import scrubbed, torch_environment
from onbeat.errors import WireError, WorkerError
from onbeat.wire import Connection

M = TypeVar("M")

_TORCH_PRELOAD = ("onbeat.training.worker", "onbeat.rollout.worker", "onbeat.model_source")
_LOG_TAIL_LINES = 20


class LocalChild(Generic[M]):
    def __init__(self, name: str, pid: int, connection: Connection[M], log: Path, server: _Server) -> None:
        self.name = name
        self.pid = pid
        self.connection = connection
        self._log = log
        self._server = server
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def shares_memory(self) -> bool:
        return True

    @property
    def courier(self) -> None:
        return None

    def kill(self) -> None:
        self._server.send(Kill(self.pid))

    async def exited(self) -> int:
        return await asyncio.shield(self._status)

    def ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    def log_tail(self) -> str:
        return log_tail(self._log)


def log_tail(log: Path) -> str:
    """The last lines of a log file; empty if there is none."""
    with contextlib.suppress(OSError), log.open(errors="replace") as lines:
        return "".join(deque(lines, maxlen=_LOG_TAIL_LINES)).rstrip()
    return ""


class _Starting:
    """A worker that has been asked for and has not been forked yet."""

    def __init__(self, sock: socket.socket, log: Path, receives: object) -> None:
        self.sock = sock
        self.log = log
        self.receives = receives
        self.child: asyncio.Future[LocalChild[Any]] = asyncio.get_running_loop().create_future()


class _Server:
    """One fork server and the workers it forked."""

    def __init__(self, name: str, preload: tuple[str, ...], log_dir: Path, environment: dict[str, str]) -> None:
        self._log = log_dir / f"{name}.log"
        self._log_dir = log_dir
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as log:
            fds = ["--control", str(theirs.fileno()), "--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onbeat.cluster.forkserver", *fds, "--preload", *preload],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        self._connection: Connection[Spawned | SpawnFailed | Exited] = Connection(ours, Spawned | SpawnFailed | Exited)
        self._starting: dict[str, _Starting] = {}
        self._children: dict[int, LocalChild[Any]] = {}
        self._gone = False
        self._reader = asyncio.create_task(self._read())

    def send(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        self._connection.send(message, fds)

    async def spawn(self, name: str, entry: str, settings: bytes, receives: object) -> LocalChild[Any]:
        ours, theirs = socket.socketpair()
        starting = _Starting(ours, self._log_dir / f"{name}.log", receives)
        self._starting[name] = starting
        if self._gone:
            self._fail_starting()
        order = Spawn(name=name, entry=entry, settings=settings, log=str(starting.log))
        self._connection.send(order, [theirs.fileno()])
        theirs.close()
        return await starting.child

    async def _read(self) -> None:
        with contextlib.suppress(WireError):  # a server that speaks nonsense is as good as dead
            await self._read_messages()
        self._gone = True
        for child in self._children.values():
            child.ended(-9)
        self._children.clear()
        self._fail_starting()

    async def _read_messages(self) -> None:
        async for message in self._connection.messages():
            match message:
                case Spawned(name=name, pid=pid):
                    new = self._starting.pop(name)
                    if new.child.cancelled():  # whoever asked for it has given up
                        new.sock.close()
                        self.send(Kill(pid))
                        continue
                    self._children[pid] = LocalChild(name, pid, Connection(new.sock, new.receives), new.log, self)
                    new.child.set_result(self._children[pid])
                case SpawnFailed(name=name, reason=reason):
                    failed = self._starting.pop(name)
                    failed.sock.close()
                    if not failed.child.cancelled():
                        failed.child.set_exception(WorkerError(f"{name} could not be started: {reason}"))
                case Exited(pid=pid, status=status):
                    if child := self._children.pop(pid, None):
                        child.ended(status)

    def _fail_starting(self) -> None:
        for name, starting in self._starting.items():
            starting.sock.close()
            if not starting.child.cancelled():
                error = WorkerError(f"{name} could not be started: the fork server died", log_tail(self._log))
                starting.child.set_exception(error)
        self._starting.clear()

    async def close(self) -> None:
        """The server kills its tree and leaves; one that is still importing has none, and just dies."""
        for child in list(self._children.values()):
            child.connection.close()
        self._process.terminate()
        self._connection.close()
        await self._reader
        await asyncio.to_thread(self._process.wait)


class LocalLauncher:
    def __init__(self, log_dir: Path, *, compact: bool = False, keep: tuple[str, ...] = ()) -> None:
        """`compact`: workers with torch take as little memory as they can (environment.py). `keep`: variables that
        those without torch, where user code runs, see beside what Python needs."""
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._compact = compact
        self._keep = keep
        self._servers: dict[bool, _Server] = {}

    def prepare(self, *, uses_torch: bool) -> None:
        """Start the fork server now, so that its imports run while the caller does something else."""
        self._server(uses_torch)

    async def spawn(
        self, *, name: str, entry: str, settings: msgspec.Struct, receives: object, uses_torch: bool
    ) -> LocalChild[Any]:
        server = self._server(uses_torch)
        return await server.spawn(name, entry, msgspec.msgpack.encode(settings), receives)

    def _server(self, uses_torch: bool) -> _Server:
        if uses_torch not in self._servers:
            if uses_torch:
                environment = os.environ | torch_environment(compact=self._compact)
                server = _Server("forkserver-torch", _TORCH_PRELOAD, self._log_dir, environment)
            else:
                server = _Server("forkserver-plain", (), self._log_dir, scrubbed(dict(os.environ), self._keep))
            self._servers[uses_torch] = server
        return self._servers[uses_torch]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        self._servers.clear()
