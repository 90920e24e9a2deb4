"""A process that has imported what workers need and forks one whenever it is asked.

    controller ──Spawn + socket──▶ fork server ──fork──▶ worker (its own session, its own log)
               ◀─Spawned, Exited──      │                   │
                                        └── reaps ◀─────────┘ dies

Importing torch and transformers takes four seconds; forking from here takes milliseconds. This process runs no torch
operation itself (threads do not survive a fork) and has one thread.

Who dies when:
- the controller dies, however: our end of the control socket ends, and PR_SET_PDEATHSIG sends SIGTERM in case
  somebody else inherited the other end. Either way we kill every descendant and leave.
- we die: each worker has PR_SET_PDEATHSIG = SIGKILL.
- a worker dies: we kill what is left of its process group. We are the subreaper of all below us, so a grandchild
  that moved to another session becomes our child; whom we did not spawn, we kill.

What is preloaded may import torch, so its environment is prepared first; this module imports none: with an empty list
it serves the torch-free reward workers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from onbeat.environment import importing, prepare_this_process, start_openmp
from onbeat.wire import Channel

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. The frame carries the worker's end of its socket."""

    name: str
    entry: str
    """`package.module:function`, called as function(socket, settings)."""
    settings: bytes
    log: str


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill the worker's whole process group. A pid that is gone is fine."""

    pid: int


class Spawned(msgspec.Struct, frozen=True, tag=True):
    name: str
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True, tag=True):
    """The kernel gave no further process."""

    name: str
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    pid: int
    status: int
    """As subprocess has it: the exit code, or minus the signal."""


def prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int, signum: int) -> None:
    """Receive `signum` when the parent dies; exit now if it is dead already."""
    prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def children_of(pid: int) -> list[int]:
    """Direct children of any thread of the process. Read from /proc, which needs no privilege."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """The worker, which may not have become the leader of its group yet, and whoever is in that group."""
    kill(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._channel: Channel[Spawn | Kill] = Channel(control, Spawn | Kill)
        self._workers: set[int] = set()

    def run(self) -> None:
        """Serve until the controller is gone; then leave nobody behind."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        try:
            while True:
                control = self._control.fileno()
                ready, _, _ = select.select([control, wake_read], [], [])
                if wake_read in ready:
                    os.read(wake_read, 4096)
                    self._reap()
                while control in ready and self._channel.poll():
                    message = self._channel.recv()
                    if message is None:
                        return
                    self._handle(message)
        finally:
            self._leave()

    def _handle(self, message: Spawn | Kill) -> None:
        match message:
            case Spawn():
                self._spawn(message, self._channel.take_fd())
            case Kill(pid=pid) if pid in self._workers:
                kill_group(pid)

    def _spawn(self, order: Spawn, fd: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            self._channel.send(SpawnFailed(order.name, str(error)))
            return
        if pid == 0:
            self._control.close()
            become_worker(order, fd, parent)
        os.close(fd)
        self._workers.add(pid)
        self._channel.send(Spawned(order.name, pid))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            was_worker = pid in self._workers
            if was_worker:
                self._workers.discard(pid)
                kill_group(pid)
            self._kill_strays()
            if was_worker:
                self._channel.send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _kill_strays(self) -> None:
        """Whoever is our child without having been spawned was orphaned by a worker, and serves nobody."""
        for pid in children_of(os.getpid()):
            if pid not in self._workers:
                kill(pid)

    def _leave(self) -> NoReturn:
        """Kill the whole tree below us. A killed child's children become ours, hence the loop."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while children := children_of(os.getpid()):
            for pid in children:
                kill(pid)
            for pid in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        os._exit(0)


def become_worker(order: Spawn, fd: int, parent: int) -> NoReturn:
    """In the fork: shed the server's state, take on the worker's, run it, and never return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGKILL)
        os.setsid()
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        prctl(_PR_SET_NAME, order.name.encode()[:15])
        if "torch" in sys.modules:
            start_openmp()
        entry_point(order.entry)(socket.socket(fileno=fd), order.settings)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # user code may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def entry_point(name: str) -> Callable[[socket.socket, bytes], None]:
    module, _, function = name.partition(":")
    found: Callable[[socket.socket, bytes], None] = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", nargs="*", default=[])
    arguments = parser.parse_args()
    die_with_parent(arguments.parent, signal.SIGTERM)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=arguments.control)
    if arguments.preload:
        prepare_this_process()
    with importing():
        for module in arguments.preload:
            importlib.import_module(module)
    ForkServer(control).run()


if __name__ == "__main__":
    main()
