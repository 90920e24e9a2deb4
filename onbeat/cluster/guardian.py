"""A process that outlives a worker by a moment, to end what it started. Run as a file; imports little.

    guardian: now and then, who descends from the worker?       (the worker's end wakes it at once: pidfd)
              at the worker's end: SIGKILL to all of them, to those who descend from them by now, and to whoever was
              started with the worker's mark in its environment; again, until there is none

Two ways to know them, since neither sees all: who renames itself overwrites its environment (Ray's processes do, and
vLLM's), who was started a moment ago is not known yet. Under the local launcher the fork server does this
(forkserver.py), being the ancestor of all. An actor's ancestor is Ray, which knows of no grandchildren. A controller
that started a Ray of its own has a guardian, too: some of Ray's processes take half a minute to notice they are alone.
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
EVERYBODY, ONLY_MARKED = "everybody", "only-marked"
"""Whose descent counts: the worker's own, or that of processes with the mark (a controller may have other children)."""
_LOOK_S = 2.0


def guard(mark: str, whom: str = EVERYBODY, folders: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start one for this process; in the end it removes the folders."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid()), whom, *folders],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
    )


def marked(mark: str) -> set[int]:
    """Every process that was started with this mark, or with one that begins with it and a dot."""
    wanted, found = f"{MARK}={mark}.".encode(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any((variable + b".").startswith(wanted) for variable in variables):
                    found.add(int(entry.name))
    return found


def descendants(pids: set[int]) -> set[int]:
    """Children, their children …"""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = pids
    while new := {pid for pid, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def began(pid: int) -> str | None:
    """When the process was started, by which it is told from another with its number; None if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def watch(worker: int, mark: str, whom: str) -> set[tuple[int, str | None]]:
    """Until it ends; who descended from it when we looked, and has not ended."""
    known: set[tuple[int, str | None]] = set()
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(worker)
        while os.getppid() == worker:
            known = {each for each in known if began(each[0]) == each[1]}
            roots = {worker} if whom == EVERYBODY else marked(mark)
            known |= {(pid, began(pid)) for pid in descendants(roots)}
            if select.select([handle], [], [], _LOOK_S)[0]:
                break
    return known


def end(known: set[tuple[int, str | None]], mark: str) -> None:
    while True:
        alive = {pid for pid, start in known if start is not None and began(pid) == start}
        alive |= {pid for pid in marked(mark) | descendants(alive) if began(pid) is not None}
        alive -= {os.getpid()}
        if not alive:
            return
        known = known | {(pid, began(pid)) for pid in alive}
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    mark, worker, whom = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    end(watch(worker, mark, whom), mark)
    for folder in sys.argv[4:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
