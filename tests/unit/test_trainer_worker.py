"""What the trainer's process does besides answering."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from onbeat.messages import TakeSnapshot, ToTrainer
from onbeat.recipe import from_tree
from onbeat.training.trainer import PolicyTrainer
from onbeat.training.worker import TrainerWorker
from onbeat.wire import Channel
from tests.fakes.models import tiny_model


def blocks() -> set[int]:
    """Snapshots' memory that this process has open."""
    paths = [path for fd in os.listdir("/proc/self/fd") if os.path.lexists(path := f"/proc/self/fd/{fd}")]
    return {os.stat(path).st_ino for path in paths if "onbeat-weights" in os.readlink(path)}


@pytest.mark.parametrize(("num_updates", "num_blocks"), [(0, 2), (2, 2), (4, 1)])
def test_memory_for_the_next_version_is_made_once_one_is_out_if_there_will_be_a_next(
    tmp_path: Path, num_updates: int, num_blocks: int
) -> None:
    """Three periods of two updates: the one that begins with the fourth update is the last."""
    tiny_model("llama").save_pretrained(tmp_path)
    config = from_tree(
        {
            "model": {"path": str(tmp_path)},
            "data": {"path": "unused.jsonl"},
            "reward": {"functions": [{"path": "exact_match"}]},
            "schedule": {"updates_per_period": 2, "periods": 3},
        }
    )
    trainer = PolicyTrainer(config, str(tmp_path))
    trainer.num_updates = num_updates
    before = blocks()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        TrainerWorker(Channel(ours, ToTrainer), trainer, tmp_path)._handle(TakeSnapshot(num_updates // 2))
        assert len(blocks() - before) == num_blocks
    trainer._writer.close()
