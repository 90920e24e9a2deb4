"""In the actor: a process that Ray started, and that becomes a worker of ours. Ray itself is imported by Ray.

    Ray ── run(invitation) ─────────▶ thread "run": meets the controller (meeting.py), then is the worker until it ends
        ── deliver(version, [ref]) ─▶ thread "mail": gets the object into this host's shared memory
                                            └──▶ the worker takes it when it is told to stage that version

Ray pulls an object once per host, whoever of its actors asks; what `get` returns is a view of that memory. One version
is kept, the last that came; whoever waits for one that never comes is ended by the controller's patience.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from onbeat.cluster.guardian import MARK, guard
from onbeat.cluster.local import log_tail
from onbeat.cluster.meeting import Arrived, Invitation, Work, meet, receive_work
from onbeat.environment import prepare_this_process
from onbeat.errors import InputError
from onbeat.inputs import model_digest
from onbeat.messages import Failed
from onbeat.rollout.arriving import deliver_by
from onbeat.wire import frame


class Mailbox:
    """The last version that was delivered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: deque[tuple[int, memoryview]] = deque(maxlen=1)

    def put(self, version: int, content: memoryview) -> None:
        with self._changed:
            self._held.append((version, content))
            self._changed.notify_all()

    def take(self, version: int) -> memoryview:
        """Wait for it. It is the caller's then: the memory is free once nobody looks at it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._held) and self._held[0][0] == version)
            return self._held.pop()[1]


class WorkerActor:
    def __init__(self) -> None:
        self._mailbox = Mailbox()

    def deliver(self, version: int, objects: list[Any]) -> None:
        """In a list: Ray would replace a plain reference by its content before the call."""
        import ray

        self._mailbox.put(version, memoryview(ray.get(objects[0])))

    def run(self, invitation_bytes: bytes) -> None:
        """Be the worker, until its work ends or the controller hangs up."""
        invitation = msgspec.msgpack.decode(invitation_bytes, type=Invitation)
        prepare_this_process()
        guard(os.environ[MARK])
        deliver_by(self._mailbox.take)
        sock = meet(invitation)
        Path("/proc/self/comm").write_text(invitation.name[:15])
        who = _introduction(invitation, shares_memory=sock.family == socket.AF_UNIX)
        _write_to(Path(who.log))
        sock.sendall(frame(who))
        if (work := receive_work(sock)) is not None:
            do_work(sock, work)


def _introduction(invitation: Invitation, *, shares_memory: bool) -> Arrived:
    import ray

    here = ray.get_runtime_context()
    log = Path(invitation.log)
    if not shares_memory:  # where Ray writes its own, which is gone when the cluster is
        log = Path(os.readlink("/proc/self/fd/1")).with_name(f"onbeat-{invitation.name}-{os.getpid()}.log")
    return Arrived(
        ticket=invitation.ticket,
        pid=os.getpid(),
        host=ray.util.get_node_ip_address(),
        node=here.get_node_id(),
        log=str(log),
        code=code_digest(),
    )


def _write_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def do_work(sock: socket.socket, work: Work) -> None:
    """Whatever goes wrong is in the log, too."""
    with suppress(OSError):
        os.chdir(work.folder)
    try:
        with _at_home(work) as settings:
            module, _, function = work.entry.partition(":")
            getattr(importlib.import_module(module), function)(sock, settings)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, InputError):
            with suppress(OSError):
                sock.sendall(frame(Failed(str(error))))
        raise
    finally:
        sock.close()


@contextmanager
def _at_home(work: Work) -> Iterator[bytes]:
    """The settings, with the model's directory as it is here."""
    settings = msgspec.msgpack.decode(work.settings)
    if work.files:
        with tempfile.TemporaryDirectory(prefix="onbeat-worker-") as folder:
            for name, content in work.files.items():
                (Path(folder) / Path(name).name).write_bytes(content)
            yield msgspec.msgpack.encode(settings | {"model_dir": folder})
        return
    if work.run and not Path(work.run).is_dir():
        raise InputError(
            f"{socket.gethostname()} does not see the run's directory {work.run}, where the trainer writes its "
            "checkpoints: put it on a file system that all hosts share (--run.dir)"
        )
    if work.model:
        _check_model(Path(settings["model_dir"]), work.model)
    yield work.settings


def _check_model(model_dir: Path, digest: str) -> None:
    if not (model_dir / "config.json").is_file():
        raise InputError(
            f"{socket.gethostname()} does not see the model in {model_dir}, which this worker reads: put it on a file "
            "system that all hosts share"
        )
    if model_digest(model_dir) != digest:
        raise InputError(f"the model in {model_dir} of {socket.gethostname()} is not the one the run has there")


def code_digest() -> str:
    """Of the onbeat that is installed here: another one may compute other bits."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def read_tail(path: str) -> str:
    """A task of its own, for the host where the file is."""
    return log_tail(Path(path))
