"""Tensors in one block of memory: written once by the trainer, read by every generator.

    [8 bytes: length of the table][table: JSON of name → dtype, shape, offset][padding][tensor][padding][tensor] …

Tensors start on 64-byte boundaries. The block is a memfd, sealed: nobody but its writer can change a byte of it. The
digest covers every byte; it guards against a torn or mixed-up copy, not an enemy.

A run publishes again and again, and memory fresh from the kernel costs several times the copy (measured, 0.4 to 2 s
against 0.07 s for 538 MB). So a `SnapshotWriter` has two blocks and takes them in turn: a block is written again two
versions later. A version is read while it is current, and by who joined then; one that is still at it two versions
later finds that another is current, and begins anew (memory.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import torch
import xxhash

_ALIGN = 64
_LENGTH_BYTES = 8
_F_SEAL_FUTURE_WRITE = 0x10
"""Linux: no new way to write; the mapping that is there stays. Python has no name for it yet."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Linux: map all pages at once instead of by a fault each (madvise(2)); Python has no names for them yet."""


class _Place(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Block:
    """Sealed memory with the one mapping that can write it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("onbeat-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        _populate(self.memory, _POPULATE_WRITE)
        seals = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class SnapshotWriter:
    """Writes version after version."""

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque(maxlen=2)
        """The one to be written next comes first."""

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int, str]:
        """Copy the tensors. Returns (descriptor, size, digest); the caller closes the descriptor."""
        places, contents, table, start, size = _planned(tensors)
        block = self._free_block(size)
        memory = block.memory
        memory[:_LENGTH_BYTES] = len(table).to_bytes(_LENGTH_BYTES, "little")
        memory[_LENGTH_BYTES : _LENGTH_BYTES + len(table)] = table
        for name, tensor in contents:
            view = _view(memory, places[name], start)
            view.copy_(tensor)
            del view
        return os.dup(block.fd), size, xxhash.xxh3_128_hexdigest(memory)

    def _free_block(self, size: int) -> _Block:
        if len(self._blocks) == 2 and self._blocks[0].size == size:
            self._blocks.rotate(-1)
        else:
            if len(self._blocks) == 2:
                self._blocks.popleft().close()
            self._blocks.append(_Block(size))
        return self._blocks[-1]

    def close(self) -> None:
        """From now on nobody at all can change what was written."""
        while self._blocks:
            self._blocks.popleft().close()


def write(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int, str]:
    """Copy the tensors into memory that nobody can change. Returns (descriptor, size, digest); the caller closes it."""
    writer = SnapshotWriter()
    try:
        return writer.write(tensors)
    finally:
        writer.close()


def _planned(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[dict[str, _Place], list[tuple[str, torch.Tensor]], bytes, int, int]:
    """Where each tensor goes; the tensors; the table; where tensors start; the size of it all."""
    places: dict[str, _Place] = {}
    contents = [(name, tensor.detach()) for name, tensor in tensors]
    offset = 0
    for name, tensor in contents:
        num_bytes = tensor.numel() * tensor.element_size()
        places[name] = _Place(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, num_bytes)
        offset = _aligned(offset + num_bytes)
    table = msgspec.json.encode(places)
    start = _aligned(_LENGTH_BYTES + len(table))
    return places, contents, table, start, max(start + offset, 1)


class Mapped:
    """A snapshot mapped for reading. Close it before the tensors it yields are forgotten, not while they are used."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        # A private mapping: torch wants writable memory, the seal forbids shared writing; nobody writes.
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        _populate(memory, _POPULATE_READ)
        self._memory: mmap.mmap | memoryview = memory

    @classmethod
    def over(cls, memory: memoryview) -> Mapped:
        """A snapshot that is in memory already; nobody writes to it."""
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch: it need not be
        mapped = cls.__new__(cls)
        mapped._memory = memory
        return mapped

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._memory)

    def checksums(self) -> dict[str, str]:
        """Of every tensor, by a function that any Python has."""
        found = {}
        start = self._start()
        for name, place in self._places().items():
            first = start + place.offset
            with memoryview(self._memory)[first : first + place.num_bytes] as content:
                found[name] = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views; forget them before the snapshot is closed."""
        return dict(self._tensors(self._places()))

    def load_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor of the snapshot over the target of the same name; the names must be the same set."""
        places = self._places()
        if places.keys() != targets.keys():
            odd = sorted(places.keys() ^ targets.keys())[:3]
            raise ValueError(f"the snapshot and the model do not have the same tensors: {odd} …")
        for name, tensor in self._tensors(places):
            target = targets[name]
            if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):  # copy_ would convert without a word
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the snapshot, "
                    f"{target.dtype} {tuple(target.shape)} in the model"
                )
            target.copy_(tensor)

    def _places(self) -> dict[str, _Place]:
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        return msgspec.json.decode(self._memory[_LENGTH_BYTES : _LENGTH_BYTES + length], type=dict[str, _Place])

    def _start(self) -> int:
        """Where the tensors begin."""
        return _aligned(_LENGTH_BYTES + int.from_bytes(self._memory[:_LENGTH_BYTES], "little"))

    def _tensors(self, places: dict[str, _Place]) -> Iterator[tuple[str, torch.Tensor]]:
        start = self._start()
        for name, place in places.items():
            yield name, _view(self._memory, place, start)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a traceback may hold a view still: its end frees the memory
            if isinstance(self._memory, memoryview):
                self._memory.release()
            else:
                self._memory.close()


def _populate(memory: mmap.mmap, how: int) -> None:
    try:
        memory.madvise(how)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.14: pages come one by one
            raise


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _view(memory: mmap.mmap | memoryview, place: _Place, start: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = place.num_bytes // dtype.itemsize
    if count == 0:
        return torch.empty(place.shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + place.offset)
    return flat.view(place.shape)
