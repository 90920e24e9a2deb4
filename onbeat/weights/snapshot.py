"""Tensors in one block of memory: written once by the trainer, read by every generator.

    [8 bytes: length of the table][table: JSON of name → dtype, shape, offset][padding][tensor][padding][tensor] …

Tensors start on 64-byte boundaries. The block is a memfd, sealed: nobody but its writer can change a byte of it. The
digest covers every byte (pieces.py).

A run publishes again and again, and memory fresh from the kernel costs several times the copy (measured, 0.4 to 2 s
against 0.07 s for 538 MB). So a `SnapshotWriter` has two blocks and takes them in turn: a block is written again two
versions later, and the second one is made as soon as the first version is out (`make_ready`). A version is read while
it is current, and by who joined then; one that is still at it two versions later finds that another is current, and
begins anew (memory.py). For the same reason a generator keeps both blocks mapped (`Blocks`), and computes with the
weights where they are (`Mapped.lend_to`): nothing is copied per generator, but for the layers that its engine packs
(rollout/invariant.py).

Weights that are spread over ranks: spread.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import mmap
import os
import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch

from onbeat import pieces
from onbeat.pieces import WHOLE, Share

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_ALIGN = 64
_LENGTH_BYTES = 8
_F_SEAL_FUTURE_WRITE = 0x10
"""Linux: no new way to write; the mapping that is there stays. Python has no name for it yet."""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Linux: map all pages at once instead of by a fault each (madvise(2)); Python has no names for them yet."""


