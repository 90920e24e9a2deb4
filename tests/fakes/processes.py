"""A real `onbeat train` in a process of its own, every process of which can be found, by an environment variable."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from tests.fakes.runs import RECIPE, SMALL

_GRACE_S = 30.0
"""How long a process may take to be gone. Only a failing test waits for it."""


def marked_processes(mark: str) -> dict[int, str]:
    """Every living process with this NAME=VALUE in its environment: pid and name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                marked = mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if marked and state != "Z":
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:
                continue
    return found


class RunProcess:
    def __init__(self, run_dir: Path, recipe: str = RECIPE, prefix: tuple[str, ...] = (), **overrides: Any) -> None:
        """`prefix`: before the command, to run it elsewhere."""
        self.run_dir = run_dir
        self._num_periods = 0
        """That it has told of, as far as it was read."""
        self._mark = f"ONBEAT_TEST_MARK={uuid.uuid4()}"
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        flags = [text for key, value in {**SMALL, **keys}.items() for text in (f"--{key}", str(value))]
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "onbeat.cli", "train", recipe, "--run.dir", str(run_dir), *flags],
            env={**os.environ, name: value, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_line(self, start: str) -> str:
        """Read its output up to the line that starts so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("period "):
                self._num_periods = int(line.split()[1].partition("/")[0])
            if line.startswith(start):
                return line
        raise AssertionError(f"it ended without a line {start!r}: {self.process.stderr and self.process.stderr.read()}")

    def wait_for_period(self, number: int) -> None:
        """Until so many periods are over."""
        while self._num_periods < number:
            self.wait_for_line("period ")

    def wait_for_joiner(self) -> None:
        """Until somebody from outside has joined."""
        while re.match(r"generator-\S+-\d+ has joined", self.wait_for_line("generator-")) is None:
            pass

    def alive(self) -> dict[int, str]:
        """Every living process of the run: pid and name."""
        return marked_processes(self._mark)

    def peak_bytes(self, name: str) -> int:
        """The most memory that one of them has held so far."""
        status = Path(f"/proc/{self.pid_of(name)}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def pid_of(self, name: str) -> int:
        return next(pid for pid, known in self.alive().items() if known == name)

    def wait_until_all_gone(self) -> dict[int, str]:
        """Wait for the end of every process of the run; what is left after the grace time."""
        while alive := self.alive():
            for pid in alive:
                try:
                    handle = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                try:
                    if not select.select([handle], [], [], _GRACE_S)[0]:
                        return self.alive()
                finally:
                    os.close(handle)
        return {}

    def finish(self, timeout_s: float = 600) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def sockets_left(self) -> list[Path]:
        return [path for path in self.run_dir.rglob("*") if path.is_socket()]
