"""A checkpoint is whole or is not there: kills at every step of a save, flipped bits, full disks (R5)."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from onbeat.checkpoint import Checkpoint, CheckpointStore, Manifest, Tensor, write_part
from onbeat.errors import CheckpointError

_SAVE = """
import os, signal, sys
from pathlib import Path
from onbeat.checkpoint import CheckpointStore, Manifest, Tensor, write_part
import onbeat.checkpoint

directory, version, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
onbeat.checkpoint._PIECE_BYTES = 64  # several writes per part
steps = []

def at(step):
    if len(steps) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    steps.append(step)

data = bytes([version]) * 200
store = CheckpointStore(directory, keep=1, at=at)
hidden = store.begin(version)
part = write_part(hidden, "rank-0.safetensors", {"weight": Tensor("U8", (200,), memoryview(data))}, at)
store.commit(Manifest(version=version, num_updates=version, cursor=8 * version, parts=(part,), lengths={}, config={}))
assert "torch" not in sys.modules
print("\\n".join(steps))
"""


def save(directory: Path, version: int, kill_at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SAVE, str(directory), str(version), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def content(checkpoint: Checkpoint) -> tuple[int, set[int]]:
    """The version it says it is, and the bytes its tensor is made of."""
    with safe_open(checkpoint.directory / "rank-0.safetensors", framework="np") as file:
        return checkpoint.manifest.version, set(file.get_tensor("weight").tolist())


@pytest.mark.integration
def test_a_kill_at_every_step_of_a_save_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path: Path) -> None:
    """Also when an older one is removed, and when one of the same version is replaced."""
    killed = 0
    found: set[int] = set()
    for kill_at in itertools.count():
        directory = tmp_path / str(kill_at)
        assert save(directory, 1, -1).returncode == 0
        done = save(directory, 2, kill_at)
        warnings: list[str] = []
        newest = CheckpointStore(directory, keep=1).newest(warnings.append)
        assert newest is not None
        assert not warnings
        assert content(newest) in ((1, {1}), (2, {2}))
        found.add(newest.manifest.version)
        assert save(directory, 3, -1).returncode == 0  # what was left behind is in nobody's way
        assert os.listdir(directory) == ["version-000003"]
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        killed += 1
    steps = done.stdout.splitlines()
    assert killed == len(steps) > 12
    assert any("rank-0.safetensors: write at 1" in step for step in steps)
    assert {"rename", "hide version-000001", "remove version-000001"} <= set(steps)
    assert found == {1, 2}


@pytest.mark.integration
def test_a_kill_while_a_damaged_one_is_replaced_leaves_a_whole_one(tmp_path: Path) -> None:
    for kill_at in itertools.count():
        directory = tmp_path / str(kill_at)
        assert save(directory, 1, -1).returncode == 0
        shutil.copytree(directory / "version-000001", directory / "version-000002")  # says it is version 1
        (directory / "version-000002" / "rank-0.safetensors").write_bytes(b"damaged")
        done = save(directory, 2, kill_at)
        newest = CheckpointStore(directory, keep=1).newest(lambda sentence: None)
        assert newest is not None
        assert content(newest) in ((1, {1}), (2, {2}))
        if done.returncode == 0:
            assert "hide version-000002" in done.stdout
            return


def two_checkpoints(directory: Path) -> CheckpointStore:
    store = CheckpointStore(directory, keep=2)
    for version in (1, 2):
        data = random.Random(version).randbytes(300)
        hidden = store.begin(version)
        part = write_part(hidden, "rank-0.safetensors", {"weight": Tensor("U8", (300,), memoryview(data))})
        store.commit(
            Manifest(version=version, num_updates=1, cursor=0, parts=(part,), lengths={"a": 1}, config={"seed": 0.5})
        )
    return store


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["rank-0.safetensors", "manifest.json"]), place=st.integers(0, 10**6), bit=st.integers(0, 7)
)
def test_one_flipped_bit_is_refused_by_name_and_the_checkpoint_before_is_used(
    name: str, place: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = two_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    file = store.directory / "version-000002" / name
    damaged = bytearray(file.read_bytes())
    damaged[place % len(damaged)] ^= 1 << bit
    file.write_bytes(damaged)
    warnings: list[str] = []
    newest = store.newest(warnings.append)
    assert newest is not None
    if newest.manifest.version == 2:  # white space between two tokens of the manifest: nothing is lost with it
        assert name == "manifest.json"
        assert newest.manifest == two_checkpoints(tmp_path_factory.mktemp("again")).load(2).manifest
        return
    assert newest.manifest.version == 1
    assert len(warnings) == 1
    assert str(file) in warnings[0]


def test_if_no_checkpoint_is_whole_each_is_named(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    for version in (1, 2):
        (store.directory / f"version-{version:06d}" / "rank-0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)version-000002.*version-000001"):
        store.newest(lambda sentence: None)


def test_the_newest_few_are_kept_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, best=lambda versions: 1)
    for version in range(1, 6):
        hidden = store.begin(version)
        part = write_part(hidden, "rank-0.safetensors", {})
        store.commit(Manifest(version=version, num_updates=1, cursor=0, parts=(part,), lengths={}, config={}))
    assert store.versions() == [1, 4, 5]


_FULL = """
set -e
mount -t tmpfs -o size=256k tmpfs "$1"
"$2" - "$1" <<'PYTHON'
import sys
from pathlib import Path
from onbeat.checkpoint import CheckpointStore, Manifest, Tensor, write_part
from onbeat.errors import CheckpointError
store = CheckpointStore(Path(sys.argv[1]), keep=2)
for version, size in ((1, 100_000), (2, 300_000)):
    try:
        hidden = store.begin(version)
        part = write_part(hidden, "rank-0.safetensors", {"weight": Tensor("U8", (size,), memoryview(bytes(size)))})
        store.commit(Manifest(version=version, num_updates=1, cursor=0, parts=(part,), lengths={}, config={}))
    except CheckpointError as error:
        print(error)
print(store.newest(print).manifest.version)
print(*(path.name for path in store.directory.rglob("*.safetensors")))
PYTHON
"""


def test_a_full_disk_is_a_sentence_with_path_and_bytes_and_the_last_good_checkpoint_loads(tmp_path: Path) -> None:
    command = ["unshare", "--mount", "bash", "-c", _FULL, "bash", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("a small file system cannot be mounted here")
    sentence, newest, parts = done.stdout.splitlines()
    assert sentence.startswith("cannot write the 300,")
    assert f"{tmp_path}/.version-000002/rank-0.safetensors: No space left on device" in sentence
    assert newest == "1"
    assert parts == "rank-0.safetensors"  # what was written of the other does not keep the disk full
