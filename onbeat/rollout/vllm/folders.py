"""Temporary folders that name their process, so that those of processes that were killed can be swept. No torch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_folder(prefix: str, place: Path | None = None) -> Path:
    """A new one, for its owner alone; what dead processes have left under the prefix is removed."""
    where = place if place is not None and place.is_dir() else Path(tempfile.gettempdir())
    for old in where.glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=where))


@contextmanager
def fresh_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    folder = make_folder(prefix, place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
