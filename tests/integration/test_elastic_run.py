"""Real runs whose generators die, hang, join and leave: nothing is lost, and the weights are those of a quiet run.

The figures of docs/reliability.md come from `make test-full`; a small share of most is in `make test-integration`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import onbeat
from onbeat.errors import NoGeneratorsError, WorkerError
from onbeat.rollout import client
from tests.fakes.faulty_worker import FAULTS, fired, fired_when, plan
from tests.fakes.figures import figure, spread
from tests.fakes.processes import RunProcess
from tests.fakes.runs import RECIPE, SMALL, run_digests, train_digests

pytestmark = pytest.mark.integration
GENERATORS = 3
SOAK_PROMPTS = 1100
"""With which a period of the small recipe, of two runs at once, takes more than five seconds on two cores."""


def faulty(run_dir: Path, faults: list[str], monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> list[str]:
    """Train with workers in which these faults go off; which did."""
    directory = run_dir.parent / f"{run_dir.name}-faults"
    plan(directory, faults)
    monkeypatch.setenv(FAULTS, str(directory))
    monkeypatch.setitem(client.ENTRIES, "embedded", "tests.fakes.faulty_worker:main")
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    told: list[tuple[str, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # of every loss there is one
        warnings.showwarning = lambda message, *place, **more: told.append((str(message), time.time()))
        onbeat.train(RECIPE, overrides={**SMALL, "generator.count": GENERATORS, "run.dir": str(run_dir), **keys})
    DETECTED[run_dir] = detection_times(fired_when(directory), told)
    TOLD[run_dir] = [sentence for sentence, _ in told]
    return fired(directory)


DETECTED: dict[Path, list[float]] = {}
"""Seconds from each fault to the run's noticing it, of runs so far."""
TOLD: dict[Path, list[str]] = {}
"""What they warned of."""


def detection_times(fired_at: dict[str, float], told: list[tuple[str, float]]) -> list[float]:
    found = []
    for worker, began_s in fired_at.items():
        noticed = [when for sentence, when in told if re.match(rf"{worker}\b", sentence)]
        found += [max(0.0, noticed[0] - began_s)] if noticed else []
    return found


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def lanes(run_dir: Path) -> set[str]:
    """Of the trace: who did something."""
    events = json.loads((run_dir / "trace.json").read_text())
    return {event["args"]["name"] for event in events if event["name"] == "process_name"}


def seeded_kills(count: int, seed: int) -> list[str]:
    """One that dies before it has done anything, then one that has done something: so that the run gets on."""
    rng = random.Random(seed)
    early = [rng.choice(["idle 1", "idle 2", "idle 3", "load 1", "prefill 1"]) for _ in range(count)]
    late = [f"{rng.choice(['decode', 'reply', 'prefill', 'load'])} {rng.randint(2, 9)}" for _ in range(count)]
    return [fault for pair in zip(late, early, strict=True) for fault in pair][:count]


@pytest.mark.parametrize(
    ("count", "periods"), [(12, 10), pytest.param(200, 160, marks=pytest.mark.full)], ids=["12", "200"]
)
def test_workers_killed_while_idle_loading_prefilling_decoding_and_replying_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, periods: int
) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=periods)
    faults = seeded_kills(count, seed=count)
    assert faulty(tmp_path / "run", faults, monkeypatch, schedule__periods=periods) == faults
    assert run_digests(tmp_path / "run") == undisturbed
    assert records(tmp_path / "run")[-1]["num_lost_generators"] == count
    assert len(DETECTED[tmp_path / "run"]) == count
    last = records(tmp_path / "run")[-1]
    figure(
        "workers killed",
        kills=count,
        periods=periods,
        resent_samples=last["num_resent_samples"],
        detection_s=spread(DETECTED[tmp_path / "run"]),
    )