class _Place(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Block:
    """Memory that one mapping can write, or those that were made before it was sealed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("onbeat-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        populate(self.memory, POPULATE_WRITE)

    def seal(self) -> None:
        seals = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


def _new_block(size: int) -> Block:
    block = Block(size)
    block.seal()
    return block


class SnapshotWriter:
    """Writes version after version."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque(maxlen=2)
        """The one to be written next comes first."""

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int, str]:
        """Copy the tensors. Returns (descriptor, size, digest); the caller closes the descriptor."""
        contents = [(name, tensor.detach()) for name, tensor in tensors]
        plan = _planned(tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in contents))
        block = self._free_block(plan.size)
        plan.write_table(block.memory)
        there = []
        for name, tensor in contents:
            if tensor.device.type == "cpu":
                there.append((plan.begin(name), tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
            else:
                plan.view(block.memory, name).copy_(tensor)
        return os.dup(block.fd), plan.size, _written(block.memory, there)

    def make_ready(self) -> None:
        """Make the block for the second version, while nobody waits for it."""
        if len(self._blocks) == 1:
            self._blocks.appendleft(_new_block(self._blocks[0].size))

    def _free_block(self, size: int) -> Block:
        if len(self._blocks) == 2 and self._blocks[0].size == size:
            self._blocks.rotate(-1)
        else:
            if len(self._blocks) == 2:
                self._blocks.popleft().close()
            self._blocks.append(_new_block(size))
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


class Plan:
    """Where each tensor goes, in the order given."""

    def __init__(self, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.places: dict[str, _Place] = {}
        offset = 0
        for name, dtype, shape in tensors:
            num_bytes = math.prod(shape) * dtype.itemsize
            self.places[name] = _Place(str(dtype).removeprefix("torch."), shape, offset, num_bytes)
            offset = _aligned(offset + num_bytes)
        self._table = msgspec.json.encode(self.places)
        self._start = _aligned(_LENGTH_BYTES + len(self._table))
        self.size = max(self._start + offset, 1)

    def write_table(self, memory: mmap.mmap) -> None:
        memory[:_LENGTH_BYTES] = len(self._table).to_bytes(_LENGTH_BYTES, "little")
        memory[_LENGTH_BYTES : _LENGTH_BYTES + len(self._table)] = self._table

    def view(self, memory: mmap.mmap, name: str) -> torch.Tensor:
        return _view(memory, self.places[name], self._start)

    def begin(self, name: str) -> int:
        """Where the tensor begins in the block."""
        return self._start + self.places[name].offset


_planned = lru_cache(1)(Plan)
"""The same as before, as long as the tensors are of the same sizes."""


def _written(memory: mmap.mmap, contents: Sequence[tuple[int, Bytes]]) -> str:
    """Copy each to its place, in the order of places; the digest of the whole memory, taken on the way."""
    contents = [each for each in contents if len(each[1])]
    begins = [begin for begin, _ in contents]
    to = np.frombuffer(memory, np.uint8)

    def write(start: int, end: int) -> None:
        number = max(0, bisect_right(begins, start) - 1)
        while number < len(contents) and begins[number] < end:
            begin, content = contents[number]
            first, last = max(start, begin), min(end, begin + len(content))
            if first < last:
                to[first:last] = content[first - begin : last - begin]
            number += 1

    with memoryview(memory) as view:
        return pieces.digest(view, write=write)


def digest_of(memory: mmap.mmap | memoryview, share: Share = WHOLE) -> str:
    with memoryview(memory) as view:
        return pieces.digest(view, share)


class Blocks:
    """The blocks a generator has seen last, mapped: a writer takes two in turn."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Mapped] = {}

    def mapped(self, fd: int, num_bytes: int) -> Mapped:
        """Takes the descriptor over."""
        found = os.fstat(fd)
        block = found.st_dev, found.st_ino  # nobody else gets the number while we have it mapped
        if block in self._known:
            os.close(fd)
        else:
            self._known[block] = Mapped(fd, num_bytes)
            while len(self._known) > 2:
                del self._known[next(iter(self._known))]
        return self._known[block]


def _bear_read_only_memory() -> None:
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch: it need not be


class Mapped:
    """A snapshot mapped for reading. Close it before the tensors it yields are forgotten, not while they are used."""

    _views: tuple[bytes, dict[str, torch.Tensor]] | None = None

    def __init__(self, fd: int, num_bytes: int) -> None:
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        os.close(fd)
        _bear_read_only_memory()
        populate(memory, POPULATE_READ)
        self._memory: mmap.mmap | memoryview = memory

    @classmethod
    def over(cls, memory: memoryview) -> Mapped:
        """A snapshot that is in memory already; nobody writes to it."""
        _bear_read_only_memory()
        mapped = cls.__new__(cls)
        mapped._memory = memory
        return mapped

    def digest(self, share: Share = WHOLE) -> str:
        return digest_of(self._memory, share)

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
        for target, tensor in self._pairs(targets):
            target.copy_(tensor)

    def lend_to(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Let every target be the tensor of the same name, where it is. Whoever writes this memory again must know
        that nobody computes with it any more. (On another device than the memory's, it is copied.)"""
        for target, tensor in self._pairs(targets):
            if target.device.type == "cpu":
                target.data = tensor
            else:
                target.copy_(tensor)

    def _pairs(self, targets: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        found = self._seen()
        if found.keys() != targets.keys():
            odd = sorted(found.keys() ^ targets.keys())[:3]
            raise ValueError(f"the snapshot and the model do not have the same tensors: {odd} …")
        for name, tensor in found.items():
            target = targets[name]
            if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):  # copy_ would convert without a word
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the snapshot, "
                    f"{target.dtype} {tuple(target.shape)} in the model"
                )
            yield target, tensor

    def _seen(self) -> dict[str, torch.Tensor]:
        """The views; the same ones while the table is the same."""
        table = bytes(self._memory[: self._start()])
        if self._views is None or self._views[0] != table:
            self._views = table, self.tensors()
        return self._views[1]

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
        self._views = None
        with contextlib.suppress(BufferError):  # a traceback may hold a view still: its end frees the memory
            if isinstance(self._memory, memoryview):
                self._memory.release()
            else:
                self._memory.close()


def populate(memory: mmap.mmap, how: int) -> None:
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
