"""A snapshot of the weights: what is read is what was written, and nobody can change it afterwards."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.weights.snapshot import Blocks, Mapped, SnapshotWriter, write

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 2), (5,), (7, 3), (2, 3, 4), (64, 64)]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes but for booleans: NaNs and denormals are weights like others."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def read(fd: int, num_bytes: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Into fresh tensors of the same kind. Closes the descriptor."""
    targets = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    mapped = Mapped(fd, num_bytes)
    mapped.load_into(targets)
    mapped.close()
    return targets


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor, _, _ = write([("weight", torch.ones(4))])
    yield descriptor
    os.close(descriptor)


def test_tensors_of_every_kind_and_shape_come_back_bit_for_bit() -> None:
    tensors = {
        f"{dtype}/{shape} „ü“": random_tensor(shape, dtype, seed)
        for seed, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in SHAPES)
    }
    fd, num_bytes, digest = write(tensors.items())
    mapped = Mapped(os.dup(fd), num_bytes)
    assert mapped.digest() == digest
    mapped.close()
    loaded = read(fd, num_bytes, tensors)
    for name, tensor in tensors.items():
        assert as_bytes(loaded[name]) == as_bytes(tensor), name
        assert loaded[name].shape == tensor.shape


@settings(deadline=None, max_examples=40)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(0, 99)),
        max_size=6,
    )
)
def test_any_set_of_tensors_comes_back_bit_for_bit(kinds: list[tuple[torch.dtype, tuple[int, ...], int]]) -> None:
    tensors = {str(n): random_tensor(shape, dtype, seed) for n, (dtype, shape, seed) in enumerate(kinds)}
    fd, num_bytes, _ = write(tensors.items())
    loaded = read(fd, num_bytes, tensors)
    assert {name: as_bytes(tensor) for name, tensor in loaded.items()} == {
        name: as_bytes(tensor) for name, tensor in tensors.items()
    }


def test_parameters_and_views_that_are_not_contiguous_may_be_written_and_loaded_into() -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    fd, num_bytes, _ = write([("weight", weight), ("transposed", weight.t()), ("strided", weight[:, ::2])])
    targets = {
        "weight": torch.zeros(4, 3).t(),
        "transposed": torch.zeros(4, 3),
        "strided": torch.zeros(3, 4)[:, 1::2],
    }
    mapped = Mapped(fd, num_bytes)
    mapped.load_into(targets)
    mapped.close()
    with pytest.raises(ValueError, match="closed"):
        mapped.load_into(targets)
    assert torch.equal(targets["weight"], weight)
    assert torch.equal(targets["transposed"], weight.t())
    assert torch.equal(targets["strided"], weight[:, ::2])


def test_what_was_loaded_outlives_the_snapshot() -> None:
    fd, num_bytes, _ = write([("weight", torch.full((1000,), 3.0))])
    assert read(fd, num_bytes, {"weight": torch.empty(1000)})["weight"].sum() == 3000.0


def test_a_snapshot_does_not_follow_the_weights_it_was_taken_of() -> None:
    weight = torch.ones(100)
    fd, num_bytes, _ = write([("weight", weight)])
    weight.zero_()
    assert read(fd, num_bytes, {"weight": weight})["weight"].sum() == 100.0


def test_a_snapshot_cannot_be_changed_by_anybody(fd: int) -> None:
    size = os.fstat(fd).st_size
    for attempt in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, size - 1),
        lambda: os.ftruncate(fd, size + 1),
        lambda: mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    ):
        with pytest.raises(OSError) as error:  # noqa: PT011
            attempt()
        assert error.value.errno == errno.EPERM
    assert os.fstat(fd).st_size == size


@pytest.mark.parametrize("ready", [False, True])
def test_a_version_stays_as_it_is_while_the_next_is_written_and_its_memory_serves_the_one_after(ready: bool) -> None:
    writer = SnapshotWriter()
    weight = torch.zeros(1000)
    versions = []
    for value in range(5):
        weight.fill_(value)
        fd, num_bytes, digest = writer.write([("weight", weight)])
        versions.append((fd, num_bytes, digest))
        if ready:
            writer.make_ready()
        for back in range(min(2, len(versions))):
            fd, num_bytes, digest = versions[-1 - back]
            mapped = Mapped(os.dup(fd), num_bytes)
            assert mapped.digest() == digest
            mapped.close()
            assert read(os.dup(fd), num_bytes, {"weight": weight})["weight"].unique().tolist() == [value - back]
    inodes = [os.fstat(fd).st_ino for fd, _, _ in versions]
    assert inodes[:2] * 2 == inodes[:4]
    assert len(set(inodes)) == 2
    for fd, _, _ in versions:
        with pytest.raises(OSError, match="Operation not permitted"):
            os.pwrite(fd, b"x", 0)
        os.close(fd)
    writer.close()