def test_a_version_that_was_loaded_in_part_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death after each tensor of the model; between two of them one that has done something."""
    num_tensors = 21
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=16)
    assert len(load_file(tmp_path / "undisturbed" / "model" / "model.safetensors")) == num_tensors
    faults = [fault for number in range(1, num_tensors + 1) for fault in (f"decode {number + 2}", f"tensor {number}")]
    assert faulty(tmp_path / "run", faults, monkeypatch, schedule__periods=16) == faults
    assert run_digests(tmp_path / "run") == undisturbed


def test_messages_twice_late_and_out_of_order_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=8)
    assert faulty(tmp_path / "run", ["talk 1"] * GENERATORS, monkeypatch, schedule__periods=8) == ["talk 1"] * 3
    assert run_digests(tmp_path / "run") == undisturbed
    last = records(tmp_path / "run")[-1]
    assert last["num_duplicate_messages"] + last["num_late_messages"] > 100
    assert last["num_lost_generators"] == 0


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 20])
def test_a_worker_that_hangs_is_given_up_and_its_groups_are_done_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    periods = 4 * count
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=periods)
    faults = [f"stop {number + 3}" for number in range(count)]
    assert faulty(tmp_path / "run", faults, monkeypatch, schedule__periods=periods) == faults
    assert run_digests(tmp_path / "run") == undisturbed
    assert records(tmp_path / "run")[-1]["num_lost_generators"] == count
    figure("workers stopped", stops=count, periods=periods, given_up_s=spread(DETECTED[tmp_path / "run"]))


@pytest.mark.full
def test_a_worker_ten_times_as_slow_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=10)
    faulty(tmp_path / "run", ["slow 10"], monkeypatch, schedule__periods=10)
    assert run_digests(tmp_path / "run") == undisturbed
    assert records(tmp_path / "run")[-1]["num_lost_generators"] == 0


def test_when_every_worker_dies_the_run_ends_with_a_typed_error_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=8)
    keys = {"schedule__periods": 8, "checkpoint__every": 1, "generator__count": 1}
    with pytest.raises(NoGeneratorsError, match="generators died one after another"):
        faulty(tmp_path / "run", ["load 4"] + ["load 1"] * 8, monkeypatch, **keys)
    monkeypatch.undo()
    names = {key.replace("__", "."): value for key, value in keys.items()}
    onbeat.train(RECIPE, overrides={**SMALL, **names, "run.dir": str(tmp_path / "run")}, resume=True)
    assert run_digests(tmp_path / "run") == undisturbed


def test_a_generator_that_computes_other_bits_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a launcher started, on whatever host."""
    monkeypatch.setitem(client.ENTRIES, "embedded", "tests.fakes.other_arithmetic:main")
    with pytest.raises(WorkerError, match=r"generator-[01] cannot be used: its processor, its build of torch"):
        train_digests(tmp_path / "run", generator__count=2)


class Visitors:
    """`onbeat worker` and `onbeat scale`, from other shells, at seeded moments."""

    def __init__(self, run: RunProcess, seed: int) -> None:
        self._run = run
        self._rng = random.Random(seed)
        self._workers: list[subprocess.Popen[str]] = []
        self._leavers: list[tuple[subprocess.Popen[str], signal.Signals]] = []
        self.kinds: Counter[str] = Counter()

    @property
    def num_changes(self) -> int:
        return self.kinds.total()

    def change_something(self) -> None:
        rng = self._rng
        kind = rng.choice(["join", "leave", "scale"])
        if kind == "leave" and not self._workers:
            kind = "join"
        if kind == "join":
            self._workers.append(worker(["--join", str(self._run.run_dir)]))
            self._run.wait_for_joiner()
        elif kind == "leave":
            leaver = self._workers.pop(rng.randrange(len(self._workers)))
            self._leavers.append((leaver, rng.choice([signal.SIGTERM, signal.SIGKILL])))
            leaver.send_signal(self._leavers[-1][1])
        else:
            assert scale(self._run.run_dir, rng.randint(1, 4)).returncode == 0
        self.kinds[kind] += 1

    def finish(self) -> None:
        for each in self._workers:
            output, errors = each.communicate(timeout=60)
            assert each.returncode == 0, output + errors
        for each, signum in self._leavers:
            output, errors = each.communicate(timeout=60)
            asked = signum == signal.SIGTERM
            assert each.returncode == (0 if asked else -signum), output + errors
            assert ("has left" in output) == asked


