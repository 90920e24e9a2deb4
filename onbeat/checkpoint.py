"""Checkpoints: a period boundary on disk, whole or not at all (R5). No torch.

    checkpoints/
      version-000010/
        rank-0.safetensors    a trainer rank's part: what falls to it of weights and optimizer state
        rank-1.safetensors …  of further ranks
        manifest.json         written last: the rest of the run's state, and the digest of every part
      .version-000020/        being written or removed, or left so by a kill: nobody reads it, the next save removes it

    controller                     trainer rank                        controller
      boundary ── SavePart ──────────▶ part: write, fsync                 the next period runs
                                       (weights stay as they are until
                                        the next step, which waits)
               ◀── PartSaved ─────────┘
      manifest: write, fsync ─▶ fsync the directory ─▶ rename ─▶ fsync its parent ─▶ remove what is not kept

The rename is the moment at which a checkpoint begins to exist. What a run appends to while it runs (ledger, metrics,
evaluations) is not copied: the manifest says how long it was, and resuming cuts it back to that.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from onbeat.errors import CheckpointError

MANIFEST = "manifest.json"
PIECES = "pieces"
"""The key of a part's metadata under which its pieces are."""
_PIECE_BYTES = 16 << 20
"""Written and hashed at a time."""

At = Callable[[str], None]
"""Told before each step of a save what is next: where tests kill."""


def nowhere(step: str) -> None:
    """Nothing happens at any step."""


class Tensor(NamedTuple):
    dtype: str
    """As safetensors writes it: F32, BF16, …"""
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes."""
    piece: Piece | None = None
    """Of which tensor it is a piece; None: it is whole."""


class Piece(msgspec.Struct, frozen=True):
    """Where in a whole tensor something lies."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    offset: tuple[int, ...]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint, as it was when it was written."""

    name: str
    num_bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a run at a period boundary that is not in a part. (Random numbers have no state: keyed.py.)"""

    format: int = 1
    version: int
    """Of the weights; the next period's number."""
    num_updates: int
    """Optimizer steps so far, those that were skipped included."""
    cursor: int
    """Prompts taken so far."""
    parts: tuple[Part, ...]
    lengths: dict[str, int]
    """Bytes of every file the run appends to."""
    digests: dict[str, str] = {}
    """Of those bytes."""
    inputs: dict[str, str] = {}
    """What the run's bits rest on beside the configuration: digests of data and model, threads, versions."""
    config: dict[str, Any]


class _Signed(msgspec.Struct, frozen=True):
    digest: str
    manifest: Manifest