def test_the_second_version_needs_no_new_memory_once_the_writer_is_ready() -> None:
    def num_blocks() -> int:
        gc.collect()
        open_files = [path for fd in os.listdir("/proc/self/fd") if os.path.lexists(path := f"/proc/self/fd/{fd}")]
        return len({os.stat(path).st_ino for path in open_files if "onbeat-weights" in os.readlink(path)})

    writer, before = SnapshotWriter(), num_blocks()
    writer.make_ready()  # nothing is known of its size yet
    assert num_blocks() == before
    os.close(writer.write([("weight", torch.ones(1000))])[0])
    writer.make_ready()
    assert num_blocks() == before + 2
    for _ in range(3):
        os.close(writer.write([("weight", torch.ones(1000))])[0])
        writer.make_ready()
        assert num_blocks() == before + 2
    writer.close()
    assert num_blocks() == before


def test_weights_of_another_size_get_memory_of_their_own() -> None:
    writer = SnapshotWriter()
    for size in (10, 1000, 10, 3000, 3000, 3000):
        fd, num_bytes, _ = writer.write([("weight", torch.full((size,), float(size)))])
        assert read(fd, num_bytes, {"weight": torch.empty(size)})["weight"].mean() == size
    writer.close()


def test_a_snapshot_has_no_name_and_is_not_inherited(fd: int) -> None:
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    assert not os.get_inheritable(fd)


def digest_of(weight: torch.Tensor, name: str = "weight") -> str:
    fd, _, digest = write([(name, weight)])
    os.close(fd)
    return digest


def test_the_digest_is_that_of_the_content_alone() -> None:
    weight = random_tensor((100,), torch.float32)
    assert digest_of(weight) == digest_of(weight.clone())
    assert digest_of(weight) != digest_of(weight, "other")
    assert digest_of(weight) != digest_of(weight.reshape(10, 10))
    assert digest_of(weight) != digest_of(weight.view(torch.int32))


@given(place=st.integers(0, 399), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=40)
def test_the_digest_differs_if_a_byte_differs(place: int, flip: int) -> None:
    weight = random_tensor((400,), torch.uint8)
    other = weight.clone()
    other[place] ^= flip
    assert digest_of(weight) != digest_of(other)


def test_a_torn_copy_has_another_digest() -> None:
    fd, num_bytes, digest = write([("weight", random_tensor((100,), torch.float32))])
    content = bytearray(os.pread(fd, num_bytes, 0))
    os.close(fd)
    for place in (0, 20, num_bytes - 1):
        torn = bytearray(content)
        torn[place] ^= 1
        copy = os.memfd_create("copy")
        os.write(copy, torn)
        mapped = Mapped(copy, num_bytes)
        assert mapped.digest() != digest
        mapped.close()


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a", "x"], []])
def test_tensors_of_other_names_are_refused_before_anything_is_loaded(names: list[str]) -> None:
    fd, num_bytes, _ = write([("a", torch.ones(2)), ("b", torch.ones(2))])
    targets = {name: torch.zeros(2) for name in names}
    mapped = Mapped(fd, num_bytes)
    with pytest.raises(ValueError, match="do not have the same tensors"):
        mapped.load_into(targets)
    mapped.close()
    assert all(not tensor.any() for tensor in targets.values())


def test_neither_end_leaves_a_descriptor_or_a_mapping_behind() -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("onbeat-weights")

    before = sorted(os.listdir("/proc/self/fd"))
    mapped_before = mappings()  # other tests' garbage may not have been collected yet
    for _ in range(3):
        fd, num_bytes, _ = write([("weight", torch.ones(100_000)), ("empty", torch.ones(0))])
        read(fd, num_bytes, {"weight": torch.ones(100_000), "empty": torch.ones(0)})
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert mappings() <= mapped_before


def test_what_is_lent_is_the_memory_itself_and_changes_with_the_version() -> None:
    """As a generator does it: two blocks, taken in turn, mapped once each."""
    writer, blocks = SnapshotWriter(), Blocks()
    target = torch.nn.Parameter(torch.zeros(64, 64))
    for version in range(5):
        weights = random_tensor((64, 64), torch.float32, seed=version).nan_to_num()
        mapped = blocks.mapped(*writer.write([("weight", weights)])[:2])
        mapped.lend_to({"weight": target})
        assert as_bytes(target) == as_bytes(weights)
        assert target.data_ptr() == next(iter(mapped.tensors().values())).data_ptr()
    assert len(blocks._known) == 2
    writer.close()
    assert as_bytes(target) == as_bytes(weights)


def test_blocks_of_another_size_take_the_place_of_the_old_ones() -> None:
    writer, blocks = SnapshotWriter(), Blocks()
    for size in (10, 10, 10, 2000, 2000, 2000, 10):
        weights = random_tensor((size,), torch.float32, seed=size)
        mapped = blocks.mapped(*writer.write([("weight", weights)])[:2])
        assert as_bytes(mapped.tensors()["weight"]) == as_bytes(weights)
    assert len(blocks._known) == 2
    writer.close()


def test_what_does_not_fit_is_not_lent() -> None:
    mapped = Mapped(*write([("weight", torch.ones(4))])[:2])
    with pytest.raises(ValueError, match="in the model"):
        mapped.lend_to({"weight": torch.zeros(5)})
    with pytest.raises(ValueError, match="do not have the same tensors"):
        mapped.lend_to({"bias": torch.zeros(4)})