def worker(flags: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onbeat.cli", "worker", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def scale(run_dir: Path, count: int, what: str = "generators") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onbeat.cli", "scale", str(run_dir), f"{what}={count}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.parametrize(("changes", "periods"), [(4, 500), (50, 4000)], ids=["4", "50"])
def test_joins_and_leaves_at_random_moments_leave_the_weights_as_they_are(
    tmp_path: Path, changes: int, periods: int
) -> None:
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=periods)
    run = RunProcess(tmp_path / "run", schedule__periods=periods)
    visitors = Visitors(run, seed=changes)
    for number in range(changes):
        run.wait_for_period(2 + number * periods // (2 * changes))
        visitors.change_something()
    code, _, errors = run.finish(timeout_s=600)
    assert code == 0, errors
    assert visitors.num_changes == changes
    assert run_digests(tmp_path / "run") == undisturbed
    visitors.finish()
    assert any(re.fullmatch(r"generator-.*-\d+", name) for name in lanes(tmp_path / "run")), "nobody came to work"
    figure("joins and leaves", changes=changes, periods=periods, **visitors.kinds)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a token for this test alone\n")
    file.chmod(0o600)
    return file


def test_a_worker_joins_over_the_network_with_the_token_and_without_the_models_files(
    tmp_path: Path, token_file: Path
) -> None:
    """Over loopback, as from another machine: no memory is shared, and the model comes through the connection."""
    undisturbed = train_digests(tmp_path / "undisturbed", schedule__periods=240)
    run = RunProcess(
        tmp_path / "run", schedule__periods=240, cluster__listen="127.0.0.1:0", cluster__token_file=str(token_file)
    )
    place = run.wait_for_line("workers may join at ").split()[-1]
    run.wait_for_line("period 2/")
    visitor = worker(["--join", place, "--token-file", str(token_file)])
    while not run.wait_for_line("generator-").endswith("has joined; there are 2 generators\n"):
        pass
    os.kill(run.pid_of("generator-0"), signal.SIGKILL)  # now the visitor must do it, at least for a while
    code, _, errors = run.finish()
    assert code == 0, errors
    output, visitor_errors = visitor.communicate(timeout=60)
    assert visitor.returncode == 0, visitor_errors
    assert "has left" in output
    assert run_digests(tmp_path / "run") == undisturbed
    assert any(re.fullmatch(r"generator-.*-\d+", name) for name in lanes(tmp_path / "run"))


def test_mistakes_at_the_door_are_told(tmp_path: Path, token_file: Path) -> None:
    assert "no run is going on in" in scale(tmp_path, 2).stderr
    nobody = worker(["--join", str(tmp_path)])
    assert "no run is going there" in nobody.communicate()[1]
    nowhere = worker(["--join", "127.0.0.1:9", "--token-file", str(token_file)])
    assert "no run answers there" in nowhere.communicate()[1]
    assert nobody.returncode == nowhere.returncode == 2


def test_a_run_listens_nowhere_unless_it_is_told_to_and_then_where_it_is_told(tmp_path: Path, token_file: Path) -> None:
    closed = RunProcess(tmp_path / "closed", schedule__periods=1000)
    closed.wait_for_line("period 2/")
    assert listeners(closed) == []
    closed.process.kill()
    run = RunProcess(
        tmp_path / "run", schedule__periods=1000, cluster__listen="127.0.0.1:0", cluster__token_file=str(token_file)
    )
    place = run.wait_for_line("workers may join at ").split()[-1]
    assert listeners(run) == [place]
    run.process.kill()


def listeners(run: RunProcess) -> list[str]:
    """Addresses at which processes of the run accept connections."""
    inodes = set()
    for pid in run.alive():
        for fd in list(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed: no longer a place to connect to
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or "udp" in table):
                address, port = fields[1].split(":")
                host = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1]) if len(address) == 8 else address
                found.append(f"{host}:{int(port, 16)}")
    return found


@pytest.mark.full
def test_by_demand_a_run_finds_its_number_of_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real generators that sleep nine tenths of their time, as if each had a device of its own: more of them help."""
    keys = {"schedule__periods": 16, "schedule__prompts_per_period": 26}
    undisturbed = train_digests(tmp_path / "undisturbed", **keys)
    faulty(tmp_path / "run", ["slow 10"] * 8, monkeypatch, generator__count={"min": 1, "max": 4}, **keys)
    found = records(tmp_path / "run")
    counts = [record["num_generators"] for record in found]
    assert counts[0] == 1
    assert counts[-1] > 1
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    decisions = [event["name"] for event in events if "generators instead of" in event["name"]]
    assert decisions[0].startswith(f"{counts[-1]} generators instead of 1: they work ")
    assert run_digests(tmp_path / "run") == undisturbed
    figure(
        "autoscaler",
        counts=counts,
        decisions=decisions,
        first_period_s=round(found[1]["period_s"], 2),
        last_period_s=round(found[-1]["period_s"], 2),
    )


def seeded_faults(count: int, seed: int) -> list[str]:
    """Of every kind; a worker gets about four periods old before its own goes off."""
    rng = random.Random(seed)
    kinds = ["idle", "prefill", "decode", "reply"] * 6 + ["stop"]
    return [f"{rng.choice(kinds)} {rng.randint(1, 20)} after {rng.randint(2, 6)}" for _ in range(count)]


@pytest.mark.parametrize(
    ("faults", "periods", "prompts"),
    [(6, 14, 13), pytest.param(100, 200, SOAK_PROMPTS, marks=pytest.mark.full)],
    ids=["short", "200 periods"],
)
def test_a_soak_with_a_fault_every_two_periods_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: int, periods: int, prompts: int
) -> None:
    """Beside it, at the same time, the run without faults: what else the machine does slows both."""
    keys = {"schedule__periods": periods, "schedule__prompts_per_period": prompts, "generator__count": 2}
    undisturbed = RunProcess(tmp_path / "undisturbed", **keys)
    planned = seeded_faults(faults, seed=faults)
    gone_off = faulty(tmp_path / "run", planned, monkeypatch, **keys)
    code, _, errors = undisturbed.finish(timeout_s=1800)
    assert code == 0, errors
    assert run_digests(tmp_path / "run") == run_digests(tmp_path / "undisturbed")
    assert gone_off == planned[: len(gone_off)]
    assert len(gone_off) >= periods // 3, "the run was too short for its faults"
    quiet_s, faulty_s = (
        [record["period_s"] for record in records(tmp_path / name)[1:]] for name in ("undisturbed", "run")
    )
    figure(
        "soak",
        periods=periods,
        faults=len(gone_off),
        period_s=spread(quiet_s),
        throughput=round(sum(quiet_s) / sum(faulty_s), 3),
    )
