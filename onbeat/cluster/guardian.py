"""A process that outlives a worker by a moment, to end what it started. Run as a file; imports little.

    guardian: waits for the worker's end, however it comes (pidfd)
              SIGKILL to every process with the worker's mark in its environment, until there is none

Under the local launcher the fork server does that (forkserver.py), being the ancestor of all. An actor's ancestor is
Ray, which knows of no grandchildren. A controller that started a Ray of its own has one, too: some of Ray's processes
take half a minute to notice that they are alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ONBEAT_ACTOR"
"""The environment variable whose value names the actor."""


def guard(mark: str, *folders: str) -> subprocess.Popen[bytes]:
    """Start one for this process; in the end it removes the folders."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid()), *folders],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
    )


def marked(mark: str) -> list[int]:
    """Every other process that was started with this mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not ended and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_for_the_end_of(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker = os.pidfd_open(pid)
        while os.getppid() == pid and not select.select([worker], [], [], 1.0)[0]:
            pass


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    mark, worker = sys.argv[1], int(sys.argv[2])
    wait_for_the_end_of(worker)
    while left := marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for folder in sys.argv[3:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
