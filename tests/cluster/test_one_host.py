"""Runs on Ray, on one host: the weights and the ledger are those of the local launcher, whatever happens to actors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onbeat
from onbeat.cluster import meeting
from onbeat.errors import WorkerError
from tests.cluster.hosts import LOOPBACK_ENVIRONMENT, RAY_ENVIRONMENT, RayNode
from tests.fakes.processes import RunProcess
from tests.fakes.runs import RECIPE, SMALL, run_digests, train_digests
from tests.integration.test_elastic_run import TOLD, faulty, listeners, records, scale, worker

pytestmark = pytest.mark.cluster
RAY = {"cluster__launcher": "ray"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray of one node on loopback, with eight CPUs and two of something else."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="obray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {**RAY_ENVIRONMENT, **LOOPBACK_ENVIRONMENT}.items():
            patch.setenv(name, value)
        where = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
        what = [
            "--num-cpus=8",
            '--resources={"slot": 2}',
            "--include-dashboard=false",
            "--object-store-memory=100000000",
        ]
        node = RayNode(tmp_path_factory.mktemp("ray") / "ray.log", [*where, *what], prefix=[], environment={})
        node.wait_until_started()
        yield f"127.0.0.1:{port}"
        node.stop()


def test_a_run_with_a_ray_of_its_own_ends_as_a_local_one_and_leaves_nothing_behind(tmp_path: Path) -> None:
    local = train_digests(tmp_path / "local", generator__count=2)
    before = set(Path(tempfile.gettempdir()).glob("onbeat-ray-*"))
    run = RunProcess(tmp_path / "run", generator__count=2, **RAY)
    run.wait_for_line("period 1/")
    places = listeners(run)
    code, _, errors = run.finish()
    assert code == 0, errors
    assert run_digests(tmp_path / "run") == local
    loopback = ("127.0.0.1:", "0000000000000000FFFF00000100007F:")
    assert [place for place in places if not place.startswith(loopback)] == []
    assert any(places), "Ray listens somewhere"
    assert run.wait_until_all_gone() == {}
    assert set(Path(tempfile.gettempdir()).glob("onbeat-ray-*")) == before


@pytest.mark.full
def test_when_the_controller_is_killed_its_ray_and_its_actors_end(tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", schedule__periods=1000, **RAY)
    run.wait_for_line("period 2/")
    names = set(run.alive().values())
    assert {"generator-0", "trainer-0", "raylet"} <= names
    run.process.kill()
    run.process.communicate()
    assert run.wait_until_all_gone() == {}


@pytest.mark.parametrize(("count", "periods"), [(4, 6), pytest.param(40, 40, marks=pytest.mark.full)], ids=["4", "40"])
def test_actors_killed_in_a_period_cost_nothing_and_their_last_words_are_told(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, count: int, periods: int
) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=periods)
    kinds = ["decode 3", "load 2", "reply 4", "prefill 2"]
    faults = [kinds[number % len(kinds)] for number in range(count)]
    keys = {"schedule__periods": periods, "cluster__address": cluster, **RAY}
    assert faulty(tmp_path / "run", faults, monkeypatch, **keys) == faults
    assert run_digests(tmp_path / "run") == undisturbed
    assert records(tmp_path / "run")[-1]["num_lost_generators"] == count
    deaths = [sentence for sentence in TOLD[tmp_path / "run"] if "died (status -9)" in sentence]
    assert len(deaths) == count
    assert all("The end of its log:" in death and "fault: " in death for death in deaths), deaths


@pytest.mark.full
def test_a_trainer_that_dies_ends_the_run_with_its_last_words_and_resume_goes_on(tmp_path: Path, cluster: str) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=60)
    keys: dict[str, Any] = {"schedule__periods": 60, "checkpoint__every": 1, "cluster__address": cluster, **RAY}
    run = RunProcess(tmp_path / "run", **keys)
    run.wait_for_line("period 3/")
    log = tmp_path / "run" / "logs" / "trainer-0.log"
    log.write_text("the last words of the trainer\n")
    os.kill(run.pid_of("trainer-0"), signal.SIGKILL)
    code, _, errors = run.finish()
    assert code == WorkerError.exit_code, errors
    assert "trainer-0 died (status -9)" in errors
    assert "the last words of the trainer" in errors
    names = {key.replace("__", "."): value for key, value in keys.items()}
    onbeat.train(RECIPE, overrides={**SMALL, **names, "run.dir": str(tmp_path / "run")}, resume=True)
    assert run_digests(tmp_path / "run") == undisturbed


def test_the_ranks_of_a_trainer_are_actors_and_another_number_of_them_is_placed(tmp_path: Path, cluster: str) -> None:
    ranks = {"trainer__ranks": 2, "trainer__shard": "true"}
    local = RunProcess(tmp_path / "local", **ranks)
    assert local.finish()[0] == 0
    keys: dict[str, Any] = {"cluster__address": cluster, **RAY}
    run = RunProcess(tmp_path / "run", **ranks, **keys)
    code, _, errors = run.finish()
    assert code == 0, errors
    assert run_digests(tmp_path / "run") == run_digests(tmp_path / "local")
    scaled = RunProcess(tmp_path / "scaled", schedule__periods=40, **keys)
    scaled.wait_for_period(2)
    assert scale(scaled.run_dir, 2, "trainer").returncode == 0
    scaled.wait_for_line("2 trainer ranks instead of 1 from version")
    code, _, errors = scaled.finish()
    assert code == 0, errors


@pytest.mark.full
def test_generators_join_leave_and_are_scaled_while_the_run_goes_on(tmp_path: Path, cluster: str) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=200)
    run = RunProcess(tmp_path / "run", schedule__periods=200, cluster__address=cluster, **RAY)
    run.wait_for_period(2)
    assert scale(run.run_dir, 3).returncode == 0
    while "there are 3 generators" not in run.wait_for_line("generator-"):
        pass
    visitor = worker(["--join", str(run.run_dir)])
    run.wait_for_joiner()
    assert scale(run.run_dir, 1).returncode == 0
    visitor.send_signal(signal.SIGTERM)
    assert "has left" in visitor.communicate(timeout=120)[0]
    code, _, errors = run.finish(timeout_s=300)
    assert code == 0, errors
    assert run_digests(tmp_path / "run") == undisturbed
    assert records(run.run_dir)[-1]["num_lost_generators"] == 0


@pytest.mark.full
def test_what_a_ray_of_ones_own_will_never_have_is_told_at_once(tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", generator__resources="{ CPU = 1, GPU = 8 }", **RAY)
    code, _, errors = run.finish()
    assert code == WorkerError.exit_code
    assert "generator.resources = { CPU = 1, GPU = 8 }, and no node of the cluster has that: 127.0.0.1 has" in errors


@pytest.mark.full
def test_what_is_not_placed_in_time_is_told_with_what_there_is(tmp_path: Path, cluster: str) -> None:
    keys = {"cluster__address": cluster, "cluster__wait_s": 1, "generator__resources": "{ slot = 1 }", **RAY}
    run = RunProcess(tmp_path / "run", generator__count=3, **keys)
    code, _, errors = run.finish()
    assert code == WorkerError.exit_code
    assert "was not placed within cluster.wait_s = 1 s: it asks for generator.resources = { slot = 1 }" in errors
    assert "127.0.0.1 has { CPU = 8, slot = 2 }" in errors


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    run = RunProcess(tmp_path / "run", cluster__address="127.0.0.1:9", **RAY)
    code, _, errors = run.finish()
    assert code == 2
    assert 'cluster.address = "127.0.0.1:9": nobody answers there' in errors


def test_the_runs_token_is_in_no_file_and_no_command_line(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = b"a-token-that-only-this-test-uses"
    monkeypatch.setattr(meeting.secrets, "token_bytes", lambda size: token)
    seen: list[bytes] = []

    def look() -> None:
        seen.extend(file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists())

    monkeypatch.setattr(meeting.Meeting, "close", _then(look, meeting.Meeting.close))
    train_digests(tmp_path / "run", cluster__address=cluster, **RAY)
    assert seen, "nobody looked"
    assert not any(token in line for line in seen)
    folders = [tmp_path, *Path("/tmp").glob("obray-*")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert [file for file in files if token in file.read_bytes()] == []


def _then(look: Any, close: Any) -> Any:
    async def looking(self: Any) -> None:
        look()
        await close(self)

    return looking


def test_without_ray_the_way_to_get_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')\n")
    run = subprocess.run(
        [*_command(tmp_path), "--cluster.launcher", "ray"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert 'pip install "onbeat[cluster]"' in run.stderr


def _command(tmp_path: Path) -> list[str]:
    return [sys.executable, "-m", "onbeat.cli", "train", RECIPE, "--run.dir", str(tmp_path / "run")]
