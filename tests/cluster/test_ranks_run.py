"""Whole runs whose trainer has several ranks: exact, elastic, resumable on another number of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import onbeat
from tests.fakes.processes import RunProcess
from tests.fakes.runs import RECIPE, SMALL, run_digests, train_digests

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"trainer.ranks": 2},
    "sharded": {"trainer.ranks": 2, "trainer.shard": True},
    "tensor parallel": {"trainer.ranks": 2, "trainer.tensor_parallel": 2},
    "sharded and tensor parallel": {"trainer.ranks": 4, "trainer.tensor_parallel": 2, "trainer.shard": True},
}
OFTEN = ("sharded",)
"""In CI."""


def keys(layout: str) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in LAYOUTS[layout].items()}


def weights(run_dir: Path) -> Any:
    return load_file(run_dir / "model" / "model.safetensors")


def change(before: Any, after: Any) -> float:
    """How far apart two sets of weights are, as a norm."""
    return float(sum(((before[name] - after[name]).double() ** 2).sum() for name in before)) ** 0.5


@pytest.mark.parametrize(
    "layout", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_sync_and_periodic_and_any_number_of_generators_give_the_same_bits(tmp_path: Path, layout: str) -> None:
    more = {"algorithm__beta": 0.05, "schedule__updates_per_period": 2, **keys(layout)}
    first = train_digests(tmp_path / "sync", schedule__mode="sync", **more)
    assert train_digests(tmp_path / "periodic", generator__count=2, **more) == first
    environment = json.loads((tmp_path / "periodic" / "environment.json").read_text())
    assert environment["exact"] is True
    assert environment["ranks"].startswith(str(LAYOUTS[layout]["trainer.ranks"]))


@pytest.mark.full
def test_two_ranks_and_one_train_the_same_model_up_to_rounding(tmp_path: Path) -> None:
    """One period: after it the rounding of one could make another token of the other."""
    for name, more in {"one": {}, **{name: keys(name) for name in ("replicated", "sharded")}}.items():
        train_digests(tmp_path / name, schedule__periods=1, trainer__learning_rate=1e-3, **more)
    one = weights(tmp_path / "one")
    size = change(one, {name: value * 0 for name, value in one.items()})
    for name in ("replicated", "sharded"):
        assert change(one, weights(tmp_path / name)) < 1e-4 * size


def test_more_trainer_ranks_are_asked_for_while_it_runs(tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", schedule__periods=12)
    run.wait_for_period(2)
    scaled = scale(tmp_path / "run", "trainer=2")
    assert "2 trainer ranks instead of 1" in scaled.stdout, scaled.stderr
    told = run.wait_for_line("2 trainer ranks instead of 1")
    assert "from version" in told
    run.wait_for_line("period ")
    assert {name for name in run.alive().values() if name.startswith("trainer-")} == {"trainer-0-1", "trainer-1-1"}
    refused = scale(tmp_path / "run", "trainer=0")
    assert refused.returncode != 0
    assert "between 1 and" in refused.stderr
    scale(tmp_path / "run", "trainer=1")
    code, output, errors = run.finish()
    assert code == 0, errors
    assert "1 trainer ranks instead of 2" in output
    ledger = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert len(ledger) == 12 * 13, "a slot was lost or trained twice"


def scale(run_dir: Path, what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onbeat.cli", "scale", str(run_dir), what]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_run_goes_on_with_other_ranks_from_the_same_weights(tmp_path: Path) -> None:
    """2 → 1 → 2 ranks, sharded and not; that the state is the same bits is tests/cluster/test_ranks.py's."""
    train_digests(tmp_path / "run", trainer__ranks=2, trainer__shard=True, checkpoint__every=1)
    before = run_digests(tmp_path / "run")
    for periods, more in ((4, {"trainer.ranks": 1}), (5, {"trainer.ranks": 2})):
        overrides = {**SMALL, "run.dir": str(tmp_path / "run"), "schedule.periods": periods, "checkpoint.every": 1}
        result = onbeat.train(RECIPE, overrides=overrides | more, resume=True)
        assert len(result.metrics) == periods
    assert run_digests(tmp_path / "run") != before
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert len(ledger) == 5 * 13


def test_the_death_of_a_rank_ends_the_run_with_its_name_and_it_can_be_resumed(tmp_path: Path) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=8, trainer__ranks=2, trainer__shard=True)
    run = RunProcess(
        tmp_path / "run", schedule__periods=8, trainer__ranks=2, trainer__shard="true", checkpoint__every=1
    )  # fmt: skip
    run.wait_for_period(3)
    os.kill(run.pid_of("trainer-1"), signal.SIGKILL)
    code, _, errors = run.finish()
    assert code == 4
    assert "trainer-1 died (status -9)" in errors or "trainer-0" in errors
    assert run.wait_until_all_gone() == {}
    overrides = {
        **SMALL, "run.dir": str(tmp_path / "run"), "schedule.periods": 8, "checkpoint.every": 1, **LAYOUTS["sharded"],
    }  # fmt: skip
    onbeat.train(RECIPE, overrides=overrides, resume=True)
    assert run_digests(tmp_path / "run") == undisturbed
