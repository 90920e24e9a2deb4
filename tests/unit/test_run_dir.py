"""The run's directory: one writer, no run overwritten, and a resumed run that is the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.checkpoint import CheckpointStore, Manifest, write_part
from onbeat.cli import main
from onbeat.config import Config
from onbeat.errors import CheckpointError, ConfigError
from onbeat.recipe import load
from onbeat.run_dir import RunDir, held_by, open_run_dir, seal
from tests.fakes.runs import RECIPE


def config(run_dir: Path, **overrides: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return load([RECIPE], {"run.dir": str(run_dir), **keys})


def opened(configuration: Config, *, resume: bool = False) -> tuple[RunDir, list[str]]:
    told: list[str] = []
    with open_run_dir(configuration, resume=resume, say=told.append, warn=told.append) as run_dir:
        return run_dir, told


def begun(path: Path, versions: tuple[int, ...] = ()) -> Config:
    """A directory as a run leaves it that has trained four periods."""
    configuration = config(path)
    opened(configuration)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (path / name).write_text("".join(json.dumps({"period": n}) + "\n" for n in range(4)))
    for period in range(4):
        (path / "rollouts" / f"period-{period:06d}.jsonl").touch()
    store = CheckpointStore(path / "checkpoints", keep=9)
    for version in versions:
        part = write_part(store.begin(version), "rank-0.safetensors", {})
        lengths = {"ledger.jsonl": 14 * version, "metrics.jsonl": 14 * version}
        manifest = Manifest(
            version=version,
            num_updates=1,
            cursor=0,
            parts=(part,),
            lengths=lengths,
            digests=seal(path, lengths),
            config={},
        )
        store.commit(manifest)
    return configuration


def test_no_period_of_an_earlier_run_is_overwritten(tmp_path: Path) -> None:
    configuration = begun(tmp_path)
    with pytest.raises(ConfigError, match=r"already holds a run; go on with it by --resume"):
        opened(configuration)


def test_a_second_run_in_the_same_directory_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom onbeat.recipe import load\nfrom onbeat.run_dir import open_run_dir\n"
        "with open_run_dir(load([sys.argv[1]], {'run.dir': sys.argv[2]}), resume=False, say=print, warn=print):\n"
        "    print('here', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, RECIPE, str(tmp_path)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"here\n"
        for resume in (False, True):
            with pytest.raises(ConfigError, match=rf"a run that is still going \(process {first.pid}\)"):
                opened(config(tmp_path), resume=resume)
        first.kill()
        first.wait()
    opened(config(tmp_path))


def test_resuming_cuts_back_what_was_written_after_the_checkpoint(tmp_path: Path) -> None:
    run_dir, told = opened(begun(tmp_path, versions=(1, 3)), resume=True)
    assert run_dir.checkpoint is not None
    assert run_dir.checkpoint.manifest.version == 3
    assert [json.loads(line)["period"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert sorted(os.listdir(tmp_path / "rollouts")) == [f"period-{period:06d}.jsonl" for period in range(3)]
    assert any("resuming from" in line and "after 3 periods" in line for line in told)


def test_resuming_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    run_dir, told = opened(begun(tmp_path), resume=True)
    assert run_dir.checkpoint is None
    assert not (tmp_path / "ledger.jsonl").exists()
    assert os.listdir(tmp_path / "rollouts") == []
    assert told == ["there is no checkpoint yet: the run begins anew"]


def test_a_ledger_that_lost_lines_or_was_changed_is_no_base_and_the_checkpoint_before_it_is_used(
    tmp_path: Path,
) -> None:
    configuration = begun(tmp_path, versions=(1, 3))
    os.truncate(tmp_path / "ledger.jsonl", 20)
    run_dir, told = opened(configuration, resume=True)
    assert run_dir.checkpoint is not None
    assert run_dir.checkpoint.manifest.version == 1
    assert "ledger.jsonl is not what it was when version 3 was saved" in told[0]
    (tmp_path / "metrics.jsonl").write_text("x" * 14)
    with pytest.raises(CheckpointError, match=r"no checkpoint .* can be used: .*metrics.jsonl is not what it was"):
        opened(configuration, resume=True)


def test_checkpoints_that_were_refused_are_set_aside_and_do_not_push_out_the_good_one(tmp_path: Path) -> None:
    configuration = begun(tmp_path, versions=(1, 2, 3))
    for version in (2, 3):
        (tmp_path / "checkpoints" / f"version-{version:06d}" / "rank-0.safetensors").write_bytes(b"damaged")
    run_dir, _ = opened(configuration, resume=True)
    assert run_dir.checkpoint is not None
    assert run_dir.checkpoint.manifest.version == 1
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.prune()
    assert store.versions() == [1]
    assert (tmp_path / "checkpoints" / "refused-version-000003").is_dir()


def test_a_run_that_is_further_than_the_recipe_wants_is_not_cut(tmp_path: Path) -> None:
    begun(tmp_path, versions=(3,))
    with pytest.raises(ConfigError, match=r"--resume: 3 periods are done, and schedule.periods = 2"):
        opened(config(tmp_path, schedule__periods=2), resume=True)
    assert (tmp_path / "ledger.jsonl").read_text().count("\n") == 4


def test_a_finished_model_stays_until_a_newer_one_takes_its_place(tmp_path: Path) -> None:
    configuration = begun(tmp_path, versions=(3,))
    (tmp_path / "model").mkdir()
    opened(configuration, resume=True)
    assert (tmp_path / "model").is_dir()


def test_whoever_may_read_is_told_which_process_holds_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert held_by(tmp_path) is None
    with open_run_dir(config(tmp_path), resume=False, say=print, warn=print):
        assert held_by(tmp_path) == str(os.getpid())
        assert main(["status", str(tmp_path)]) == 2
        assert f"is going on (process {os.getpid()}), but gives no answer" in capsys.readouterr().err
    assert held_by(tmp_path) is None


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run; leave --resume out"):
        opened(config(tmp_path / "new"), resume=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 1), ("trainer.learning_rate", 1.0), ("sampling.temperature", 0.5), ("schedule.order", "completion"),
     ("algorithm.group_size", 3), ("trainer.pack_tokens", 5), ("data.path", "other.jsonl"), ("trainer.threads", 2)],
)  # fmt: skip
def test_a_key_that_would_make_it_another_run_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    begun(tmp_path, versions=(3,))
    with pytest.raises(ConfigError, match=f"--resume: {key} was .* when the run began and is .* now"):
        opened(config(tmp_path, **{key.replace(".", "__"): value}), resume=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [("generator.count", 3), ("schedule.mode", "sync"), ("schedule.periods", 99), ("checkpoint.every", 1),
     ("reward.workers", 2), ("run.rollout_groups", 1), ("evaluation.every", 2)],
)  # fmt: skip
def test_a_key_that_may_change_is_told(tmp_path: Path, key: str, value: Any) -> None:
    begun(tmp_path, versions=(3,))
    _, told = opened(config(tmp_path, **{key.replace(".", "__"): value}), resume=True)
    assert any(line.startswith(f"resuming with {key} = {value!r} (was ") for line in told)


def test_more_periods_are_refused_if_the_learning_rate_falls_over_all_of_them(tmp_path: Path) -> None:
    opened(config(tmp_path, trainer__lr_schedule="linear"))
    with pytest.raises(ConfigError, match="but the learning rate falls over all of them"):
        opened(config(tmp_path, trainer__lr_schedule="linear", schedule__periods=99), resume=True)