def write_part(directory: Path, name: str, tensors: Mapping[str, Tensor], at: At = nowhere) -> Part:
    """One safetensors file, on the disk when this returns. Its metadata say what is a piece of which tensor."""
    header: dict[str, Any] = {}
    offset = 0
    if pieces := {name: tensor.piece for name, tensor in tensors.items() if tensor.piece is not None}:
        header["__metadata__"] = {PIECES: msgspec.json.encode(pieces).decode()}
    for tensor_name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[tensor_name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    table = msgspec.json.encode(header)
    table += b" " * (-len(table) % 8)
    path = directory / name
    content = [memoryview(len(table).to_bytes(8, "little") + table), *(tensor.data for tensor in tensors.values())]
    return _write(path, content, at)


def _write(path: Path, content: list[memoryview], at: At) -> Part:
    """A new file of these bytes, synced; a sentence that names path and size if they do not fit."""
    size = sum(view.nbytes for view in content)
    digest = xxhash.xxh3_128()
    try:
        at(f"{path.name}: open")
        with path.open("xb") as file:
            for piece in _pieces(content):
                at(f"{path.name}: write at {file.tell()}")
                digest.update(piece)
                file.write(piece)
            at(f"{path.name}: flush")
            file.flush()
            at(f"{path.name}: sync")
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # others need the room
        room = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        full = f" ({room:,} bytes are free there)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"cannot write the {size:,} bytes of {path}: {error.strerror}{full}") from error
    return Part(name=path.name, num_bytes=size, digest=digest.hexdigest())


def _pieces(content: list[memoryview]) -> Iterator[memoryview]:
    for view in content:
        flat = view.cast("B")
        for start in range(0, flat.nbytes, _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole one, verified."""

    directory: Path
    manifest: Manifest


class CheckpointStore:
    """The `checkpoints` directory of a run. Blocking; one writer (run_dir.py holds the lock)."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        at: At = nowhere,
        best: Callable[[Sequence[int]], int | None] = lambda versions: None,
    ) -> None:
        """The newest `keep` are kept, and, of all there are, the one `best` names: that evaluated best."""
        self.directory = directory
        self._keep = keep
        self._at = at
        self._best = best

    def begin(self, version: int) -> Path:
        """Where the parts of this version go."""
        hidden = self.directory / f".{_name(version)}"
        try:
            self._at("make the directory")
            self.directory.mkdir(parents=True, exist_ok=True)
            for left_behind in [*self.directory.glob(".version-*"), *self.directory.glob(".removed-*")]:
                shutil.rmtree(left_behind)
            hidden.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot make {hidden}: {error.strerror}") from error
        return hidden

    def commit(self, manifest: Manifest) -> Path:
        """Every part is on the disk: from now on this checkpoint exists."""
        hidden, final = self.directory / f".{_name(manifest.version)}", self.directory / _name(manifest.version)
        signed = _Signed(_digest(manifest), manifest)
        _write(hidden / MANIFEST, [memoryview(msgspec.json.format(msgspec.json.encode(signed)))], self._at)
        try:
            self._at("sync the directory")
            _sync(hidden)
            if final.exists():  # damaged: the run went on from one before it, and has come here again
                self._remove(manifest.version)
            self._at("rename")
            hidden.rename(final)
            self._at("sync the parent")
            _sync(self.directory)
            self.prune()
        except OSError as error:
            raise CheckpointError(f"cannot put {final} in its place: {error.strerror}") from error
        return final

    def prune(self) -> None:
        """Remove what is not kept: all but the newest few and the best."""
        versions = self.versions()
        best = self._best(versions)
        for version in versions[: -self._keep]:
            if version != best:
                self._remove(version)

    def _remove(self, version: int) -> None:
        """Out of sight first: half a checkpoint must not look like one."""
        self._at(f"hide {_name(version)}")
        hidden = (self.directory / _name(version)).rename(self.directory / f".removed-{_name(version)}")
        self._at(f"remove {_name(version)}")
        shutil.rmtree(hidden)

    def versions(self) -> list[int]:
        """Of the checkpoints that exist, rising."""
        names = [path.name for path in self.directory.glob("version-*")] if self.directory.exists() else []
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"version-(\d+)", name)))

    def newest(
        self, warn: Callable[[str], None], fits: Callable[[Manifest], None] = lambda manifest: None
    ) -> Checkpoint | None:
        """The newest checkpoint that is whole and of which `fits` does not complain; those that are not are named. None
        if there is none at all."""
        problems = []
        for version in reversed(self.versions()):
            try:
                checkpoint = self.load(version)
                fits(checkpoint.manifest)
                return checkpoint
            except CheckpointError as error:
                problems.append(str(error))
                warn(f"{error}; trying the checkpoint before it")
        if problems:
            raise CheckpointError(f"no checkpoint in {self.directory} can be used: {'; '.join(problems)}")
        return None

    def set_aside(self, after: int) -> None:
        """What is newer than the version a run goes on from is no checkpoint of that run any more."""
        for version in self.versions():
            if version > after:
                aside = self.directory / f"refused-{_name(version)}"
                shutil.rmtree(aside, ignore_errors=True)
                self.path(version).rename(aside)

    def path(self, version: int) -> Path:
        return self.directory / _name(version)

    def load(self, version: int) -> Checkpoint:
        """Read and verify: every byte of every part."""
        directory = self.path(version)
        manifest = read_manifest(directory / MANIFEST)
        for part in manifest.parts:
            _verify(directory / part.name, part)
        return Checkpoint(directory, manifest)


def read_manifest(path: Path) -> Manifest:
    try:
        signed = msgspec.json.decode(path.read_bytes(), type=_Signed)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if _digest(signed.manifest) != signed.digest:
        raise CheckpointError(f"{path} is damaged: its digest is not {signed.digest}")
    return signed.manifest


def _verify(path: Path, part: Part) -> None:
    digest, size = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if (size, digest.hexdigest()) != (part.num_bytes, part.digest):
        raise CheckpointError(f"{path} is damaged: {size:,} bytes with digest {digest.hexdigest()}, written were "
                              f"{part.num_bytes:,} with {part.digest}")  # fmt: skip


def _digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(manifest, order="deterministic"))


def _name(version: int) -> str:
    return f"version-{version:06d}"


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
