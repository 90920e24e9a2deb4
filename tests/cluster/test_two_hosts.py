"""Runs over two hosts: the same bits as on one, also when a host is cut off, loses its power and is replaced."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import RAY_ENVIRONMENT, Host, Network, why_no_hosts
from tests.fakes.figures import figure
from tests.fakes.processes import RunProcess
from tests.fakes.runs import SMALL, run_digests, train_digests
from tests.integration.test_elastic_run import records

pytestmark = pytest.mark.cluster
CUT_S = 5.0
"""How long a host is cut off: the fault itself, nothing is waited for."""
GENERATE, TRAIN = '{"generate": 4}', '{"train": 4}'


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Home, with Ray's head and what a trainer needs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        base = tmp_path_factory.getbasetemp()
        network = Network(tmp_path_factory.mktemp("ray"), hidden=[base])
        try:
            network.home.start_ray(TRAIN)
            yield network
        finally:
            network.remove()


@pytest.fixture(scope="module")
def away(network: Network) -> Host:
    """A host for generators, that has neither the model nor the run's directory."""
    host = network.add_host()
    host.start_ray(GENERATE)
    return host


def start(run_dir: Path, network: Network, **overrides: Any) -> RunProcess:
    """Controller and trainer at home, generators away."""
    keys = {"generator__resources": "{ generate = 1 }", "trainer__resources": "{ train = 1 }", **overrides}
    where = {"cluster__launcher": "ray", "cluster__address": network.address}
    return RunProcess(run_dir, prefix=tuple(network.home.prefix), **where, **keys)


def test_generators_on_another_host_give_the_same_bits_and_weights_cross_once_per_period(
    tmp_path: Path, network: Network, away: Host
) -> None:
    periods = 40
    local = train_digests(tmp_path / "local", schedule__periods=periods)
    to_away = {}
    for count in (1, 3):
        run = start(tmp_path / f"run-{count}", network, generator__count=count, schedule__periods=periods)
        run.wait_for_period(5)
        before = network.bytes_to(away)
        run.wait_for_period(periods - 5)
        sent, back = (now - then for now, then in zip(network.bytes_to(away), before, strict=True))
        code, _, errors = run.finish()
        assert code == 0, errors
        assert run_digests(tmp_path / f"run-{count}") == local
        to_away[count] = sent / (periods - 10)
        weights = (tmp_path / f"run-{count}" / "model" / "model.safetensors").stat().st_size
        assert sent > (periods - 11) * weights, "the weights went another way"
        figure(
            "two hosts",
            generators=count,
            weights_bytes=weights,
            to_generators_bytes_per_period=round(to_away[count]),
            back_bytes_per_period=round(back / (periods - 10)),
        )
    assert to_away[3] < 1.5 * to_away[1], "three generators of one host took the weights more than once"


@pytest.mark.full
def test_a_host_that_is_cut_off_and_later_lost_and_replaced_changes_nothing(
    tmp_path: Path, network: Network, away: Host
) -> None:
    periods = 60
    local = train_digests(tmp_path / "local", schedule__periods=periods)
    run = start(tmp_path / "run", network, generator__count=2, schedule__periods=periods)
    run.wait_for_period(5)
    network.cut_off(away)
    time.sleep(CUT_S)
    network.connect(away)
    run.wait_for_period(15)
    network.power_off(away)
    assert run.process.poll() is None
    network.add_host().start_ray(GENERATE)
    code, output, errors = run.finish(timeout_s=400)
    assert code == 0, errors
    assert run_digests(tmp_path / "run") == local
    assert records(tmp_path / "run")[-1]["num_lost_generators"] >= 2, "the host was not missed"
    ledger = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    times = Counter((entry["period"], entry["slot"]) for entry in ledger)
    assert len(times) == periods * SMALL["schedule.prompts_per_period"]
    assert set(times.values()) == {1}
    assert "has joined" in output


@pytest.mark.full
def test_the_last_words_of_an_actor_on_another_host_are_told(tmp_path: Path, network: Network) -> None:
    host = network.add_host()
    host.start_ray('{"elsewhere": 1}')
    run = start(tmp_path / "run", network, schedule__periods=300, generator__resources="{ elsewhere = 1 }")
    run.wait_for_period(2)
    log = Path(f"/proc/{run.pid_of('generator-0')}/root") / str(
        os.readlink(f"/proc/{run.pid_of('generator-0')}/fd/2")
    ).lstrip("/")
    log.write_text("the last words of a generator far away\n")
    os.kill(run.pid_of("generator-0"), signal.SIGKILL)
    run.wait_for_line("generator-1 has joined")
    run.process.send_signal(signal.SIGINT)
    _, _, errors = run.finish()
    assert "generator-0 died (status -9)" in errors
    assert "the last words of a generator far away" in errors


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Network]:
    """Two hosts that see the same files, as over a network file system."""
    network = Network(tmp_path, hidden=[], models=True)
    try:
        network.home.start_ray(GENERATE)
        network.add_host().start_ray(TRAIN)
        yield network
    finally:
        network.remove()


@pytest.mark.full
def test_a_trainer_on_another_host_gives_the_same_bits(
    tmp_path: Path, sharing: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshots come over the wire."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    local = train_digests(tmp_path / "local", schedule__periods=5)
    run = start(tmp_path / "run", sharing, schedule__periods=5)
    code, _, errors = run.finish(timeout_s=300)
    assert code == 0, errors
    assert run_digests(tmp_path / "run") == local


@pytest.mark.full
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_a_trainer_whose_ranks_are_on_two_hosts_gives_the_bits_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: bool
) -> None:
    """Gradients, gathered weights and rank 1's pieces of a snapshot go over the network."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    two_ranks = {"trainer__ranks": 2, "trainer__shard": shard, "schedule__periods": 30}
    local = train_digests(tmp_path / "local", **two_ranks)
    (tmp_path / "network").mkdir()
    network = Network(tmp_path / "network", hidden=[], models=True)
    try:
        network.home.start_ray('{"generate": 1, "train": 1}')
        network.add_host().start_ray('{"train": 1}')
        run = start(tmp_path / "run", network, **two_ranks | {"trainer__shard": str(shard).lower()})
        run.wait_for_period(1)
        hosts = {os.readlink(f"/proc/{run.pid_of(f'trainer-{rank}')}/ns/net") for rank in range(2)}
        code, _, errors = run.finish(timeout_s=300)
    finally:
        network.remove()
    assert code == 0, errors
    assert len(hosts) == 2, "both ranks were placed on one host"
    assert run_digests(tmp_path / "run") == local
