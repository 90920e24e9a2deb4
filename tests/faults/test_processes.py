"""Processes that die: nothing is left behind, nothing is lost, and the one who looks is told why."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from onbeat.cluster.forkserver import ForkServer, Spawn, SpawnFailed
from onbeat.wire import Channel
from tests.fakes.processes import RunProcess
from tests.fakes.runs import run_digests, train_digests


def kill_the_controller(run_dir: Path, moment_s: float | None) -> int:
    """SIGKILL after `moment_s`, or in the second period; returns how many processes there were then."""
    shared_memory = set(os.listdir("/dev/shm"))
    run = RunProcess(run_dir, generator__count=2, schedule__periods=1000)
    if moment_s is None:
        run.wait_for_line("period 1/")
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(timeout=moment_s)
    count = len(run.alive())
    run.process.kill()
    run.process.wait()
    assert run.wait_until_all_gone() == {}
    assert run.sockets_left() == []
    assert set(os.listdir("/dev/shm")) == shared_memory
    return count


def test_sigkill_of_the_controller_leaves_nothing_behind(tmp_path: Path) -> None:
    counts = [kill_the_controller(tmp_path / str(moment_s), moment_s) for moment_s in (0.3, 2.0, None)]
    assert max(counts) >= 6  # controller, two fork servers, trainer, generators, reward worker


@pytest.mark.full
def test_sigkill_of_the_controller_at_20_random_moments_leaves_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(20)
    counts = [kill_the_controller(tmp_path / str(number), rng.uniform(0.1, 12.0)) for number in range(20)]
    assert max(counts) >= 6


@pytest.mark.integration
def test_a_killed_generators_groups_are_sent_again_and_the_weights_are_the_same(tmp_path: Path) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=20)
    run = RunProcess(tmp_path / "disturbed", schedule__periods=20, generator__count=3)
    run.wait_for_line("period 3/")
    os.kill(run.pid_of("generator-0"), signal.SIGKILL)
    run.wait_for_line("period 9/")
    os.kill(run.pid_of("generator-2"), signal.SIGKILL)
    code, _, errors = run.finish()
    assert code == 0, errors
    assert errors.count("generator-0 died (status -9)") == 1
    assert errors.count("generator-2 died (status -9)") == 1
    assert run_digests(tmp_path / "disturbed") == undisturbed


@pytest.mark.integration
def test_the_only_generator_is_replaced_when_it_dies_and_the_weights_are_the_same(tmp_path: Path) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=10)
    run = RunProcess(tmp_path / "disturbed", schedule__periods=10)
    run.wait_for_line("period 2/")
    os.kill(run.pid_of("generator-0"), signal.SIGKILL)
    code, output, errors = run.finish()
    assert code == 0
    assert "generator-0 died (status -9)" in errors
    assert "generator-1 has joined; there are 1 generators" in output
    assert run_digests(tmp_path / "disturbed") == undisturbed


def test_the_death_of_the_trainer_ends_the_run_with_its_name_and_code_4(tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", schedule__periods=1000)
    run.wait_for_line("period 2/")
    os.kill(run.pid_of("trainer-0"), signal.SIGKILL)
    code, _, errors = run.finish()
    assert code == 4
    assert "trainer-0 died (status -9)" in errors
    assert "Traceback" not in errors
    assert run.wait_until_all_gone() == {}


@pytest.mark.integration
def test_a_killed_reward_worker_is_replaced_and_the_weights_are_the_same(tmp_path: Path) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=10)
    run = RunProcess(tmp_path / "disturbed", schedule__periods=10)
    run.wait_for_line("period 2/")
    os.kill(run.pid_of("reward-0"), signal.SIGKILL)
    code, _, errors = run.finish()
    assert (code, errors) == (0, "")
    assert run_digests(tmp_path / "disturbed") == undisturbed
    assert len(list((tmp_path / "disturbed" / "logs").glob("reward-0*"))) == 2


def test_a_fork_that_fails_is_told_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("os.fork", no_more)
    order = Spawn(name="generator-9", entry="none:none", settings=b"", log="none")
    ForkServer(theirs)._spawn(order, os.open(os.devnull, os.O_RDONLY))
    told = Channel[SpawnFailed](ours, SpawnFailed).recv()
    assert told == SpawnFailed("generator-9", "[Errno 11] Resource temporarily unavailable")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_with_code_130_and_leaves_no_process(signum: signal.Signals, tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", schedule__periods=1000)
    run.wait_for_line("period 2/")
    run.process.send_signal(signum)
    code, _, errors = run.finish()
    assert code == 130
    assert errors.strip().splitlines()[-1] == "onbeat: interrupted"
    assert "Traceback" not in errors
    assert run.wait_until_all_gone() == {}


def test_a_generator_that_cannot_start_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "nothing-known"}')
    (tmp_path / "broken" / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    run = RunProcess(tmp_path / "run", model__path=str(tmp_path / "broken"))
    code, _, errors = run.finish()
    assert code == 4
    assert "cannot be loaded as a causal language model" in errors
    assert "Traceback" not in errors
    assert run.wait_until_all_gone() == {}
