"""Tensors in one block of memory: written once by the trainer, read by every generator.

    [8 bytes: length of the table][table: JSON of name → dtype, shape, offset][padding][tensor][padding][tensor] …

Tensors start on 64-byte boundaries. The block is a memfd, sealed after writing: nobody, the trainer included, can
change a published version. The digest covers every byte; it guards against a torn or mixed-up copy, not an enemy.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import torch
import xxhash

_ALIGN = 64
_LENGTH_BYTES = 8
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Linux: map all pages at once instead of by a fault each (madvise(2)); Python has no names for them yet."""


class _Place(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def write(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int, str]:
    """Copy the tensors into fresh sealed memory. Returns (descriptor, size, digest); the caller closes it."""
    places: dict[str, _Place] = {}
    contents = [(name, tensor.detach()) for name, tensor in tensors]
    offset = 0
    for name, tensor in contents:
        num_bytes = tensor.numel() * tensor.element_size()
        places[name] = _Place(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, num_bytes)
        offset = _aligned(offset + num_bytes)
    table = msgspec.json.encode(places)
    start = _aligned(_LENGTH_BYTES + len(table))
    size = max(start + offset, 1)
    fd = os.memfd_create("onbeat-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        _populate(memory, _POPULATE_WRITE)
        memory[:_LENGTH_BYTES] = len(table).to_bytes(_LENGTH_BYTES, "little")
        memory[_LENGTH_BYTES : _LENGTH_BYTES + len(table)] = table
        for name, tensor in contents:
            view = _view(memory, places[name], start)
            view.copy_(tensor)
            del view
        digest = xxhash.xxh3_128_hexdigest(memory)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, size, digest


class Mapped:
    """A snapshot mapped for reading. Close it before the tensors it yields are forgotten, not while they are used."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        # A private mapping: torch wants writable memory, the seal forbids shared writing; nobody writes.
        self._memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        _populate(self._memory, _POPULATE_READ)

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._memory)

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

    def _tensors(self, places: dict[str, _Place]) -> Iterator[tuple[str, torch.Tensor]]:
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        start = _aligned(_LENGTH_BYTES + length)
        for name, place in places.items():
            yield name, _view(self._memory, place, start)

    def close(self) -> None:
        self._memory.close()


def _populate(memory: mmap.mmap, how: int) -> None:
    try:
        memory.madvise(how)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.14: pages come one by one
            raise


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _view(memory: mmap.mmap, place: _Place, start: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = place.num_bytes // dtype.itemsize
    if count == 0:
        return torch.empty(place.shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + place.offset)
    return flat.view(place.shape)
