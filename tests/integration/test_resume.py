"""Killed, interrupted, resumed: the run that comes out is the undisturbed one, bit for bit (R5)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.processes import marked_processes
from tests.fakes.runs import RECIPE, sha256

PERIODS = 12
MARK = "ONBEAT_TEST_MARK"
"""In the environment of every process of a run."""
KILLS = 3
"""Of one run."""
OF_THE_MACHINE = {
    "num_generators",
    "num_duplicate_messages",
    "num_late_messages",
    "num_resent_samples",
    "num_hedged_samples",
    "num_lost_generators",
}
"""Metrics of who did the work and what was asked of two: how busy the machine is decides, in every run anew."""
FLAGS = [
    f"--schedule.periods={PERIODS}",
    "--checkpoint.every=2",
    "--schedule.updates_per_period=2",
    "--evaluation.every=4",
    "--generator.count=2",
    f"--reward.environment=['{MARK}']",
]


def command(run_dir: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "onbeat.cli", "train", RECIPE, *FLAGS, f"--run.dir={run_dir}", *more]


def left_behind(run_dir: Path) -> tuple[str, str, str, list[dict[str, object]], list[str]]:
    """Digests of weights, optimizer state and ledger; metrics of what was computed; the files of rollouts."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(m.keys() >= OF_THE_MACHINE for m in metrics)
    computed = [{k: v for k, v in m.items() if not k.endswith("_s") and k not in OF_THE_MACHINE} for m in metrics]
    return (
        sha256(run_dir / "model" / "model.safetensors"),
        sha256(run_dir / "checkpoints" / f"version-{PERIODS:06d}" / "rank-0.safetensors"),
        sha256(run_dir / "ledger.jsonl"),
        computed,
        sorted(sha256(file) for file in (run_dir / "rollouts").iterdir()),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(command(run_dir), check=True, capture_output=True)
    return run_dir


def wait_for_periods(run_dir: Path, process: subprocess.Popen[bytes], num_periods: int) -> None:
    """Until so many are written down, or the process has ended."""
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None and (metrics.read_bytes().count(b"\n") if metrics.exists() else 0) < num_periods:
        time.sleep(0.002)


def killed_and_resumed(run_dir: Path, seed: int) -> int:
    """SIGKILL the whole run at random moments until it gets through; how often."""
    rng = random.Random(seed)
    kills, done = 0, 0
    while True:
        resume = ["--resume"] if (run_dir / "config.toml").exists() else []
        process = subprocess.Popen(command(run_dir, *resume), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done += rng.randint(1, 3)
        if kills < KILLS:
            wait_for_periods(run_dir, process, done)
            time.sleep(rng.random() * 0.2)
            process.kill()
        output, _ = process.communicate()
        if process.returncode == 0:
            return kills
        assert process.returncode == -signal.SIGKILL, output.decode()
        kills += 1
        metrics = run_dir / "metrics.jsonl"
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.integration if seed < 1 else pytest.mark.full) for seed in range(10)]
)
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(
    undisturbed: Path, tmp_path: Path, seed: int
) -> None:
    assert killed_and_resumed(tmp_path / "run", seed) == KILLS
    assert left_behind(tmp_path / "run") == left_behind(undisturbed)


@pytest.mark.integration
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved_leaves_nothing_running_and_goes_on(
    undisturbed: Path, tmp_path: Path, how: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, "--checkpoint.every=0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, MARK: str(run_dir)},
    )
    wait_for_periods(run_dir, process, 3)
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    assert b"go on with --resume" in output
    saved = sorted(os.listdir(run_dir / "checkpoints"))
    assert len(saved) == 1
    assert saved[0] >= "version-000003"
    assert marked_processes(f"{MARK}={run_dir}") == {}
    subprocess.run(command(run_dir, "--resume"), check=True, capture_output=True)
    assert left_behind(run_dir) == left_behind(undisturbed)


INTERRUPTS = 3


