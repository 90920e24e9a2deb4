"""A run as people live with it: asked from another shell what it waits for, watched on a terminal, read afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import onbeat
from onbeat.cli import main
from tests.fakes.runs import RECIPE, ROOT

GATED_REWARD = """
import os

def gated(completions, gate, **columns):
    with open(gate[0], "rb") as waits_for_a_writer:
        waits_for_a_writer.read()
    return [float(len(completion)) for completion in completions]
"""


def status_of(run_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "onbeat.cli", "status", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def asked_by_another_user(run_dir: Path) -> bytes:
    script = (
        "import os, socket, sys\nfrom pathlib import Path\nfrom onbeat.control import AskStatus, address\n"
        "from onbeat.wire import frame\nname = address(Path(sys.argv[1]))\nos.setuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX)\nsock.connect(name)\n"
        "try:\n    sock.sendall(frame(AskStatus()))\n    sys.stdout.buffer.write(sock.recv(100))\n"
        "except OSError:\n    pass\n"
    )
    return subprocess.run([sys.executable, "-c", script, str(run_dir)], capture_output=True, check=True).stdout


@pytest.mark.integration
def test_status_from_another_shell_tells_what_exactly_a_run_waits_for(tmp_path: Path) -> None:
    """The reward function hangs on a pipe until the test opens it."""
    gate, run_dir = tmp_path / "gate", tmp_path / ("a long directory name " * 6) / "run"
    os.mkfifo(gate)
    (tmp_path / "rewards.py").write_text(GATED_REWARD)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "gate": str(gate)}) + "\n")
    flags = [
        f"--data.path={tmp_path}/rows.jsonl", f"--data.eval_path={tmp_path}/rows.jsonl", "--evaluation.samples=0",
        f'--reward.functions=[{{path = "{tmp_path}/rewards.py:gated"}}]', "--schedule.periods=1",
        "--schedule.prompts_per_period=2", f"--run.dir={run_dir}", "--reward.timeout_s=600",
    ]  # fmt: skip
    command = [sys.executable, "-m", "onbeat.cli", "train", RECIPE, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not (run_dir / "config.toml").exists():
            assert process.poll() is None, process.communicate()[0].decode()
            time.sleep(0.01)
        while "scoring" not in (status := status_of(run_dir))["waiting_for"]:
            assert process.poll() is None, process.communicate()[0].decode()
        if os.getuid() == 0:
            assert asked_by_another_user(run_dir) == b""
        assert (status["pid"], status["phase"], status["period"], status["num_periods"]) == (
            process.pid,
            "training",
            0,
            1,
        )
        assert {worker["name"] for worker in status["workers"]} == {"trainer-0", "generator-0", "reward-0"}
        assert all(Path(f"/proc/{worker['pid']}").exists() for worker in status["workers"])
        assert [worker["state"] for worker in status["workers"] if worker["name"] == "reward-0"] == ["scoring"]
        scoring = [group for group in status["groups"] if group["state"] == "scoring"]
        assert scoring
        assert all(group["num_done"] == group["num_samples"] and group["age_s"] > 0 for group in scoring)
        while process.poll() is None:  # open the gate for every call that comes to it
            try:
                os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                time.sleep(0.01)
        assert process.returncode == 0, process.stdout.read().decode() if process.stdout else ""
    status = status_of(run_dir)
    assert (status["pid"], status["phase"], status["period"]) == (None, "not running", 1)
    assert "finished" in status["waiting_for"]


def test_status_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is not the directory of a run: it has no config.toml" in capsys.readouterr().err


@pytest.mark.integration
def test_evaluations_on_the_way_checkpoints_and_rollouts_are_left_to_read(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = {
        "run.dir": str(run_dir), "schedule.periods": 6, "evaluation.every": 2, "evaluation.samples": 3,
        "checkpoint.every": 2, "checkpoint.keep": 1, "run.rollout_groups": 2, "track.tensorboard": True,
    }  # fmt: skip
    result = onbeat.train(RECIPE, overrides=keys)
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [record["version"] for record in evaluations] == [0, 2, 4, 6]
    assert all(0.0 <= record["pass@1"] <= record["pass@3"] <= 1.0 for record in evaluations)
    assert (evaluations[0]["accuracy"], evaluations[-1]["accuracy"]) == (result.accuracy_before, result.accuracy_after)
    best = max(evaluations, key=lambda record: record["accuracy"])["version"]
    kept = {int(name.removeprefix("version-")) for name in os.listdir(run_dir / "checkpoints")}
    assert kept == {6, best} - {0}
    with safe_open(run_dir / "checkpoints" / "version-000006" / "rank-0.safetensors", framework="np") as part:
        assert int(part.get_tensor("num_updates")) == 6
    for period in range(6):
        lines = (run_dir / "rollouts" / f"period-{period:06d}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        assert len(rollouts) == 2 * 8
        assert all(set("0123456789+=") >= set(rollout["prompt"]) for rollout in rollouts)
        assert {rollout["reward"] for rollout in rollouts} <= {0.0, 1.0}
    assert list((run_dir / "tensorboard").iterdir())


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_on_a_terminal_the_run_is_shown_live_and_lines_scroll_above(tmp_path: Path) -> None:
    socket, run_dir = tmp_path / "tmux", tmp_path / "run"

    def tmux(*words: str) -> str:
        command = ["tmux", "-S", str(socket), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    train = f"{sys.executable} -m onbeat.cli train {RECIPE} --schedule.periods=25 --run.dir={run_dir}"
    tmux("new-session", "-d", "-x", "150", "-y", "50", "-s", "run", f"cd {ROOT} && {train}; echo ended; read")
    try:
        screens = []
        while not any("ended" in screen for screen in screens[-1:]):
            screens.append(tmux("capture-pane", "-p", "-t", "run"))
            time.sleep(0.05)
    finally:
        tmux("kill-server")
    live = [screen for screen in screens if "waits for" in screen]
    assert live
    assert any("trainer-0" in screen and "generator-0" in screen and "groups done" in screen for screen in live)
    assert any("period 3/25  reward" in screen for screen in screens)
    assert "waits for" not in screens[-1]
    assert "model:" in screens[-1]


@pytest.mark.integration
def test_into_a_file_the_same_run_writes_plain_lines(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "onbeat.cli", "train", RECIPE, "--schedule.periods=3", f"--run.dir={tmp_path}/run"]
    with (tmp_path / "output").open("w") as file:
        subprocess.run(train, stdout=file, stderr=file, check=True, cwd=ROOT)
    text = (tmp_path / "output").read_text()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("period ")] == ["1/3", "2/3", "3/3"]
    assert lines[-1] == f"model: {tmp_path}/run/model"


@pytest.mark.integration
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    train = f"{sys.executable} -m onbeat.cli train {RECIPE} --schedule.periods=3 --run.dir={tmp_path}/run | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {train}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.integration
def test_a_model_is_evaluated_and_talked_to_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = onbeat.train(RECIPE, overrides={"run.dir": str(tmp_path / "run"), "schedule.periods": 3})
    capsys.readouterr()
    assert main(["eval", str(result.model_path), RECIPE, "--evaluation.samples", "2"]) == 0
    out = capsys.readouterr().out
    assert f"accuracy {result.accuracy_after}" in out
    assert "pass@2" in out
    done = subprocess.run(
        [sys.executable, "-m", "onbeat.cli", "sample", str(result.model_path), "27+15=", "--sampling.temperature", "0"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip().isdigit()
    done = subprocess.run(
        [sys.executable, "-m", "onbeat.cli", "sample", str(result.model_path)],
        input="27+15=\n\n31+11=\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 2