def interrupted_and_resumed(run_dir: Path, seed: int) -> int:
    """Ctrl-C or SIGTERM at random moments, each of which must keep every period that was done; how often."""
    rng = random.Random(seed)
    interrupts, done = 0, 0
    while True:
        resume = ["--resume"] if (run_dir / "config.toml").exists() else []
        flags = ["--checkpoint.every=3", "--evaluation.every=1"]
        process = subprocess.Popen(
            command(run_dir, *flags, *resume), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        done += 1
        if interrupts < INTERRUPTS:
            wait_for_periods(run_dir, process, done)
            time.sleep(rng.random() * 0.1)
            process.send_signal(rng.choice([signal.SIGINT, signal.SIGTERM]))
        output, errors = process.communicate(timeout=60)
        if process.returncode == 0:
            return interrupts
        assert (process.returncode, errors) == (130, "onbeat: interrupted\n"), output + errors
        interrupts += 1
        metrics = run_dir / "metrics.jsonl"
        done = metrics.read_bytes().count(b"\n")
        assert f"go on with --resume, from {run_dir}/checkpoints/version-{done:06d}" in output


@pytest.mark.integration
def test_interrupts_at_any_moment_lose_no_period(undisturbed: Path, tmp_path: Path) -> None:
    assert interrupted_and_resumed(tmp_path / "run", seed=0) == INTERRUPTS
    after, before = left_behind(tmp_path / "run"), left_behind(undisturbed)
    assert after == before


@pytest.mark.integration
def test_a_second_interrupt_ends_the_run_at_once_and_it_goes_on_from_its_checkpoint(
    undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: str(run_dir)},
    )
    wait_for_periods(run_dir, process, 5)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # two signals of one kind may be taken for one
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT, -signal.SIGTERM), errors
    assert "Traceback" not in errors
    assert marked_processes(f"{MARK}={run_dir}") == {}
    subprocess.run(command(run_dir, "--resume"), check=True, capture_output=True)
    assert left_behind(run_dir) == left_behind(undisturbed)


@pytest.mark.integration
def test_a_run_with_other_data_does_not_go_on(tmp_path: Path) -> None:
    run_dir, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(10, 40)))
    flags = [f"--data.path={rows}", "--schedule.periods=2", "--checkpoint.every=1"]
    subprocess.run(command(run_dir, *flags), check=True, capture_output=True)
    with rows.open("a") as file:
        file.write('{"prompt": "5+5=", "answer": "10"}\n')
    more = command(run_dir, *flags, "--schedule.periods=3", "--resume")
    refused = subprocess.run(more, capture_output=True, text=True, check=False)
    assert refused.returncode == 6
    assert "--resume: the prompts to train on are not what was there" in refused.stderr
    assert (run_dir / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.integration
def test_a_checkpoint_becomes_a_model_directory(undisturbed: Path, tmp_path: Path) -> None:
    def export(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "onbeat.cli", "export", str(undisturbed), *words]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    newest = export(str(tmp_path / "newest"), "--version", str(PERIODS))
    assert newest.stdout == f"model: {tmp_path}/newest, of version {PERIODS}\n", newest.stderr
    for name in os.listdir(undisturbed / "model"):
        assert sha256(tmp_path / "newest" / name) == sha256(undisturbed / "model" / name), name
    records = [json.loads(line) for line in (undisturbed / "evaluations.jsonl").read_text().splitlines()]
    kept = {int(name.removeprefix("version-")) for name in os.listdir(undisturbed / "checkpoints")}
    best = max((r for r in records if r["version"] in kept), key=lambda record: record["accuracy"])["version"]
    assert export(str(tmp_path / "best")).stdout == f"model: {tmp_path}/best, of version {best}\n"
    assert "exists; name a directory that is to be made" in export(str(tmp_path / "best")).stderr
    assert f"has no checkpoint of version 1; it has {sorted(kept)}" in export(str(tmp_path / "x"), "--version=1").stderr


_SMALL_DISK = """
mount -t tmpfs -o size="$1" tmpfs "$2" || exit 77
shift 2
"$@"
echo "first: $?"
mount -o remount,size=500m "$0"
"$@" --resume > /dev/null
echo "resumed: $?"
cp -r "$0/run" "$0.kept"
"""


@pytest.mark.integration
def test_a_run_on_a_disk_that_fills_up_says_so_and_goes_on_when_there_is_room(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Room for two checkpoints and a half."""
    part = (undisturbed / "checkpoints" / f"version-{PERIODS:06d}" / "rank-0.safetensors").stat().st_size
    disk = tmp_path / "disk"
    disk.mkdir()
    train = command(disk / "run", "--checkpoint.keep=5")
    script = ["unshare", "--mount", "bash", "-c", _SMALL_DISK, str(disk), str(int(2.5 * part)), str(disk), *train]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "not permitted" in done.stderr:
        pytest.skip("a small file system cannot be mounted here")
    assert "first: 6\n" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert f"{disk}/run" in done.stderr
    assert "No space left on device" in done.stderr or "is full" in done.stderr
    assert "resumed: 0\n" in done.stdout, done.stdout + done.stderr
    assert left_behind(tmp_path / "disk.kept") == left_behind(undisturbed)
